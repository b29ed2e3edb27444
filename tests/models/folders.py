"""Folders with a checkpoint, damaged in one way at a time, and the message that loading them ends in."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from probe.data.library_logs import quietly
from probe.models.loading import EMBEDDED, load_model

SMALL = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2}


NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def refusal(name: object, **options: Any) -> str:
    """The message of the ValueError, checked to be one line without a traceback."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_model(str(name), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def save_small(kind: str, target: Path) -> nn.Module:
    import transformers

    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "Mamba2ForCausalLM": ("Mamba2Config", {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1}),
        "LlamaForCausalLM": ("LlamaConfig", {"num_attention_heads": 2, "intermediate_size": 32}),
        "BertModel": ("BertConfig", {"num_attention_heads": 2, "intermediate_size": 32}),
    }
    config, more = settings[kind]
    with quietly():
        made = getattr(transformers, config)(**SMALL, **more, **NO_SPECIAL_TOKENS)
        model: nn.Module = getattr(transformers, kind)(made)
        cast(Any, model).save_pretrained(target)
    return model


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def copy_of_llama(tmp_path: Path) -> Path:
    """The folder of a copy of tiny-llama."""
    source = EMBEDDED["tiny-llama"].folder
    assert source is not None
    return Path(shutil.copytree(source, tmp_path / "model"))
