"""The commands on checkpoints of other tools, and on models that are quantized already."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from probe.commands import main
from probe.running.modes import MODES, unregister_mode
from tests.models.quantized_models import by_compressed_tensors, by_torchao, write_gguf

SMALL = ("--samples", "2", "--seqlen", "32")


@pytest.fixture(autouse=True)
def _no_new_modes() -> Iterator[None]:
    known = set(MODES)
    yield
    for name in set(MODES) - known:
        unregister_mode(name)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_errors_takes_a_checkpoint_beside_other_modes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(place / "q4.gguf", Kind.Q4_0)
    modes = ("--modes", "checkpoint:q4.gguf", "bf16", "--layers", "first")
    code, out, err = run(capsys, "errors", "--model", "tiny-llama", *modes, *SMALL)
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["checkpoint_q4_gguf", "bf16"]
    assert "quantized by GGUF (10 tensors F32, 28 tensors Q4_0); as: 589,824 Q4_0 of GGUF" in out


def test_a_recorded_checkpoint_is_compared_by_either_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_torchao(place / "int8")
    modes = ("--modes", "fp32", "checkpoint:./int8")
    code, out, err = run(capsys, "record", "--model", "tiny-llama", *modes, *SMALL)
    assert code == 0, err
    assert "layer_outputs: fp32, checkpoint_int8; layer_0, layer_3" in out
    manifest = (place / "layer_outputs" / "manifest.json").read_text()
    assert str(place) not in manifest
    assert json.loads(manifest)["recipes"]["checkpoint_int8"]["weights"]["forms"] == {"Int8Tensor of torchao": 589824}
    found = [run(capsys, "compare", name, "--json", "-") for name in ("checkpoint:int8", "checkpoint_int8")]
    assert [code for code, _, _ in found] == [0, 0]
    assert found[0][1] == found[1][1]


def test_sensitivity_ranks_the_layers_of_a_checkpoint_and_saves_no_mode(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_compressed_tensors(place / "int4")
    ranked = ("sensitivity", "--model", "tiny-llama", "--mode", "checkpoint:int4", *SMALL)
    code, out, err = run(capsys, *ranked)
    assert code == 0, err
    assert out.startswith("tiny-llama, checkpoint_int4, 4 layers, 64 tokens")
    assert "quantized by compressed-tensors (int4 group 32)" in out
    assert "As a mode" not in out
    for more, told in (
        (("--save-mode", "x.toml"), "and a checkpoint is quantized already. Leave it out: the tool that makes"),
        (("--format", "int8"), "mode checkpoint:int4 is quantized already and takes no format, but int8 was given."),
        (("--sites",), "mode checkpoint:int4 builds its model by itself, so its sites are not known."),
    ):
        code, _, err = run(capsys, *ranked, *more)
        assert code == 2
        assert told in err


FACTORIES = """
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from probe.models.loading import load_model


def quantized():
    model = load_model("tiny-llama").model
    chosen = lambda one, name: isinstance(one, nn.Linear) and name != "lm_head"
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=chosen)
    return model


def plain():
    return load_model("tiny-llama").model
"""


def test_a_quantized_model_is_compared_with_its_reference(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "made.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(place)
    code, _, err = run(capsys, "errors", "--model", "made:quantized", *SMALL)
    assert code == 2
    assert 'Name its float original too, as reference = "package.module:factory" in [tool.probe] or --reference' in err

    both = ("--model", "made:quantized", "--reference", "made:plain", *SMALL)
    code, out, err = run(capsys, "errors", *both)
    assert code == 0, err
    assert out.splitlines()[1].startswith("checkpoint_quantized ")
    assert "as: 589,824 Int8Tensor of torchao" in out
    code, _, err = run(capsys, "errors", *both, "--modes", "linear_w")
    assert code == 2
    assert "made:plain is the reference of made:quantized, and the modes linear_w leave that model out." in err

    code, out, err = run(capsys, "sensitivity", *both, "--no-advice", "--layers", "first")
    assert code == 0, err
    assert out.startswith("made:quantized, checkpoint_quantized, 1 layers")
    code, out, err = run(capsys, "record", *both, "--quantize")
    assert code == 0, err
    assert "layer_outputs: fp32, checkpoint_quantized; layer_0, layer_3" in out
    code, _, err = run(capsys, "errors", "--model", "tiny-llama", "--reference", "made:plain", *SMALL)
    assert code == 2
    assert "checkpoint 'tiny-llama' is neither a folder" in err


def test_a_factory_of_plain_floats_is_no_quantized_model(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "made_plain.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(place)
    code, _, err = run(capsys, "errors", "--model", "made_plain:plain", "--reference", "tiny-llama", *SMALL)
    assert code == 2
    assert "checkpoint 'made_plain:plain' is the model of a factory, but all its weights are plain floats" in err
