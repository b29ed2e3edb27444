"""A mode that declares what it keeps float, in the gate: from the advice of `probe sensitivity` to a red layer."""

import json
from collections.abc import Callable

import pytest

from probe.commands import main
from probe.running import recipes
from tests.plugin.conftest import Run

TABLE = '\n[tool.probe.modes.mixed]\nbase = "{base}"\nkeep_float = [{patterns}]\n'
#: Quantizes everything, also what it was told to keep float.
FORGETFUL = """
import probe.running.recipes

probe.running.recipes.put_back = lambda twin, aside, mode: None
"""


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The project breaks these in its conftest, in this process."""
    for name in ("put_back", "set_aside", "float_blocks"):
        monkeypatch.setattr(recipes, name, getattr(recipes, name))


def declaring(
    pytester: pytest.Pytester, *patterns: str, base: str = "linear_w", matrix: str = ""
) -> Callable[[], None]:
    """Adds the tables to the pyproject.toml of the project, in which `modes` is no list then."""

    def add() -> None:
        file = pytester.path / "pyproject.toml"
        listed = ", ".join(f'"{pattern}"' for pattern in patterns)
        head = f"\n[tool.probe.modes]\nmatrix = {matrix}\n" if matrix else ""
        file.write_text(file.read_text() + head + TABLE.format(base=base, patterns=listed))

    return add


ONE: dict[str, object] = {"modes": None, "formats": '["int8"]'}


def test_a_declared_mode_lives_as_any_other_and_its_float_layer_must_stay_float(
    project: Run, pytester: pytest.Pytester
) -> None:
    after = declaring(pytester, "layers.1", matrix='["mixed"]')
    result = project(after=after, **ONE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*mixed-layer_0-cpu-int8 has no baseline*"])
    assert project("--update-baselines", after=after, **ONE).ret == 0
    (file,) = pytester.path.glob("baselines/*/cpu/mixed.json")
    stored = json.loads(file.read_text())["cases"]["int8"]
    assert stored["layer_1"]["injected"]["mse"] == [0.0, 0.0]
    assert stored["layer_0"]["injected"]["mse"][0] > 0
    assert project(after=after, **ONE).ret == 0

    broken = project(after=after, hooks=FORGETFUL, **ONE)
    assert broken.ret == pytest.ExitCode.TESTS_FAILED
    told = "\n".join(broken.outlines)
    assert "mixed-layer_1-cpu-int8 is declared float, but changed" in told
    assert "layer_1 of mixed-int8 is declared float, but changed: mse" in told
    assert "keep the layer float, or change keep_float of its mode" in told
    assert "own: layer_1;" in told or "own: layer_1\n" in told
    before = file.read_bytes()
    refused = project("--update-baselines", "--allow-worse", "we want it all", after=after, hooks=FORGETFUL, **ONE)
    assert refused.ret == pytest.ExitCode.TESTS_FAILED
    assert file.read_bytes() == before


def test_a_layer_that_is_float_and_not_declared_is_not_applied(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines", after=declaring(pytester, "layers.1", matrix='["mixed"]'), **ONE)
    wider = """
from dataclasses import replace
import probe.running.recipes as recipes

real = recipes.set_aside
recipes.set_aside = lambda twin, mode: real(twin, replace(mode, keep_float=("layers.1", "layers.2")))
"""
    result = project(after=declaring(pytester, "layers.1", matrix='["mixed"]'), hooks=wider, **ONE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*mixed-layer_2-cpu-int8 was not applied*"])


def test_a_users_mode_that_forgets_its_declaration_fails_in_that_layer(project: Run, pytester: pytest.Pytester) -> None:
    hooks = '\nprobe.unregister_mode("coarse")\nprobe.register_mode("coarse", coarse, keep_float=["layers.1"])\n'
    one: dict[str, object] = {"formats": '["int8"]'}
    assert project("--update-baselines", hooks=hooks, fault="skipped", **one).ret == 0
    assert project(hooks=hooks, fault="skipped", **one).ret == 0
    result = project(hooks=hooks, **one)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*coarse-layer_1-cpu-int8 is declared float, but changed*"])


def test_a_part_of_a_layer_that_a_users_mode_keeps_float_is_checked_too(project: Run) -> None:
    hooks = '\nprobe.unregister_mode("coarse")\nprobe.register_mode("coarse", coarse, keep_float=["layers.1.{}"])\n'
    assert project("--update-baselines", hooks=hooks.format("down"), formats='["int8"]').ret == 0
    result = project(hooks=hooks.format("up"), formats='["int8"]')
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    told = "\n".join(result.outlines)
    assert "coarse-layer_1-cpu-int8 is declared float, but changed" in told
    assert "layers.1.up.weight is declared float, but changed." in told


def test_a_head_that_is_declared_float_and_changed_fails_with_the_logits(
    project: Run, pytester: pytest.Pytester
) -> None:
    hooks = """
def with_head(model, format, calibration):
    model.head.weight.data.mul_(1.01)
    return coarse(model, format, calibration)

probe.unregister_mode("coarse")
probe.register_mode("coarse", with_head, keep_float=["head"])
"""
    result = project("--update-baselines", hooks=hooks, formats='["int8"]')
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    told = "\n".join(result.outlines)
    assert "coarse-logits-cpu-int8 cannot be stored, it is not float" in told
    assert "head.weight is declared float, but changed." in told
    assert not (pytester.path / "baselines").exists()


def test_without_a_list_the_matrix_has_the_fitting_modes_and_all_declared_ones(
    project: Run, pytester: pytest.Pytester
) -> None:
    result = project("--collect-only", "-q", after=declaring(pytester, "layers.1"), **ONE)
    modes = {line.partition("[")[2].partition("-")[0] for line in result.outlines if "[" in line}
    assert modes == {"linear_w", "linear_wa", "mixed"}


def test_under_xdist_a_declared_mode_is_the_same(project: Run, pytester: pytest.Pytester) -> None:
    after = declaring(pytester, "layers.1", matrix='["mixed", "linear_w"]')
    assert project("--update-baselines", after=after, workers=2, **ONE).ret == 0
    assert project(after=after, workers=2, **ONE).ret == 0
    assert project(after=after, **ONE).ret == 0


def test_a_file_of_modes_can_be_named_beside_a_list_of_modes(project: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "mixed.toml").write_text(TABLE.format(base="coarse", patterns='"layers.0"'))
    given: dict[str, object] = {"modes": '["coarse", "mixed"]', "modes_from": '"mixed.toml"', "formats": '["int8"]'}
    assert project("--update-baselines", **given).ret == 0
    result = project("-q", **given)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*8 of 8 stored cases compared*"])


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"table": "bas = 'linear_w'"}, 4, "unknown key 'bas'. Did you mean 'base'?"),
        ({"table": "base = 'linear_w'\nkeep_float = []"}, 4, "keep_float is []; expected a list of module names"),
        ({"table": "base = 'linear_x'\nkeep_float = ['a']"}, 2, "unknown mode 'linear_x'. Did you mean 'linear_w"),
        ({"table": "base = 'linear_w'\nkeep_float = ['layers.7']"}, 2, "'layers.7' matches no module of network:make"),
        ({"table": "base = 'linear_w'\nkeep_float = ['layers']"}, 2, "matches all 6 weights of network:make"),
        ({"modes_from": '"nowhere.toml"', "modes": '["coarse"]'}, 2, "nowhere.toml cannot be read as TOML"),
        ({"declared": "{}", "modes": '["coarse"]'}, 4, "unknown key 'declared'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_mistake_is_one_message(
    project: Run, pytester: pytest.Pytester, change: dict[str, object], code: int, message: str
) -> None:
    table = change.pop("table", None)

    def after() -> None:
        if table:
            file = pytester.path / "pyproject.toml"
            file.write_text(f"{file.read_text()}\n[tool.probe.modes.mixed]\n{table}\n")

    result = project(after=after, **{**ONE, **change})
    told = "\n".join([*result.outlines, *result.errlines])
    assert message in told
    assert "Traceback" not in told
    assert result.ret == code


@pytest.mark.parametrize("model", ["tiny-mamba", "tiny-llama"])
def test_the_advice_of_sensitivity_is_a_mode_that_the_gate_stores_and_holds(
    project: Run, pytester: pytest.Pytester, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--samples", "2", "--seqlen", "32", "--calib-data-num", "2", "--calib-seqlen", "32"]
    file = pytester.path / "mixed.toml"
    assert main(["sensitivity", "--model", model, *short, "--save-mode", str(file)]) == 0
    out, err = capsys.readouterr()
    assert file.read_text() in out, "the same table, ready to paste"
    assert f"mode mixed: {file}" in err
    (path,) = json.loads(f"[{file.read_text().partition('keep_float = [')[2].partition(']')[0]}]")
    layer = f"layer_{path.rpartition('.')[2]}"

    given: dict[str, object] = {
        "model": f'"{model}"',
        "modes": '["mixed"]',
        "modes_from": '"mixed.toml"',
        "formats": '["int8"]',
        "calibration": "{ samples = 2, seqlen = 32 }",
    }
    missing = project(**given)
    assert missing.ret == pytest.ExitCode.TESTS_FAILED
    missing.stdout.fnmatch_lines(["*mixed-layer_0-cpu-int8 has no baseline*"])
    assert project("--update-baselines", **given).ret == 0
    assert project(**given).ret == 0
    breaks = FORGETFUL + "\nprobe.running.recipes.float_blocks = lambda model, mode: []\n"
    broken = project(hooks=breaks, **given)
    assert broken.ret == pytest.ExitCode.TESTS_FAILED
    broken.stdout.fnmatch_lines([f"*mixed-{layer}-cpu-int8 is declared float, but changed*"])


def test_a_first_baseline_over_its_limit_is_not_stored(project: Run, pytester: pytest.Pytester) -> None:
    limits = '{ "coarse-*" = { mse = 1e-9 } }'
    result = project(limits=limits)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*coarse-layer_0-cpu-int8 is over its limit*"])
    result.stdout.no_fnmatch_line("*create*--update-baselines*")
    refused = project("--update-baselines", limits=limits)
    assert refused.ret == pytest.ExitCode.TESTS_FAILED
    refused.stdout.fnmatch_lines(["*cannot be stored, it is over the limit*"])
    assert not (pytester.path / "baselines").exists()
