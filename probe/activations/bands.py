"""Percentiles of every channel: signed values in 8 buckets per octave, counted channel by channel."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probe.activations.twins import fast_twin

#: In percent; the bands of the picture are the first with the last, the second with the last but one, ...
BANDS = (0.01, 1.0, 25.0, 50.0, 75.0, 99.0, 99.99)
#: Octaves that are told apart, from 2^LOWEST up; smaller values count as 0, larger ones as the largest.
LOWEST, OCTAVES = -24, 40
SIDE = OCTAVES * 8
#: |percentile - exact| <= BAND_ERROR |exact|, or 2^LOWEST
BAND_ERROR = 2.0**-3

FIRST = (127 + LOWEST) << 3  # the bucket of 2^LOWEST among the bits above the last 20
Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ChannelBands:
    """How many values of each channel lie in each of 2 SIDE + 1 buckets: negative ones, about zero, positive ones."""

    module: str
    kind: str
    counts: Counts
    minimum: Floats
    maximum: Floats

    def merge(self, other: "ChannelBands") -> "ChannelBands":
        """Both together."""
        return ChannelBands(
            self.module,
            self.kind,
            self.counts + other.counts,
            np.minimum(self.minimum, other.minimum),
            np.maximum(self.maximum, other.maximum),
        )

    def percentiles(self) -> npt.NDArray[np.float64]:
        """[len(BANDS), channels]: the values of rank percent / 100 * (n - 1), spread evenly over their buckets."""
        lows, highs = _edges()
        ends = np.cumsum(self.counts, axis=1, dtype=np.int64)
        total = ends[:, -1]
        found = np.zeros((len(BANDS), len(total)))
        for row, percent in enumerate(BANDS):
            rank = percent / 100 * np.maximum(total - 1, 0)
            bucket = (ends <= rank[:, None]).sum(1).clip(max=2 * SIDE)
            inside = np.take_along_axis(self.counts, bucket[:, None], 1)[:, 0]
            before = np.take_along_axis(ends, bucket[:, None], 1)[:, 0] - inside
            share = (rank - before + 0.5) / np.maximum(inside, 1)
            value = lows[bucket] + (highs[bucket] - lows[bucket]) * share.clip(0, 1)
            value = np.where(bucket == SIDE, 0.0, value)
            found[row] = np.where(total > 0, np.clip(value, self.minimum, self.maximum), 0.0)
        return found


def _edges() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The least and the largest value of every bucket."""
    bits = ((np.arange(SIDE + 1, dtype=np.int32) + np.int32(FIRST)) << 20).view(np.float32).astype(np.float64)
    lows = np.concatenate([-bits[:0:-1], [-bits[0]], bits[:-1]])
    highs = np.concatenate([-bits[-2::-1], [bits[0]], bits[1:]])
    return lows, highs


def measure_bands(
    rows: Tensor, keep: Tensor | None = None, *, module: str = "", kind: str = "output", fast: bool | None = None
) -> ChannelBands:
    """Of [..., rows, channels]; rows that are not kept, NaN and Inf count for nothing. `fast` as in `measure`."""
    twin = None if fast is False else fast_twin()
    counting = count if twin is None else twin.count_bands
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


def count(columns: Floats, counts: Counts, low: Floats, high: Floats) -> None:
    """The readable twin: count the values of every channel, [channels, rows], and keep the least and the largest."""
    good = np.isfinite(columns)
    place = np.minimum((columns.view(np.int32) & 0x7FFFFFFF) >> 20, FIRST + SIDE - 1) - FIRST
    bucket = np.where(place < 0, SIDE, np.where(columns > 0, SIDE + 1 + place, SIDE - 1 - place))
    channel = np.broadcast_to(np.arange(len(columns))[:, None], columns.shape)
    np.add.at(counts, (channel[good], bucket[good]), 1)
    np.minimum(low, np.where(good, columns, np.float32(np.inf)).min(1), out=low)
    np.maximum(high, np.where(good, columns, np.float32(-np.inf)).max(1), out=high)
