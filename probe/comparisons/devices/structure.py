"""How the difference between two devices is spread over tokens and channels: sums of one pass, and what they tell.

A tensor is read as rows, one for each token, of channels (its last axis). With a row's size n = rms(a) as its unit,
so that one huge token does not outshine the rest:

    d = (b - a) / n           the difference
    u = (a - base_a) / n      what the layer adds to its input, if it is a residual layer; else all of a
    e = d - (base_b - base_a) / n     the difference in what it adds

A row in which anything is NaN or Inf is left out, and counted.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[np.float64]

#: Elements converted to float64 at a time: 2 MB per temporary.
CHUNK = 2**18
_TINY = 1e-300


def as_rows(tensor: Tensor) -> Tensor:
    """[tokens, channels], without a copy where that is possible; a vector is one channel."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)


def is_residual(a: Array, base: Array) -> bool:
    """Whether the layer looks like input + something: taking its input away leaves less."""
    return a.shape == base.shape and float(np.square(a - base).sum()) < float(np.square(a).sum())


@dataclass(frozen=True, eq=False)
class Structure:
    """The sums, over the rows that are finite on both sides."""

    rows: int
    left_out: int
    per_sample: int  # rows of a sample
    e_squares: float
    constant: float  # sum over channels of (sum of e n over rows)^2 / rows, in units of e_raw
    e_raw: float  # sum of (e n)^2
    tokens: Array  # [4, tokens]: e^2, u^2, e u, d^2 summed over channels; NaN in rows that are left out
    channels: Array  # [5, channels]: e^2, u^2, e u, d^2, a^2 summed over rows

    @property
    def error(self) -> float:
        """rms(d): the difference relative to the size of the tensor."""
        return _ratio(self.channels[3].sum(), self.channels[4].sum())

    @property
    def added(self) -> float:
        """rms(e) / rms(u): the difference in what the layer adds, relative to what it adds."""
        return _ratio(self.channels[0].sum(), self.channels[1].sum())

    @property
    def part(self) -> float:
        """rms(u) / rms(a): how much of the tensor the layer added."""
        return _ratio(self.channels[1].sum(), self.channels[4].sum())

    @property
    def slope(self) -> float:
        """sum e u / sum u^2: what B adds is 1 + slope times what A adds."""
        return float(self.channels[2].sum() / max(float(self.channels[1].sum()), _TINY))

    @property
    def factor_share(self) -> float:
        """The part of e^2 that one common factor explains."""
        return self._share(float(self.channels[2].sum()) ** 2 / max(float(self.channels[1].sum()), _TINY))

    @property
    def channel_factor_share(self) -> float:
        """The part of e^2 that a factor for each channel explains."""
        return self._share(float((self.channels[2] ** 2 / np.maximum(self.channels[1], _TINY)).sum()))

    @property
    def token_factor_share(self) -> float:
        """The part of e^2 that a factor for each token explains."""
        _, u, eu, _ = self.tokens
        return self._share(float(np.nansum(eu**2 / np.maximum(u, _TINY))))

    @property
    def constant_share(self) -> float:
        """The part of (e n)^2 that a constant for each channel explains."""
        return self.constant / self.e_raw if self.e_raw else 0.0

    def channel_peak(self) -> tuple[int, float]:
        """The channel that differs most for its size, and by how many times the median channel."""
        e, u, _, _, a = self.channels
        return _peak(e / np.maximum(u + a, _TINY))

    def token_peak(self) -> tuple[int, float]:
        """The token (row) that differs most for its size, and by how many times the median token."""
        return _peak(self.tokens[0])

    def sample_peak(self) -> tuple[int, float]:
        """The sample that differs most, and by how many times the median of the others."""
        samples = self.samples()
        if len(samples) < 3:
            return 0, 1.0
        place = int(np.nanargmax(samples))
        others = np.delete(samples, place)
        return place, math.sqrt(float(samples[place]) / max(float(np.nanmedian(others)), _TINY))

    def samples(self) -> Array:
        """Mean e^2 of every sample."""
        whole = len(self.tokens[0]) // self.per_sample * self.per_sample
        grouped = self.tokens[0][:whole].reshape(-1, self.per_sample)
        known = np.isfinite(grouped)
        found: Array = np.where(known, grouped, 0.0).sum(1) / np.maximum(known.sum(1), 1)
        return found

    def _share(self, explained: float) -> float:
        return min(1.0, explained / self.e_squares) if self.e_squares else 0.0


def measure_structure(a: Tensor, b: Tensor, bases: tuple[Tensor, Tensor] | None) -> Structure:
    """One pass over the two tensors, and over those that they add to."""
    per_sample = max(1, a.numel() // max(1, a.shape[0] * a.shape[-1])) if a.dim() > 2 else 1
    given = [as_rows(x) for x in (a, b, *(bases or ()))]
    rows, width = given[0].shape
    tokens = np.full((4, rows), np.nan)
    channels = np.zeros((5, width))
    raw_sum, raw_squares, left_out = np.zeros(width), 0.0, 0
    for start, parts in _chunks(given):
        finite = np.logical_and.reduce([np.isfinite(part).all(1) for part in parts])
        left_out += int((~finite).sum())
        x, y, *base = (part[finite] for part in parts)
        size = np.sqrt(np.square(x).mean(1, keepdims=True))
        size[size == 0] = 1.0
        d = y - x
        e, u = (d - (base[1] - base[0]), x - base[0]) if base else (d, x)
        raw_sum += e.sum(0)
        raw_squares += float(np.square(e).sum())
        d, e, u, x = d / size, e / size, u / size, x / size
        products = (e * e, u * u, e * u, d * d, x * x)
        for place, product in enumerate(products):
            channels[place] += product.sum(0)
        where = start + np.flatnonzero(finite)
        for place, product in enumerate(products[:4]):
            tokens[place, where] = product.sum(1)
    used = rows - left_out
    constant = float(np.square(raw_sum).sum()) / max(used, 1)
    return Structure(used, left_out, per_sample, float(channels[0].sum()), constant, raw_squares, tokens, channels)


def _chunks(given: list[Tensor]) -> Iterator[tuple[int, list[Array]]]:
    rows, width = given[0].shape
    step = max(1, CHUNK // width)
    for start in range(0, rows, step):
        yield start, [one[start : start + step].double().numpy() for one in given]


def _ratio(numerator: float, denominator: float) -> float:
    return math.sqrt(float(numerator) / float(denominator)) if denominator > 0 else (1.0 if numerator > 0 else 0.0)


def _peak(energy: Array) -> tuple[int, float]:
    """Place of the largest, and the root of its ratio to the median."""
    if len(energy) < 3 or not np.isfinite(energy).any():
        return 0, 1.0
    place = int(np.nanargmax(energy))
    return place, math.sqrt(float(energy[place]) / max(float(np.nanmedian(energy)), _TINY))
