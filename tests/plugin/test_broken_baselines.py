"""Baselines that are damaged: the gate fails, says which file and what in it, and never passes or crashes."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugin.conftest import Run
from tests.plugin.test_lifecycle import snapshot

FIGURES = "cpu/coarse.json"
Damage = Callable[[Path], object]
_made: dict[str, bytes] = {}  # the baselines of the project, made once for all tests of this file


@pytest.fixture
def folder(project: Run, pytester: pytest.Pytester) -> Path:
    """Sound baselines of the project."""
    root = pytester.path / "baselines"
    if not _made:
        assert project("--update-baselines").ret == 0
        _made.update(snapshot(root))
    for name, data in _made.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root / "network_make"


def told(result: pytest.RunResult, *words: str, recipes: int = 2) -> None:
    """All four cases of so many recipes failed, the first of each says why, and there is no traceback."""
    text = result.stdout.str() + result.stderr.str()
    assert result.ret == pytest.ExitCode.TESTS_FAILED, text
    passed = f"{8 - 4 * recipes} passed, " if recipes < 2 else ""
    counted = rf"= {recipes} failed, {passed}(1 warning, )?{3 * recipes} failed in the same recipe in "
    assert re.search(counted, text), text
    assert "Traceback" not in text, text
    assert "Error:" not in text, text
    for word in words:
        assert word in text, f"{word} is not told:\n{text}"


def put(old: str, new: str) -> Damage:
    def change(file: Path) -> None:
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))

    return change


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def bend(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def empty(file: Path) -> None:
    file.write_bytes(b"")


def twice(file: Path) -> None:
    lines = file.read_text().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if '"mse":' in line)
    file.write_text("".join([*lines[: index + 1], *lines[index:]]))


def replace_mse(figure: str) -> Damage:
    def change(file: Path) -> None:
        lines = file.read_text().splitlines(keepends=True)
        index = next(i for i, line in enumerate(lines) if '"mse":' in line)
        lines[index] = f'     "mse": {figure},\n'
        file.write_text("".join(lines))

    return change


def edit_values(file: Path) -> None:
    """Another letter in the golden values of the first case."""
    lines = file.read_text().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if '"values":' in line)
    head, _, values = lines[index].rpartition(":")
    lines[index] = f"{head}:{'B' if values[0] == 'A' else 'A'}{values[1:]}"
    file.write_text("".join(lines))


#: The first figure of that name in the file.
MSE = "cases.fp8_e4m3.layer_0.injected.mse"


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        (FIGURES, cut, ["is not JSON"]),
        (FIGURES, empty, ["is not JSON that can be read (Expecting value: line 1"]),
        (FIGURES, make_folder, ["Is a directory"]),
        (FIGURES, lambda file: file.write_bytes(b"\xff"), ["can't decode byte 0xff"]),
        (FIGURES, lambda file: file.write_text("[]\n"), ["expected an object with named keys, found []"]),
        (FIGURES, put('"version": 3', '"version": 4'), ["was written by a newer probe, 4", "Upgrade probe"]),
        (FIGURES, put('"version": 3', '"version": "3"'), ['version: expected a whole number, 1 or more, found "3"']),
        (FIGURES, put('"version": 3', '"version": 1'), ["were written by an older probe", "baselines.convert"]),
        (FIGURES, replace_mse("[NaN, 0.0]"), ["holds NaN, which is never stored"]),
        (FIGURES, replace_mse('["low", 0.0]'), [f'{MSE}[0]: expected a finite number, found "low"']),
        (FIGURES, replace_mse("0.1"), [f"{MSE}: expected [value, spread]"]),
        (FIGURES, replace_mse("[0.1, -1]"), [f"{MSE}: the spread is -1.0, expected 0 or more"]),
        (FIGURES, twice, ["the key 'mse' is there twice"]),
        (FIGURES, put('"mode": "coarse"', '"mode": "other"'), ["mode: expected the one that the file is named for"]),
        (
            FIGURES,
            put('"model": "network:make"', '"model": "other"'),
            ["models 'other' and 'network:make' would share"],
        ),
        (FIGURES, put('"device": "cpu"', '"device": "cuda"'), ["devices 'cuda' and 'cpu' would share"]),
        (FIGURES, edit_values, ["layer_0.values: the values do not have the digest", "damaged or were edited"]),
        (FIGURES, put('"torch": "', '"torch": 2, "tor": "'), ["environment.torch: expected a text, found 2"]),
        (FIGURES, put('"anchors": "anchors-', '"anchors": "../anchors-'), ["is not a name of anchors"]),
        (FIGURES, put('"anchors": "anchors-', '"anker": "anchors-'), ["'' is not a name of anchors"]),
        ("anchors-*", Path.unlink, ["No such file or directory"]),
        ("anchors-*", make_folder, ["Is a directory"]),
        ("anchors-*", cut, ["does not hold what its name says: it is damaged or was edited"]),
        ("anchors-*", bend, ["does not hold what its name says: it is damaged or was edited"]),
    ],
)
def test_a_damaged_file_fails_the_gate_by_name_and_an_update_does_not_write_over_it(
    project: Run, folder: Path, name: str, damage: Damage, words: list[str]
) -> None:
    (file,) = folder.glob(name)
    damage(file)
    before = snapshot(folder)
    stem = file.name.split(".")[0]
    told(project(), stem, *words)
    told(project("--update-baselines"), stem, *words, "was written: 8 of 8 cases have nothing to store")
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"cosine":', '"cosin":', "unknown figure 'injected.cosin'. Did you mean 'injected.cosine'?"),
        ('"injected":', '"injectd":', "168 golden values, expected 64 for propagated."),
    ],
)
def test_figures_that_nobody_knows_fail_their_recipe_by_name(
    project: Run, folder: Path, old: str, new: str, words: str
) -> None:
    put(old, new)(folder / FIGURES)
    before = snapshot(folder)
    where = "baselines/network_make/cpu/coarse.json: coarse-layer_0-cpu-fp8_e4m3: "
    told(project(), where + words, "or delete baselines/network_make/cpu/coarse.json and make it again", recipes=1)
    told(project("--update-baselines"), where + words, "4 of 8 cases have nothing to store", recipes=1)
    assert snapshot(folder) == before


def test_a_case_that_could_not_be_judged_is_a_failure_in_the_summary_too(
    project: Run, folder: Path, pytester: pytest.Pytester
) -> None:
    put('"cosine":', '"cosin":')(folder / FIGURES)
    project("--probe-output=out", "--html=out/report.html", "--self-contained-html")
    summary = json.loads((pytester.path / "out" / "summary.json").read_text())
    assert summary["exit_status"] == 1
    assert summary["totals"] == {"passed": 4, "failed": 4}
    messages = [case["message"] for case in summary["cases"] if case["status"] == "failed"]
    assert all("unknown figure 'injected.cosin'" in message for message in messages)
    assert "unknown figure" in (pytester.path / "out" / "summary.md").read_text()


def test_a_damage_is_told_once_for_each_recipe_and_before_anything_is_measured(
    project: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(folder / FIGURES)
    monkeypatch.setattr("probe.gate.bench.Bench.observe", lambda *_: pytest.fail("a recipe was measured"))
    result = project()
    told(result, "coarse.json", "is not JSON")
    result.stdout.fnmatch_lines(["*2 failed, 6 failed in the same recipe*"])


def test_what_the_message_advises_works(project: Run, folder: Path, pytester: pytest.Pytester) -> None:
    """`delete ... and make it again`, for the file of a mode, for anchors and for the whole folder."""
    before = snapshot(folder)
    cut(folder / FIGURES)
    told(project(), f"delete {folder / FIGURES} and make it again with: pytest --update-baselines")
    (folder / FIGURES).unlink()
    assert project("--update-baselines").ret == 0
    assert snapshot(folder) == before
    shutil.rmtree(folder)
    assert project("--update-baselines").ret == 0
    assert snapshot(folder) == before


def test_a_case_under_another_name_is_missing_and_obsolete(project: Run, folder: Path) -> None:
    put('"layer_1":', '"layer_7":')(folder / FIGURES)
    result = project()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=7, failed=1)
    result.stdout.fnmatch_lines(
        ["*coarse-layer_1-cpu-fp8_e4m3 has no baseline*", "obsolete: coarse-layer_7-cpu-fp8_e4m3 of network:make*"]
    )


def test_baselines_of_an_older_probe_are_refused_once_before_anything_runs(
    project: Run, folder: Path, pytester: pytest.Pytester
) -> None:
    (folder / "environment.json").write_text("{}")
    before = snapshot(folder)
    for arguments in ((), ("--update-baselines",)):
        result = project(*arguments)
        assert result.ret == pytest.ExitCode.INTERRUPTED
        text = result.stdout.str()
        assert text.count(f"python -m probe.gate.baselines.convert {pytester.path / 'baselines'}") == 1
        assert "Traceback" not in text
    assert snapshot(folder) == before


def test_damage_beside_the_cases_that_ran_fails_the_run_too(project: Run, folder: Path) -> None:
    """In the baselines of a device and of a model that no test asked for, which are only looked at for the obsolete."""
    for other in (folder / "cuda", folder.with_name("other") / "cpu"):
        other.mkdir(parents=True)
        (other / "coarse.json").write_text("{")
        result = project()
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert "INTERNALERROR" not in result.stdout.str()
        result.assert_outcomes(passed=8)
        result.stdout.fnmatch_lines([f"{other / 'coarse.json'}: is not JSON that can be read*"])
        shutil.rmtree(other)
    assert project().ret == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_told(project: Run, folder: Path) -> None:
    (folder / FIGURES).chmod(0)
    told(project(), "coarse.json", "Permission denied")
