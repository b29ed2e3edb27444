"""`recorded:<folder>` as a device: cases measured from a recording that another machine made."""

import json
from pathlib import Path

import pytest
import torch

import probe
from probe.recordings import write_recording
from tests.plugin.conftest import Run

SETTINGS: dict[str, object] = {
    "model": '"tiny-mamba"',
    "modes": '["2-1"]',
    "formats": '["fp8_e4m3"]',
    "layers": '["first", "last"]',
    "devices": '["recorded:elsewhere"]',
    "samples": 2,
    "seqlen": 32,
}


def record(folder: Path, *, factor: float = 1.0, mode: str = "2-1", seqlen: int = 32) -> None:
    """What `probe record` of another machine would leave; `factor` is what that machine does wrong in layer 3."""
    loaded = probe.load_model("tiny-mamba")
    text = probe.text_of("evaluation")
    batches = probe.token_batches(text, loaded.tokenizer, samples=2, seqlen=seqlen, batch_size=2)
    recipe = probe.Recipe("2-1", "fp8_e4m3")
    twin = probe.apply(loaded.model, probe.Recipe("fp32") if mode == "fp32" else recipe)
    with torch.no_grad(), probe.capture(twin, ["first", "last"]) as captured:
        logits = [twin(batch, use_cache=False).logits for batch in batches]
    captured.tensors["layer_3.output"] = [tensor * factor for tensor in captured.tensors["layer_3.output"]]
    write_recording(
        folder,
        [(recipe, {**captured.tensors, "logits": logits})],
        model="tiny-mamba",
        batches=batches,
        device="another machine",
        model_fingerprint=loaded.fingerprint,
        overwrite=True,
    )


def test_a_recording_is_held_to_its_baselines(project: Run, pytester: pytest.Pytester) -> None:
    record(pytester.path / "elsewhere")
    assert project("--update-baselines", **SETTINGS).ret == 0
    (file,) = pytester.path.glob("baselines/tiny-mamba/*/mode_2_1.json")
    assert file.parent.name == "recorded_elsewhere"
    stored = json.loads(file.read_text())["cases"]["fp8_e4m3"]
    assert set(stored) == {"layer_0", "layer_3", "logits"}
    assert set(stored["layer_0"]) == {"propagated", "values"}, "there is no injected run in a recording"
    assert project(**SETTINGS).ret == 0

    record(pytester.path / "elsewhere", factor=1.2)
    result = project(**SETTINGS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(["mode_2_1-layer_3-recorded:elsewhere-fp8_e4m3 drifted from its baseline"])


@pytest.mark.parametrize(
    ("change", "words"),
    [({"mode": "fp32"}, "*was not applied*"), ({"seqlen": 16}, "*tokens*")],
    ids=["the float model under the wrong name", "other tokens"],
)
def test_a_recording_of_something_else_is_no_pass(
    project: Run, pytester: pytest.Pytester, change: dict[str, object], words: str
) -> None:
    record(pytester.path / "elsewhere")
    project("--update-baselines", **SETTINGS)
    record(pytester.path / "elsewhere", **change)  # type: ignore[arg-type]
    result = project(**SETTINGS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([words])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_recording_that_is_not_there_is_said(project: Run) -> None:
    result = project(**SETTINGS)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*device 'recorded:elsewhere': there is no folder*"])
