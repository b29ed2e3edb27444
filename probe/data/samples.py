"""Samples of documents: chosen with a seed, padded where they are short."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from probe.data.sources import Documents
from probe.data.tokenizers import Tokenizer

#: Documents of a dataset among which the seed chooses; further ones are not read.
POOL = 10_000


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens int64 [samples, tokens], short samples padded on the right; `mask` is True at real tokens."""

    tokens: Tensor
    mask: Tensor
    first: int
    """The index of the first sample."""

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


def batches_of(samples: Sequence[Sequence[int]], *, batch_size: int, pad: bool) -> list[Batch]:
    """Batches in order. Without `pad`, a batch holds samples of one length, so it may be smaller."""
    batches: list[Batch] = []
    start = 0
    while start < len(samples):
        stop = min(start + batch_size, len(samples))
        if not pad:
            stop = next((i for i in range(start, stop) if len(samples[i]) != len(samples[start])), stop)
        some = samples[start:stop]
        longest = max(map(len, some))
        tokens = torch.zeros(len(some), longest, dtype=torch.int64)
        mask = torch.zeros(len(some), longest, dtype=torch.bool)
        for row, ids in enumerate(some):
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = True
        batches.append(Batch(tokens, mask, start))
        start = stop
    return batches
