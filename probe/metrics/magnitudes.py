"""The sizes of differences: kept one by one while they are few, then counted in buckets."""

import numpy as np
import numpy.typing as npt

#: How many magnitudes |d| a Comparison keeps, as float64, for exact percentiles (32 MB).
KEPT = 2**22
#: The percentiles of |d| that are reported, as fractions.
QUANTILES = (0.50, 0.90, 0.95, 0.99)
#: A percentile read from the histogram differs from the exact one by at most this part of it.
PERCENTILE_ERROR = 2.0**-9

#: 2^8 buckets per octave, told apart by the exponent and the first 8 bits of the float64 mantissa.
SHIFT = 52 - 8
BUCKETS = 2048 << 8

_Array = npt.NDArray[np.float64]


class Magnitudes:
    """The values |d| themselves, or once there are more than `keep`, how many fell into each bucket."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._count = 0
        self._kept: list[_Array] = []
        self._buckets: npt.NDArray[np.int64] | None = None

    @property
    def exact(self) -> bool:
        """Whether every value is still there."""
        return self._buckets is None

    def take(self, values: _Array) -> None:
        """Append values."""
        self._count += values.size
        self._kept.append(values)
        if self._count > self._keep:
            self._fold()

    def has_room_for(self, count: int) -> bool:
        """Whether so many more can be kept one by one."""
        return self.exact and self._count + count <= self._keep

    def take_counts(self, buckets: npt.NDArray[np.int64], count: int) -> None:
        """Append `count` values, those that are not 0 by their buckets; there must be no room to keep them."""
        self._count += count
        self._fold()
        assert self._buckets is not None
        self._buckets += buckets

    def take_from(self, other: "Magnitudes") -> None:
        """Append what another has, and share nothing with it that changes."""
        if other._buckets is not None:
            self._buckets = other._buckets + (0 if self._buckets is None else self._buckets)
        self._count += other._count
        self._kept = self._kept + other._kept
        if self._count > self._keep:
            self._fold()

    def quantiles(self, *, largest: float) -> list[float]:
        """QUANTILES of the values, of which there is one at least, as numpy's `linear` defines them."""
        if self._buckets is None:
            with np.errstate(invalid="ignore"):  # |d| beyond float64
                return [float(x) for x in np.quantile(np.concatenate(self._kept), QUANTILES)]
        used = np.flatnonzero(self._buckets)
        ends = np.cumsum(self._buckets[used])
        zeros = self._count - int(ends[-1] if ends.size else 0)  # they are in no bucket, and have the lowest ranks

        def ranked(rank: int) -> float:
            """The middle of the bucket of the value with `rank` others before it."""
            if rank < zeros:
                return 0.0
            bucket = used[np.searchsorted(ends, rank - zeros, side="right")]
            return float(np.int64((int(bucket) << SHIFT) + (1 << (SHIFT - 1))).view(np.float64))

        def quantile(position: float) -> float:
            below = int(position)
            low, high = ranked(below), ranked(min(below + 1, self._count - 1))
            value = low + (high - low) * (position - below)
            return largest if value > largest else value

        return [quantile(q * (self._count - 1)) for q in QUANTILES]

    def _fold(self) -> None:
        counts = np.zeros(BUCKETS, dtype=np.int64) if self._buckets is None else self._buckets
        for values in self._kept:
            buckets = values[values > 0].view(np.int64) >> SHIFT
            if buckets.size:
                first = int(buckets.min())
                found = np.bincount(buckets - first)
                counts[first : first + found.size] += found
        self._buckets, self._kept = counts, []
