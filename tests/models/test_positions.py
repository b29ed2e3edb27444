"""Samples longer than the positions of a model: refused before it runs where it would fail, else said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from probe.commands import main
from probe.models.positions import learned_positions, position_notes

SMALL: dict[str, Any] = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


SIZES: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def made(kind: str, config: str, **settings: Any) -> nn.Module:
    """A model of transformers with random weights."""
    import transformers

    configuration = getattr(transformers, config)(**{**SMALL, **settings})
    model: nn.Module = getattr(transformers, kind)(configuration)
    return model.eval()


def gpt2() -> nn.Module:
    return made("GPT2LMHeadModel", "GPT2Config", n_positions=48, n_embd=8, n_layer=2, n_head=2)


def opt() -> nn.Module:
    own = {"pad_token_id": 1, "max_position_embeddings": 48, "ffn_dim": 8, "word_embed_proj_dim": 8}
    return made("OPTForCausalLM", "OPTConfig", **SIZES, **own)


def roberta() -> nn.Module:
    own = {"pad_token_id": 1, "max_position_embeddings": 50, "intermediate_size": 8}
    return made("RobertaForMaskedLM", "RobertaConfig", **SIZES, **own)


def llama() -> nn.Module:
    return made("LlamaForCausalLM", "LlamaConfig", **SIZES, max_position_embeddings=48, intermediate_size=8)


@pytest.mark.parametrize("make", [gpt2, opt, roberta])
def test_a_table_of_positions_is_as_long_as_the_model_can_run(make: Callable[[], nn.Module]) -> None:
    model = make()
    length = learned_positions(model)
    assert length == 48
    with torch.no_grad():
        model(torch.full((1, length), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, length + 1), 7))
    assert position_notes(model, length, key="data.seq_len", longest=length) == ()
    assert position_notes(model, 400, key="data.seq_len", longest=length) == (), "no sample is that long"
    with pytest.raises(ValueError, match=r"data\.seq_len 400 exceeds the 48 positions of the model\. Give data"):
        position_notes(model, 400, key="data.seq_len", longest=49)


def test_rotary_positions_are_only_said() -> None:
    model = llama()
    assert learned_positions(model) is None
    assert position_notes(model, 48, key="data.seq_len", longest=48) == ()
    (note,) = position_notes(model, 49, key="data.seq_len", longest=49)
    assert note.startswith("data.seq_len 49 is beyond the 48 positions that the model's configuration states")
    with torch.no_grad():
        model(torch.full((1, 49), 7))


def test_a_model_without_positions_has_no_limit() -> None:
    from probe import load_model

    model = load_model("tiny-mamba").model
    assert position_notes(model, 10**6, key="data.seq_len", longest=10**6) == ()
    assert position_notes(nn.Sequential(nn.Embedding(9, 2)), 10, key="data.seq_len", longest=10) == ()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["analyze", "--model.path", "{model}", "--data.seq_len", "400", "--save_dir", "x"], "data.seq_len"),
        (
            ["analyze", "--model.path", "{model}", "--data.seq_len", "400", "--dry-run", "--save_dir", "x"],
            "data.seq_len",
        ),
        (["record", "--model", "{model}", "--seqlen", "400", "--modes", "fp32"], "seqlen"),
        (["record", "--model", "{model}", "--prompt", "x" * 400, "--modes", "fp32"], "seqlen"),
        (["errors", "--model", "{model}", "--seqlen", "400", "--modes", "bf16"], "seqlen"),
        (["sensitivity", "--model", "{model}", "--seqlen", "400"], "seqlen"),
    ],
)
def test_commands_say_it_before_they_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    key: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "tests.models.test_positions:gpt2"
    assert main([one.format(model=name) for one in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith(f"probe: error: {key} 400 exceeds the 48 positions of the model.")
    assert list(tmp_path.iterdir()) == []


def test_a_note_on_rotary_positions_is_printed_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "--model.path",
        "tests.models.test_positions:llama",
        "--data.seq_len",
        "64",
        "--save_dir",
        str(tmp_path / "x"),
    ]
    assert main(["analyze", *given, "--dry-run"]) == 0
    assert "note: data.seq_len 64 is beyond the 48 positions" in capsys.readouterr().err
