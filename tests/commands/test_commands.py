"""The commands as a whole, formats and demo: tables, messages, exit codes, what loads, what can be written."""

import errno
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import probe
from probe import FORMATS, __version__
from probe.commands import main, parse
from probe.files.atomic import write
from probe.files.paths import check_outputs
from probe.formats import PERCENTILE
from probe.numerics.observers import PercentileObserver


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_formats_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "formats")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(FORMATS)


def test_formats_as_json_is_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "formats", "--json")
    rows = {row["format"]: row for row in json.loads(out)}
    assert rows["fp8_e4m3"]["max"] == 448
    assert rows["nvfp4"]["block"] == 16
    assert rows["mxint8"]["min normal"] is None


def test_demo_ranks_formats_as_their_bits_suggest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "demo", "--json", "--shape", "64", "96")
    assert code == 0
    sqnr = {row["format"]: row["sqnr dB"] for row in json.loads(out)}
    assert list(sqnr) == list(FORMATS)
    assert sqnr["fp16"] > sqnr["bf16"] > sqnr["mxint8"] > sqnr["fp8_e4m3"] > sqnr["fp4_e2m1"]
    assert sqnr["int8"] > sqnr["int4"] > sqnr["int2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--formats", "fp8"], "unknown format 'fp8'. Did you mean 'fp8_e4m3'?"),
        (["demo", "--shape", "1000000", "1000000"], "has 1000000000000 elements"),
        (["demo", "--seed", "99999999999999999999999"], "seed 99999999999999999999999 is out of range"),
        (["demo", "--formats", "int8", "--scale-rule", "ceil"], "none of these formats has a power-of-two scale"),
        (["demo", "--scale-rule", "cel"], "unknown scale rule 'cel'. Did you mean 'ceil'?"),
        (["demo", "--shape", "0"], "shape 0 has no elements"),
        (["demo", "--outliers", "3"], "outliers 3.0 is not a share"),
        (["layers", "--model", "nofolder"], "unknown model 'nofolder'. Embedded: tiny-mamba"),
        (["sensitivity", "--layers", "9"], "List them with: probe layers --model tiny-mamba"),
        (["errors", "--modes", "fp32", "--layers", "9"], "List them with: probe layers --model tiny-mamba"),
        (["sensitivity", "--model", "tiny-llama", "--mode", "2-1"], "Modes for other models: fp16, bf16, linear_w"),
        (["errors", "--modes", "fp32", "--formats", "int7"], "unknown format 'int7'. Did you mean 'int"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("probe: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["formats"]])
def test_help_version_and_formats_do_not_import_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from probe.commands import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if arguments == ["--version"]:
        assert done.stdout.strip() == f"probe {__version__}"


ENDING = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > 0))
from probe.commands import main
sys.argv = ["probe", "modes"]
main({given})
"""


@pytest.mark.parametrize(("given", "frozen"), [("", "True"), ("sys.argv[1:]", "False")], ids=["process", "call"])
def test_only_the_process_of_a_command_ends_without_looking_for_garbage(given: str, frozen: str) -> None:
    program = ENDING.format(given=given)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == frozen


def test_demo_of_a_lossless_tensor_is_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "demo", "--json", "--shape", "1", "--formats", "int4")
    (row,) = json.loads(out, parse_constant=pytest.fail)
    assert (row["mse"], row["sqnr dB"], row["saturated %"]) == (0, None, 0)


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    for arguments in (["--debug", "demo", "--shape", "0"], ["demo", "--shape", "0", "--debug"]):
        with pytest.raises(ValueError, match="has no elements"):
            main(arguments)


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m probe.commands formats --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0"
    assert "error" not in done.stderr


def test_every_public_name_can_be_imported() -> None:
    front: Any = probe  # mypy knows the stub, which lists the names and not how they are found
    assert all(getattr(probe, name) is not None for name in front.__all__)
    assert set(front._HOMES) | {"__version__"} == set(front.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        front.nothing  # noqa: B018


def test_a_limit_that_is_no_number_says_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("two", "nan"):
        with pytest.raises(SystemExit, match="2"):
            main(["compare", "2-1", "--min-correlation", given])
        assert f"'{given}' is no limit. Expected a number, such as 0.01 or 1e-6." in capsys.readouterr().err


def test_one_recipe_has_one_default_calibration() -> None:
    from probe.gate.configuration import CalibrationSettings
    from probe.recordings.request import RecordRequest
    from probe.running.calibration import calibrate_on
    from probe.running.measurement_job import measure_all
    from probe.sensitivity.ranking import rank_model

    for command in ("record", "errors", "sensitivity"):
        assert parse([command]).percentile == PERCENTILE == 0.9995
    for function in (probe.calibrate, calibrate_on, measure_all, RecordRequest, rank_model):
        assert inspect.signature(function).parameters["percentile"].default == PERCENTILE
    assert CalibrationSettings().percentile == PERCENTILE
    assert PercentileObserver().settings == {"alpha": PERCENTILE}


def test_a_model_in_the_current_folder_is_found_by_the_installed_command(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(
        "from torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Linear(2, 3))\n"
    )
    command = Path(sys.executable).with_name("probe")
    done = subprocess.run(
        [command, "layers", "--model", "here:make"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Linear" in done.stdout


#: What is given, and what is said of it; {file} is a file, so that nothing can be made below it.
UNWRITABLE = {
    "analyze": (["analyze", "--visualization.save_dir", "{file}/sub"], "to {file}/sub: {file} is a file, not a folder"),
    "dry run": (
        ["analyze", "--save_dir", "/proc/x", "--dry-run"],
        "to /proc/x: no such file or directory. Give a fold",
    ),
    "two runs": (["analyze", "--compare", "a", "b", "--output", "/proc/x"], "to /proc/x: no such file or directory"),
    "sensitivity": (["sensitivity", "--report", "{file}"], "to {file}: {file} is a file, not a folder. Give a folder"),
    "figures": (["sensitivity", "--json", "/proc/x.json"], "/proc/x.json: no such file or directory. Give a file in"),
    "a folder": (["sensitivity", "--json", "{folder}"], "{folder}: it is a folder. Give the name of a file."),
    "record": (["record", "--json", "{file}/x.json"], "{file}/x.json: {file} is a file, not a folder. Give a file in"),
    "check": (["check", "nothing", "--report", "{file}"], "to {file}: {file} is a file, not a folder"),
    "diff": (["diff", "a", "b", "--json", "/proc/x.json"], "/proc/x.json: no such file or directory"),
}


@pytest.mark.parametrize(("arguments", "message"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_an_output_that_cannot_be_written_is_told_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    names = {"file": str(tmp_path / "file"), "folder": str(tmp_path)}
    Path(names["file"]).write_text("mine")
    code, out, err = run(capsys, *(one.format(**names) for one in arguments))
    assert (code, out) == (2, "")
    assert err.startswith(f"probe: error: cannot write {message.format(**names)}")
    assert err.count("\n") == 1, "nothing was begun"
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"


def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "old.json").write_text("old")
    check_outputs(files=[tmp_path / "kept" / "old.json", "-", None], folders=[tmp_path / "a" / "b", tmp_path / "kept"])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "old.json"]
    assert (tmp_path / "kept" / "old.json").read_text() == "old"


def test_a_disk_that_fills_up_is_told_with_the_name_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", ".x.json.1.tmp")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '\S+/x\.json'"):
        write(tmp_path / "x.json", "text")
    assert list(tmp_path.iterdir()) == []
