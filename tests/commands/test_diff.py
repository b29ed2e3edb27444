"""`probe diff`: exit codes, text, JSON, report, and one message for every mistake."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from probe import Recipe, diff
from probe.commands import main
from probe.recordings import Recording
from tests.comparisons.devices.recordings import IDS, network, noisy, recorded


@pytest.fixture
def a(tmp_path: Path) -> Recording:
    return recorded(tmp_path / "a", network())


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(one) for one in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_exit_code_0_and_json_alone_on_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    recorded(tmp_path / "b", noisy(network()))
    code, out, _ = run(capsys, "diff", a.folder, tmp_path / "b", "--json", "-")
    document = json.loads(out, parse_constant=pytest.fail)
    assert code == 0
    assert document["passed"] is True
    assert document["verdict"]["kind"] == "dtype noise"
    assert list(document["layers"]) == ["embedding", "layer_0", "layer_1", "layer_2", "layer_3", "logits"]
    assert document == json.loads(json.dumps(diff(a, tmp_path / "b").as_dict()))


def test_a_fault_is_reported_in_text_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    tensors = network()
    added = tensors["layer_2.output"] - tensors["layer_1.output"]
    tensors["layer_2.output"] = tensors["layer_1.output"] + 2 * added
    recorded(tmp_path / "b", tensors)
    code, out, err = run(capsys, "diff", a.folder, tmp_path / "b")
    assert (code, err) == (1, "")
    (verdict,) = (line for line in out.splitlines() if line.startswith("Verdict"))
    assert verdict == (
        "Verdict: device fault from layer_2 on (certain): what it adds is 2 times A's: the scale is off by a factor "
        "of 2^1"
    )
    assert "Inputs: the token ids agree: 3 samples of 8" in out
    marks = {line.split()[1]: line[0] for line in out.splitlines() if line[:2] in ("> ", "✗ ", "= ")}
    assert marks["layer_2"] == ">"
    assert marks["layer_1"] == "="
    assert "FAILED: 1 of 6 tensors exceed max abs < 0.01, mean abs < 0.001, cosine > 0.99; first layer_2" in out


def test_limits_layers_and_recipes_from_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    recorded(tmp_path / "b", noisy(network()), recipe=Recipe("bf16"))
    common = ("diff", a.folder, tmp_path / "b", "--recipe", "fp32", "bf16", "--layers", "layer_*", "--json", "-")
    assert run(capsys, *common, "--max-abs", "1", "--mean-abs", "1", "--cosine", "0.5")[0] == 0
    code, out, _ = run(capsys, *common, "--max-abs", "1e-9", "--mean-abs", "1e-9", "--cosine", "0.999", "--rtol", "0")
    document = json.loads(out)
    assert code == 1
    assert document["limits"] == {"max_abs": 1e-9, "mean_abs": 1e-9, "cosine": 0.999}
    assert (document["rtol"], document["atol"]) == (0, 1e-3)
    assert list(document["layers"]) == ["layer_0", "layer_1", "layer_2", "layer_3"]
    assert document["layers"]["layer_0"]["exceeded"] == ["max_abs", "mean_abs"]


def test_the_report_has_page_figures_and_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recorded(tmp_path / "a", network())
    tensors = noisy(network(), 0.5)
    tensors["layer_2.output"][0, 0, 0] = torch.nan
    recorded(tmp_path / "b", tensors, device="<script>alert(1)</script>")
    code, _, err = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--report", tmp_path / "r")
    assert code == 1
    assert err == f"report: {tmp_path / 'r' / 'diff.html'}\n"
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        "diff.html",
        "diff.json",
        "error_by_layer.png",
        "values.png",
    ]
    page = (tmp_path / "r" / "diff.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page
    assert page.count("data:image/png;base64,") == 2
    assert "device fault from layer_0 on" in page
    for name in ("error_by_layer.png", "values.png"):
        assert (tmp_path / "r" / name).read_bytes().startswith(b"\x89PNG")
    json.loads((tmp_path / "r" / "diff.json").read_text(), parse_constant=pytest.fail)


def test_the_report_of_identical_and_of_mismatched_recordings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    assert run(capsys, "diff", a.folder, a.folder, "--report", tmp_path / "same")[0] == 0
    recorded(tmp_path / "b", network(), ids=IDS + 1)
    code, out, _ = run(
        capsys, "diff", a.folder, tmp_path / "b", "--report", tmp_path / "other", "--json", tmp_path / "j"
    )
    assert code == 1
    assert "FAILED: mismatched capture" in out
    for name in ("same", "other"):
        assert "<img" not in (tmp_path / name / "diff.html").read_text()
    assert json.loads((tmp_path / "j").read_text())["layers"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}", "nowhere"], "there is no folder nowhere."),
        (["{a}"], "1 recordings are given by place or name, expected two: probe diff A B, or probe diff --gpu-path A"),
        (["--gpu-path", "{a}"], "1 recordings are given by place or name, expected two: "),
        (["{a}", "{a}", "--gpu-path", "{a}"], "3 recordings are given by place or name, expected two: "),
        (["{a}", "{a}", "--recipe", "1", "2", "3"], "--recipe has 3 names. Give one for both, or one for A and one"),
        (["{a}", "{a}", "--recipe", "2-1"], "has no mode '2-1'."),
        (["{a}", "{a}", "--layers", "nothing"], "layers 'nothing' matches none of"),
        (["{a}", "{a}", "--max-abs", "nan"], "the limit max_abs is nan."),
        (["{a}", "{a}", "--reference", "{a}"], "there is no float reference of it."),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], a: Recording, arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, "diff", *(one.format(a=a.folder) for one in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("probe: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_the_command_of_the_fourth_document_works_as_it_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    theirs = ("--gpu-path", a.folder, "--neuron-path", a.folder, "--layer-pattern", "layer_*")
    code, out, _ = run(capsys, "diff", *theirs, "--report-path", tmp_path / "reports")
    assert code == 0
    assert "Verdict: identical" in out
    assert (tmp_path / "reports" / "diff.html").exists()


def test_what_a_recording_says_never_reaches_the_terminal_as_a_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    b = recorded(tmp_path / "b", network())
    evil = dataclasses.replace(b.manifest, device="\x1b[31mred")
    from probe.report.devices import device_text

    text = device_text(diff(a, Recording(b.folder, evil)))
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text


def test_a_changed_byte_is_found_when_asked_to_verify(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    recorded(tmp_path / "b", network())
    (file,) = (tmp_path / "b").glob("fp32*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert run(capsys, "diff", a.folder, tmp_path / "b")[0] == 1
    code, _, err = run(capsys, "diff", a.folder, tmp_path / "b", "--verify")
    assert code == 2
    assert "sha256" in err


def test_nan_on_both_sides_fails_in_text_json_and_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensors = {name: torch.full_like(x, torch.nan) if "_2" in name else x for name, x in network().items()}
    a, b = (recorded(tmp_path / name, tensors).folder for name in "ab")
    code, out, _ = run(capsys, "diff", a, b, "--report", tmp_path / "r")
    assert code == 1
    assert "Verdict: not compared from layer_2 on (certain): not finite on both sides: nothing was compared" in out
    assert "FAILED: 1 of 6 tensors exceed " in out
    (row,) = (line for line in out.splitlines() if line.startswith("> layer_2"))
    assert row.endswith(" 0%")
    code, out, _ = run(capsys, "diff", a, b, "--json", "-")
    document = json.loads(out, parse_constant=pytest.fail)
    assert (code, document["passed"], document["layers"]["layer_2"]["compared"]) == (1, False, 0.0)
    assert document["worst_by_cosine"][0] == "layer_2"


def test_tensors_that_only_one_has_are_counted_in_the_last_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    recorded(tmp_path / "b", {name: x for name, x in network().items() if name != "layer_2.output"})
    code, out, _ = run(capsys, "diff", a.folder, tmp_path / "b")
    assert code == 0
    assert out.splitlines()[-1].endswith("in all 5 tensors that both have; 1 only A has: not compared")


def test_integers_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording) -> None:
    (tmp_path / "b").mkdir()
    torch.save(torch.zeros(3, 8, 4, dtype=torch.int8), tmp_path / "b" / "layer_0_output.pt")
    code, _, err = run(capsys, "diff", a.folder, tmp_path / "b")
    assert code == 2
    assert "int8 [3, 8, 4]. Expected floats" in err
    torch.save(torch.zeros(3, 0, 4), tmp_path / "b" / "layer_0_output.pt")
    code, _, err = run(capsys, "diff", a.folder, tmp_path / "b")
    assert code == 2
    assert "float32 [3, 0, 4]. Expected floats" in err


def test_a_cosine_near_one_can_be_read_from_the_page_and_the_screen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Recording
) -> None:
    b = recorded(tmp_path / "b", noisy(network()))
    _, out, _ = run(capsys, "diff", a.folder, b.folder, "--report", tmp_path)
    page = (tmp_path / "diff.html").read_text()
    near = [layer for layer in diff(a, b).layers if layer.cosine is not None and 0.999999 < layer.cosine < 1]
    assert len(near) >= 3
    for layer in near:
        assert layer.cosine is not None
        assert f"{1 - layer.cosine:.6g}" in page
        assert f"{1 - layer.cosine:.2e}" in out
    assert "1 - cosine" in page
    assert "1 - cosine" in out
