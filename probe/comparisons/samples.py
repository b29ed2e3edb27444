"""The parts of recorded tensors that pages draw: evenly spread samples, histograms, and maps of means."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probe.comparisons.devices.diff import DeviceComparison
from probe.comparisons.modes import ModeComparison
from probe.comparisons.selection import Side, bands
from probe.recordings import read_recording

_Array = npt.NDArray[np.float64]
_Counts = npt.NDArray[np.int64]

#: Values in a sample at most.
SAMPLED = 20_000
#: Rows and columns of a map at most.
ROWS, COLUMNS = 64, 128
#: The share of the differences that lie inside of a histogram.
INSIDE = 0.999
#: Modes share the axis of their histograms unless one reaches this many times as far as the median mode.
FAR = 50
#: Bars of a histogram of differences.
BARS = 61
#: Values and features of one layer that are drawn one by one.
VALUES, FEATURES = 1000, 100


@dataclass(frozen=True, eq=False)
class Pairs:
    """Values of a tensor and of its reference at the same places; only those that are finite on both sides."""

    output: _Array
    reference: _Array
    left_out: int
    """How many values of the sample are not finite."""

    @property
    def difference(self) -> _Array:
        """output - reference."""
        return self.output - self.reference


@dataclass(frozen=True, eq=False)
class Differences:
    """The histogram of the differences in a sample, and their moments."""

    counts: _Counts
    edges: _Array
    mean: float
    std: float
    rms: float
    beyond: int
    """How many values of the sample lie outside of the edges."""


@dataclass(frozen=True, eq=False)
class DrawnTensor:
    """One tensor against its reference, as a page draws it."""

    label: str
    shape: tuple[int, ...]
    pairs: Pairs
    differences: Differences | None
    """None where every difference is 0, or none is finite."""
    errors: _Array
    """The mean |difference| by position and feature."""
    scale: tuple[float, float] | None
    """The ends of the scale of shades for `errors`; None where no error is above 0."""


@dataclass(frozen=True, eq=False)
class DrawnLayer:
    """One layer by itself, as a page draws it."""

    name: str
    counts: _Counts
    edges: _Array
    first_values: _Array
    features: _Array
    """The first features of the first sample, position by feature."""
    feature_scale: tuple[float, float] | None
    """The ends of the scale of shades for `features`; None where none is finite."""


def drawn_modes(
    compared: Sequence[tuple[ModeComparison, Side, Side]], *, progress: Callable[[str], object] | None = None
) -> dict[str, dict[str, DrawnTensor]]:
    """By layer and mode: the first layer, the last, and the one with the largest relative error in any mode."""
    names = list(compared[0][0].layers)

    def error(name: str) -> float:
        return max(comparison.layers[name].metrics.relative_mse or 0.0 for comparison, _, _ in compared)

    chosen = {names[0], max(names, key=error), names[-1]}
    sides = {comparison.compared_mode: (side, reference) for comparison, side, reference in compared}
    drawn = {}
    for name in filter(chosen.__contains__, names):
        if progress:
            progress(f"pictures of {name}")
        drawn[name] = drawn_tensors(name, sides)
    return drawn


def drawn_tensors(label: str, sides: Mapping[str, tuple[Side, Side]]) -> dict[str, DrawnTensor]:
    """One tensor of several sides, each with its reference, on shared scales where they can share one."""
    pairs = {name: sample_pairs(label, *both) for name, both in sides.items()}
    errors = {name: error_map(label, *both) for name, both in sides.items()}
    reaches = {name: _reach(one.difference) for name, one in pairs.items()}
    if max(reaches.values()) <= FAR * statistics.median(reaches.values()):
        reaches = dict.fromkeys(reaches, max(reaches.values()))
    known = np.concatenate([one[np.isfinite(one) & (one > 0)] for one in errors.values()])
    scale = (float(np.quantile(known, 0.001)), float(known.max())) if len(known) else None
    drawn = {}
    for name, (side, _) in sides.items():
        differences = _differences(pairs[name].difference, reaches[name])
        drawn[name] = DrawnTensor(label, side.shape(label), pairs[name], differences, errors[name], scale)
    return drawn


def drawn_devices(found: DeviceComparison) -> DrawnTensor | None:
    """The tensor of two devices where a fault began, or else the worst; None where nothing differs or was compared."""
    if not found.layers or found.verdict.kind == "identical":
        return None
    recipes = ((found.a, found.recipe_a), (found.b, found.recipe_b))
    a, b = (Side(read_recording(folder, verify=False), recipe) for folder, recipe in recipes)
    label = found.verdict.layer
    known = any(layer.label == label for layer in found.layers)
    if label is None or not known or found.verdict.kind == "dtype noise":
        label = found.worst_by_max_abs[0].label
    return drawn_tensors(label, {"B": (b, a)})["B"]


def drawn_layer(name: str, side: Side, low: float | None, high: float | None) -> DrawnLayer:
    """All values of a layer between its extremes as a histogram, the first ones, and its first features."""
    nothing = (np.zeros(1, np.int64), np.array([0.0, 1.0]))
    counts, edges = nothing if low is None or high is None else histogram(name, side, low, high)
    values, shape = side.flat(name), _as_planes(side.shape(name))
    features = values[: shape[1] * shape[2]].reshape(shape[1:])[:, :FEATURES].double().numpy()
    good, scale = features[np.isfinite(features)], None
    if len(good):
        least, most = (float(x) for x in np.quantile(good, (0.005, 0.995)))
        scale = (least, max(most, least + 1e-12))
    return DrawnLayer(name, counts, edges, values[:VALUES].double().numpy(), features, scale)


def _reach(difference: _Array) -> float:
    """Where a histogram of the differences ends."""
    sizes = np.abs(difference)
    return float(np.quantile(sizes, INSIDE)) or float(sizes.max()) if len(sizes) else 0.0


def _differences(difference: _Array, reach: float) -> Differences | None:
    if not np.abs(difference).max(initial=0.0):
        return None
    counts, edges = np.histogram(difference, bins=BARS, range=(-reach, reach))
    beyond = int((np.abs(difference) > reach).sum())
    rms = float(np.sqrt(np.square(difference).mean()))
    return Differences(counts, edges, float(difference.mean()), float(difference.std()), rms, beyond)


def sample_pairs(label: str, side: Side, reference: Side, *, most: int = SAMPLED) -> Pairs:
    """About `most` places, evenly spread over the tensor and over its features."""
    step = _stride(math.prod(side.shape(label)), side.shape(label)[-1], most)
    output, expected = (one.flat(label)[::step].double().numpy() for one in (side, reference))
    good = np.isfinite(output) & np.isfinite(expected)
    return Pairs(output[good], expected[good], int((~good).sum()))


def error_map(label: str, side: Side, reference: Side, *, rows: int = ROWS, columns: int = COLUMNS) -> _Array:
    """mean |output - reference| over samples, position by feature; neighbours share a cell where there are many.

    A cell with a value that is not finite is NaN.
    """
    shape = _as_planes(side.shape(label))
    tokens, features = _cuts(shape[1], rows), _cuts(shape[2], columns)
    widths = np.diff([*features, shape[2]])
    means = np.zeros((len(tokens), len(features)))
    output, expected = (one.flat(label).reshape(shape) for one in (side, reference))
    for row, (start, stop) in enumerate(zip(tokens, [*tokens[1:], shape[1]], strict=True)):
        for sample in range(shape[0]):
            x, y = (values[sample, start:stop].double().numpy() for values in (output, expected))
            with np.errstate(invalid="ignore"):
                error = np.abs(x - y).mean(axis=0)
            means[row] += np.add.reduceat(error, features) / widths / shape[0]
    means[~np.isfinite(means)] = np.nan
    return means


def histogram(label: str, side: Side, low: float, high: float, *, bins: int = 100) -> tuple[_Counts, _Array]:
    """How many finite values are in each of `bins` between the extremes, and the edges."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts, edges = np.zeros(bins, np.int64), np.linspace(low, high, bins + 1)
    for (values,) in bands(label, side):
        plain = values.double().numpy()
        counts += np.histogram(plain[np.isfinite(plain)], edges)[0]
    return counts, edges


def _as_planes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """[samples, tokens, features], whatever the number of axes."""
    samples, *tokens = shape[:-1] if len(shape) > 2 else (1, *shape[:-1])
    return samples, math.prod(tokens), shape[-1]


def _cuts(size: int, most: int) -> list[int]:
    """The starts of at most `most` parts of nearly equal size."""
    parts = min(size, most)
    return [size * part // parts for part in range(parts)]


def _stride(count: int, features: int, most: int) -> int:
    """A step over the values of a tensor that visits all features: it has no factor in common with their number."""
    step = max(1, math.ceil(count / most))
    while step > 1 and math.gcd(step, features) > 1:
        step += 1
    return step
