"""`probe record`: options in both spellings, messages, progress, JSON for pipes; and the gate takes what it writes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import probe
from probe.commands import main, parse
from probe.commands.output import Progress
from probe.gate.observations import observe
from probe.gate.recorded_observations import observe_recording
from probe.recordings import read_recording
from probe.running.recipes import Recipe
from probe.running.reference import run_reference

SMALL = ("--samples", "2", "--seqlen", "16", "--calib-data-num", "2", "--calib-seqlen", "16")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["record", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_options_have_the_spelling_of_the_scripts_too() -> None:
    theirs = (
        *("--pretrained_dir", "p", "--mode", "fp32", "--output_dir", "o", "--output_file", "f.npz", "--seq_len", "7"),
        *("--calib_data_num", "3", "--calib_seqlen", "9", "--calib_data", "c", "--batch_size", "2"),
    )
    ours = (
        *("--pretrained-dir", "p", "--modes", "fp32", "--out", "o", "--output-file", "f.npz", "--seqlen", "7"),
        *("--calib-data-num", "3", "--calib-seqlen", "9", "--calib-data", "c", "--batch-size", "2"),
    )
    one, other = (vars(parse(["record", *some])) for some in (theirs, ours))
    assert one == other
    assert (one["out"], one["seqlen"], one["modes"], one["calib_data_num"]) == ("o", 7, ["fp32"], 3)


def test_quantize_of_the_script_is_accepted_with_modes_that_quantize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in seed 000: --mode 2-1 --quantize."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "--mode", "2-1", "--quantize", "--output_dir", "layer_outputs", *SMALL)
    assert code == 0
    assert "layer_outputs: mode_2_1-int8; " in out
    for given in (("--mode", "fp32"), ("--mode", "fp32", "fp16"), ("--layout", "pt")):
        code, out, err = run(capsys, *given, "--quantize", "--out", "other", *SMALL)
        assert (code, out) == (2, "")
        assert " quantizes nothing. Add a mode that does, such as 2-1, or leave --quantize out." in err
        assert err.count("\n") == 1
    assert not Path("other").exists()


def test_the_commands_of_the_first_document_work_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seed 000: the name of the model by its place, the weights by --pretrained_dir."""
    monkeypatch.chdir(tmp_path)
    model: Any = probe.load_model("tiny-mamba").model
    model.save_pretrained("weights")
    theirs = ("quamba-130m-w8a8", "--pretrained_dir", "weights")
    small = ("--samples", "1", "--seqlen", "16", "--calib_data_num", "2", "--calib_seqlen", "16")
    code, out, _ = run(capsys, *theirs, "--mode", "fp32", "--output_dir", "layer_outputs", *small)
    assert code == 0
    assert "layer_outputs: fp32; " in out
    assert read_recording("layer_outputs").manifest.model == "quamba-130m-w8a8"
    assert main(["compare", "2-1"]) == 2
    next_command = "It has: fp32. Record it: probe record --modes 2-1 --out layer_outputs\n"
    assert capsys.readouterr().err.endswith(next_command)
    code, out, _ = run(capsys, *theirs, "--mode", "2-1", "--quantize", "--output_dir", "layer_outputs", *small)
    assert code == 0
    assert main(["compare", "2-1", "--reference", "fp32", "--output_dir", "layer_outputs"]) == 0


def test_a_folder_of_another_layout_says_which_option_adds_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "--mode", "fp32", "--layout", "npy", *SMALL)[0] == 0
    code, _, err = run(capsys, "--mode", "2-1", *SMALL)
    assert code == 2
    assert err.endswith("layout npy -> safetensors. Record in that layout (--layout npy), or give another folder.\n")
    code, _, err = run(capsys, "--mode", "2-1", *SMALL, "--samples", "1")
    assert code == 2
    assert err.endswith("Give another folder.\n"), "another layout would not help"


def test_every_option_reaches_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def record(out: str, **more: Any) -> None:
        given.update(more, out=out)
        raise ValueError("enough")

    monkeypatch.setattr("probe.recordings.recorder.record", record)
    options = {
        "out": "o", "model": "m", "pretrained-dir": "p", "modes": "fp32", "formats": "int4", "include": "head",
        "layers": "all", "reference": "r", "inputs": "i:i",
        "taps": "logits", "samples": "5", "seqlen": "6", "data": "d", "prompt": "hi", "batch-size": "3",
        "device": "mps", "calib-data": "c", "calib-data-num": "7", "calib-seqlen": "8", "percentile": "0.5",
        "layout": "pt", "output-file": "f.npz",
    }  # fmt: skip
    flags = ("compile", "overwrite", "restart", "allow-download", "trust-remote-code")
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert main(["record", *words, *(f"--{flag}" for flag in flags)]) == 2
    assert {type(given.pop(name)).__name__ for name in ("progress", "engine", "units")} >= {"Progress", "LocalEngine"}
    lists = ("modes", "formats", "include", "layers", "taps")
    expected: dict[str, Any] = {name.replace("-", "_"): value for name, value in options.items()}
    expected |= {name: [options[name]] for name in lists} | dict.fromkeys((f.replace("-", "_") for f in flags), True)
    for name in ("samples", "seqlen", "batch_size", "calib_data_num", "calib_seqlen"):
        expected[name] = int(expected[name])
    assert given == expected | {"percentile": 0.5}


def test_it_says_what_it_does_and_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--modes", "fp32", "2-1", "--out", str(tmp_path / "r"), *SMALL)
    assert code == 0
    assert out.startswith(f"{tmp_path}/r: fp32, mode_2_1-int8; layer_0, layer_3; 2 x 16 tokens, 0.")
    assert err.splitlines() == [
        "[calibration] 2 x 16 of calibration, percentile 0.9995",
        "[1/2] fp32",
        "[2/2] mode_2_1-int8",
    ]


@pytest.mark.parametrize("name", ["2-1", "mode_2_1", "essential"])
def test_a_mode_in_the_place_of_the_model_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    code, out, err = run(capsys, name, "--out", str(tmp_path / "r"), *SMALL)
    assert (code, out) == (2, "")
    assert err == f"probe: error: {name} stands in the place of the model, and it is a mode. Write: --modes {name}\n"


@pytest.mark.parametrize("to", ["-", "file"])
def test_the_manifest_goes_to_a_pipe_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str) -> None:
    place = "-" if to == "-" else str(tmp_path / "m.json")
    code, out, _ = run(capsys, "--modes", "fp32", "--out", str(tmp_path / "r"), "--json", place, *SMALL)
    assert code == 0
    text = out if to == "-" else Path(place).read_text()
    assert json.loads(text) == json.loads((tmp_path / "r" / "manifest.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "a"], "two models are given, tiny-mamba and --model a. Leave one of them out."),
        (["--taps", "scans"], "unknown tap 'scans'. Did you mean 'scan'?"),
        (["--seqlen", "70000"], "the text has 65536 tokens"),
        (["--layout", "csv"], "unknown layout 'csv'"),
        (["--json", "/proc/all.json"], "cannot write /proc/all.json: no such file or directory. Give a file in"),
        (["--formats", "int7"], "unknown format 'int7'. Did you mean 'int"),
        (["--out", "/dev/null"], "/dev/null is a file. Expected the name of a folder to make."),
        (["--out", "/proc/nothing/r"], "cannot write /proc/nothing/r: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "tiny-mamba", "--modes", "fp32", *SMALL, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("probe: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_gets_a_bar_with_mode_layer_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run_bar(tmp_path)
    shown = capsys.readouterr().err
    assert "[1/1] fp32" in shown
    assert "fp32 layer_3: 100%" in shown
    assert "4/4 [" in shown
    assert "<00:00" in shown, "the time left"


def run_bar(tmp_path: Path) -> None:
    with Progress() as progress:
        progress.bar.mininterval = 0
        probe.record(tmp_path / "r", modes=["fp32"], samples=2, seqlen=8, progress=progress)


def test_the_bar_is_for_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bars: list[object] = []

    def record(out: str, *, progress: Progress, **more: Any) -> None:
        bars.append(progress.bar)
        raise ValueError("enough")

    monkeypatch.setattr("probe.recordings.recorder.record", record)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        assert main(["record"]) == 2
    assert bars[0] is None
    assert type(bars[1]).__name__ == "tqdm"


@torch.no_grad()
def test_the_gate_judges_what_the_command_writes_as_a_run_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--layers", "all", "--taps", "logits", "--modes", "2-1", *SMALL)
    assert run(capsys, "--out", str(tmp_path / "board"), "--batch-size", "2", *arguments)[0] == 0
    loaded = probe.load_model("tiny-mamba")
    batches = probe.token_batches(probe.text_of("evaluation"), loaded.tokenizer, samples=2, seqlen=16, batch_size=2)
    reference = run_reference(loaded.model, batches)
    calibration = probe.calibrate_on(loaded, "calibration", 2, 16)
    recipe = Recipe("2-1", "int8")
    live = observe(loaded.model, recipe, reference, calibration)
    seen = observe_recording(
        read_recording(tmp_path / "board"),
        recipe,
        reference,
        model_fingerprint=loaded.fingerprint,
        data_fingerprint=read_recording(tmp_path / "board").manifest.tokens.fingerprint or "",
    )
    assert list(seen) == list(live)
    for label, one in seen.items():
        assert one.flaws == ()
        kind = "logits" if label == "logits" else "propagated"
        assert one.figures == {name: value for name, value in live[label].figures.items() if name.startswith(kind)}
        assert one.figures
