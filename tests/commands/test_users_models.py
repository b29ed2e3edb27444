"""Models of users through the commands: they run, or end in one message and exit code 2, never in a traceback."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import probe
from probe.commands import main
from probe.models.linear import linear_layers
from probe.models.parts import output_head
from tests.models.nets import Gpt
from tests.recordings.models import Stack

SMALL = ["--samples", "1", "--seqlen", "16", "--calib-data-num", "1", "--calib-seqlen", "16"]
COMMANDS = {
    "errors": ["errors", "--modes", "linear_wa", "--formats", "int8", *SMALL],
    "record": ["record", "--modes", "fp32", "linear_wa", "--formats", "int8", "--taps", "logits", *SMALL],
    "sensitivity": ["sensitivity", "--mode", "linear_wa", "--format", "int8", *SMALL],
    "analyze": [
        "analyze",
        "--data.num_samples",
        "1",
        "--data.seq_len",
        "16",
        "--visualization.magnitude.patterns",
        "h",
    ],
}
EVERY = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(command: str, factory: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    option = "--model.path" if command == "analyze" else "--model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main([*COMMANDS[command], option, f"tests.models.nets:{factory}"])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("command", ["errors", "record", "sensitivity"])
def test_a_config_without_use_cache_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "gpt", capsys)[0] == 0


@EVERY
def test_two_inputs_are_one_message(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run(command, "two_inputs", capsys)
    assert code == 2
    if command != "analyze":
        assert "TwoInputs failed on token ids [1, 16]: TypeError: " in shown
        assert 'What else its forward needs, a function returns: inputs = "package.module:function"' in shown


@EVERY
@pytest.mark.parametrize("factory", ["by_torchao", "by_probe"])
def test_a_quantized_model_is_refused(command: str, factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run(command, factory, capsys)
    assert code == 2
    assert "the factory returned a model that is quantized already: h.0.0" in shown


def test_logits_of_the_last_token_only_have_no_bits(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*COMMANDS["errors"], "--model", "tests.models.nets:last_only"])
    shown = capsys.readouterr().out
    assert code == 0
    assert "bits" not in shown
    assert "cosine: of all of it" in shown


def test_the_head_of_a_model_that_names_none_stays_float() -> None:
    for model, head in ((Gpt(), "lm_head"), (Stack(2, 16), "head")):
        assert output_head(model) is model.get_submodule(head)
        assert head not in linear_layers(model)
    assert output_head(nn.Sequential(nn.Linear(4, 4))) is None
    inside = Stack(2, 256)  # its blocks have as many outputs as there are tokens
    assert set(linear_layers(inside)) == {"layers.0.linear", "layers.1.linear"}


def test_a_mode_of_a_users_own_is_found_in_both_spellings() -> None:
    for name, id in (("4_a", "mode_4_a"), ("4", "mode_4"), ("5-b", "mode_5_b")):
        probe.register_mode(name, lambda model, format, calibration: model)
        assert str(probe.Recipe(id, "int8")) == str(probe.Recipe(name, "int8")) == f"{id}-int8"
        for taken in (name, name.replace("-", "_"), name.replace("_", "-")):
            with pytest.raises(ValueError, match="there is a mode"):
                probe.register_mode(taken, lambda model, format, calibration: model)
        probe.unregister_mode(id)
        with pytest.raises(ValueError, match="unknown mode"):
            probe.Recipe(name, "int8")


def test_a_whole_percentile_is_recorded_as_it_is_read(tmp_path: Path) -> None:
    given: dict[str, Any] = {"modes": ["0"], "samples": 1, "seqlen": 8, "calib_data_num": 1, "calib_seqlen": 8}
    probe.record(tmp_path / "r", **given, percentile=1)
    assert probe.read_recording(tmp_path / "r").manifest.recipes["mode_0-int8"].calibration is not None
    for wrong in (0, 1.5, True, float("nan")):
        with pytest.raises(ValueError, match=r"percentile is .*; expected a share above 0 and at most 1"):
            probe.record(tmp_path / "s", **given, percentile=wrong)


def test_sensitivity_gives_a_users_mode_its_calibration(capsys: pytest.CaptureFixture[str]) -> None:
    given = []

    def build(model: nn.Module, format: str, calibration: probe.Calibration | None) -> nn.Module:
        given.append(calibration)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        return model

    probe.register_mode("mine", build)
    try:
        assert main(["sensitivity", "--model", "tiny-llama", "--mode", "mine", "--format", "fp8_e4m3", *SMALL]) == 0
    finally:
        probe.unregister_mode("mine")
    assert given
    assert None not in given
