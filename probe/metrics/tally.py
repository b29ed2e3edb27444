"""Counts, sums, extremes and magnitudes of a stretch of the stream, and how two stretches in a row join."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.numerics.histogram import Buckets, linear
from probe.numerics.moments import NO_MOMENTS, Moments
from probe.numerics.native import numba_twin

#: How many magnitudes |d| a Comparison keeps, as float64, for exact percentiles (32 MB).
KEPT = 2**22
#: The buckets of |d| beyond that: 2^8 per octave, over all of float64. The first ones are subnormal.
BUCKETS = Buckets(float_bits=64, mantissa_bits=8, lowest=-1023, octaves=2048)
#: A percentile read from the buckets differs from the exact one by at most this part of it.
PERCENTILE_ERROR = BUCKETS.width / 2

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Mean, sum of squares around it, and extremes of some values."""

    moments: Moments = NO_MOMENTS
    minimum: float = math.inf
    maximum: float = -math.inf

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return 0.0 + max(-self.minimum, self.maximum)  # -0.0 becomes 0.0

    def merge(self, other: "Spread") -> "Spread":
        """The spread of both together."""
        minimum, maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        return Spread(self.moments.merge(other.moments), minimum, maximum)


@dataclass(frozen=True)
class Tally:
    """Counts, sums and extremes of a stretch of the stream; elements that are NaN or Inf on a side are only counted."""

    seen: int = 0
    count: int = 0  # elements that are finite on both sides: all fields but the last six are about these
    output: Spread = Spread()
    reference: Spread = Spread()
    difference: Spread = Spread()
    product: float = 0.0  # sum of (output - mean output) (reference - mean reference)
    sum_difference: float = 0.0  # sum of |d|
    sum_reference: float = 0.0  # sum of |reference|
    zeroed: int = 0
    at_largest: int = 0  # how many outputs have the largest magnitude
    moved: int = 0
    nan_output: int = 0
    inf_output: int = 0
    nan_reference: int = 0
    inf_reference: int = 0
    first_nonfinite: int | None = None

    @property
    def finite(self) -> bool:
        """No NaN and no Inf on either side."""
        return not (self.nan_output or self.inf_output or self.nan_reference or self.inf_reference)

    def then(self, other: "Tally") -> "Tally":
        """The tally of this stretch and the next one.

        The product merges as the squares of `Moments` do: D_o D_r n_a n_b / n is added.
        """
        count = self.count + other.count
        weight = self.count * (other.count / count) if count else 0.0
        steps = 0.0
        if weight:  # an empty stretch has no mean
            steps = other.output.moments.mean - self.output.moments.mean
            steps *= other.reference.moments.mean - self.reference.moments.mean
        largest = max(self.output.largest, other.output.largest)
        return Tally(
            **{name: getattr(self, name) + getattr(other, name) for name in _ADDED},
            **{name: getattr(self, name).merge(getattr(other, name)) for name in SIDES},
            product=self.product + other.product + steps * weight,
            at_largest=sum(part.at_largest for part in (self, other) if part.output.largest == largest),
            first_nonfinite=first_index(self.first_nonfinite, self.seen, other.first_nonfinite),
        )


#: The fields of a Tally that are spreads, and those that add up.
SIDES = ("output", "reference", "difference")
_ADDED = {field.name for field in fields(Tally)} - {*SIDES, "product", "at_largest", "first_nonfinite"}


def first_index(before: int | None, seen: int, after: int | None) -> int | None:
    """The first index of two stretches in a row, the first of which has `seen` elements."""
    return before if before is not None or after is None else seen + after


class Magnitudes:
    """The values |d| themselves, or once there are more than `keep`, how many fell into each bucket."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._count = 0
        self._kept: list[_Array] = []
        self._counts: npt.NDArray[np.int64] | None = None

    @property
    def exact(self) -> bool:
        """Whether every value is still there."""
        return self._counts is None

    def take(self, values: _Array) -> None:
        """Append values."""
        self._count += values.size
        self._kept.append(values)
        if self._count > self._keep:
            self._fold()

    def has_room_for(self, count: int) -> bool:
        """Whether `count` more values can be kept one by one."""
        return self.exact and self._count + count <= self._keep

    def take_counts(self, counts: npt.NDArray[np.int64], count: int) -> None:
        """Append `count` values that there is no room to keep: `counts` has those that are not 0, by bucket."""
        self._count += count
        self._fold()
        assert self._counts is not None
        self._counts += counts

    def take_from(self, other: "Magnitudes") -> None:
        """Append all values of another, which stays as it is."""
        if other._counts is not None:
            self._counts = other._counts + (0 if self._counts is None else self._counts)
        self._count += other._count
        self._kept = self._kept + other._kept
        if self._count > self._keep:
            self._fold()

    def expect(self, total: Fraction) -> None:
        """Stop keeping values that the stretches after this one leave no room for: `total` values in all."""
        if total > self._keep:
            self._fold()

    def __getstate__(self) -> dict[str, Any]:
        """Only the buckets that are in use, a few thousand of half a million."""
        counts = self._counts
        used = None if counts is None else np.flatnonzero(counts)
        return {**vars(self), "_counts": None if counts is None else (used, counts[used])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if state["_counts"] is not None:
            used, counted = state["_counts"]
            self._counts = np.zeros(BUCKETS.size, dtype=np.int64)
            self._counts[used] = counted

    def quantiles(self, shares: Sequence[float], *, largest: float) -> list[float]:
        """Quantiles of the values, of which there is one at least, as numpy's `linear` defines them."""
        if self._counts is None:
            kept = self._kept[0] if len(self._kept) == 1 else np.concatenate(self._kept)
            twin = numba_twin("probe.numerics.selection", "percentiles") if math.isfinite(largest) else None
            if twin is None:
                with np.errstate(invalid="ignore"):  # |d| beyond float64
                    return [float(x) for x in np.quantile(kept, shares)]
            places = [share * (kept.size - 1) for share in shares]
            ranks = sorted({min(int(place) + more, kept.size - 1) for place in places for more in (0, 1)})
            ranked = dict(zip(ranks, twin.values_at(kept, ranks), strict=True)).__getitem__
            return [linear(place, ranked) for place in places]
        counted = BUCKETS.ranked(self._counts, zeros=self._count - int(self._counts.sum()))
        found = [linear(share * (self._count - 1), counted) for share in shares]
        return [largest if value > largest else value for value in found]

    def _fold(self) -> None:
        counts = np.zeros(BUCKETS.size, dtype=np.int64) if self._counts is None else self._counts
        for values in self._kept:
            BUCKETS.add(counts, values)
        self._counts, self._kept = counts, []
