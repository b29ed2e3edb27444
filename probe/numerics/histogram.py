"""Histograms over the bits of floats: magnitudes counted in buckets, and quantiles read back from the counts.

The bits of a positive float, read as an integer, are in the order of the floats. All magnitudes that share an exponent
and the first `mantissa_bits` bits of the mantissa are one bucket, so that an octave has 2^mantissa_bits of them, each
of the same width, and a bucket is found with one shift. Tables of counts add up, whatever the order of the values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Whole = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]

#: By the width of a float: its bits as integers in numpy and torch, its own types, bits of mantissa, exponent bias.
_LAYOUTS: dict[int, tuple[Any, Any, torch.dtype, torch.dtype, int, int]] = {
    32: (np.int32, np.float32, torch.int32, torch.float32, 23, 127),
    64: (np.int64, np.float64, torch.int64, torch.float64, 52, 1023),
}


@dataclass(frozen=True)
class Buckets:
    """Where magnitudes are counted: 2^mantissa_bits buckets per octave, from 2^lowest up, over `octaves` octaves.

    bucket(x) = (bits of |x| >> shift) - first;      below 0: less than 2^lowest;  `size` or more: 2^(lowest + octaves)

    With `lowest` = -bias of the float (the subnormals are the first octave) only zero lies below the buckets; it
    has the bits of the first one, so it is counted apart.
    """

    float_bits: int
    mantissa_bits: int
    lowest: int
    octaves: int

    @cached_property
    def shift(self) -> int:
        """Bits of the mantissa that do not matter."""
        return int(_LAYOUTS[self.float_bits][4]) - self.mantissa_bits

    @cached_property
    def first(self) -> int:
        """The shifted bits of 2^lowest."""
        return (int(_LAYOUTS[self.float_bits][5]) + self.lowest) << self.mantissa_bits

    @cached_property
    def size(self) -> int:
        """How many buckets there are."""
        return self.octaves << self.mantissa_bits

    @cached_property
    def width(self) -> float:
        """The width of a bucket of normal numbers as a part of its values, at most."""
        return 2.0**-self.mantissa_bits

    @cached_property
    def edges(self) -> Array:
        """The least value of every bucket and the end of the last one, [size + 1]; never beyond the largest float."""
        bits, floats = _LAYOUTS[self.float_bits][:2]
        top = int(np.array(np.finfo(floats).max).view(bits))
        ends = (np.arange(self.size + 1, dtype=np.int64) + self.first) << self.shift
        values: Array = np.minimum(ends, top).astype(bits).view(floats).astype(np.float64)
        return values

    def middles(self, buckets: npt.ArrayLike) -> Array:
        """The middles of these buckets, each within width / 2 of all values of its bucket."""
        bits, floats = _LAYOUTS[self.float_bits][:2]
        raw = ((np.asarray(buckets, np.int64) + self.first) << self.shift) + (1 << self.shift >> 1)
        values: Array = raw.astype(bits).view(floats).astype(np.float64)
        return values

    def find(self, magnitudes: npt.NDArray[np.floating]) -> Whole:
        """The bucket of every magnitude, which is 0 or more."""
        bits, floats = _LAYOUTS[self.float_bits][:2]
        raw = np.ascontiguousarray(magnitudes, dtype=floats).view(bits)
        buckets: Whole = (raw >> self.shift).astype(np.int64) - self.first
        return buckets

    def add(self, counts: Whole, magnitudes: npt.NDArray[np.floating]) -> None:
        """Count magnitudes, finite and inside the buckets, into `counts`; zeros are counted nowhere."""
        found = self.find(magnitudes[magnitudes > 0])
        if found.size:
            start = int(found.min())
            some = np.bincount(found - start)
            counts[start : start + some.size] += some

    def count_tensor(self, magnitudes: Tensor) -> Tensor:
        """The same on the device of a tensor, as a table on the CPU; what lies below the buckets is in the first one.

        IndexError with how many magnitudes lie beyond the last bucket, if any does.
        """
        _, _, bits, floats, *_ = _LAYOUTS[self.float_bits]
        bucket = (magnitudes.to(floats).view(bits) >> self.shift) - self.first
        beyond = int((bucket >= self.size).sum())
        if beyond:
            raise IndexError(beyond)
        return torch.bincount(bucket.clamp(min=0), minlength=self.size).cpu()

    def ranked(self, counts: Whole, *, zeros: int) -> Callable[[int], float]:
        """rank -> the middle of the bucket of the value that has so many others below it; `zeros` values are 0."""
        ends = np.cumsum(counts)

        def value(rank: int) -> float:
            bucket = np.searchsorted(ends, rank - zeros, side="right")
            return 0.0 if rank < zeros else float(self.middles(bucket))

        return value


def linear(position: float, ranked: Callable[[int], float]) -> float:
    """The value at a position between two ranks: numpy's method `linear`, in numpy's own order of operations.

    The quantile q of n values is at q (n - 1).
    """
    below = int(position)
    part, low = position - below, ranked(below)
    if not part:
        return low
    high = ranked(below + 1)
    step = high - low
    return high - step * (1 - part) if part >= 0.5 else low + step * part


def spread_evenly(counts: npt.NDArray[Any], ranks: Array, lows: Array, highs: Array) -> Array:
    """The values of these ranks, [...], in tables [..., buckets], as if values were spread evenly over their buckets.

        value = low + (high - low) (rank - those in lower buckets + 1/2) / (those in this one)

    Within the width of a bucket of the true value. A rank beyond the table gives the end of the last bucket.
    """
    ends = np.cumsum(counts, axis=-1, dtype=np.int64)
    bucket = (ends <= ranks[..., None]).sum(-1).clip(max=counts.shape[-1] - 1)
    inside = np.take_along_axis(counts, bucket[..., None], -1)[..., 0]
    before = np.take_along_axis(ends, bucket[..., None], -1)[..., 0] - inside
    place = np.minimum(ranks - before + 0.5, inside) / np.maximum(inside, 1)
    values: Array = lows[bucket] + (highs[bucket] - lows[bucket]) * place
    return values
