"""Some of the values of recorded tensors, for pictures: evenly spread samples, maps of means, histograms."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from probe.comparisons.selection import Side, bands

_Array = npt.NDArray[np.float64]

#: Values in a sample at most.
SAMPLED = 20_000
#: Rows and columns of a map at most.
ROWS, COLUMNS = 64, 128


@dataclass(frozen=True, eq=False)
class Pairs:
    """Values of a tensor and of its reference at the same places; those that are finite on both sides."""

    output: _Array
    reference: _Array
    left_out: int
    """How many of the sample are not finite."""

    @property
    def difference(self) -> _Array:
        """output - reference."""
        return self.output - self.reference


def sample_pairs(label: str, side: Side, reference: Side, *, most: int = SAMPLED) -> Pairs:
    """About `most` places, evenly spread over the tensor and over its features."""
    step = _stride(math.prod(side.shape(label)), side.shape(label)[-1], most)
    output, expected = (_doubles(one.flat(label)[::step]) for one in (side, reference))
    good = np.isfinite(output) & np.isfinite(expected)
    return Pairs(output[good], expected[good], int((~good).sum()))


def error_map(label: str, side: Side, reference: Side, *, rows: int = ROWS, columns: int = COLUMNS) -> _Array:
    """mean |output - reference| over samples, position by feature; neighbours share a cell where there are many.

    A cell with a value that is not finite is NaN.
    """
    shape = _as_planes(side.shape(label))
    tokens, features = _cuts(shape[1], rows), _cuts(shape[2], columns)
    widths = np.diff([*features, shape[2]])
    found = np.zeros((len(tokens), len(features)))
    output, expected = (one.flat(label).reshape(shape) for one in (side, reference))
    for row, (start, stop) in enumerate(zip(tokens, [*tokens[1:], shape[1]], strict=True)):
        for sample in range(shape[0]):
            sides = (_doubles(x[sample, start:stop]) for x in (output, expected))
            with np.errstate(invalid="ignore"):
                error = np.abs(next(sides) - next(sides)).mean(axis=0)
            found[row] += np.add.reduceat(error, features) / widths / shape[0]
    found[~np.isfinite(found)] = np.nan
    return found


def histogram(
    label: str, side: Side, low: float, high: float, *, bins: int = 100
) -> tuple[npt.NDArray[np.int64], _Array]:
    """How many finite values are in each of `bins` between the extremes, and the edges."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts, edges = np.zeros(bins, np.int64), np.linspace(low, high, bins + 1)
    for (values,) in bands(label, side):
        plain = _doubles(values)
        counts += np.histogram(plain[np.isfinite(plain)], edges)[0]
    return counts, edges


def first_values(label: str, side: Side, count: int) -> _Array:
    """In the order in which they lie."""
    return _doubles(side.flat(label)[:count])


def first_features(label: str, side: Side, count: int) -> _Array:
    """Of the first sample: position by the first `count` features."""
    shape = _as_planes(side.shape(label))
    return _doubles(side.flat(label)[: shape[1] * shape[2]].reshape(shape[1:])[:, :count])


def _doubles(x: Tensor) -> _Array:
    found: _Array = x.double().numpy()
    return found


def _as_planes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """[samples, tokens, features], whatever the number of axes."""
    if len(shape) < 3:
        return 1, math.prod(shape[:-1]), shape[-1]
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def _cuts(size: int, most: int) -> list[int]:
    """Where each of at most `most` parts of nearly one size begins."""
    parts = min(size, most)
    return [size * part // parts for part in range(parts)]


def _stride(count: int, features: int, most: int) -> int:
    """Such that neither the same features nor the same positions come up again and again."""
    step = max(1, math.ceil(count / most))
    while step > 1 and math.gcd(step, features) > 1:
        step += 1
    return step
