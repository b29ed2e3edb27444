"""Gathering the figures of embeddings, one vector for every sample, against those of a reference."""

from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from probe.metrics.comparison import check_kind, check_pair, check_seen

#: With fewer samples the nearest other one is always the same.
FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class EmbeddingMetrics:
    """The figures of an EmbeddingComparison.

        sample_cosine          mean over samples of the cosine of a vector and its reference
        lowest_sample_cosine   the smallest of them
        neighbour_agreement    share of samples whose nearest other sample, by cosine, is the same on both sides

    A sample with a NaN, an Inf or only zeros on either side is left out. The cosines are None when none is left, the
    agreement when fewer than three are: two always have each other.
    """

    samples: int
    compared: int
    sample_cosine: float | None
    lowest_sample_cosine: float | None
    neighbour_agreement: float | None

    def as_dict(self) -> dict[str, Any]:
        """Name -> figure, in the order above."""
        return asdict(self)


class EmbeddingComparison:
    """Gathers the `EmbeddingMetrics` of vectors [samples, channels]; it keeps all of them."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def update(self, output: Tensor, reference: Tensor) -> None:
        """Append a batch of vectors, [samples, channels]."""
        check_pair(output, reference, names=("output", "reference"))
        if output.dim() != 2:
            raise ValueError(f"embeddings have shape {list(output.shape)}. Expected [samples, channels].")
        self._pairs.append((output.detach().cpu().double(), reference.detach().cpu().double()))

    def merge(self, other: "EmbeddingComparison") -> Self:
        """Append the whole stream of `other`, which stays as it is; returns itself."""
        check_kind(self, other)
        self._pairs += other._pairs
        return self

    def metrics(self) -> EmbeddingMetrics:
        """The figures of the whole stream so far."""
        samples = sum(len(pair[0]) for pair in self._pairs)
        check_seen(self, samples)
        found, expected = (torch.cat(side) for side in zip(*self._pairs, strict=True))
        good = torch.stack([_is_usable(found), _is_usable(expected)]).all(0)
        found, expected = (_of_length_one(side[good]) for side in (found, expected))
        cosines = (found * expected).sum(1).clamp(-1, 1)
        count = len(cosines)
        same = _nearest(found) == _nearest(expected) if count >= FEWEST else None
        return EmbeddingMetrics(
            samples=samples,
            compared=count,
            sample_cosine=float(cosines.mean()) if count else None,
            lowest_sample_cosine=float(cosines.min()) if count else None,
            neighbour_agreement=None if same is None else float(same.double().mean()),
        )

    def __repr__(self) -> str:
        return f"EmbeddingComparison(samples={sum(len(pair[0]) for pair in self._pairs)})"


def _is_usable(vectors: Tensor) -> Tensor:
    return vectors.isfinite().all(1) & (vectors != 0).any(1)


def _of_length_one(vectors: Tensor) -> Tensor:
    """Divided by the largest element first, so that no square leaves the range of float64."""
    scaled = vectors / vectors.abs().amax(1, keepdim=True)
    return scaled / scaled.square().sum(1, keepdim=True).sqrt()


def _nearest(vectors: Tensor) -> Tensor:
    """The index of the nearest other vector, the first of equals."""
    return (vectors @ vectors.T).fill_diagonal_(-torch.inf).argmax(1)
