"""Tokenizers: bytes, and the files beside a model."""

from pathlib import Path

import pytest
import torch

from probe.data.tokenizers import ByteTokenizer, PretrainedTokenizer, Tokenizer
from probe.models.loading import load_model
from tests.models.folders import change_config, change_weights, copy_of_llama, refusal


def test_bytes_come_back_as_text() -> None:
    tokenizer = ByteTokenizer()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("é!") == [0xC3, 0xA9, 0x21]
    assert tokenizer.decode(tokenizer.encode("Anne, 7 £ — naïve")) == "Anne, 7 £ — naïve"
    assert tokenizer.decode([0xC3]) == "\ufffd"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of tiny-llama."""
    return copy_of_llama(tmp_path)


def test_tokenizer_files_are_used_and_add_no_tokens(folder: Path) -> None:
    from tokenizers import Tokenizer as Fast, models, pre_tokenizers, processors

    fast = Fast(models.WordLevel({"<s>": 0, "to": 1, "be": 2, "<unk>": 3}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    got = load_model(str(folder))
    assert isinstance(got.tokenizer, PretrainedTokenizer)
    assert got.tokenizer.encode("to be to") == [1, 2, 1]
    assert got.tokenizer.decode([1, 2]) == "to be"
    assert got.notes == ()


def test_a_small_vocabulary_without_tokenizer(folder: Path) -> None:
    change_config(folder, vocab_size=100)
    change_weights(folder, lambda w: w.update({"model.embed_tokens.weight": torch.zeros(100, 128)}))
    tokenizer = load_model(str(folder)).tokenizer  # the model can still be given other inputs than text
    expected = (
        "has no tokenizer files and a vocabulary of 100; text as bytes needs at least 256 ids. Add tokenizer.json"
    )
    with pytest.raises(ValueError, match=expected):
        tokenizer.encode("text")


def test_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    message = refusal(folder)
    assert f"the tokenizer in '{folder}' cannot be loaded: " in message
    assert message.endswith("Copy its files again, or remove them to read text as bytes.")
