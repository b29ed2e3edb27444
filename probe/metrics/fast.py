"""The fast twin: the tally of a batch in one pass over memory by numba loops, on as many threads as torch may use.

Counts, extremes and percentiles are those of the readable twin to the bit; sums differ by the order of additions.

The loops work on blocks that fit the cache. They find extremes and counts from the bits of the floats, as integers,
which vectorizes well. The key of a float is an integer that is ordered as the floats are:

    key = bits, or bits ^ 0x7f...f where the sign is set;    |x| has the bits max(key, ~key)

A block is measured as the readable twin measures a chunk, its sums first and then squares around its means, and blocks
merge as `Tally.then` merges stretches.
"""

from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probe.metrics import reference as readable
from probe.metrics.tally import BUCKETS, SIDES, Magnitudes, Spread, Tally
from probe.numerics.machine_code import kernel, summing_kernel
from probe.numerics.moments import Moments
from probe.numerics.native import in_threads

#: Elements of other dtypes than float32 and float64 that are converted at a time.
STRETCH = 2**18
#: Sums of squares of float64 below this cannot overflow; those of narrower dtypes never do.
LARGEST = 1e100

#: Elements in a block: 128 KB with their differences, and long enough for the processor to prefetch the next one.
BLOCK = 8192
#: Values that differ from their mean by no more than this part of it may all be equal: the mean is rounded.
_EQUAL = 1e-12

#: Indices into sums (means, then squares around them, of output, reference and difference), counts and keys.
(MEAN_O, MEAN_R, MEAN_D, SQUARES_O, SQUARES_R, SQUARES_D, PRODUCT, SUM_D, SUM_R, SUMS) = range(10)
(COUNT, ZEROED, AT_LARGEST, MOVED, NAN_O, INF_O, NAN_R, INF_R, FIRST_NONFINITE, COUNTS) = range(10)
#: The fields of a Tally in the order of counts; the last is first_nonfinite.
_COUNTED = ("count", "zeroed", "at_largest", "moved", "nan_output", "inf_output", "nan_reference", "inf_reference")
(LOW_O, HIGH_O, LOW_R, HIGH_R, LARGEST_D, KEYS) = range(6)

#: The shift from the upper half of a float64 to its bucket.
_SHIFT = np.uint32(BUCKETS.shift - 32)

_Floats = npt.NDArray[np.floating]
_Bits = npt.NDArray[np.signedinteger]
_Doubles = npt.NDArray[np.float64]
_Whole = npt.NDArray[np.int64]


class _Pair(NamedTuple):
    """Output and reference, flat, both float32 or both float64, and their bits."""

    output: _Floats
    reference: _Floats
    bits_output: _Bits
    bits_reference: _Bits


class _Totals(NamedTuple):
    """The arrays that the loops update in place."""

    sums: _Doubles
    counts: _Whole
    keys: _Whole
    buckets: _Whole  # |d| is counted here, but for zeros, if there are any buckets
    sizes: _Doubles  # |d| is written here, if there is room


def measure(output: Tensor, reference: Tensor, magnitudes: Magnitudes | None) -> Tally:
    """The tally of two flat tensors of one size; |output - reference| is added to `magnitudes`."""
    count = output.numel()
    dtype = torch.float64 if torch.float64 in (output.dtype, reference.dtype) else torch.float32
    if not count or (dtype == torch.float64 and not (_is_moderate(output) and _is_moderate(reference))):
        return readable.measure(output, reference, magnitudes)
    folded = magnitudes is not None and not magnitudes.has_room_for(count)
    kept = magnitudes is not None and not folded

    def measure_part(start: int, stop: int) -> tuple[Tally, _Whole, _Doubles]:
        buckets, sizes = np.zeros(BUCKETS.size * folded, np.int64), np.empty((stop - start) * kept)
        tally = Tally()
        step = stop - start if output.dtype == reference.dtype == dtype else STRETCH
        for place in range(start, stop, step):
            o, r = (x[place : min(place + step, stop)].to("cpu", dtype).numpy() for x in (output, reference))
            tally = tally.then(_measure_stretch(o, r, buckets, sizes[tally.count :]))
        return tally, buckets, sizes[: tally.count]

    parts = in_threads(measure_part, count, count)
    tally = reduce(Tally.then, (part for part, _, _ in parts))
    if magnitudes is None:
        return tally
    if folded and magnitudes.has_room_for(tally.count):
        return readable.measure(output, reference, magnitudes)  # so much is NaN that the rest can be kept
    for part, buckets, sizes in parts:
        if folded:
            magnitudes.take_counts(buckets, part.count)
        else:
            magnitudes.take(sizes)
    return tally


def _is_moderate(x: Tensor) -> bool:
    """Whether squares of `x` can be summed: it is narrower than float64, or finite and below LARGEST."""
    return x.dtype != torch.float64 or all(abs(float(end)) < LARGEST for end in torch.aminmax(x))


def _measure_stretch(output: _Floats, reference: _Floats, buckets: _Whole, sizes: _Doubles) -> Tally:
    bits = np.int32 if output.dtype == np.float32 else np.int64
    infinity = int(np.array(np.inf, output.dtype).view(bits))
    sums, counts, keys = np.zeros(SUMS), np.zeros(COUNTS, np.int64), np.full(KEYS, -1, np.int64)
    keys[[LOW_O, LOW_R]] = np.iinfo(np.int64).max
    keys[[HIGH_O, HIGH_R]] = np.iinfo(np.int64).min
    counts[FIRST_NONFINITE] = -1
    pair = _Pair(output, reference, output.view(bits), reference.view(bits))
    _measure(pair, infinity, _Totals(sums, counts, keys, buckets, sizes))
    *counted, first = counts.tolist()
    found: dict[str, Any] = dict(zip(_COUNTED, counted, strict=True))
    if found["count"]:
        ends = [_from_key(key, output.dtype) for key in keys[:LARGEST_D].tolist()]
        largest = float(keys[LARGEST_D].view(np.float64))
        means, squares = sums[: MEAN_D + 1].tolist(), sums[SQUARES_O : SQUARES_D + 1].tolist()
        extremes = (ends[: HIGH_O + 1], ends[LOW_R:], (-largest, largest))
        for name, mean, square, (low, high) in zip(SIDES, means, squares, extremes, strict=True):
            found[name] = Spread(Moments(found["count"], mean, square), low, high)
    found |= zip(("product", "sum_difference", "sum_reference"), sums[PRODUCT:].tolist(), strict=True)
    return Tally(seen=output.size, **found, first_nonfinite=None if first < 0 else first)


def _from_key(key: int, dtype: np.dtype[np.floating]) -> float:
    """The float with this key."""
    top = 2 ** (8 * dtype.itemsize - 1) - 1
    bits = key if key >= 0 else key ^ top
    return float(np.array(bits, f"i{dtype.itemsize}").view(dtype))


@kernel
def _measure(pair: _Pair, infinity: int, totals: _Totals) -> None:
    """Add a pair to totals that are those of nothing; `infinity` has the bits of Inf."""
    output, reference, bits_output, bits_reference = pair
    sums, counts, keys, buckets, sizes = totals
    top = (1 << (8 * bits_output.itemsize - 1)) - 1
    o, r = np.empty(BLOCK, output.dtype), np.empty(BLOCK, output.dtype)
    room = _Pair(o, r, o.view(bits_output.dtype), r.view(bits_output.dtype))
    d = np.empty(BLOCK)
    block, ends = np.empty(SUMS), np.empty(KEYS, np.int64)
    for start in range(0, output.size, BLOCK):
        here = slice(start, min(start + BLOCK, output.size))
        x, y, bits_x, bits_y = output[here], reference[here], bits_output[here], bits_reference[here]
        moved, zeros = _scan(bits_x, bits_y, top, ends)
        counts[MOVED] += moved
        if max(ends[HIGH_O], ~ends[LOW_O], ends[HIGH_R], ~ends[LOW_R]) >= infinity:
            quiet = (top - infinity + 1) >> 1
            kept = _leave_out_nonfinite(_Pair(x, y, bits_x, bits_y), room, counts, start, quiet)
            if kept == 0:
                continue
            x, y, bits_x, bits_y = o[:kept], r[:kept], room.bits_output[:kept], room.bits_reference[:kept]
            moved, zeros = _scan(bits_x, bits_y, top, ends)
        _sum_block(x, y, d, block)
        bits_d = d.view(np.int64)[: x.size]
        ends[LARGEST_D] = _largest(bits_d)
        if zeros:
            counts[ZEROED] += _zero_alone(bits_x, bits_y, top)
        _count_largest(bits_x, top, keys, ends, counts)
        if buckets.size:
            _count_sizes(bits_d, buckets)
        if sizes.size:
            sizes[counts[COUNT] : counts[COUNT] + x.size] = np.abs(d[: x.size])
        _join(sums, block, counts[COUNT], x.size)
        keys[LOW_O], keys[LOW_R] = min(keys[LOW_O], ends[LOW_O]), min(keys[LOW_R], ends[LOW_R])
        for place in (HIGH_O, HIGH_R, LARGEST_D):
            keys[place] = max(keys[place], ends[place])
        counts[COUNT] += x.size


@kernel
def _scan(bits_o: _Bits, bits_r: _Bits, top: int, ends: _Whole) -> tuple[int, int]:
    """Find the extreme keys of both sides; returns how many elements differ in bits and how many outputs are zero."""
    whole = bits_o.dtype.type  # of one width throughout, so that all of it fits the lanes
    zero, size, sign = whole(0), whole(top), whole(8 * bits_o.itemsize - 1)
    moved, zeros = zero, zero
    low_o, high_o, low_r, high_r = size, whole(~size), size, whole(~size)
    for i in range(bits_o.size):
        o, r = bits_o[i], bits_r[i]
        moved = whole(moved + whole(o != r))
        zeros = whole(zeros + whole((o & size) == zero))
        o = whole(o ^ ((o >> sign) & size))
        r = whole(r ^ ((r >> sign) & size))
        low_o, high_o = whole(min(low_o, o)), whole(max(high_o, o))
        low_r, high_r = whole(min(low_r, r)), whole(max(high_r, r))
    ends[LOW_O], ends[HIGH_O], ends[LOW_R], ends[HIGH_R] = low_o, high_o, low_r, high_r
    return int(moved), int(zeros)


@kernel
def _leave_out_nonfinite(pair: _Pair, room: _Pair, counts: _Whole, start: int, quiet: int) -> int:
    """Count NaN and Inf and copy the pairs that are finite into `room`; returns how many these are.

    A NaN widened to float64 is a quiet one: two that differ by that bit alone have not moved.
    """
    x, y, bits_x, bits_y = pair
    kept = 0
    for i in range(x.size):
        good_x, good_y = np.isfinite(x[i]), np.isfinite(y[i])
        counts[NAN_O] += np.isnan(x[i])
        counts[INF_O] += np.isinf(x[i])
        counts[NAN_R] += np.isnan(y[i])
        counts[INF_R] += np.isinf(y[i])
        if np.isnan(x[i]) and np.isnan(y[i]) and (bits_x[i] ^ bits_y[i]) == quiet:
            counts[MOVED] -= 1
        if good_y and not good_x and counts[FIRST_NONFINITE] < 0:
            counts[FIRST_NONFINITE] = start + i
        if good_x and good_y:
            room.output[kept], room.reference[kept] = x[i], y[i]
            kept += 1
    return kept


@kernel
def _sum_block(x: _Floats, y: _Floats, d: _Doubles, block: _Doubles) -> None:
    """The differences and all sums. Squares that may be nothing but rounding are summed again, around a value."""
    _add_up(x, y, d, block)
    _centre(x, y, d, block)
    for values, mean, squares in ((x, MEAN_O, SQUARES_O), (y, MEAN_R, SQUARES_R)):
        if block[squares] <= x.size * (_EQUAL * block[mean]) ** 2:
            block[mean], block[squares] = _around_the_first(values)
    if block[SQUARES_D] <= x.size * (_EQUAL * block[MEAN_D]) ** 2:
        block[MEAN_D], block[SQUARES_D] = _around_the_first(d[: x.size])


@summing_kernel
def _add_up(x: _Floats, y: _Floats, d: _Doubles, block: _Doubles) -> None:
    sum_o = sum_r = sum_d = size_d = size_r = 0.0
    for i in range(x.size):
        o, r = np.float64(x[i]), np.float64(y[i])
        e = o - r
        d[i] = e
        sum_o += o
        sum_r += r
        sum_d += e
        size_d += abs(e)
        size_r += abs(r)
    block[MEAN_O], block[MEAN_R], block[MEAN_D] = sum_o / x.size, sum_r / x.size, sum_d / x.size
    block[SUM_D], block[SUM_R] = size_d, size_r


@summing_kernel
def _centre(x: _Floats, y: _Floats, d: _Doubles, block: _Doubles) -> None:
    mean_o, mean_r, mean_d = block[MEAN_O], block[MEAN_R], block[MEAN_D]
    squares_o = squares_r = squares_d = product = 0.0
    for i in range(x.size):
        o, r, e = np.float64(x[i]) - mean_o, np.float64(y[i]) - mean_r, d[i] - mean_d
        squares_o += o * o
        squares_r += r * r
        squares_d += e * e
        product += o * r
    block[SQUARES_O], block[SQUARES_R], block[SQUARES_D], block[PRODUCT] = squares_o, squares_r, squares_d, product


@summing_kernel
def _around_the_first(values: _Floats) -> tuple[float, float]:
    """Mean and squares around it, of values that are nearly equal; of equal ones, the value and zero."""
    first = np.float64(values[0])
    total = squares = 0.0
    for i in range(values.size):
        total += np.float64(values[i]) - first
    step = total / values.size
    for i in range(values.size):
        off = (np.float64(values[i]) - first) - step
        squares += off * off
    return first + step, squares


@kernel
def _largest(bits: _Whole) -> int:
    found = 0
    for i in range(bits.size):
        found = max(found, bits[i] & 0x7FFFFFFFFFFFFFFF)
    return found


@kernel
def _zero_alone(bits_o: _Bits, bits_r: _Bits, top: int) -> int:
    """How many outputs are 0 where the reference is not."""
    size = bits_o.dtype.type(top)
    alone = 0
    for i in range(bits_o.size):
        alone += ((bits_o[i] & size) == 0) & ((bits_r[i] & size) != 0)
    return alone


@kernel
def _count_largest(bits: _Bits, top: int, keys: _Whole, ends: _Whole, counts: _Whole) -> None:
    """Count the outputs with the largest magnitude so far; most blocks do not reach it."""
    here = max(ends[HIGH_O], ~ends[LOW_O])
    before = max(keys[HIGH_O], ~keys[LOW_O]) if counts[COUNT] else -1
    if here < before:
        return
    if here > before:
        counts[AT_LARGEST] = 0
    for i in range(bits.size):
        counts[AT_LARGEST] += (bits[i] & top) == here


@kernel
def _count_sizes(bits: _Whole, buckets: _Whole) -> None:
    """Count every difference in its bucket, which is in the upper half of its bits; zeros are not counted."""
    halves = bits.view(np.uint32)
    before = buckets[0]
    for i in range(bits.size):
        buckets[(halves[2 * i + 1] & np.uint32(0x7FFFFFFF)) >> _SHIFT] += 1
    if buckets[0] != before:
        for i in range(bits.size):
            buckets[0] -= (bits[i] << 1) == 0


@kernel
def _join(sums: _Doubles, block: _Doubles, before: int, size: int) -> None:
    """`Moments.merge` and `Tally.then`, in place."""
    share = size / (before + size)
    weight = before * share
    if before:
        sums[PRODUCT] += (block[MEAN_O] - sums[MEAN_O]) * (block[MEAN_R] - sums[MEAN_R]) * weight
    for mean, squares in ((MEAN_O, SQUARES_O), (MEAN_R, SQUARES_R), (MEAN_D, SQUARES_D)):
        step = block[mean] - sums[mean] if before else 0.0
        sums[mean] = sums[mean] + step * share if before else block[mean]
        sums[squares] += block[squares] + step * step * weight
    for place in (PRODUCT, SUM_D, SUM_R):
        sums[place] += block[place]
