"""Batches of tokens: windows of a text, and the fingerprint of their tokens."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from probe.data.texts import text_of
from probe.data.tokenizers import Tokenizer
from probe.words import require_positive


class TextSamples(NamedTuple):
    """Samples of a text: how many, of how many tokens each, in batches of how many."""

    source: str  # as in `text_of`
    samples: int
    seqlen: int
    batch_size: int = 8

    def __str__(self) -> str:
        return f"{self.samples} x {self.seqlen} tokens of {self.source}"

    def batches(self, tokenizer: Tokenizer) -> list[Tensor]:
        """The samples as tokens, by `token_batches`."""
        text = text_of(self.source)
        return token_batches(text, tokenizer, samples=self.samples, seqlen=self.seqlen, batch_size=self.batch_size)


#: What is measured, and what scales are taken from, unless the caller says otherwise.
EVALUATION = TextSamples("evaluation", 8, 256)
CALIBRATION = TextSamples("calibration", 16, 256)


def token_batches(
    tokens_or_text: str | Sequence[int] | Tensor, tokenizer: Tokenizer, *, samples: int, seqlen: int, batch_size: int
) -> list[Tensor]:
    """`samples` windows of `seqlen` tokens, int64 [batch, seqlen]; the last batch may be smaller.

    Window i holds the tokens i * seqlen to (i + 1) * seqlen: consecutive from the start, without overlap.
    """
    for name, value in (("samples", samples), ("seqlen", seqlen), ("batch_size", batch_size)):
        require_positive(name, value)
    tokens = tokenizer.encode(tokens_or_text) if isinstance(tokens_or_text, str) else tokens_or_text
    ids = torch.as_tensor(tokens)
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"tokens are {ids.dtype} of shape {tuple(ids.shape)}; expected a row of integer ids.")
    if len(ids) < samples * seqlen:
        fits = len(ids) // seqlen
        advice = (
            f"At most samples={fits} fit at this seqlen." if fits else f"Not one sample fits: seqlen <= {len(ids)}."
        )
        raise ValueError(
            f"the text has {len(ids)} tokens; {samples} samples of {seqlen} need {samples * seqlen}. {advice}"
        )
    windows = ids[: samples * seqlen].to(torch.int64).view(samples, seqlen)
    return list(torch.split(windows, batch_size))


def token_fingerprint(batches: Iterable[Tensor]) -> str:
    """The first 16 hex digits of sha256 over the samples in order, each with its length, however they are batched."""
    digest = hashlib.sha256()
    for sample in (row for batch in batches for row in batch):
        digest.update(f"{len(sample)}\n".encode())
        digest.update(sample.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]
