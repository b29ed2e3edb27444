"""Text to token ids: the tokenizer of a model, or bytes where it has none."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from probe.data.library_logs import quietly
from probe.words import describe_error

BYTES = 256
#: What can be given instead of a text.
OTHERWISE = 'Or give the inputs themselves: inputs = "package.module:function" (--inputs).'
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("spiece.model", "vocab.json", "vocab.txt"),
)


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back; no special tokens are added."""

    def encode(self, text: str, /) -> list[int]:
        """The ids of `text`."""

    def decode(self, tokens: Sequence[int], /) -> str:
        """The text of `tokens`."""


class ByteTokenizer:
    """A token is a byte of UTF-8: 256 ids, no special ones."""

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these bytes; a byte that is not UTF-8 becomes the replacement character."""
        return bytes(tokens).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class NoTokenizer:
    """Of a model that has none: what it says to text."""

    message: str

    def encode(self, text: str) -> list[int]:
        """Refuse the text."""
        raise ValueError(self.message)

    def decode(self, tokens: Sequence[int]) -> str:
        """No text."""
        return ""


@dataclass(frozen=True, eq=False)
class PretrainedTokenizer:
    """A tokenizer of transformers, without its begin and end tokens: samples are windows of running text."""

    inner: Any

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        return [int(token) for token in self.inner.encode(text, add_special_tokens=False, verbose=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`."""
        return str(self.inner.decode(list(tokens)))


def tokenizer_of_folder(folder: Path, model: nn.Module, trust_remote_code: bool) -> tuple[Tokenizer, tuple[str, ...]]:
    """The tokenizer beside the weights of a model, or bytes and a note that says so."""
    if any((folder / file).is_file() for file in TOKENIZER_FILES):
        again = "Copy its files again, or remove them to read text as bytes."
        return _pretrained(folder, folder, again, trust_remote_code=trust_remote_code), ()
    lacking = f"model folder {str(folder)!r} has no tokenizer files"
    remedy = "Add tokenizer.json, as save_pretrained of the tokenizer writes it."
    return _as_bytes(model, lacking, remedy, f"no tokenizer files in {str(folder)!r}")


def tokenizer_of_gguf(file: Path, model: nn.Module, *, has_tokenizer: bool) -> tuple[Tokenizer, tuple[str, ...]]:
    """The tokenizer in a GGUF file, or bytes and a note that says so."""
    if has_tokenizer:
        return _pretrained(file, file.parent, "Copy or download the file again.", gguf_file=file.name), ()
    lacking, remedy = f"{str(file)!r} has no tokenizer", "Add one, as llama.cpp's converter does."
    return _as_bytes(model, lacking, remedy, f"no tokenizer in {str(file)!r}")


def _pretrained(shown: Path, folder: Path, again: str, **options: Any) -> PretrainedTokenizer:
    with quietly():
        from transformers import AutoTokenizer

        try:
            auto: Any = AutoTokenizer
            return PretrainedTokenizer(auto.from_pretrained(str(folder), local_files_only=True, **options))
        except Exception as problem:
            why = describe_error(problem)
            raise ValueError(f"the tokenizer in {str(shown)!r} cannot be loaded: {why} {again}") from problem


def _as_bytes(model: nn.Module, lacking: str, remedy: str, note: str) -> tuple[Tokenizer, tuple[str, ...]]:
    """Bytes and a note, if the vocabulary of a model without a tokenizer has room for them."""
    vocabulary = _vocabulary_size(model)
    if vocabulary is not None and vocabulary >= BYTES:
        return ByteTokenizer(), (f"{note}: text is read as bytes, ids 0 to 255",)
    size = "an unknown vocabulary" if vocabulary is None else f"a vocabulary of {vocabulary}"
    why = f"{lacking} and {size}; text as bytes needs at least {BYTES} ids. {remedy} {OTHERWISE}"
    return NoTokenizer(why), ()


def tokenizer_of_factory(name: str, model: nn.Module) -> tuple[Tokenizer, tuple[str, ...]]:
    """The attribute `tokenizer` of a model, or bytes and a note that says so."""
    own = getattr(model, "tokenizer", None)
    if isinstance(own, Tokenizer):
        return own, ()
    vocabulary = _vocabulary_size(model)
    if vocabulary is not None and vocabulary < BYTES:
        return NoTokenizer(
            f"model {name!r} has no tokenizer and a vocabulary of {vocabulary}; text as bytes needs at least {BYTES} "
            f"ids. Give the model an attribute `tokenizer` with encode(text) and decode(ids). {OTHERWISE}"
        ), ()
    return ByteTokenizer(), (f"model {name!r} brings no tokenizer: text is read as bytes, ids 0 to 255",)


def _vocabulary_size(model: nn.Module) -> int | None:
    size = getattr(text_config(model), "vocab_size", None)
    return size if isinstance(size, int) else None


def text_config(model: nn.Module) -> Any:
    """The configuration of the model's text part, as transformers has it; None without one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
