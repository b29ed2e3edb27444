"""Sizes in buckets: 64 per octave, told apart by the bits of a float32."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: A bucket is the exponent and the first 6 bits of the float32 mantissa.
SHIFT = 23 - 6
BUCKETS = 256 << 6
#: A percentile read from buckets differs from the exact one by at most this part of it (if that is 2^-126 or more).
PERCENTILE_ERROR = 2.0**-7

Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Trimmed:
    """A table of counts without the zeros at its ends: most are zeros, and there is one for every layer."""

    size: int
    first: int
    counts: Whole

    @classmethod
    def of(cls, counts: Whole) -> "Trimmed":
        """Of a whole table, of which nothing is kept."""
        flat = counts.reshape(-1)
        some = np.flatnonzero(flat)
        if not some.size:
            return cls(flat.size, 0, np.zeros(0, np.int64))
        return cls(flat.size, int(some[0]), flat[some[0] : some[-1] + 1].copy())

    def __add__(self, other: "Trimmed") -> "Trimmed":
        if not self.counts.size or not other.counts.size:
            return self if self.counts.size else other
        first = min(self.first, other.first)
        last = max(one.first + one.counts.size for one in (self, other))
        both = np.zeros(last - first, np.int64)
        for one in (self, other):
            both[one.first - first : one.first - first + one.counts.size] += one.counts
        return Trimmed(self.size, first, both)

    def whole(self) -> Whole:
        """With its zeros."""
        full = np.zeros(self.size, np.int64)
        full[self.first : self.first + self.counts.size] = self.counts
        return full


def count_sizes(sizes: Floats) -> Whole:
    """How many of the sizes, which are 0 or more, are in each bucket; zeros are in none."""
    some = np.ascontiguousarray(sizes[sizes > 0], dtype=np.float32)
    return np.bincount(some.view(np.int32) >> SHIFT, minlength=BUCKETS).astype(np.int64)


def edges() -> npt.NDArray[np.float64]:
    """The least size of every bucket, and the end of the last finite one: [BUCKETS + 1], with inf beyond float32."""
    bits = np.minimum(np.arange(BUCKETS + 1, dtype=np.int64) << SHIFT, 0x7F800000).astype(np.int32)
    wide: npt.NDArray[np.float64] = bits.view(np.float32).astype(np.float64)
    return wide


def quantile_of(buckets: Whole, zeros: int, share: float, *, low: float, high: float) -> float:
    """The quantile `share` of sizes of which `zeros` are 0 and the others counted in buckets, in [low, high].

    The value of rank k (numpy's `linear`: rank share * (n - 1)) is taken to lie in its bucket as if all of that bucket
    were spread evenly over it. 0 where there is nothing.
    """
    ends = np.cumsum(buckets)
    total = zeros + int(ends[-1])
    if not total:
        return 0.0
    position = share * (total - 1)
    below = int(position)
    first = _ranked(buckets, ends, zeros, below, low, high)
    if position == below:
        return first
    return first + (_ranked(buckets, ends, zeros, below + 1, low, high) - first) * (position - below)


def _ranked(buckets: Whole, ends: Whole, zeros: int, rank: int, low: float, high: float) -> float:
    if rank < zeros:
        return 0.0
    bucket = int(np.searchsorted(ends, rank - zeros, side="right"))
    start, stop = (float(np.int32(min(b << SHIFT, 0x7F7FFFFF)).view(np.float32)) for b in (bucket, bucket + 1))
    place = rank - zeros - int(ends[bucket]) + int(buckets[bucket])
    inside = start + (stop - start) * (place + 0.5) / int(buckets[bucket])
    return min(max(inside, low), high)
