"""The figures of one recorded tensor, and of the step that a layer takes from the tensor before it.

A tensor is read as tokens (rows) of channels (its last axis). A trained model has a few tokens and channels with values
a thousand times as large as the others, so a step is measured for each token in units of its own size, and the median
of a sample counts:

    size              mean |x| of a token; of a tensor, the median over its tokens
    growth            size / size before; of all samples the one that is farthest from 1
    relative_change   mean |x - before| / mean |before|; of all samples the largest
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probe.comparisons.devices.differences import CHUNK, Array, chunks
from probe.comparisons.selection import Side, bands, place_of
from probe.files.checked_json import finite
from probe.numerics.moments import NO_MOMENTS, Moments

#: Tokens of which a channel must have the same value to count as constant, at least.
FEWEST_TOKENS = 8


@dataclass(frozen=True)
class StepFigures:
    """The figures of a tensor over its finite values; None where a figure has no meaning."""

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    nan: int
    inf: int
    first_nonfinite: tuple[int, ...] | None
    """(sample, token, feature)."""
    size: float | None
    growth: float | None
    """Against the layer before, or the embedding; None without one of as many tokens."""
    max_change: float | None
    """max |x - before| where both are finite; None without a layer before of the same shape."""
    mean_change: float | None
    relative_change: float | None


@dataclass(frozen=True, eq=False)
class Step(StepFigures):
    """The figures of a tensor, with what the layers after it are judged by."""

    sizes: Array
    """Of every token; NaN where none of its values is finite."""
    constant: npt.NDArray[np.bool_]
    """Whether a channel has the same value in all tokens; False for all where there are few tokens."""


def measure_step(side: Side, label: str, *, before: str | None, sizes_before: Array | None) -> Step:
    """One pass over a tensor, and over that of the layer `before` it; `sizes_before` are those of its tokens."""
    shape = side.shape(label)
    width = shape[-1] if len(shape) > 1 else 1
    moments, low, high = NO_MOMENTS, np.full(width, np.inf), np.full(width, -np.inf)
    nan, inf, first, seen, compared, total, largest = 0, 0, None, 0, 0, 0.0, 0.0
    sizes, changes = [], []
    names = (label,) if before is None else (label, before)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for parts in zip(*(bands(name, side) for name in names), strict=True):
            for x, *y in chunks(*(values.reshape(-1, width) for (values,) in parts), size=CHUNK):
                good = np.isfinite(x)
                if not good.all():
                    nan, inf = nan + int(np.isnan(x).sum()), inf + int(np.isinf(x).sum())
                    first = seen + int(np.flatnonzero(~good)[0]) if first is None else first
                moments = moments.merge(_moments(x[good]))
                low = np.minimum(low, np.where(good, x, np.inf).min(0))
                high = np.maximum(high, np.where(good, x, -np.inf).max(0))
                sizes.append(np.where(good, np.abs(x), 0.0).sum(1) / good.sum(1))
                for other in y:
                    both = good & np.isfinite(other)
                    apart = np.where(both, np.abs(x - other), 0.0)
                    sums = apart.sum(1)
                    changes.append(sums / np.where(both, np.abs(other), 0.0).sum(1))
                    compared, total = compared + int(both.sum()), total + float(sums.sum())
                    largest = max(largest, float(apart.max()))
                seen += x.size
            del parts
        own = np.concatenate(sizes)
        samples = shape[0] if len(shape) > 2 else 1
        growths = [] if sizes_before is None or len(sizes_before) != len(own) else _medians(own / sizes_before, samples)
        relative = _medians(np.concatenate(changes), samples) if changes else []
    return Step(
        mean=finite(moments.mean) if moments.count else None,
        std=finite(moments.std) if moments.count else None,
        min=float(low.min()) if moments.count else None,
        max=float(high.max()) if moments.count else None,
        nan=nan,
        inf=inf,
        first_nonfinite=place_of(first, shape),
        size=next(iter(_medians(own, 1)), None),
        growth=max(growths, key=lambda x: abs(math.log(x)) if x else math.inf, default=None),
        max_change=largest if compared else None,
        mean_change=finite(total / compared) if compared else None,
        relative_change=max(relative, default=None),
        sizes=own,
        constant=(low == high) & (len(own) >= FEWEST_TOKENS),
    )


def _moments(x: Array) -> Moments:
    if not x.size:
        return NO_MOMENTS
    mean = float(x.mean())
    return Moments(x.size, mean, float(np.square(x - mean).sum()))


def _medians(by_token: Array, samples: int) -> list[float]:
    """The median of every sample over the tokens that have the figure."""
    rows = (sample[np.isfinite(sample)] for sample in by_token.reshape(samples, -1))
    return [float(np.median(known)) for known in rows if len(known)]
