"""Samples of tokens, in batches: consecutive windows of a text, or documents chosen with a seed and padded."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from probe.data.calls import Call
from probe.data.sources import Documents
from probe.data.texts import text_of
from probe.data.tokenizers import Tokenizer
from probe.words import require_positive


class TextSamples(NamedTuple):
    """Samples of a text: how many, of how many tokens each, in batches of how many.

    Of models that read no tokens, `source` may also be a folder of files, and of all a function (running/inputs.py).
    """

    source: str  # as in `text_of`
    samples: int
    seqlen: int
    batch_size: int = 8

    def __str__(self) -> str:
        return f"{self.samples} x {self.seqlen} tokens of {self.source}"

    def check(self) -> None:
        """Refuse sizes below 1 and a text that cannot be read, before a model is loaded to tokenize it."""
        _check_sizes(self.samples, self.seqlen, self.batch_size)
        text_of(self.source)

    def batches(self, tokenizer: Tokenizer) -> list[Tensor]:
        """The samples as tokens, by `token_batches`."""
        text = text_of(self.source)
        return token_batches(text, tokenizer, samples=self.samples, seqlen=self.seqlen, batch_size=self.batch_size)


def _check_sizes(samples: int, seqlen: int, batch_size: int) -> None:
    for name, value in (("samples", samples), ("seqlen", seqlen), ("batch_size", batch_size)):
        require_positive(name, value)


#: What is measured, and what scales are taken from, unless the caller says otherwise.
EVALUATION = TextSamples("evaluation", 8, 256)
CALIBRATION = TextSamples("calibration", 16, 256)


def token_batches(
    tokens_or_text: str | Sequence[int] | Tensor, tokenizer: Tokenizer, *, samples: int, seqlen: int, batch_size: int
) -> list[Tensor]:
    """`samples` windows of `seqlen` tokens, int64 [batch, seqlen]; the last batch may be smaller.

    Window i holds the tokens i * seqlen to (i + 1) * seqlen: consecutive from the start, without overlap.
    """
    _check_sizes(samples, seqlen, batch_size)
    tokens = tokenizer.encode(tokens_or_text) if isinstance(tokens_or_text, str) else tokens_or_text
    ids = torch.as_tensor(tokens)
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"tokens are {ids.dtype} of shape {tuple(ids.shape)}; expected a row of integer ids.")
    if len(ids) < samples * seqlen:
        fits = len(ids) // seqlen
        most = f"At most samples={fits} fit at this seqlen." if fits else f"Not one sample fits: seqlen <= {len(ids)}."
        need = f"{samples} samples of {seqlen} need {samples * seqlen}"
        raise ValueError(f"the text has {len(ids)} tokens; {need}. {most}")
    windows = ids[: samples * seqlen].to(torch.int64).view(samples, seqlen)
    return list(torch.split(windows, batch_size))


def bytes_per_target(batches: Iterable[Tensor], tokenizer: Tokenizer) -> float:
    """The mean length, in bytes of text, of the tokens that a model predicts: all of a row but the first.

    Their length is that of the row's text less that of its first token: a token alone may be no whole character.
    """
    rows = [row.tolist() for batch in batches for row in batch]
    size = sum(len(tokenizer.decode(row).encode()) - len(tokenizer.decode(row[:1]).encode()) for row in rows)
    return max(1, size) / max(1, sum(len(row) - 1 for row in rows))


#: Documents of a dataset among which the seed chooses; further ones are not read.
POOL = 10_000


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Tokens int64 [samples, tokens], short samples padded on the right; `mask` is True at real tokens.

    With a `call`, that is what the model is given; of one that reads no tokens, there are none, [samples, 0].
    """

    tokens: Tensor
    mask: Tensor
    first: int
    """The index of the first sample."""
    call: Call | None = None

    @property
    def reads_tokens(self) -> bool:
        """Whether the tokens are the first thing that the model is given."""
        return self.call is None or self.call.main is self.tokens

    @property
    def padded(self) -> bool:
        """Whether there is any padding."""
        return not bool(self.mask.all())


def samples_of(documents: Documents, tokenizer: Tokenizer, *, count: int, length: int, seed: int) -> list[list[int]]:
    """`count` samples of at most `length` tokens, chosen with `seed`.

    Of a running text: windows that do not overlap, the last of which may be shorter. Of documents: one sample each,
    a window at a place that the seed chooses, or all of a document that is shorter.
    """
    chooser = random.Random(seed)
    if documents.running:
        ids = tokenizer.encode("".join(documents.texts))
        windows = [ids[start : start + length] for start in range(0, len(ids), length)]
        _check(documents, len(windows), count, f"its {len(ids)} tokens make {len(windows)} samples of {length}")
        return [windows[index] for index in chooser.sample(range(len(windows)), count)]
    texts = list(islice(documents.texts, POOL))
    chooser.shuffle(texts)
    samples = list(islice(_encoded(texts, tokenizer, length, chooser), count))
    _check(documents, len(samples), count, f"it has {len(samples)} documents")
    return samples


def _encoded(texts: Sequence[str], tokenizer: Tokenizer, length: int, chooser: random.Random) -> Iterator[list[int]]:
    for text in texts:
        ids = tokenizer.encode(text)
        if ids:
            start = chooser.randrange(len(ids) - length + 1) if len(ids) > length else 0
            yield ids[start : start + length]


def _check(documents: Documents, found: int, wanted: int, why: str) -> None:
    if not found:
        raise ValueError(f"data {documents.source!r} is empty: it holds no text. Expected text to make samples of.")
    if found < wanted:
        raise ValueError(
            f"data {documents.source!r} is too small for data.num_samples {wanted}: {why}. "
            f"Give data.num_samples {found} or less, or a larger text."
        )


def batches_of(samples: Sequence[Sequence[int]], *, batch_size: int, pad: bool) -> list[TokenBatch]:
    """Batches in order. Without `pad`, a batch holds samples of one length, so it may be smaller."""
    batches: list[TokenBatch] = []
    start = 0
    while start < len(samples):
        stop = min(start + batch_size, len(samples))
        if not pad:
            stop = next((i for i in range(start, stop) if len(samples[i]) != len(samples[start])), stop)
        rows = [torch.tensor(ids, dtype=torch.int64) for ids in samples[start:stop]]
        real = [torch.ones_like(row, dtype=torch.bool) for row in rows]
        batches.append(TokenBatch(pad_sequence(rows, batch_first=True), pad_sequence(real, batch_first=True), start))
        start = stop
    return batches
