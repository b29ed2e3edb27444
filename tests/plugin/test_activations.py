"""Statistics as golden values: missing -> stored -> passed -> a checkpoint with new outliers -> failed."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.conftest import UNUSED
from tests.plugin.project import lines_of
from tests.plugin.test_lifecycle import snapshot

TEST = """
import pytest

@pytest.mark.probe_activations(
    overrides={{
        "model.path": "tests.activations.toys:{model}", "model.name": "toy", "data.num_samples": 3, "data.seq_len": 12,
        "outlier.threshold": 8, "layer_selection.patterns": ["layers.0"], "enabled.heatmap_3d": False,
        "enabled.distribution": False, "enabled.percentile_range": False, "enabled.magnitude_output": False,
        **{overrides!r},
    }},
    {more}
)
def test_activations(probe_activations):
    {body}
"""
CHECK = "probe_activations.check()"
Run = Callable[..., pytest.RunResult]
FILE = "baselines/activations-toy/cpu/activations.json"
ONE = "pytest 'test_own.py::test_activations[activations-layers.0-cpu-output]'"


def tail_of(result: pytest.RunResult) -> list[str]:
    """The last lines of the story of the output of layer 0, without the width of the column."""
    lines = lines_of(result.outlines, "activations-layers.0-cpu-output drifted")
    return ["  ".join(line.split(maxsplit=1)) for line in lines if line][-3:]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("CI", raising=False)
    root = str(Path(__file__).parents[2])
    pytester.makeconftest(f"import sys; sys.path.insert(0, {root!r})")  # workers find the toys too
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", lambda self: None)

    def once(
        *arguments: str,
        model: str = "make",
        more: str = "",
        body: str = "probe_activations.check()",
        workers: int = 0,
        overrides: dict[str, Any] | None = None,
    ) -> pytest.RunResult:
        pytester.makepyfile(test_own=TEST.format(model=model, more=more, body=body, overrides=overrides or {}))
        sys.modules.pop("test_own", None)
        xdist = ("-n", str(workers), *UNUSED) if workers else ("-p", "no:xdist")
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *xdist, *arguments)

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
    assert tail_of(failed) == [
        f"baseline  {FILE}",
        f"rerun  {ONE}",
        f'accept  {ONE} --update-baselines --allow-worse "REASON"',
    ]
    run("-k", "[activations-layers.0-cpu-output]", model="make").assert_outcomes(failed=1, deselected=4)

    refused = run("--update-baselines", model="make")
    refused.assert_outcomes(failed=3, passed=2)  # worse, and no reason is given
    refused.stdout.fnmatch_lines(
        ["activations-toy on cpu: 5 cases: 3 drift, 2 passed; *", "no baseline of activations-toy was written: 3 of 5*"]
    )
    run("--update-baselines", "--allow-worse", "the new checkpoint", model="make").assert_outcomes(passed=5)
    run(model="make").assert_outcomes(passed=5)


def test_tolerances_and_figures_of_a_marker(run: Run) -> None:
    chosen = 'figures=["outliers", "kurtosis"],'
    run("--update-baselines", model="make_other", more=chosen).assert_outcomes(passed=5)
    run(model="make", more=chosen).assert_outcomes(failed=3, passed=2)
    wide = chosen + 'tolerances={"outliers": 100, "kurtosis": 1e9}'
    run(model="make", more=wide).assert_outcomes(passed=5)


def test_a_better_figure_is_accepted_without_a_reason_and_its_story_says_so(run: Run) -> None:
    run("--update-baselines", model="make").assert_outcomes(passed=5)
    better = run(model="make_other")
    better.assert_outcomes(failed=3, passed=2)
    assert tail_of(better)[-1] == f"accept  {ONE} --update-baselines"
    run("-k", "[activations-layers.0-cpu-output]", "--update-baselines", model="make_other").assert_outcomes(
        passed=1, deselected=4
    )


ONLY = 'figures=["outliers"],'


def test_a_threshold_that_nothing_reaches_does_not_switch_the_check_off(run: Run) -> None:
    """A baseline of 8; a model with a giant outlier at a threshold of 100000 has as few outliers as before."""
    run("--update-baselines", model="make_other", more=ONLY).assert_outcomes(passed=1)
    run(model="make", more=ONLY).assert_outcomes(failed=1)
    wide: dict[str, Any] = {"model": "make", "more": ONLY, "overrides": {"outlier.threshold": 100000}}
    off = run(**wide)
    off.assert_outcomes(failed=1)
    assert lines_of(off.outlines, "activations-layers.0-cpu-output failed") == [
        "activations-layers.0-cpu-output failed",
        "  what           the baseline was made with other settings (outlier.threshold), so the figures are not "
        "compared.",
        "                 Restore those settings, or accept the new ones with --update-baselines.",
        "  changed        outlier.threshold 8.0 -> 100000.0",
        f"  baseline       {FILE}",
        f"  rerun          {ONE}",
        f"  accept         {ONE} --update-baselines",
    ]
    off.stdout.fnmatch_lines(["activations-toy on cpu: 1 cases: 1 failed; 1 of 1 recipes fail"])
    told = run("--update-baselines", **wide)
    told.assert_outcomes(passed=1)
    told.stdout.fnmatch_lines(["activations-layers.0-cpu-output  outlier.threshold  8.0 -> 100000.0"])
    run(**wide).assert_outcomes(passed=1)
    run(model="make", more=ONLY).assert_outcomes(failed=1)


@pytest.mark.parametrize(
    ("overrides", "failed", "said"),
    [
        ({"data.num_samples": 4}, 3, r"tokens \w{16} \(36 in 3 samples\) -> \w{16} \(48 in 4 samples\)"),
        ({"data.seq_len": 13}, 3, r"tokens \w{16} \(36 in 3 samples\) -> \w{16} \(39 in 3 samples\)"),
        ({"data.seed": 1}, 3, r"tokens \w{16} \(36 in 3 samples\) -> \w{16} \(36 in 3 samples\)"),
        ({"model.dtype": "bfloat16"}, 5, "model.dtype float32 -> bfloat16"),
        ({"outlier.threshold": 8.5}, 1, "outlier.threshold 8.0 -> 8.5"),
        ({"data.batch_size": 1, "dpi": 30, "magnitude.reduce_dim": -1, "decode_tokens": False}, 0, ""),
    ],
)
def test_what_the_figures_depend_on_is_stored_and_compared(
    run: Run, overrides: dict[str, Any], failed: int, said: str
) -> None:
    """By tensor: weights have no tokens, and only counts of outliers have a threshold."""
    run("--update-baselines").assert_outcomes(passed=5)
    result = run(overrides=overrides)
    result.assert_outcomes(failed=failed, passed=5 - failed)
    if failed:
        assert any(re.fullmatch(f"  changed        {said}", line) for line in result.outlines)
        result.stdout.no_fnmatch_line("*drifted from its baseline*")


def test_settings_that_are_not_there_were_none(run: Run, pytester: pytest.Pytester) -> None:
    """Nor does it help to take them out of the file."""
    run("--update-baselines", more=ONLY).assert_outcomes(passed=1)
    file = pytester.path / "baselines" / "activations-toy" / "cpu" / "activations.json"
    document = json.loads(file.read_text())
    stored = document["cases"]["output"]["layers.0"].pop("settings")
    assert set(stored) == {"model.dtype", "model.sites", "outlier.threshold", "tokens"}
    file.write_text(json.dumps(document) + "\n")
    result = run(more=ONLY)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["  changed  *model.dtype none -> float32", "  *model.sites none -> false"])


def test_figures_that_got_worse_with_other_settings_need_a_reason(run: Run) -> None:
    run("--update-baselines", model="make_other", more=ONLY).assert_outcomes(passed=1)
    lower = {"model": "make", "more": ONLY, "overrides": {"outlier.threshold": 7}}
    failed = run(**lower)
    failed.stdout.fnmatch_lines(['*accept * --update-baselines --allow-worse "REASON"'])
    refused = run("--update-baselines", **lower)
    refused.assert_outcomes(failed=1)
    refused.stdout.fnmatch_lines(["*got worse: activations.outliers 0 -> *Settings changed too: outlier.threshold *"])
    run("--update-baselines", "--allow-worse", "the new checkpoint", **lower).assert_outcomes(passed=1)
    run(**lower).assert_outcomes(passed=1)


def test_two_tests_of_one_case_must_agree(run: Run, pytester: pytest.Pytester) -> None:
    other = TEST.format(model="make", more='figures=["kurtosis"],', body=CHECK, overrides={})
    pytester.makepyfile(test_another=other)
    sys.modules.pop("test_another", None)
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*another test compares activations-layers.0* of activations-toy with the same baseline*"]
    )


def test_the_lifecycle_under_xdist_is_that_of_one_process(run: Run, pytester: pytest.Pytester) -> None:
    missing = run(model="make_other", workers=2)
    missing.assert_outcomes(failed=5)
    missing.stdout.fnmatch_lines(["activations-layers.0-cpu-output has no baseline*"])
    assert not (pytester.path / "baselines").exists()
    run("--update-baselines", model="make_other", workers=2).assert_outcomes(passed=5)
    parallel = snapshot(pytester.path / "baselines")
    assert parallel
    for name in parallel:
        Path(pytester.path / "baselines" / name).unlink()
    run("--update-baselines", model="make_other").assert_outcomes(passed=5)
    assert snapshot(pytester.path / "baselines") == parallel
    run(model="make_other", workers=2).assert_outcomes(passed=5)
    failed = run(model="make", workers=2)
    failed.assert_outcomes(failed=3, passed=2)
    failed.stdout.fnmatch_lines(["activations-layers.0-cpu-output drifted from its baseline*"])
    refused = run("--update-baselines", model="make", workers=2)
    refused.stdout.fnmatch_lines(["activations-toy on cpu: 5 cases: 3 drift, 2 passed; *"])
    assert snapshot(pytester.path / "baselines") == parallel
    other = run(model="make", workers=2, overrides={"outlier.threshold": 100000, "data.seed": 1})
    other.assert_outcomes(failed=3, passed=2)
    other.stdout.fnmatch_lines(["  changed  *outlier.threshold 8.0 -> 100000.0", "  *tokens * -> *"])


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
        ("layers=3", "*probe_activations marker of test_activations: unknown key 'layers'.*Known: config, overrides*"),
        ("figures=['outlier']", "*unknown figure 'outlier'. Did you mean 'outliers'?*"),
        ("figures=3", "*figures is 3; expected some of outliers, amax*"),
        ("tolerances=3", "*tolerances is 3; expected a dict such as*"),
        ("tolerances={'outliers': -1}", "*is -1; expected a number, 0 or more.*"),
        (
            "tolerances={'kurtosis': 1}",
            "*tolerances has 'kurtosis', which is not among the figures of this test: outliers, max_to_median. Add*",
        ),
        ("tolerances={'kurtoses': 1}", "*unknown figure 'kurtoses'. Did you mean 'kurtosis'?*"),
        ("config='no.yaml'", "*no.yaml' does not exist*"),
        ("config=3", "*config is 3; expected the path of a YAML file.*"),
    ],
)
def test_mistakes_are_collection_errors(run: Run, more: str, message: str) -> None:
    result = run(more=more)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])
