"""The error of a format, predicted from statistics alone: before any run, without the tensors.

The statistics say how many magnitudes lie in each bucket (64 per octave), and how many elements lie d octaves below
the largest of their block. Values are assumed to be spread evenly inside a bucket; then rounding to a grid of step s
and last value m has an exact mean error:

    integral of (t - round(t))^2 from 0 to t = n / 12 + r^3 / 3        n = round(t), r = t - n
    mean of (y - q(y))^2 over [a, b] = s^3 / (b - a) * (that of b/s - that of a/s)      up to m
                                       ((b - m)^3 - (a - m)^3) / 3 / (b - a)            beyond

It is s^2 / 12 where a bucket holds many steps and y^2 where all of it becomes zero. The step of float elements is
s = 2^(max(e, min_exponent) - mantissa_bits) for y of exponent e; integers have one step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.activations.reference import SIZES
from probe.activations.statistics import LayerStatistics
from probe.formats import FORMATS, Format
from probe.numerics.histogram import Trimmed
from probe.words import look_up

Array = npt.NDArray[np.float64]
ByTensor = Mapping[tuple[str, str], LayerStatistics]  # module and kind

#: A block is spoiled by an outlier if its median lies this many octaves below its largest magnitude: in fp4_e2m1 at
#: least half of it then becomes zero.
SPOILED = 5
#: The layers to keep in higher precision cause this part of the predicted noise.
SHARE = 0.5

_PER_OCTAVE = 1 << SIZES.mantissa_bits
_BIAS = 127  # of the exponent of a float32
_SMALLEST_SCALE = 1e-6  # of integers
_MANTISSAS = 8  # places of the largest magnitude in its octave that are told apart, for nvfp4
_NVFP4_BLOCK = 16  # elements
_NEGLIGIBLE = 1e-9  # of all elements


@dataclass(frozen=True)
class Prediction:
    """The expected error of a tensor, or of the output of a linear layer, in one format."""

    module: str
    format: str
    mse: float
    mean_square: float  # of the float tensor
    of: str = ""
    """What the prediction is of: linear (W x with both on the grid), or input, output or weight alone."""

    @property
    def noise(self) -> float:
        """mse / mean square; 0 where both are 0."""
        return self.mse / self.mean_square if self.mean_square else math.inf if self.mse else 0.0

    @property
    def sqnr(self) -> float:
        """10 log10(mean square / mse), in decibels; inf without error."""
        return -10 * math.log10(self.noise) if 0 < self.noise < math.inf else -math.inf if self.noise else math.inf

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: None in its place."""
        return asdict(self) | {"sqnr": self.sqnr if math.isfinite(self.sqnr) else None}


def predict_tensor(statistics: LayerStatistics, format: str, *, amax: float | None = None) -> Prediction:
    """The mse of a tensor on the grid of `format`, with the scales that probe's modes give it.

        integers   scale = amax / max, one for the tensor
        MX         2^(E - max_exponent) for a block whose largest magnitude has exponent E: known exactly
        nvfp4      e4m3(block amax / 6 / tensor scale) * tensor scale, tensor scale = amax / (448 * 6)
        casts      none

    `amax` is the calibrated one; None takes that of the statistics. The statistics do not show whether values are on
    the grid already, so the prediction for a tensor that is on it is too large.
    """
    fmt = look_up("format", format, FORMATS, see="List them with: probe formats")
    limit = statistics.amax if amax is None else amax
    if statistics.count == 0:
        what = f"{statistics.kind} of {statistics.module or 'a tensor'}"
        raise ValueError(f"{what} has no finite element to predict from.")
    if fmt.scale == "e8m0":
        total = _mx_error(statistics, fmt)
    elif fmt.scale == "e4m3":
        total = _nvfp4_error(statistics, fmt, limit)
    else:
        step = max(limit / fmt.max, _SMALLEST_SCALE) if fmt.scale == "float32" else 1.0
        counts = statistics.buckets.whole()
        used = np.flatnonzero(counts)
        low, high = SIZES.edges[used], SIZES.edges[used + 1]
        total = float((counts[used] * _mean_error(low / step, high / step, fmt)).sum()) * step**2
    mse, mean_square = total / statistics.count, statistics.moments.mean_square
    return Prediction(statistics.module, format, mse, mean_square, statistics.kind)


def predict_linear(
    given: LayerStatistics,
    weight: LayerStatistics,
    format: str,
    *,
    inputs: bool = True,
    weights: bool = True,
    amax: float | None = None,
    output: LayerStatistics | None = None,
) -> Prediction:
    """The mse of W x for errors dx and dW that are independent of x, of W and of each other, with mean 0.

        E[(W x)^2] = n E[W^2] E[x^2]                                        n: channels of the input
        E[d(W x)^2] = n (E[dx^2] E[W^2] + E[x^2] E[dW^2] + E[dx^2] E[dW^2])

    `inputs` and `weights` say which of the two are on the grid (mode linear_w has weights only). With statistics of
    the `output` its mean square is known; without, it is that of the first line, which holds for weights that have
    nothing to do with their input.
    """
    channels = given.channels
    if weight.channels != channels:
        raise ValueError(
            f"the weight of {weight.module} has {weight.channels} inputs and the input of {given.module} "
            f"{channels} channels. Give the statistics of one linear layer."
        )
    dx = predict_tensor(given, format, amax=amax).mse if inputs else 0.0
    dw = predict_tensor(weight, format).mse if weights else 0.0
    x, w = given.moments.mean_square, weight.moments.mean_square
    signal = channels * x * w if output is None else output.moments.mean_square
    return Prediction(given.module, format, channels * (dx * w + x * dw + dx * dw), signal, "linear")


def predict_layers(
    statistics: ByTensor, formats: Sequence[str], *, amax: Mapping[str, float] | None = None
) -> list[Prediction]:
    """The predictions for every module that has statistics, in every format.

    A module with input and weight [out, in] is predicted as a linear layer. For others it is the first of input,
    output (of a site) and weight that there is, and `of` says which. `amax` has the calibrated maxima by module;
    modules without one take that of their statistics.
    """
    found = []
    calibrated, apart = amax or {}, mismatched_channels(statistics)
    for module in dict.fromkeys(module for module, _ in statistics):
        given, weight, output = (statistics.get((module, kind)) for kind in ("input", "weight", "output"))
        for format in formats:
            if given is not None and weight is not None and module not in apart:
                limit = calibrated.get(module)
                found.append(predict_linear(given, weight, format, amax=limit, output=output))
                continue
            tensor = next(tensor for tensor in (given, output, weight) if tensor is not None)
            found.append(predict_tensor(tensor, format, amax=None if tensor is weight else calibrated.get(module)))
    return found


def mismatched_channels(statistics: ByTensor) -> dict[str, tuple[int, int]]:
    """The modules whose input has other channels than their weight, with both numbers: W x is not predicted."""
    found = {}
    for module, kind in statistics:
        if kind == "input" and (module, "weight") in statistics:
            inputs, weights = statistics[module, kind].channels, statistics[module, "weight"].channels
            if inputs != weights:
                found[module] = (inputs, weights)
    return found


def spoiled_share(statistics: LayerStatistics, *, octaves: int = SPOILED) -> float:
    """The share of the blocks of 32 whose median magnitude lies at least `octaves` octaves below their largest one.

    Octaves are differences of exponents: a block with a ratio below 2^(octaves - 1) never counts and one above
    2^(octaves + 1) always does. Blocks of zeros never count. A median of zero lies below all others.
    """
    if not 1 <= octaves <= 31:
        raise ValueError(f"octaves is {octaves}; expected 1 to 31.")
    return float(statistics.median_depths.whole()[octaves:].sum()) / statistics.blocks if statistics.blocks else 0.0


def keep_in_higher_precision(predictions: Sequence[Prediction], *, share: float = SHARE) -> list[str]:
    """The fewest modules with `share` of the sum of all noise, the noisiest first, from predictions of one format."""
    formats = sorted({prediction.format for prediction in predictions})
    if len(formats) > 1:
        raise ValueError(f"the predictions are of {len(formats)} formats: {', '.join(formats)}. Give those of one.")
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; expected above 0 and at most 1.")
    order = sorted(predictions, key=lambda prediction: -prediction.noise)
    endless = [prediction.module for prediction in order if math.isinf(prediction.noise)]
    if endless:
        return endless
    total = math.fsum(prediction.noise for prediction in order)
    before = accumulate((prediction.noise for prediction in order), initial=0.0)  # the noise of those in front
    return [prediction.module for prediction, noise in zip(order, before, strict=False) if noise < share * total]


def _mean_error(low: Array, high: Array, fmt: Format) -> Array:
    """The mean of (y - q(y))^2 for y spread evenly over [low, high], each within one octave, above 0."""
    if fmt.is_integer:
        step = np.full_like(low, 2.0**-fmt.mantissa_bits)
    else:
        exponent = np.frexp(low)[1] - 1
        step = 2.0 ** (np.maximum(exponent, fmt.min_exponent) - fmt.mantissa_bits)
    inside, beyond = np.minimum(high, fmt.max), np.maximum(low, fmt.max)
    rounded = step**3 * (_saw(inside / step) - _saw(np.minimum(low, fmt.max) / step))
    clipped = ((np.maximum(high, fmt.max) - fmt.max) ** 3 - (beyond - fmt.max) ** 3) / 3
    error: Array = (rounded + clipped) / (high - low)
    return error


def _saw(t: Array) -> Array:
    """The integral of (t - round(t))^2 from 0."""
    nearest = np.rint(t)
    result: Array = nearest / 12 + (t - nearest) ** 3 / 3
    return result


def _mantissas(counts: Trimmed) -> Array:
    """[256, 64]: how the magnitudes of each octave are spread over it; evenly where there are none."""
    by_octave = counts.whole().reshape(256, _PER_OCTAVE).astype(np.float64)
    total = by_octave.sum(1, keepdims=True)
    return np.where(total > 0, by_octave / np.maximum(total, 1), 1 / _PER_OCTAVE)


def _octave(exponent: float) -> tuple[Array, Array]:
    """The ends of the 64 buckets of an octave."""
    ends = 2.0**exponent * (1 + np.arange(_PER_OCTAVE + 1) / _PER_OCTAVE)
    return ends[:-1], ends[1:]


@cache
def _mx_table(format: str) -> Array:
    """[32, 64]: the mean error, in steps of the scale, of an element d octaves below its block's largest, by bucket."""
    fmt = FORMATS[format]
    return np.stack([_mean_error(*_octave(fmt.max_exponent - depth), fmt) for depth in range(32)])


def _mx_error(statistics: LayerStatistics, fmt: Format) -> float:
    """The sum of squared errors: every block has the scale of its exponent."""
    table, spread, depths = _mx_table(fmt.name), _mantissas(statistics.buckets), statistics.depths.whole()[:, :32]
    total = 0.0
    for top in np.flatnonzero(depths.sum(1)):
        counts = depths[top]
        octaves = np.maximum(top - np.arange(32), 0)
        scale = 2.0 ** max(float(top) - _BIAS - fmt.max_exponent, -_BIAS)
        total += float((counts[:, None] * spread[octaves] * table).sum()) * scale**2
    return total


def _halved(depths: npt.NDArray[np.int64]) -> Array:
    """The table of depths for blocks of 16, from that for blocks of 32, as if elements fell into halves by chance.

    One half of a block holds its largest magnitude and 15 of the 31 others. Of the 16 in the other half each lies d
    octaves below with the chances p(d) of the others of its row; their largest lies D below with the chance
    S(D)^16 - S(D + 1)^16, S(d) = p(d) + p(d + 1) + ..., and the 15 beside it at d >= D with p(d) / S(D).
    """
    result = np.zeros((256, 33))
    for top in np.flatnonzero(depths[:, :32].sum(1)):
        others = depths[top].astype(np.float64)
        blocks = others.sum() / 32
        others[0] = max(others[0] - blocks, 0.0)
        result[top] += others * 15 / 31
        result[top, 0] += blocks
        chance = others / max(others.sum(), 1e-300)
        left = np.append(np.cumsum(chance[::-1])[::-1], 0.0)
        for depth in range(min(32, int(top))):
            weight = (left[depth] ** 16 - left[depth + 1] ** 16) * blocks * 16
            if weight <= 0:
                continue
            rest = np.where(np.arange(33) >= depth, chance, 0.0) / left[depth]
            inner = 15 / 16 * rest
            inner[depth] += 1 / 16
            row = np.zeros(33)
            row[: 32 - depth] = inner[depth:32]
            row[32] = inner[32]
            result[int(top) - depth] += weight * row
    return result


def _nvfp4_error(statistics: LayerStatistics, fmt: Format, amax: float) -> float:
    """The sum of squared errors of blocks of 16, each with the scale of its largest magnitude.

    The place of that magnitude in its octave is taken from all blocks. It is one element in 16, and not spread: its
    error is that of its scale. No other element of its octave is above it.
    """
    e4m3 = FORMATS["fp8_e4m3"]
    tensor_scale = amax / (e4m3.max * fmt.max) if amax > 0 else 1.0
    depths, spread = _halved(statistics.depths.whole()), _mantissas(statistics.buckets)
    tops = _mantissas(statistics.block_buckets).reshape(256, _MANTISSAS, -1).sum(2)
    elements = depths.sum(1)
    total = 0.0
    for top in np.flatnonzero(elements > _NEGLIGIBLE * elements.sum()):
        octaves = np.maximum(top - np.arange(32), 0)
        low, high = (2.0 ** (octaves - float(_BIAS))[:, None] * ends for ends in _octave(0))
        blocks = elements[top] / _NVFP4_BLOCK
        others = depths[top, :32].copy()
        others[0] = max(others[0] - blocks, 0.0)
        for place in np.flatnonzero(tops[top]):
            largest = 2.0 ** (float(top) - _BIAS) * (1 + (place + 0.5) / _MANTISSAS)
            scale = max(_nearest(largest / fmt.max / tensor_scale, e4m3), e4m3.min_subnormal) * tensor_scale
            below = spread[octaves]
            below[0, (place + 1) * _PER_OCTAVE // _MANTISSAS :] = 0.0
            below[0] /= max(below[0].sum(), 1e-300)
            spread_out = float((others[:, None] * below * _mean_error(low / scale, high / scale, fmt)).sum())
            alone = float(blocks) * (largest / scale - _nearest(largest / scale, fmt)) ** 2
            total += float(tops[top, place]) * (spread_out + alone) * scale**2
    return total


def _nearest(y: float, fmt: Format) -> float:
    """The number of a float format that is nearest to y > 0, at most its largest."""
    step = 2.0 ** (max(math.frexp(y)[1] - 1, fmt.min_exponent) - fmt.mantissa_bits)
    return min(round(y / step) * step, fmt.max)
