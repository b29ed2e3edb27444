"""The fast twin: numba loops that compute every statistic of a row while the row is in the cache.

Everything but the sums equals the readable twin to the bit; sums differ by the order of additions.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probe.activations.reference import BLOCK, DEPTHS, SIDE, SIGNED_SIZES, SIZES, empty
from probe.numerics.machine_code import kernel, summing_kernel
from probe.numerics.moments import Moments

#: The indices into the array of sums and into that of counts.
MEAN, SECOND, THIRD, FOURTH, MINIMUM, MAXIMUM, SMALLEST = range(7)
COUNT, NONFINITE, ZEROS, NEGATIVES, ZERO_BLOCKS = range(5)
#: The fields of LayerStatistics in the order of the counts.
_COUNTED = ("count", "nonfinite", "zeros", "negatives", "zero_blocks")

#: What the loops read of the buckets.
SHIFT, SIGNED_SHIFT, SIGNED_FIRST = SIZES.shift, SIGNED_SIZES.shift, SIGNED_SIZES.first
_SIZE, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)

Floats = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]
_Whole = npt.NDArray[np.int64]
_Bits = npt.NDArray[np.int32]


class _Tables(NamedTuple):
    """The arrays of LayerStatistics that the loops update in place."""

    channel_amax: _Bits
    buckets: _Whole
    block_buckets: _Whole
    depths: _Whole
    median_depths: _Whole


class Gathering:
    """Gathers the fields of LayerStatistics piece by piece, in place."""

    def __init__(self, channels: int) -> None:
        self._found = empty(channels)
        tables = {name: self._found[name] for name in _Tables._fields}
        self._tables = _Tables(**tables | {"channel_amax": self._found["channel_amax"].view(np.int32)})
        self._sums, self._counts = np.zeros(7), np.zeros(5, np.int64)
        self._sums[MINIMUM], self._sums[MAXIMUM], self._sums[SMALLEST] = np.inf, -np.inf, np.inf
        self._top, self._row_top = np.full(3, -1.0, np.float32), np.full(3, -1.0, np.float32)

    def take(self, rows: Floats) -> Floats:
        """Append rows [rows, channels]; returns max |x| of each."""
        found = self._found
        amax = np.zeros(len(rows), np.float32)
        _measure(rows, amax, self._sums, self._counts, self._top, self._tables)
        _insert_all(self._row_top, amax)
        found["rows"] += len(rows)
        found["row_smallest"] = min(found["row_smallest"], float(amax.min()))
        SIZES.add(found["row_buckets"], amax)
        return amax

    def fields(self) -> dict[str, Any]:
        """The fields of all rows so far."""
        sums, counts = self._sums.tolist(), self._counts.tolist()
        return {
            **self._found,
            **dict(zip(_COUNTED, counts, strict=True)),
            "minimum": sums[MINIMUM] + 0.0,
            "maximum": sums[MAXIMUM] + 0.0,
            "smallest": sums[SMALLEST],
            "largest": tuple(float(x) for x in self._top if x >= 0),
            "moments": Moments(counts[COUNT], *sums[:MINIMUM]),
            "row_largest": tuple(float(x) for x in self._row_top if x >= 0),
        }


@kernel
def _measure(rows: Floats, row_amax: Floats, sums: _Doubles, counts: _Whole, top: Floats, tables: _Tables) -> None:
    channels = rows.shape[1]
    clean, packed = np.empty(channels, np.float32), np.empty(channels, np.float32)
    found, depth = np.empty(4), np.empty(DEPTHS, np.int32)
    for index in range(rows.shape[0]):
        row = rows[index]
        values = row
        if _largest(row.view(np.int32)) >= _INFINITE:
            size = _without_nonfinite(row, clean, packed)
            counts[NONFINITE] += channels - size
            row, values = clean, packed[:size]
        if values.size:
            amax = _extremes(values, sums, counts)
            if amax > top[2]:
                _insert_all(top, values)
            _moments(values, sums[MEAN] if counts[COUNT] else np.float64(values[0]), found)
            _join(sums, found, counts[COUNT], values.size)
            counts[COUNT] += values.size
            row_amax[index] = amax
        counts[ZERO_BLOCKS] += _count_blocks(row.view(np.int32), tables, depth)


@kernel
def _largest(bits: _Bits) -> int:
    """The bits of the largest |x|; those of Inf and NaN are the largest of all."""
    largest = np.int32(0)
    for i in range(bits.size):
        size = bits[i] & _SIZE
        largest = size if size > largest else largest
    return int(largest)


@kernel
def _without_nonfinite(row: Floats, clean: Floats, packed: Floats) -> int:
    """Write the row with zeros for NaN and Inf, and its finite values side by side; returns how many these are."""
    kept = 0
    for i in range(row.size):
        good = np.isfinite(row[i])
        clean[i] = row[i] if good else np.float32(0)
        if good:
            packed[kept] = row[i]
            kept += 1
    return kept


@summing_kernel
def _extremes(values: Floats, sums: _Doubles, counts: _Whole) -> float:
    low = high = values[0]
    small = abs(values[0])
    zeros = negatives = np.int32(0)
    for i in range(values.size):
        x = values[i]
        size = abs(x)
        low = x if x < low else low
        high = x if x > high else high
        small = size if size < small else small
        zeros += np.int32(x == 0)
        negatives += np.int32(x < 0)
    sums[MINIMUM], sums[MAXIMUM] = min(sums[MINIMUM], low), max(sums[MAXIMUM], high)
    sums[SMALLEST] = min(sums[SMALLEST], small)
    counts[ZEROS] += zeros
    counts[NEGATIVES] += negatives
    return max(abs(float(low)), abs(float(high)))


@kernel
def _insert_all(top: Floats, values: Floats) -> None:
    """Insert |x| of the values into `top`, the three largest so far, largest first."""
    for value in values:
        size = abs(value)
        if size > top[0]:
            top[0], top[1], top[2] = size, top[0], top[1]
        elif size > top[1]:
            top[1], top[2] = size, top[1]
        elif size > top[2]:
            top[2] = size


@summing_kernel
def _moments(values: Floats, about: float, found: _Doubles) -> None:
    """Mean and centred sums, from sums about a value near the mean.

    With S_k the sum of (x - about)^k and D = S_1 / n:  M2 = S2 - n D^2,  M3 = S3 - 3 D S2 + 2 n D^3,
    M4 = S4 - 4 D S3 + 6 D^2 S2 - 3 n D^4
    """
    first = second = third = fourth = 0.0
    for i in range(values.size):
        d = np.float64(values[i]) - about
        square = d * d
        first += d
        second += square
        third += square * d
        fourth += square * square
    n = values.size
    step = first / n
    found[0] = about + step
    found[1] = max(second - n * step * step, 0.0)
    found[2] = third - 3 * step * second + 2 * n * step**3
    found[3] = max(fourth - 4 * step * third + 6 * step * step * second - 3 * n * step**4, 0.0)


@kernel
def _join(sums: _Doubles, found: _Doubles, before: int, size: int) -> None:
    """`Moments.merge`, in place."""
    if not before:
        sums[:4] = found
        return
    n = before + size
    a, b, d = before / n, size / n, found[MEAN] - sums[MEAN]
    w = before * b
    sums[FOURTH] += found[FOURTH] + d**4 * w * (a * a - a * b + b * b)
    sums[FOURTH] += 6 * d * d * (a * a * found[SECOND] + b * b * sums[SECOND])
    sums[FOURTH] += 4 * d * (a * found[THIRD] - b * sums[THIRD])
    sums[THIRD] += found[THIRD] + d**3 * w * (a - b) + 3 * d * (a * found[SECOND] - b * sums[SECOND])
    sums[SECOND] += found[SECOND] + d * d * w
    sums[MEAN] += d * b


@kernel
def _count_blocks(bits: _Bits, tables: _Tables, depth: _Bits) -> int:
    """Count a row block by block; returns how many blocks are all zero.

    `depth` is scratch space. Indices are unsigned, so that numba does not test whether they are negative.
    """
    deepest, zero_blocks = np.int32(DEPTHS - 2), 0
    for start in range(0, bits.size, BLOCK):
        block, channels = bits[start : start + BLOCK], tables.channel_amax[start : start + BLOCK]
        amax, zeros = np.int32(0), np.int32(0)
        for i in range(block.size):
            size = block[i] & _SIZE  # the bits of |x| are in the order of |x|
            amax = size if size > amax else amax
            zeros += np.int32(size == 0)
            channels[i] = size if size > channels[i] else channels[i]
        if amax == 0:
            zero_blocks += 1
            continue
        tables.block_buckets[np.uint32(amax >> SHIFT)] += 1
        exponent = amax >> np.int32(23)
        depth[:] = 0
        for i in range(block.size):
            size = block[i] & _SIZE
            below = exponent - (size >> np.int32(23))
            depth[np.uint32(below if below < deepest else deepest)] += 1
            tables.buckets[np.uint32(size >> SHIFT)] += 1
        tables.buckets[0] -= zeros  # which are in no bucket
        depth[min(exponent, deepest)] -= zeros
        depth[DEPTHS - 1] += zeros
        seen, place = 0, -1
        while 2 * seen < block.size:
            place += 1
            seen += depth[place]
        tables.median_depths[place] += 1
        for i in range(DEPTHS):
            tables.depths[np.uint32(exponent), i] += depth[i]
    return zero_blocks


@kernel
def count_channels(columns: Floats, counts: _Bits, low: Floats, high: Floats) -> None:
    """As `count_channels` of the readable twin."""
    for channel in range(columns.shape[0]):
        column, bucket = columns[channel], counts[channel]
        bits = column.view(np.int32)
        for i in range(column.size):
            x = column[i]
            if not np.isfinite(x):
                continue
            low[channel], high[channel] = min(low[channel], x), max(high[channel], x)
            place = min(((bits[i] & 0x7FFFFFFF) >> SIGNED_SHIFT) - SIGNED_FIRST, SIDE - 1)
            if place < 0:
                bucket[SIDE] += 1
            elif x > 0:
                bucket[SIDE + 1 + place] += 1
            else:
                bucket[SIDE - 1 - place] += 1
