"""The figures of one tensor on two devices, streamed."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from probe.comparisons.devices.structure import CHUNK, Structure
from probe.metrics import KEPT, Comparison, Metrics
from probe.metrics.tally import Magnitudes

#: Added to |a| in relative differences.
FLOOR = 1e-8


@dataclass(frozen=True)
class Limits:
    """What every tensor has to keep for the comparison to pass: below, below, above."""

    max_abs: float = 0.01
    mean_abs: float = 0.001
    cosine: float = 0.99

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or not math.isfinite(value) or (value < 0 and name != "cosine"):
                raise ValueError(f"the limit {name} is {value!r}. Expected a number, 0 or more.")
        if not -1 <= self.cosine <= 1:
            raise ValueError(f"the limit cosine is {self.cosine!r}. Expected -1 to 1.")


@dataclass(frozen=True, kw_only=True)
class LayerDifference:
    """One tensor, d = b - a; elements that are NaN or Inf on either side are counted and left out of the rest.

        max_relative, ...   of |d| / (|a| + 1e-8): relative to A
        within              share of all elements with |d| <= atol + rtol |a|; equal infinities are within
        error               rms(d) / rms(a), every token in units of its own size
        added, noise        the difference in what the layer adds, relative to that, and what sound devices stay below
        recipe_error        with a reference: what `error` is between the float reference and the recipe (A)
        device_error        ... and between the float reference and the device (B)
        recipe_errors       error / recipe_error: how many times the recipe's own error the device is off

    None stands for a figure without meaning, as in `Metrics`.
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
    lost: int
    """Elements that are finite on one side only."""
    error: float
    added: float
    noise: float
    recipe_error: float | None = None
    device_error: float | None = None
    recipe_errors: float | None = None
    exceeded: tuple[str, ...] = ()
    """Limits that are not kept."""

    @property
    def label(self) -> str:
        """`layer_0` for `layer_0.output`."""
        return label_of(self.name)

    @property
    def beyond_noise(self) -> float:
        """added / noise: above 1, sound devices do not differ so."""
        return self.added / self.noise if self.noise else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "shape": list(self.shape), "exceeded": list(self.exceeded)}


def label_of(name: str) -> str:
    """The name of a tensor without a closing `.output`."""
    return name.removesuffix(".output")


def measure_layer(
    name: str, a: Tensor, b: Tensor, dtypes: tuple[str, str], structure: Structure, *, rtol: float, atol: float,
    noise: float, limits: Limits,
) -> LayerDifference:  # fmt: skip
    """All figures but those of a reference: one pass of `Comparison`, and one for what is relative to A."""
    comparison = Comparison()
    comparison.update(b, a)
    metrics = comparison.metrics()
    relative = Magnitudes(KEPT)
    count, total, largest, within, lost = 0, 0.0, 0.0, 0, 0
    flat = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.numel(), CHUNK):
        x, y = (one[start : start + CHUNK].double().numpy() for one in flat)
        good = np.isfinite(x) & np.isfinite(y)
        lost += int((np.isfinite(x) != np.isfinite(y)).sum() + (~good & (np.isinf(x) & np.isinf(y)) & (x != y)).sum())
        within += int((~good & (x == y)).sum())
        if not good.all():
            x, y = x[good], y[good]
        size, scale = np.abs(y - x), np.abs(x)
        within += int((size <= atol + rtol * scale).sum())
        part = size / (scale + FLOOR)
        relative.take(part)
        count, total = count + part.size, total + float(part.sum())
        largest = max(largest, float(part.max(initial=0.0)))
    difference = LayerDifference(
        name=name,
        shape=tuple(a.shape),
        dtype_a=dtypes[0],
        dtype_b=dtypes[1],
        identical=metrics.identical,
        max_abs=metrics.max_abs,
        mean_abs=metrics.mae,
        median_abs=metrics.p50,
        max_relative=_figure(largest) if count else None,
        mean_relative=_figure(total / count) if count else None,
        median_relative=_figure(relative.quantiles((0.5,), largest=largest)[0]) if count else None,
        within=within / a.numel(),
        cosine=metrics.cosine,
        correlation=metrics.correlation,
        nan_a=metrics.nan_reference,
        inf_a=metrics.inf_reference,
        nan_b=metrics.nan_output,
        inf_b=metrics.inf_output,
        lost=lost,
        error=structure.error,
        added=structure.added,
        noise=noise,
        exceeded=_exceeded(metrics, limits, lost),
    )
    return difference


def _exceeded(metrics: Metrics, limits: Limits, lost: int) -> tuple[str, ...]:
    """A figure that is None keeps its limit only where nothing differs."""
    if metrics.identical:
        return ()
    known = (
        ("max_abs", metrics.max_abs is not None and metrics.max_abs < limits.max_abs),
        ("mean_abs", metrics.mae is not None and metrics.mae < limits.mean_abs),
        ("cosine", metrics.max_abs == 0 or (metrics.cosine is not None and metrics.cosine > limits.cosine)),
        ("finite", not lost),
    )
    return tuple(name for name, kept in known if not kept)


def _figure(x: float) -> float | None:
    return x if math.isfinite(x) else None
