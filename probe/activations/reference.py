"""The readable twin: the statistics of rows in a few numpy operations; sums are in float64."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.numerics.histogram import Buckets
from probe.numerics.moments import Moments

#: |x| > 0 of a tensor is counted in 64 buckets per octave, over all of float32.
SIZES = Buckets(float_bits=32, mantissa_bits=6, lowest=-127, octaves=256)
#: The values of a channel are counted in 8 buckets per octave, negative ones, then those below 2^-24 as zeros, then
#: positive ones; what is beyond the last octave counts as the largest.
SIGNED_SIZES = Buckets(float_bits=32, mantissa_bits=3, lowest=-24, octaves=40)
SIDE = SIGNED_SIZES.size

#: Channels of a row that share a scale in the MX formats.
BLOCK = 32
#: Depths below the exponent of a block that are told apart; the last one is of zeros.
DEPTHS = 33
#: The fields of LayerStatistics that are counts, and those that are tables of counts.
COUNTS = ("rows", "count", "nonfinite", "zeros", "negatives", "zero_blocks")
TABLES = ("buckets", "row_buckets", "block_buckets", "depths", "median_depths")

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int32]


def empty(channels: int) -> dict[str, Any]:
    """The fields of LayerStatistics for no rows."""
    return {
        **dict.fromkeys(COUNTS, 0),
        **dict.fromkeys(("minimum", "smallest", "row_smallest"), np.inf),
        "maximum": -np.inf,
        **dict.fromkeys(("largest", "row_largest"), ()),
        "moments": Moments(third=0.0, fourth=0.0),
        **{name: np.zeros(SIZES.size, np.int64) for name in ("buckets", "row_buckets", "block_buckets")},
        "channel_amax": np.zeros(channels, np.float32),
        "depths": np.zeros((256, DEPTHS), np.int64),
        "median_depths": np.zeros(DEPTHS, np.int64),
    }


class Gathering:
    """Gathers the fields of LayerStatistics piece by piece: counts add up, extremes and moments merge."""

    def __init__(self, channels: int) -> None:
        self._found = empty(channels)

    def take(self, rows: Floats) -> Floats:
        """Append rows [rows, channels]; returns max |x| of each."""
        old, (new, amax) = self._found, measure(rows)
        self._found = {name: merge(old[name], new[name]) for name, merge in MERGED.items()}
        return amax

    def fields(self) -> dict[str, Any]:
        """The fields of all rows so far."""
        return dict(self._found)


def largest_three(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    """The three largest of both, largest first."""
    return tuple(sorted(a + b, reverse=True)[:3])


#: How two pieces merge, field by field of LayerStatistics.
MERGED: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys((*COUNTS, *TABLES), operator.add),
    **dict.fromkeys(("minimum", "smallest", "row_smallest"), min),
    "maximum": max,
    "channel_amax": np.maximum,
    **dict.fromkeys(("largest", "row_largest"), largest_three),
    "moments": Moments.merge,
}


def measure(rows: Floats) -> tuple[dict[str, Any], Floats]:
    """The fields of LayerStatistics for rows [rows, channels], and max |x| of each row."""
    good = np.isfinite(rows)
    values = rows[good]
    if not values.size:
        found = empty(rows.shape[1]) | {"nonfinite": rows.size}
        return found | _of_rows(np.zeros_like(rows)), np.zeros(len(rows), np.float32)
    sizes = np.abs(values)
    clean = np.where(good, rows, np.float32(0))
    wide = values.astype(np.float64)
    mean = min(max(float(wide.mean()), float(values.min())), float(values.max()))
    d = wide - mean
    found = {
        "count": values.size,
        "nonfinite": rows.size - values.size,
        "zeros": int((values == 0).sum()),
        "negatives": int((values < 0).sum()),
        "minimum": float(values.min()) + 0.0,
        "maximum": float(values.max()) + 0.0,
        "smallest": float(sizes.min()),
        "largest": _top(sizes),
        "moments": Moments(values.size, mean, float((d**2).sum()), float((d**3).sum()), float((d**4).sum())),
        "buckets": _count_sizes(sizes),
    }
    return found | _of_rows(clean), np.abs(clean).max(1)


def _of_rows(clean: Floats) -> dict[str, Any]:
    """The fields that depend on the place of a value: rows, channels and blocks."""
    sizes = np.abs(clean)
    amax = sizes.max(1)
    return {
        "rows": len(clean),
        "channel_amax": sizes.max(0),
        "row_largest": _top(amax),
        "row_smallest": float(amax.min()),
        "row_buckets": _count_sizes(amax),
        **_of_blocks(sizes),
    }


def _of_blocks(sizes: Floats) -> dict[str, Any]:
    counts = np.zeros(SIZES.size, np.int64)
    depths, medians = np.zeros((256, DEPTHS), np.int64), np.zeros(DEPTHS, np.int64)
    zero_blocks = 0
    for start in range(0, sizes.shape[1], BLOCK):
        block = np.ascontiguousarray(sizes[:, start : start + BLOCK])
        amax = block.max(1)
        zero_blocks += int((amax == 0).sum())
        SIZES.add(counts, amax)
        block, amax = block[amax > 0], amax[amax > 0]
        exponent = (amax.view(np.int32) >> 23)[:, None]
        depth = np.where(block == 0, DEPTHS - 1, np.minimum(exponent - (block.view(np.int32) >> 23), DEPTHS - 2))
        np.add.at(depths, (np.broadcast_to(exponent, depth.shape), depth), 1)
        median = np.sort(depth, axis=1)[:, (depth.shape[1] + 1) // 2 - 1]
        medians += np.bincount(median, minlength=DEPTHS)
    return {"block_buckets": counts, "zero_blocks": zero_blocks, "depths": depths, "median_depths": medians}


def _count_sizes(sizes: Floats) -> npt.NDArray[np.int64]:
    counts = np.zeros(SIZES.size, np.int64)
    SIZES.add(counts, sizes)
    return counts


def _top(values: Floats) -> tuple[float, ...]:
    return tuple(float(x) for x in np.sort(values)[:-4:-1])


def count_channels(columns: Floats, counts: Counts, low: Floats, high: Floats) -> None:
    """Count the values of every channel, [channels, rows], and keep the least and the largest; in place."""
    good = np.isfinite(columns)
    place = np.minimum(SIGNED_SIZES.find(np.abs(columns)), SIDE - 1)
    bucket = np.where(place < 0, SIDE, np.where(columns > 0, SIDE + 1 + place, SIDE - 1 - place))
    channel = np.broadcast_to(np.arange(len(columns))[:, None], columns.shape)
    np.add.at(counts, (channel[good], bucket[good]), 1)
    np.minimum(low, np.where(good, columns, np.float32(np.inf)).min(1), out=low)
    np.maximum(high, np.where(good, columns, np.float32(-np.inf)).max(1), out=high)
