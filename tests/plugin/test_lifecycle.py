"""The life of a baseline, end to end: missing, accepted, passing, changed, refused, accepted with a reason."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from probe.gate.bench import Bench
from probe.running.noise import BASE, Variation, variations
from probe.running.recipes import Recipe
from tests.plugin.conftest import Run
from tests.plugin.project import lines_of


@pytest.fixture
def without() -> None:
    """Every case that the model has."""


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_missing_fails_and_writes_nothing_then_update_creates_then_it_passes(
    project: Run, pytester: pytest.Pytester
) -> None:
    result = project()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*coarse-layer_0-cpu-int8 has no baseline*", "*create*--update-baselines*"])
    assert not (pytester.path / "baselines").exists()

    result = project("--update-baselines")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*16 cases measured (all of the matrix), 16 changes*"])
    result.stdout.fnmatch_lines(["16 of 16 stored cases measured for the update"])
    stored = snapshot(pytester.path / "baselines")
    assert [name for name in stored if "anchors-" not in name] == ["network_make/cpu/coarse.json"]
    assert len(stored) == 2

    assert project().ret == 0
    assert project("--update-baselines").ret == 0, "an update without a change is no change"
    assert snapshot(pytester.path / "baselines") == stored


def test_a_fault_in_one_layer_is_told_once_with_the_layer_the_figures_and_the_way_to_accept_it(
    project: Run, pytester: pytest.Pytester
) -> None:
    project("--update-baselines")
    result = project("-k", "fp8_e4m3", fault="scale")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    text = lines_of(result.outlines, "coarse-layer_1-cpu-fp8_e4m3 drifted from its baseline")
    assert len(text) <= 22
    told = "\n".join(text)
    for part in ("injected.mse", "worse", "own: layer_1", "baselines/", "accept", '--allow-worse "REASON"'):
        assert part in told, f"{part} is not told:\n{told}"
    result.assert_outcomes(failed=2, passed=5, deselected=8)  # ragged and batch_1 run through the layer too
    assert sum("drifted from its baseline" in line for line in result.outlines) == 1

    before = snapshot(pytester.path / "baselines")
    refused = project("-k", "fp8_e4m3", "--update-baselines", fault="scale")
    assert refused.ret == pytest.ExitCode.TESTS_FAILED
    refused.stdout.fnmatch_lines(["*got worse: injected.m*", "*no baseline of network:make was written*"])
    refused.stdout.fnmatch_lines(["network:make on cpu: 8 cases: 2 changed values, 1 drift, 5 passed; 1 of 1 *"])
    refused.stdout.no_fnmatch_line("* updated*")
    assert snapshot(pytester.path / "baselines") == before

    reason = "the scale is a trial of ours"
    accepted = project("-k", "fp8_e4m3", "--update-baselines", "--allow-worse", reason, fault="scale")
    assert accepted.ret == 0
    accepted.stdout.fnmatch_lines(["*coarse-layer_1-cpu-fp8_e4m3  injected.mse  * -> *"])
    (file,) = pytester.path.glob("baselines/*/cpu/coarse.json")
    figures = json.loads(file.read_text())["cases"]
    assert figures["fp8_e4m3"]["layer_1"]["injected"]["mse"][2] == reason
    assert len(figures["fp8_e4m3"]["layer_0"]["injected"]["mse"]) == 2, "layer_0 did not get worse"
    assert figures["int8"] == json.loads(before[str(file.relative_to(pytester.path / "baselines"))])["cases"]["int8"]
    assert project("-k", "fp8_e4m3", fault="scale").ret == 0
    assert project("-k", "int8").ret == 0


def test_an_update_measures_the_spread_only_of_what_it_stores(project: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring it takes several runs of a recipe: an update that is refused, or changes nothing, does without."""
    seen: list[tuple[str, str]] = []
    plain = Bench.observe

    def counting(self: Bench, recipe: Recipe, device: str, variation: Variation | None = None) -> Any:
        assert variation is not None
        seen.append((str(recipe), variation.name))
        return plain(self, recipe, device, variation)

    monkeypatch.setattr(Bench, "observe", counting)

    def measured(*arguments: str, fault: str = "") -> list[str]:
        seen.clear()
        project("--update-baselines", *arguments, fault=fault)
        return [recipe for recipe, _ in seen]

    base, every = 1, 1 + len(variations())
    assert every > 2
    assert Counter(measured()) == {"coarse-int8": every, "coarse-fp8_e4m3": every}
    assert Counter(measured()) == {"coarse-int8": base, "coarse-fp8_e4m3": base}
    assert Counter(measured(fault="scale")) == {"coarse-int8": base, "coarse-fp8_e4m3": base}
    assert {variation for _, variation in seen} == {BASE.name}
    assert Counter(measured("-k", "cpu-int8", "--allow-worse", "a trial of ours", fault="scale")) == {
        "coarse-int8": every
    }


def test_a_sudden_gain_fails_too_and_needs_no_reason(project: Run) -> None:
    project("--update-baselines")
    result = project("-k", "int8", fault="better")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert any(re.search(r"injected\.mse .*better", line) for line in result.outlines)
    assert project("-k", "int8", "--update-baselines", fault="better").ret == 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("skipped", "was not applied"),
        ("nan", "is not finite"),
        ("uncovered", "was not covered"),
    ],
)
def test_what_is_wrong_in_itself_fails_with_or_without_baselines_and_is_never_stored(
    project: Run, pytester: pytest.Pytester, fault: str, words: str
) -> None:
    for arguments in ((), ("--update-baselines",)):
        result = project(*arguments, fault=fault)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.no_fnmatch_line("* updated*")  # nothing is written, so nothing is updated
        assert not (pytester.path / "baselines").exists()
    project("--update-baselines")
    before = snapshot(pytester.path / "baselines")
    result = project(fault=fault)
    assert any(f"coarse-layer_1-cpu-int8 {words}" in line for line in result.outlines), result.outlines
    result = project("--update-baselines", "--allow-worse", "we want it all the same", fault=fault)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert snapshot(pytester.path / "baselines") == before


@pytest.mark.parametrize(
    ("stored", "now", "change"),
    [
        ("both", "half", "4096 -> 2048"),  # one of the two linears of layer_1 is no longer quantized
        ("", "newly", "2048 -> 4096"),
    ],
)
def test_a_weight_that_is_no_longer_quantized_or_newly_is_fails_in_its_layer(
    project: Run, stored: str, now: str, change: str
) -> None:
    project("--update-baselines", fault=stored)
    assert project(fault=stored).ret == 0
    wide = '{ "injected.mse" = { relative = 1e6 } }'  # whatever a project tolerates elsewhere
    result = project("-k", "int8 and layer_1", fault=now, tolerances=wide)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    pattern = rf"weights\.on_grid +{change.replace(' ', ' +')} +\(tolerance 0\)"
    assert any(re.search(pattern, line) for line in result.outlines), result.outlines
    assert project("-k", "int8 and layer_0", fault=now).ret == 0, "the layer before has the same weights"
    accepted = project("--update-baselines", "--allow-worse", "measured on purpose", fault=now)
    assert accepted.ret == 0
    assert project(fault=now).ret == 0


def test_the_gate_says_how_much_is_on_a_grid(project: Run, pytester: pytest.Pytester) -> None:
    line = (
        "weights on a grid: 50.0 % (6,144 of 12,288); float: 6,144 in layers.*.down.weight (nn.Linear); "
        "embedding 8,192 float, head 8,192 float, biases 544 float"
    )
    result = project("-k", "layer_1", "--update-baselines", "--probe-output", "out")
    assert result.outlines.count(line) == 1, "once for both formats"
    summary = json.loads((pytester.path / "out" / "summary.json").read_text())
    assert [one["weights"] for one in summary["recipes"]] == [line] * 2


def test_a_count_has_no_tolerance_to_set(project: Run) -> None:
    result = project(tolerances='{ "weights.on_grid" = { absolute = 10.0 } }')
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = "\n".join([*result.outlines, *result.errlines])
    assert "weights.on_grid is a count without a tolerance: any change fails. Leave it out." in text


def test_over_the_limit_fails_whatever_the_baseline_says(project: Run) -> None:
    limits = '{ "coarse-*" = { mse = 1e-9 } }'
    project("--update-baselines")
    result = project(limits=limits)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*is over its limit*"])
    assert any("propagated.mse is" in line and "above the limit 1e-09" in line for line in result.outlines)
    assert project("--update-baselines", limits=limits).ret == pytest.ExitCode.TESTS_FAILED


def test_obsolete_cases_fail_the_run_by_name_unless_they_were_only_left_out(
    project: Run, pytester: pytest.Pytester
) -> None:
    project("--update-baselines")
    smaller = '["int8"]'
    for selection in (("-k", "int8"), ("--deselect", "test_gate.py::test_matches_baseline[coarse-layer_0-cpu-int8]")):
        assert project(*selection).ret == 0
    assert project("--probe-formats", "int8").ret == 0, "an option leaves out, it does not make obsolete"
    result = project(formats=smaller)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["obsolete: coarse-layer_0-cpu-fp8_e4m3 of network:make*"])
    assert project("-k", "layer_0", "--update-baselines", formats=smaller).ret == 0
    assert project(formats=smaller).ret == pytest.ExitCode.TESTS_FAILED, "an update with -k deletes nothing"
    assert project("--update-baselines", formats=smaller).ret == 0
    assert project(formats=smaller).ret == 0
    (file,) = pytester.path.glob("baselines/*/cpu/coarse.json")
    assert list(json.loads(file.read_text())["cases"]) == ["int8"]


def test_a_model_that_no_test_measures_is_obsolete(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines")
    folder = next((pytester.path / "baselines").iterdir())
    other = folder.with_name("forgotten")
    for file in snapshot(folder):
        (other / file).parent.mkdir(parents=True, exist_ok=True)
        text = (folder / file).read_bytes().replace(b'"model": "network:make"', b'"model": "forgotten"')
        (other / file).write_bytes(text)
    result = project()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["not compared: 16 cases of forgotten, *: no test measures forgotten; delete its baselines*"]
    )


def test_another_input_is_said_and_only_a_full_update_may_follow(project: Run) -> None:
    project("--update-baselines")
    result = project(seqlen=32)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*were made with another input: input.tokens*"])
    assert project("-k", "int8", "--update-baselines", seqlen=32).ret == pytest.ExitCode.TESTS_FAILED
    assert project("--update-baselines", "--allow-worse", "longer samples now", seqlen=32).ret == 0
    assert project(seqlen=32).ret == 0


def test_a_case_that_was_never_checked_fails(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines")
    (pytester.path / "test_more.py").write_text("def test_idle(probe_case):\n    pass\n")
    result = project("test_more.py")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*never called probe_case.check()*"])


def test_an_absent_device_is_a_skip_that_says_so(project: Run) -> None:
    devices = '["cpu", "xla"]'
    assert project("--update-baselines", devices=devices).ret == 0
    result = project("-rs", devices=devices)
    assert result.ret == 0
    result.assert_outcomes(passed=16, skipped=16)
    result.stdout.fnmatch_lines(["*device xla is not present on this machine*"])


def test_all_layers_drifting_is_one_story_of_at_most_25_lines(project: Run) -> None:
    options: dict[str, object] = {"depth": 24, "formats": '["int8"]'}
    project("--update-baselines", **options)
    result = project(fault="everywhere", **options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    start = next(i for i, line in enumerate(result.outlines) if "= FAILURES =" in line)
    end = next(i for i, line in enumerate(result.outlines) if "= probe =" in line)
    failed = [line for line in result.outlines if line.startswith("FAILED ")]
    printed = result.outlines[start + 1 : end] + failed
    assert len(printed) <= 25, "\n".join(printed)
    assert any("24 of 24 layers" in line for line in printed), "\n".join(printed)
    result.stdout.fnmatch_lines(["*1 failed, * failed in the same recipe*"])


def test_a_limit_for_no_recipe_is_refused(project: Run) -> None:
    result = project(limits='{ "corse-*" = { correlation = 0.9 } }')
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*'corse-[*]' matches no recipe of the matrix. Nearest: coarse-*"])


def test_a_reference_that_moved_is_no_fault_of_a_mode_and_needs_a_full_update(
    project: Run, pytester: pytest.Pytester
) -> None:
    assert project("--update-baselines").ret == 0
    before = snapshot(pytester.path / "baselines")
    result = project(fault="float")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*coarse-layer_1-cpu-int8 cannot be judged: the float reference moved"])
    told = "\n".join(result.outlines)
    assert "from layer_1 on: its input differs by " in told
    assert "drift" not in told
    assert "not applied" not in told

    refused = project("-k", "cpu-int8", "--update-baselines", fault="float")
    assert refused.ret == pytest.ExitCode.TESTS_FAILED
    lines = [line for line in refused.outlines if "no baseline of network:make was written" in line]
    assert len(lines) == 1
    assert "the float reference moved (from layer_1 on" in lines[0]
    assert "so all cases must be updated" in lines[0]
    assert snapshot(pytester.path / "baselines") == before

    accepted = project("--update-baselines", fault="float")
    assert accepted.ret == 0
    accepted.stdout.fnmatch_lines(["network:make: the float reference moved, from layer_1 on: *"])
    after = snapshot(pytester.path / "baselines")
    assert set(before) - set(after), "the anchors are new"
    assert project(fault="float").ret == 0
    assert project().ret == pytest.ExitCode.TESTS_FAILED


def test_a_moved_reference_updates_to_the_same_bytes_in_two_processes(project: Run, pytester: pytest.Pytester) -> None:
    project("--update-baselines")
    assert project("--update-baselines", workers=2, fault="float").ret == 0
    parallel = snapshot(pytester.path / "baselines")
    project("--update-baselines")
    assert project("--update-baselines", fault="float").ret == 0
    assert snapshot(pytester.path / "baselines") == parallel


def test_a_path_on_which_the_model_crashes_is_told_and_stored_and_a_stored_case_of_it_fails(
    project: Run, pytester: pytest.Pytester
) -> None:
    told = "paths not run: decode (*), batch_1, ragged (RuntimeError: one row is no batch.)*"
    result = project("--update-baselines", fault="alone")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"*{told}*"])
    file = pytester.path / "baselines" / "network_make" / "cpu" / "coarse.json"
    assert json.loads(file.read_text())["environment"]["not run.batch_1"] == "RuntimeError: one row is no batch."
    result = project(fault="alone")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"*{told}*"])
    assert project().ret == pytest.ExitCode.TESTS_FAILED, "the paths run again, and have no baselines"

    assert project("--update-baselines").ret == 0
    before = snapshot(pytester.path / "baselines")
    for options in ([], ["--update-baselines"]):
        result = project(*options, fault="alone")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(["*batch_1 could not run: RuntimeError: one row is no batch. Fix that, or leave *"])
        assert snapshot(pytester.path / "baselines") == before
