"""The statistics of a tensor: counts, extremes and sums that are gathered piece by piece and merged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from types import ModuleType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probe.activations import reference as readable
from probe.activations.reference import MERGED, SIDE, SIGNED_SIZES, SIZES, TABLES
from probe.numerics.histogram import Trimmed, spread_evenly
from probe.numerics.moments import Moments
from probe.numerics.native import in_threads, numba_twin

Kind = Literal["input", "output", "weight"]
KINDS: tuple[Kind, ...] = ("input", "output", "weight")
#: The percentiles of |x| that are reported, in percent.
PERCENTILES = (0.01, 1.0, 25.0, 50.0, 75.0, 99.0, 99.9, 99.99)
#: A percentile of |x| differs from the exact one by at most this part of it (if that is 2^-126 or more).
PERCENTILE_ERROR = SIZES.width
#: The percentiles of every channel, in percent. The outermost band lies between the first and the last.
BANDS = (0.01, 1.0, 25.0, 50.0, 75.0, 99.0, 99.99)
#: |percentile of a channel - exact| <= BAND_ERROR |exact|, or 2^-24
BAND_ERROR = SIGNED_SIZES.width
#: Elements that are measured at a time: 1 MB of float32.
PIECE = 2**18

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """The statistics of one tensor of one module over all batches; rows are tokens, columns are channels.

    The rows of a weight [out, in] are outputs and its channels are inputs. A block is 32 neighbouring channels of a
    row, which share a scale in the MX formats; the last one of a row may be shorter.

    Counts, extremes, `channel_amax` and all tables of counts are exact, also after `merge`. Sums are in float64.
    Percentiles come from `buckets`; their relative error is at most PERCENTILE_ERROR = 2^-6.
    NaN and Inf are counted in `nonfinite` and left out; the tables of blocks count them as zeros.
    Values are read as float32: a float64 is rounded first.
    """

    module: str
    kind: Kind
    rows: int
    count: int
    """Finite elements."""
    nonfinite: int
    zeros: int
    negatives: int
    minimum: float
    maximum: float
    smallest: float
    """The smallest |x|."""
    largest: tuple[float, ...]
    """The three largest |x|, largest first; fewer where there are fewer elements."""
    moments: Moments
    channel_amax: Floats
    """max |x| of every channel."""
    row_largest: tuple[float, ...]
    """The three largest of max |x| of a row, largest first."""
    row_smallest: float
    """The smallest max |x| of a row."""
    zero_blocks: int
    buckets: Trimmed
    """How many |x| > 0 have these float32 bits above the last 17: 64 buckets per octave, [16384]."""
    row_buckets: Trimmed
    """How many rows have their max |x| > 0 in these buckets."""
    block_buckets: Trimmed
    """How many blocks have their max |x| > 0 in these buckets."""
    depths: Trimmed
    """[256, 33]: elements by the biased float32 exponent E of their block's max |x|, and by how far below it their own
    exponent lies: E - e, at most 31; column 32 counts zeros. Blocks of zeros are left out."""
    median_depths: Trimmed
    """[33]: blocks by the depth of their median: the smallest d with at least half of the elements at <= d."""

    @property
    def channels(self) -> int:
        """How many channels there are."""
        return int(self.channel_amax.size)

    @property
    def amax(self) -> float:
        """max |x|."""
        return self.largest[0] if self.largest else 0.0

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return int(self.block_buckets.counts.sum()) + self.zero_blocks

    @property
    def median(self) -> float:
        """The median of |x|."""
        return self.percentile(50.0)

    def percentile(self, percent: float) -> float:
        """A percentile of |x|, as numpy's `linear`, within PERCENTILE_ERROR."""
        return SIZES.quantile(self.buckets.whole(), percent / 100, zeros=self.zeros, low=self.smallest, high=self.amax)

    def percentiles(self) -> dict[str, float]:
        """PERCENTILES of |x| by name, such as p99.9."""
        return {f"p{percent:g}": self.percentile(percent) for percent in PERCENTILES}

    @property
    def max_to_median(self) -> float | None:
        """max |x| / median |x|; None where the median is 0."""
        return self.amax / self.median if self.median else None

    @property
    def max_to_p99(self) -> float | None:
        """max |x| / the 99th percentile of |x|; None where that is 0."""
        p99 = self.percentile(99.0)
        return self.amax / p99 if p99 else None

    def magnitudes(self, reduce_dim: int | None) -> dict[str, float | None]:
        """Top-1/2/3, median and min of |x| (reduce_dim None), of max |x| by token (-1) or of max |x| by channel (-2).

        A top that does not exist is None. All are exact but the medians for None and -1.
        """
        if reduce_dim is None:
            top, low, median = self.largest, self.smallest, self.median
        elif reduce_dim == -1:
            top, low = self.row_largest, self.row_smallest
            counts, high = self.row_buckets.whole(), top[0] if top else 0.0
            median = SIZES.quantile(counts, 0.5, zeros=self.rows - int(counts.sum()), low=low, high=high)
        else:
            channels = np.sort(self.channel_amax)
            top, low = tuple(float(x) for x in channels[:-4:-1]), float(channels[0])
            median = float(np.median(channels))
        tops = {f"top{i + 1}": top[i] if i < len(top) else None for i in range(3)}
        return {**tops, "median": median, "min": low}

    def figures(self) -> dict[str, Any]:
        """Every statistic that is one number, by name."""
        return {
            **{name: getattr(self, name) for name in ("module", "kind", "rows", "channels", "count")},
            **{name: getattr(self, name) for name in ("nonfinite", "zeros", "negatives")},
            **{"min": self.minimum, "max": self.maximum},
            **{name: getattr(self.moments, name) for name in ("mean", "std", "kurtosis")},
            **{"amax": self.amax, "smallest": self.smallest},
            **self.percentiles(),
            **{name: getattr(self, name) for name in ("max_to_median", "max_to_p99", "blocks", "zero_blocks")},
        }

    def merge(self, other: "LayerStatistics") -> "LayerStatistics":
        """The statistics of both tensors together."""
        if (self.module, self.kind, self.channels) != (other.module, other.kind, other.channels):
            raise ValueError(
                f"cannot merge {other.kind} of {other.module} ({other.channels} channels) into {self.kind} of "
                f"{self.module} ({self.channels} channels). Merge statistics of one tensor."
            )
        merged = {name: merge(getattr(self, name), getattr(other, name)) for name, merge in MERGED.items()}
        return replace(self, **merged)


@dataclass(frozen=True, eq=False)
class ChannelBands:
    """How many values of each channel lie in each of 2 SIDE + 1 buckets of SIGNED_SIZES."""

    module: str
    kind: str
    counts: npt.NDArray[np.int32]
    minimum: Floats
    maximum: Floats

    def merge(self, other: "ChannelBands") -> "ChannelBands":
        """The bands of both sets of rows."""
        low, high = np.minimum(self.minimum, other.minimum), np.maximum(self.maximum, other.maximum)
        return replace(self, counts=self.counts + other.counts, minimum=low, maximum=high)

    def percentiles(self) -> npt.NDArray[np.float64]:
        """[len(BANDS), channels]: the values of rank percent / 100 * (n - 1), spread evenly over their buckets."""
        ends = SIGNED_SIZES.edges
        lows, highs = np.concatenate([-ends[:0:-1], [0.0], ends[:-1]]), np.concatenate([-ends[-2::-1], [0.0], ends[1:]])
        total = self.counts.sum(axis=1, dtype=np.int64)
        found = np.zeros((len(BANDS), len(total)))
        for row, percent in enumerate(BANDS):
            value = spread_evenly(self.counts, percent / 100 * np.maximum(total - 1, 0), lows, highs)
            found[row] = np.where(total > 0, np.clip(value, self.minimum, self.maximum), 0.0)
        return found


def measure(
    x: Tensor, *, module: str = "", kind: Kind = "output", keep: Tensor | None = None, fast: bool | None = None
) -> tuple[LayerStatistics, Floats]:
    """The statistics of `x` [..., rows, channels], and max |x| of each of its rows, [...] as float32 (0 if left out).

    `keep` [..., rows] says which rows count; padding does not. `fast` chooses the twin (None: what can be loaded).
    """
    if not x.is_floating_point():
        raise ValueError(f"{kind} of {module or 'a tensor'} is {x.dtype}. Only floats have magnitudes to analyze.")
    x = x.detach()
    x = x.reshape(1, 1, -1) if x.dim() < 2 else x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3)
    kept = None if keep is None else keep.reshape(x.shape[:2]).to("cpu", torch.bool)
    gathering = _twin(fast).Gathering
    row_amax = np.zeros(tuple(x.shape[:2]), np.float32)
    spans = list(_spans(x))

    def measure_some(some: Sequence[tuple[int, int, int]]) -> LayerStatistics:
        gathered = gathering(x.shape[2])
        for sample, start, stop in some:
            piece = x[sample, start:stop].to("cpu", torch.float32)
            place = torch.arange(start, stop) if kept is None else start + kept[sample, start:stop].nonzero()[:, 0]
            if kept is not None and len(place) < stop - start:
                piece = piece[place - start]
            if len(piece):
                row_amax[sample, place.numpy()] = gathered.take(piece.contiguous().numpy())
        fields = gathered.fields()
        return LayerStatistics(module, kind, **fields | {name: Trimmed.of(fields[name]) for name in TABLES})

    strides = max(1, min(torch.get_num_threads(), len(spans)))

    def measure_strides(first: int, last: int) -> list[LayerStatistics]:
        return [measure_some(spans[i::strides]) for i in range(first, last)]

    parts = in_threads(measure_strides, strides, x.numel())
    return reduce(LayerStatistics.merge, chain.from_iterable(parts)), row_amax


def _twin(fast: bool | None) -> ModuleType:
    twin = None if fast is False else numba_twin("probe.activations.fast", "statistics")
    return twin or readable


def _spans(x: Tensor) -> Iterator[tuple[int, int, int]]:
    """(sample, first row, end row) of pieces that fit the cache."""
    step = max(1, PIECE // max(1, x.shape[2]))
    for sample in range(x.shape[0]):
        for start in range(0, x.shape[1], step):
            yield sample, start, min(start + step, x.shape[1])


def measure_bands(
    rows: Tensor, keep: Tensor | None = None, *, module: str = "", kind: str = "output", fast: bool | None = None
) -> ChannelBands:
    """The bands of [..., rows, channels], without NaN, Inf and rows that are not in `keep`. `fast` as in `measure`."""
    counting = _twin(fast).count_channels
    channels = rows.shape[-1]
    flat = rows.detach().reshape(-1, rows.shape[-2], channels) if rows.dim() > 2 else rows.detach()[None]
    kept = None if keep is None else keep.reshape(flat.shape[:2]).cpu()
    counts = np.zeros((channels, 2 * SIDE + 1), np.int32)
    low, high = np.full(channels, np.inf, np.float32), np.full(channels, -np.inf, np.float32)
    for index, sample in enumerate(flat):
        piece = sample if kept is None else sample[kept[index].to(sample.device)]
        if len(piece):
            counting(np.ascontiguousarray(piece.to("cpu", torch.float32).numpy().T), counts, low, high)
    return ChannelBands(module, kind, counts, low, high)
