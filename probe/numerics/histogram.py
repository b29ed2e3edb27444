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

from probe.numerics.native import is_native, numba_twin

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
        """Bits of the mantissa below those that choose the bucket."""
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

    def count_tensor(self, values: Tensor, *, tables: int = 1) -> Tensor:
        """Counts of magnitudes as a table on the CPU; what lies below the buckets counts in the first one.

        With two tables, negative values are counted in the second one. IndexError with the number of magnitudes beyond
        the last bucket, if there are any.
        """
        twin = numba_twin("probe.numerics.bucket_counts", "histograms") if is_native(values) else None
        if twin is None or self.float_bits != 64:
            return self._count_by_torch(values, tables)
        flat = values.detach().reshape(-1)
        flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
        counts = np.zeros((tables, self.size), np.int64)
        count, bits = (twin.count_wide, np.int64) if flat.dtype == torch.float64 else (twin.count_narrow, np.int32)
        if beyond := count(flat.contiguous().numpy().view(bits), self.mantissa_bits, self.first, counts):
            raise IndexError(beyond)
        return torch.from_numpy(counts.reshape(-1))

    def _count_by_torch(self, values: Tensor, tables: int) -> Tensor:
        """The readable twin, on the device of the values."""
        _, _, bits, floats, *_ = _LAYOUTS[self.float_bits]
        bucket = (values.flatten().abs().to(floats).view(bits) >> self.shift) - self.first
        beyond = int((bucket >= self.size).sum())
        if beyond:
            raise IndexError(beyond)
        table = (values.flatten() < 0) * (tables - 1)
        return torch.bincount(bucket.clamp(min=0) + table * self.size, minlength=tables * self.size).cpu()

    def ranked(self, counts: Whole, *, zeros: int) -> Callable[[int], float]:
        """rank -> the middle of the bucket of the value of that rank, counted from 0; `zeros` values are 0."""
        ends = np.cumsum(counts)

        def value(rank: int) -> float:
            bucket = np.searchsorted(ends, rank - zeros, side="right")
            return 0.0 if rank < zeros else float(self.middles(bucket))

        return value

    def quantile(self, counts: Whole, share: float, *, zeros: int, low: float, high: float) -> float:
        """A quantile, as numpy's `linear`, of values spread evenly over their buckets, and `zeros` zeros; 0 of none.

        Clamped to [low, high], and within `width` of the exact one.
        """
        total = zeros + int(counts.sum())

        def ranked(rank: int) -> float:
            if rank < zeros:
                return 0.0
            value = spread_evenly(counts, np.array(rank - zeros), self.edges[:-1], self.edges[1:])
            return min(max(float(value), low), high)

        return linear(share * (total - 1), ranked) if total else 0.0


@dataclass(frozen=True, eq=False)
class Trimmed:
    """A table of counts without the zeros at its ends, which are most of it."""

    shape: tuple[int, ...]
    first: int
    counts: Whole

    @classmethod
    def of(cls, counts: Whole) -> "Trimmed":
        """A copy of the part of a table that is not zero."""
        flat = counts.reshape(-1)
        some = np.flatnonzero(flat)
        if not some.size:
            return cls(counts.shape, 0, np.zeros(0, np.int64))
        return cls(counts.shape, int(some[0]), flat[some[0] : some[-1] + 1].copy())

    def __add__(self, other: "Trimmed") -> "Trimmed":
        if not self.counts.size or not other.counts.size:
            return self if self.counts.size else other
        first = min(self.first, other.first)
        last = max(part.first + part.counts.size for part in (self, other))
        both = np.zeros(last - first, np.int64)
        for part in (self, other):
            both[part.first - first : part.first - first + part.counts.size] += part.counts
        return Trimmed(self.shape, first, both)

    def whole(self) -> Whole:
        """The whole table."""
        full = np.zeros(self.shape, np.int64)
        full.reshape(-1)[self.first : self.first + self.counts.size] = self.counts
        return full

    def as_list(self) -> list[Any]:
        """For JSON: [the first place that is not 0, the counts from there to the last one]."""
        return [self.first, self.counts.tolist()]


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

        value = low + (high - low) (rank - count of lower buckets + 1/2) / count of this bucket

    Within the width of a bucket of the true value. A rank beyond the table gives the end of the last bucket.
    """
    ends = np.cumsum(counts, axis=-1, dtype=np.int64)
    bucket = (ends <= ranks[..., None]).sum(-1).clip(max=counts.shape[-1] - 1)
    inside = np.take_along_axis(counts, bucket[..., None], -1)[..., 0]
    before = np.take_along_axis(ends, bucket[..., None], -1)[..., 0] - inside
    place = np.minimum(ranks - before + 0.5, inside) / np.maximum(inside, 1)
    values: Array = lows[bucket] + (highs[bucket] - lows[bucket]) * place
    return values
