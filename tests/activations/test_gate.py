"""Statistics as golden values: missing -> stored -> passed -> a checkpoint with new outliers -> failed."""

import json
import sys
from collections.abc import Callable

import pytest

TEST = """
import pytest

@pytest.mark.probe_activations(
    overrides={{
        "model.path": "tests.activations.toys:{model}", "model.name": "toy", "data.num_samples": 3, "data.seq_len": 12,
        "outlier.threshold": 8, "layer_selection.patterns": ["layers.0"], "enabled.heatmap_3d": False,
        "enabled.distribution": False, "enabled.percentile_range": False, "enabled.magnitude_output": False,
    }},
    {more}
)
def test_activations(probe_activations):
    {body}
"""
CHECK = "probe_activations.check()"
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", lambda self: None)

    def once(
        *arguments: str, model: str = "make", more: str = "", body: str = "probe_activations.check()"
    ) -> pytest.RunResult:
        pytester.makepyfile(test_own=TEST.format(model=model, more=more, body=body))
        sys.modules.pop("test_own", None)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", *arguments)

    return once


def test_the_lifecycle_of_a_baseline(run: Run, pytester: pytest.Pytester) -> None:
    other = {"model": "make_other"}
    missing = run(**other)
    missing.assert_outcomes(failed=5)
    missing.stdout.fnmatch_lines(["activations-layers.0-cpu-output has no baseline*"])
    run("--update-baselines", **other).assert_outcomes(passed=5)
    file = pytester.path / "baselines" / "activations-toy" / "cpu" / "activations.json"
    cases = json.loads(file.read_text())["cases"]
    assert set(cases) == {"input", "output", "weight"}
    assert set(cases["input"]) == {"layers.0.up_proj", "layers.0.down_proj"}
    assert cases["output"]["layers.0"]["activations"]["outliers"][0] == 0
    assert set(cases["weight"]["layers.0.up_proj"]["activations"]) == {"max_to_median"}
    run(**other).assert_outcomes(passed=5)

    failed = run(model="make")
    failed.assert_outcomes(failed=3, passed=2)  # the weights are the same
    failed.stdout.fnmatch_lines(
        ["activations-layers.0-cpu-output drifted from its baseline*", "*activations.outliers*"]
    )
    failed.stdout.fnmatch_lines(['*accept  pytest -k "activations and output" --update-baselines*'])

    run("--update-baselines", model="make").assert_outcomes(failed=3, passed=2)  # worse, and no reason is given
    run("--update-baselines", "--allow-worse", "the new checkpoint", model="make").assert_outcomes(passed=5)
    run(model="make").assert_outcomes(passed=5)


def test_tolerances_and_figures_of_a_marker(run: Run) -> None:
    chosen = 'figures=["outliers", "kurtosis"],'
    run("--update-baselines", model="make_other", more=chosen).assert_outcomes(passed=5)
    run(model="make", more=chosen).assert_outcomes(failed=3, passed=2)
    wide = chosen + 'tolerances={"outliers": 100, "kurtosis": 1e9}'
    run(model="make", more=wide).assert_outcomes(passed=5)


def test_nan_is_never_stored(run: Run) -> None:
    result = run("--update-baselines", model="make_nan")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*values are NaN or Inf*"])


def test_a_test_that_never_checks_fails(run: Run) -> None:
    result = run(body="pass")
    result.assert_outcomes(failed=5)
    result.stdout.fnmatch_lines(["*took probe_activations and never called probe_activations.check()*"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("layers=3", "*probe_activations marker of test_activations: unknown key 'layers'. Known: config, overrides*"),
        ("figures=['outlier']", "*unknown figure 'outlier'. Did you mean 'outliers'?*"),
        ("figures=3", "*figures is 3; expected some of outliers, amax*"),
        ("tolerances=3", "*tolerances is 3; expected a dict such as*"),
        ("tolerances={'outliers': -1}", "*is -1; expected a number, 0 or more.*"),
        ("tolerances={'kurtosis': 1}", "*unknown figure 'kurtosis'*Known: outliers, max_to_median.*"),
        ("config='no.yaml'", "*no.yaml' does not exist*"),
        ("config=3", "*config is 3; expected the path of a YAML file.*"),
    ],
)
def test_mistakes_are_collection_errors(run: Run, more: str, message: str) -> None:
    result = run(more=more)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])
