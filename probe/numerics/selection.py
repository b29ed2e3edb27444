"""Values of given ranks among many magnitudes, exactly, in two passes of numba loops instead of a sort.

The bits of a positive float, read as an integer, are in the order of the floats. The first pass counts magnitudes in
2^8 buckets per octave, from the largest one down; the second collects the few that share a bucket with a wanted rank.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from probe.numerics.machine_code import kernel

#: Bits below those that choose the bucket: 2^8 buckets per octave.
_SHIFT = np.int64(52 - 8)
#: Buckets: 32 octaves below the largest magnitude; the last one has everything below these.
_BUCKETS = 32 << 8
#: Below this many magnitudes a sort is faster.
FEW = 2**10

_Doubles = npt.NDArray[np.float64]
_Whole = npt.NDArray[np.int64]


def values_at(magnitudes: _Doubles, ranks: Sequence[int]) -> list[float]:
    """The magnitudes, 0 or more and not NaN, that a sort would put at these places, counted from 0."""
    if magnitudes.size <= FEW:
        ordered = np.sort(magnitudes)
        return [float(ordered[rank]) for rank in ranks]
    bits = magnitudes.view(np.int64)
    counts = np.zeros(_BUCKETS, np.int64)
    top = count(bits, counts)
    ends = np.cumsum(counts)
    places = magnitudes.size - 1 - np.array(ranks, np.int64)  # from the largest down
    buckets = np.searchsorted(ends, places, side="right")
    wanted = np.zeros(_BUCKETS, np.bool_)
    wanted[buckets] = True
    some = np.empty(int(counts[wanted].sum()), np.int64)
    collect(bits, top, wanted, some)
    left_out = np.cumsum(np.where(wanted, 0, counts))[buckets]  # larger, and in no wanted bucket
    places = some.size - 1 - (places - left_out)
    found = np.partition(some, np.unique(places))[places].view(np.float64)
    return [float(value) for value in found]


@kernel
def count(bits: _Whole, counts: _Whole) -> int:
    """Count magnitudes by their distance from the largest one, in buckets; returns the bucket of the largest."""
    largest = np.int64(0)
    for i in range(bits.size):
        largest = max(largest, bits[i])
    top, last = largest >> _SHIFT, np.int64(counts.size - 1)
    for i in range(bits.size):
        counts[min(top - (bits[i] >> _SHIFT), last)] += 1
    return int(top)


@kernel
def collect(bits: _Whole, top: int, wanted: npt.NDArray[np.bool_], some: _Whole) -> None:
    """Write the magnitudes of the wanted buckets one after the other."""
    last, found = np.int64(wanted.size - 1), 0
    for i in range(bits.size):
        if wanted[min(top - (bits[i] >> _SHIFT), last)]:
            some[found] = bits[i]
            found += 1
