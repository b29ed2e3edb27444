"""The difference of one tensor between two devices, streamed: its figures, and how it spreads over tokens and channels.

For the spread, a tensor is read as rows, one for each token, of channels (its last axis). Each row is in units of its
own size n = rms(a), so that one huge token does not outweigh the rest:

    d = (b - a) / n                   the difference
    u = (a - base_a) / n              what the layer adds to its input if it is a residual layer, else all of a
    e = d - (base_b - base_a) / n     the difference in what it adds

Elements that are NaN or Inf on any side are left out: they count as 0 in every sum, and n is of the others.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probe.comparisons.selection import label_of
from probe.files.checked_json import finite
from probe.metrics import KEPT, Comparison, Metrics
from probe.metrics.tally import Magnitudes

Array = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

#: Elements converted to float64 at a time: 2 MB per temporary.
CHUNK = 2**18
#: Rows of a tensor that are read for a quick comparison, and elements at most.
QUICK, QUICK_ELEMENTS = 256, 2**18
#: A tensor is judged if this share of its elements, or more, is finite on both sides.
SUFFICIENT = 0.9
#: A layer that adds less than this part of the tensor is judged as if it added that much.
LEAST_PART = 1e-6
#: Added to |a| in relative differences.
FLOOR = 1e-8
_TINY = 1e-300


def as_rows(tensor: Tensor) -> Tensor:
    """[tokens, channels], without a copy where that is possible; a vector is one channel."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)


def sample_rows(tensor: Tensor) -> Array:
    """At most QUICK of the rows, fewer if they are wide, evenly spaced, in float64."""
    rows = as_rows(tensor)
    picked = evenly(len(rows), min(QUICK, max(8, QUICK_ELEMENTS // rows.shape[1])))
    return rows[torch.from_numpy(picked)].double().numpy()


def evenly(length: int, count: int) -> Places:
    """At most `count` places in range(length), evenly spaced, with both ends."""
    if count >= length:
        return np.arange(length)
    return np.unique(np.linspace(0, length - 1, count).round().astype(np.int64))


def chunks(*tensors: Tensor, size: int) -> Iterator[tuple[Array, ...]]:
    """The tensors side by side in float64, about `size` elements at a time, cut along their first axis."""
    step = max(1, size // max(1, math.prod(tensors[0].shape[1:])))
    for start in range(0, len(tensors[0]), step):
        yield tuple(tensor[start : start + step].double().numpy() for tensor in tensors)


@dataclass(frozen=True, eq=False)
class Structure:
    """How the difference spreads, over the elements that are finite on both sides. A share is a part of sum e^2."""

    rows: int  # those with at least one such element
    per_sample: int  # rows of a sample
    compared: float  # the share of such elements
    tokens: Array  # [5, tokens]: e^2, u^2, e u, d^2, a^2 summed over channels; NaN in rows without such elements
    channels: Array  # [5, channels]: the same summed over rows
    error: float  # rms(d): the difference relative to the size of the tensor
    added: float  # rms(e) / rms(u): the difference in what the layer adds, relative to what it adds
    part: float  # rms(u) / rms(a): how much of the tensor the layer added, LEAST_PART or more; 1 if a is 0
    slope: float  # sum e u / sum u^2: what B adds is 1 + slope times what A adds
    factor_share: float  # explained by one common factor
    channel_factor_share: float  # explained by a factor for each channel
    token_factor_share: float  # explained by a factor for each token
    constant_share: float  # explained by a constant for each channel, of the e without its unit n

    def channel_peak(self) -> tuple[int, float]:
        """The channel that differs most for its size, and by how many times the median channel."""
        e, u, _, _, a = self.channels
        return _peak(e / np.maximum(u + a, _TINY))

    def sample_peak(self) -> tuple[int, float]:
        """The sample that differs most, and by how many times the median of the others."""
        return _peak(self.samples(), among_others=True)

    @property
    def is_unstructured(self) -> bool:
        """Whether the difference looks like rounding: no bias, no factor, no place where most of it is."""
        few = 2.0 / max(1.0, self.rows) ** 0.5
        return (
            self.factor_share < 0.1 + few
            and self.constant_share < 0.25 + few
            and self.channel_factor_share < 0.25 + few
            and self.token_factor_share < 0.25 + 2.0 / len(self.channels[0]) ** 0.5
            and self.channel_peak()[1] < 8
            and self.sample_peak()[1] < 8
        )

    def samples(self) -> Array:
        """Mean e^2 of every sample."""
        whole = len(self.tokens[0]) // self.per_sample * self.per_sample
        grouped = self.tokens[0][:whole].reshape(-1, self.per_sample)
        means: Array = np.nansum(grouped, 1) / np.maximum(np.isfinite(grouped).sum(1), 1)
        return means

    def added_in(self, sample: int) -> float:
        """As `added`, of one sample alone."""
        rows = slice(sample * self.per_sample, (sample + 1) * self.per_sample)
        e, u = np.nansum(self.tokens[:2, rows], 1)
        return float(np.sqrt(e / max(u, _TINY)))


def measure_structure(a: Tensor, b: Tensor, bases: tuple[Tensor, Tensor] | None) -> Structure:
    """One pass over the two tensors, and over those that they add to."""
    rows, width = as_rows(a).shape
    tokens, channels = np.full((5, rows), np.nan), np.zeros((5, width))
    raw_sum, raw_squares, counts, used, start = np.zeros(width), 0.0, np.zeros(width, np.int64), 0, 0
    tensors = [as_rows(one) for one in (a, b, *(bases or ()))]
    for parts in chunks(*tensors, size=CHUNK):
        good = np.logical_and.reduce([np.isfinite(part) for part in parts])
        on_a, on_b, *base = parts if good.all() else (np.where(good, part, 0.0) for part in parts)
        size = _row_sizes(on_a, good)
        apart = on_b - on_a
        error, adds = (apart - (base[1] - base[0]), on_a - base[0]) if base else (apart, on_a)
        raw_sum += error.sum(0)
        with np.errstate(over="ignore"):
            raw_squares += float(np.square(error).sum())
        counts += good.sum(0)
        apart, error, adds, on_a = apart / size, error / size, adds / size, on_a / size
        known = good.any(1)
        places = start + np.flatnonzero(known)
        products = (error * error, adds * adds, error * adds, apart * apart, on_a * on_a)
        for row, product in enumerate(products):
            channels[row] += product.sum(0)
            tokens[row, places] = product.sum(1)[known]
        start, used = start + len(good), used + len(places)
    e, u, eu, d, x = (float(total) for total in channels.sum(1))

    def share(sums: Array) -> float:
        """The part of e^2 that a factor for each column of `sums` explains."""
        explained = float(np.nansum(sums[2] ** 2 / np.maximum(sums[1], _TINY)))
        return min(1.0, explained / e) if e else 0.0

    with np.errstate(over="ignore"):
        constant = float((np.square(raw_sum) / np.maximum(counts, 1)).sum())
    part = max(_ratio(u, x), LEAST_PART) if x else 1.0
    return Structure(
        rows=used,
        per_sample=max(1, a.numel() // max(1, a.shape[0] * a.shape[-1])) if a.dim() > 2 else 1,
        compared=float(counts.sum()) / a.numel(),
        tokens=tokens,
        channels=channels,
        error=_ratio(d, x),
        added=_ratio(e, max(u, LEAST_PART**2 * x)),
        part=part,
        slope=eu / max(u, _TINY),
        factor_share=share(np.array([[e], [u], [eu]])),
        channel_factor_share=share(channels),
        token_factor_share=share(tokens),
        constant_share=constant / raw_squares if 0 < raw_squares < math.inf else 0.0,
    )


def _row_sizes(x: Array, good: npt.NDArray[np.bool_]) -> Array:
    """rms of every row over its good elements, [rows, 1]; 1 where all are 0. The others are 0 in x."""
    counts = np.maximum(good.sum(1, keepdims=True), 1)
    with np.errstate(over="ignore"):
        size: Array = np.sqrt(np.square(x).sum(1, keepdims=True) / counts)
    extreme = ~((size > 1e-140) & (size < 1e140)).all(1)  # squares that are near the ends of float64
    if extreme.any():
        largest = np.abs(x[extreme]).max(1, keepdims=True)
        scaled = x[extreme] / np.where(largest > 0, largest, 1.0)
        size[extreme] = largest * np.sqrt(np.square(scaled).sum(1, keepdims=True) / counts[extreme])
    size[size == 0] = 1.0
    return size


def _ratio(numerator: float, denominator: float) -> float:
    return math.sqrt(numerator / denominator) if denominator > 0 else float(numerator > 0)


def _peak(energy: Array, *, among_others: bool = False) -> tuple[int, float]:
    """The place of the largest, and the root of its ratio to the median of all, or of the others."""
    if len(energy) < 3 or not np.isfinite(energy).any():
        return 0, 1.0
    place = int(np.nanargmax(energy))
    usual = float(np.nanmedian(np.delete(energy, place) if among_others else energy))
    return place, math.sqrt(float(energy[place]) / max(usual, _TINY))


@dataclass(frozen=True)
class Limits:
    """Every tensor must stay below max_abs and mean_abs and above cosine for the comparison to pass."""

    max_abs: float = 0.01
    mean_abs: float = 0.001
    cosine: float = 0.99

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or not math.isfinite(value) or (value < 0 and name != "cosine"):
                raise ValueError(f"the limit {name} is {value!r}. Expected a number, 0 or more.")
        if not -1 <= self.cosine <= 1:
            raise ValueError(f"the limit cosine is {self.cosine!r}. Expected -1 to 1.")


@dataclass(frozen=True)
class Tolerances:
    """An element is within if |b - a| <= atol + rtol |a|; a tensor passes if it keeps the limits."""

    rtol: float = 1e-3
    atol: float = 1e-3
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}. Expected a number, 0 or more.")


@dataclass(frozen=True, kw_only=True)
class LayerDifference:
    """One tensor, d = b - a; elements that are NaN or Inf on either side are counted and left out of the rest.

        compared            share of the elements that are finite on both sides: those that the figures are of
        max_relative, ...   of |d| / (|a| + 1e-8): relative to A
        within              share of all elements with |d| <= atol + rtol |a|; equal infinities are within
        error               rms(d) / rms(a), every token in units of its own size
        added, noise        the difference in what the layer adds, relative to what it adds, and its noise bound
        recipe_error        with a reference: `error` between the float reference and the recipe (A)
        device_error        with a reference: `error` between the float reference and the device (B)
        recipe_errors       error / recipe_error

    A figure without meaning is None, as in `Metrics`.
    """

    name: str
    shape: tuple[int, ...]
    dtype_a: str
    dtype_b: str
    identical: bool
    max_abs: float | None
    mean_abs: float | None
    median_abs: float | None
    max_relative: float | None
    mean_relative: float | None
    median_relative: float | None
    within: float
    cosine: float | None
    correlation: float | None
    nan_a: int
    inf_a: int
    nan_b: int
    inf_b: int
    compared: float
    nan_both: int
    """Elements that are NaN on both sides."""
    inf_both: int
    """Elements that are the same infinity on both sides."""
    lost: int
    """Elements that are not finite on one side, and not the same on the other."""
    is_zero: bool
    """Whether every element is 0 on both sides."""
    error: float
    added: float
    noise: float
    recipe_error: float | None
    device_error: float | None
    recipe_errors: float | None
    exceeded: tuple[str, ...]
    """Limits that are not kept."""

    @property
    def label(self) -> str:
        """`layer_0` for `layer_0.output`."""
        return label_of(self.name)

    @property
    def is_judged(self) -> bool:
        """Whether enough of the tensor was compared for a verdict."""
        return self.compared >= SUFFICIENT

    @property
    def beyond_noise(self) -> float:
        """added / noise: above 1, the difference is more than noise."""
        return self.added / self.noise if self.noise else 0.0


@dataclass(frozen=True)
class ReferenceErrors:
    """Differences from the float reference: of the recipe, of what the recipe's layer adds, and of the device.

    None where less than SUFFICIENT of the tensor could be compared.
    """

    recipe: float | None
    recipe_added: float | None
    device: float | None


def measure_difference(
    name: str,
    a: Tensor,
    b: Tensor,
    structure: Structure,
    *,
    dtypes: tuple[str, str],
    tolerances: Tolerances,
    noise: float,
    errors: ReferenceErrors | None,
) -> LayerDifference:
    """All figures of a tensor: one pass of `Comparison`, and one for the figures that are relative to A."""
    comparison = Comparison()
    comparison.update(b, a)
    metrics = comparison.metrics()
    relative = Magnitudes(KEPT)
    count, total, largest, within, nan_both, inf_both = 0, 0.0, 0.0, 0, 0, 0
    for x, y in chunks(a.reshape(-1), b.reshape(-1), size=CHUNK):
        good = np.isfinite(x) & np.isfinite(y)
        if not good.all():
            nan_both += int((np.isnan(x) & np.isnan(y)).sum())
            inf_both += int((np.isinf(x) & (x == y)).sum())
        x, y = x[good], y[good]
        size, scale = np.abs(y - x), np.abs(x)
        within += int((size <= tolerances.atol + tolerances.rtol * scale).sum())
        part = size / (scale + FLOOR)
        relative.take(part)
        count, total = count + part.size, total + float(part.sum())
        largest = max(largest, float(part.max(initial=0.0)))
    lost = a.numel() - count - nan_both - inf_both
    ends = (getattr(metrics, f"{end}_{side}") for end in ("min", "max") for side in ("output", "reference"))
    counts = ((kind, side, of) for kind in ("nan", "inf") for side, of in (("a", "reference"), ("b", "output")))
    return LayerDifference(
        name=name,
        shape=tuple(a.shape),
        dtype_a=dtypes[0],
        dtype_b=dtypes[1],
        **{figure: getattr(metrics, figure) for figure in ("identical", "max_abs", "cosine", "correlation")},
        **{f"{kind}_{side}": getattr(metrics, f"{kind}_{of}") for kind, side, of in counts},
        mean_abs=metrics.mae,
        median_abs=metrics.p50,
        max_relative=finite(largest) if count else None,
        mean_relative=finite(total / count) if count else None,
        median_relative=finite(relative.quantiles((0.5,), largest=largest)[0]) if count else None,
        within=(within + inf_both) / a.numel(),
        compared=count / a.numel(),
        nan_both=nan_both,
        inf_both=inf_both,
        lost=lost,
        is_zero=count == a.numel() and not any(ends),
        error=structure.error,
        added=structure.added,
        noise=noise,
        recipe_error=errors.recipe if errors else None,
        device_error=errors.device if errors else None,
        recipe_errors=structure.error / errors.recipe if errors and errors.recipe and structure.compared else None,
        exceeded=_exceeded(metrics, tolerances.limits, is_finite=not lost and not nan_both),
    )


def _exceeded(metrics: Metrics, limits: Limits, *, is_finite: bool) -> tuple[str, ...]:
    """The limits that are not kept; a figure that is None keeps its limit only where nothing differs.

    "compared" stands for a tensor that is finite or of equal infinities, too many for a verdict.
    """
    known = (
        ("max_abs", metrics.max_abs is not None and metrics.max_abs < limits.max_abs),
        ("mean_abs", metrics.mae is not None and metrics.mae < limits.mean_abs),
        ("cosine", metrics.max_abs == 0 or (metrics.cosine is not None and metrics.cosine > limits.cosine)),
    )
    beyond = [] if metrics.identical else [name for name, kept in known if not kept]
    if not is_finite:
        beyond.append("finite")
    elif metrics.compared < SUFFICIENT * metrics.count:
        beyond.append("compared")
    return tuple(beyond)
