"""Folders as transformers writes them: what loads, what is noted, and what is refused with which words."""

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from probe.data.library_logs import quietly
from probe.data.tokenizers import ByteTokenizer
from probe.models.loading import load_model, weight_fingerprint
from tests.models.folders import change_config, change_weights, refusal, save_small


@pytest.mark.parametrize("kind", ["Mamba2ForCausalLM", "LlamaForCausalLM", "BertModel"])
def test_a_saved_model_loads_back_from_its_folder(tmp_path: Path, kind: str) -> None:
    saved = save_small(kind, tmp_path)
    got = load_model(str(tmp_path))
    assert type(got.model).__name__ == kind
    assert got.fingerprint == weight_fingerprint(saved)
    assert got.notes == (f"no tokenizer files in {str(tmp_path)!r}: text is read as bytes, ids 0 to 255",)
    assert isinstance(got.tokenizer, ByteTokenizer)


def test_a_model_in_shards_loads(folder: Path) -> None:
    whole = load_model("tiny-llama")
    (folder / "model.safetensors").unlink()
    with quietly():
        cast(Any, whole.model).save_pretrained(folder, max_shard_size="1MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert load_model(str(folder)).fingerprint == whole.fingerprint
    next(folder.glob("*-00002-of-*.safetensors")).unlink()
    assert "lists shards that are not in its folder: model-00002-of-" in refusal(folder)


def test_no_dtype_keeps_the_dtype_of_the_checkpoint(folder: Path) -> None:
    cast(Any, load_model(str(folder), dtype=torch.bfloat16).model).save_pretrained(folder)
    assert next(load_model(str(folder), dtype=None).model.parameters()).dtype == torch.bfloat16
    assert next(load_model(str(folder)).model.parameters()).dtype == torch.float32


def test_tensors_without_a_place_are_noted(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update(extra=torch.ones(2)))
    notes = load_model(str(folder)).notes
    assert "1 tensors of the checkpoint are not part of LlamaForCausalLM and were left out: extra" in notes


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder) == (
        f"model folder {str(folder)!r} has no config.json. "
        "Expected a folder written by save_pretrained of transformers."
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON that can be read (Expecting"),
        ("[]", "holds a list"),
        ("{}", "names no model_type"),
    ],
)
def test_a_broken_config(folder: Path, text: str, words: str) -> None:
    (folder / "config.json").write_text(text)
    message = refusal(folder)
    assert words in message
    assert "config.json" in message


def test_a_model_type_that_transformers_does_not_know(folder: Path) -> None:
    change_config(folder, model_type="zzz", architectures=None)
    message = refusal(folder)
    assert message.startswith("transformers 5.")
    assert "model type `zzz`" in message


@pytest.mark.parametrize("keep", [0, 7, 1000, 2_498_999], ids=lambda keep: f"{keep}_bytes")
def test_weights_that_are_cut_short(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(folder)
    assert f"weights '{file}' are corrupt or cut short ({keep} bytes): is not safetensors that can be read (" in message
    assert message.endswith("Copy or download the file again.")


def test_weights_with_a_corrupt_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])
    assert f"weights '{file}' are corrupt or cut short" in refusal(folder)


def test_pickled_weights_are_refused_unopened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    message = refusal(folder)
    assert "has its weights only as pickle (pytorch_model.bin), which can run code when opened." in message
    assert "Expected model.safetensors" in message


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights. Expected model.safetensors" in refusal(folder)


def test_an_index_that_leaves_its_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    assert "lists shards that are not in its folder: ../other.safetensors" in refusal(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"))
    message = refusal(folder)
    assert "do not fit LlamaForCausalLM of config.json: model.layers.2.mlp.up_proj.weight is missing." in message


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(5)}))
    assert "model.norm.weight is (5,), not (128,)." in refusal(folder)


def test_many_wrong_tensors_are_counted(folder: Path) -> None:
    change_config(folder, num_hidden_layers=6)
    assert re.search(r"model.layers.4.input_layernorm.weight is missing; .* and 10 more\. ", refusal(folder))


def test_code_in_a_folder_runs_only_when_trusted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "marker"
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(marker)!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change_config(folder, model_type="own", auto_map=auto_map, architectures=["OwnForCausalLM"])
    message = refusal(folder)
    assert "needs its own Python code to run. Read that code first, then allow it with --trust-remote-code" in message
    assert not marker.exists()
    assert type(load_model(str(folder), trust_remote_code=True).model).__name__ == "OwnForCausalLM"
    assert marker.exists()
