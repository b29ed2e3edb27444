"""The figures of a comparison: each is a field of `Metrics` together with its formula."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, cast

from probe.files.checked_json import finite
from probe.metrics.tally import Tally

#: The percentiles of |d| that are reported, as fractions.
QUANTILES = (0.50, 0.90, 0.95, 0.99)

#: What a report calls a figure: the label of the first limit that the figure is better than, else "poor".
MSE_LABELS = ((1e-4, "excellent"), (1e-3, "good"), (1e-2, "fair"))
RELATIVE_MSE_LABELS = ((1e-4, "excellent"), (1e-3, "good"), (1e-2, "fair"))  # a sqnr of 40, 30 and 20 dB
CORRELATION_LABELS = ((0.9999, "excellent"), (0.999, "good"), (0.99, "fair"))

#: Added to the denominators of the relative errors, as the gate defines them.
_FLOOR = 1e-8


@dataclass(frozen=True)
class Measured:
    """The input of every formula: the tally of the whole stream, and the quantiles of |d| if they were gathered."""

    tally: Tally
    quantiles: Mapping[float, float]
    quantiles_exact: bool | None


def fact(formula: Callable[[Measured], Any]) -> Any:
    """A field of `Metrics` that always has a meaning."""
    return field(metadata={"formula": formula})


def value(formula: Callable[[Tally], float | None], *, lossless: float | None = None) -> Any:
    """A figure of the values: None without values, or beyond float64; `lossless`, if given, where d = 0 everywhere."""

    def checked(measured: Measured) -> float | None:
        tally = measured.tally
        if not tally.count:
            return None
        figure = lossless if lossless is not None and _is_lossless(tally) else finite(formula(tally))
        return cast(float | None, figure)

    return fact(checked)


def quantile(share: float) -> Any:
    """A quantile of |d|, one of QUANTILES."""
    return fact(lambda measured: finite(measured.quantiles.get(share)))


def _is_lossless(t: Tally) -> bool:
    return t.difference.largest == 0


def _mse(t: Tally) -> float:
    return t.difference.moments.mean_square


def _power(t: Tally) -> float:
    """mean reference^2"""
    return t.reference.moments.mean_square


def _correlation(t: Tally) -> float | None:
    return _cosine(t.product, t.output.moments.second, t.reference.moments.second, same=_is_lossless(t))


def _cosine_of_values(t: Tally) -> float | None:
    o, r = t.output.moments, t.reference.moments
    return _cosine(t.product / t.count + o.mean * r.mean, o.mean_square, r.mean_square, same=_is_lossless(t))


def _cosine(product: float, squares_a: float, squares_b: float, *, same: bool) -> float | None:
    norm = math.sqrt(squares_a) * math.sqrt(squares_b)
    if not 0 < norm < math.inf or not math.isfinite(product):
        return None
    return 1.0 if same else max(-1.0, min(1.0, product / norm))


def _decibels(signal: float, noise: float) -> float | None:
    """20 log10(signal / noise), of logarithms so that the quotient cannot overflow."""
    if not (0 < signal < math.inf and 0 < noise < math.inf):
        return None
    return 20 * (math.log10(signal) - math.log10(noise))


def _saturated(t: Tally) -> float:
    return (t.at_largest if t.at_largest > 1 and t.output.largest > 0 else 0) / t.count


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The figures of a Comparison; d = output - reference, n = the elements that are finite on both sides.

        mse, rmse, mae   mean d^2, its root, mean |d|
        relative_mse     mse / (mean reference^2 + 1e-8);  relative_mae = mae / (mean |reference| + 1e-8)
        correlation      sum (o - mean o)(r - mean r) / sqrt(sum (o - mean o)^2 * sum (r - mean r)^2)
        cosine           sum o r / sqrt(sum o^2 * sum r^2)
        psnr             20 log10(max |reference| / rmse);  sqnr = 10 log10(sum reference^2 / sum d^2)
        std_*            of the population: sqrt(mean (x - mean x)^2)
        zeroed           share of n where the output is 0 and the reference is not
        saturated        share of n whose magnitude is the largest of the output; 0 if that is 0 or occurs once
        moved            share of `count` whose bits, widened to float64, differ (0.0 and -0.0 do)

    Without loss (d = 0 everywhere) psnr and sqnr are inf, and correlation and cosine are 1 where defined.
    None stands for:

        every figure of values   when n is 0, or when the figure is beyond the range of float64
        correlation              when either side is constant
        cosine                   when either side is all zeros
        psnr, sqnr               when the reference is all zeros and the output is not
        p50 .. p99               when percentiles were not asked for
        first_nonfinite          when no output is NaN or Inf where its reference is finite
    """

    count: int = fact(lambda m: m.tally.seen)  # all elements seen
    compared: int = fact(lambda m: m.tally.count)  # those finite on both sides: n
    finite: bool = fact(lambda m: m.tally.finite)  # no NaN and no Inf on either side
    identical: bool = fact(lambda m: m.tally.moved == 0)  # every bit of the output is that of the reference
    mse: float | None = value(_mse)
    rmse: float | None = value(lambda t: math.sqrt(_mse(t)))
    mae: float | None = value(lambda t: t.sum_difference / t.count)
    max_abs: float | None = value(lambda t: t.difference.largest)
    relative_mse: float | None = value(lambda t: _mse(t) / (_power(t) + _FLOOR))
    relative_mae: float | None = value(lambda t: t.sum_difference / t.count / (t.sum_reference / t.count + _FLOOR))
    correlation: float | None = value(_correlation)
    cosine: float | None = value(_cosine_of_values)
    psnr: float | None = value(lambda t: _decibels(t.reference.largest, math.sqrt(_mse(t))), lossless=math.inf)
    sqnr: float | None = value(lambda t: _decibels(math.sqrt(_power(t)), math.sqrt(_mse(t))), lossless=math.inf)
    p50: float | None = quantile(0.50)
    p90: float | None = quantile(0.90)
    p95: float | None = quantile(0.95)
    p99: float | None = quantile(0.99)
    percentiles_exact: bool | None = fact(lambda m: m.quantiles_exact)
    """Whether p50 .. p99 are numpy's own, or within PERCENTILE_ERROR of them."""
    mean_output: float | None = value(lambda t: t.output.moments.mean)
    std_output: float | None = value(lambda t: t.output.moments.std)
    min_output: float | None = value(lambda t: t.output.minimum)
    max_output: float | None = value(lambda t: t.output.maximum)
    mean_reference: float | None = value(lambda t: t.reference.moments.mean)
    std_reference: float | None = value(lambda t: t.reference.moments.std)
    min_reference: float | None = value(lambda t: t.reference.minimum)
    max_reference: float | None = value(lambda t: t.reference.maximum)
    mean_difference: float | None = value(lambda t: t.difference.moments.mean)
    std_difference: float | None = value(lambda t: t.difference.moments.std)
    nan_output: int = fact(lambda m: m.tally.nan_output)
    inf_output: int = fact(lambda m: m.tally.inf_output)
    nan_reference: int = fact(lambda m: m.tally.nan_reference)
    inf_reference: int = fact(lambda m: m.tally.inf_reference)
    first_nonfinite: int | None = fact(lambda m: m.tally.first_nonfinite)
    """Index, over the whole stream, of the first output that is NaN or Inf while its reference is finite."""
    zeroed: float | None = value(lambda t: t.zeroed / t.count)
    saturated: float | None = value(_saturated)
    moved: float = fact(lambda m: m.tally.moved / m.tally.seen)

    @classmethod
    def of(cls, measured: Measured) -> Self:
        """Every figure by its formula."""
        return cls(**{figure.name: figure.metadata["formula"](measured) for figure in fields(cls)})

    def as_dict(self) -> dict[str, Any]:
        """Name -> figure, in the order above."""
        return asdict(self)


def label_mse(mse: float | None) -> str:
    """Below 1e-4 excellent, below 1e-3 good, below 1e-2 fair, else poor (NaN too); None is undefined."""
    if mse is None:
        return "undefined"
    return next((label for limit, label in MSE_LABELS if mse < limit), "poor")


def label_relative_mse(relative_mse: float | None) -> str:
    """Below 1e-4 (40 dB) excellent, below 1e-3 good, below 1e-2 fair, else poor (NaN too); None is undefined."""
    if relative_mse is None:
        return "undefined"
    return next((label for limit, label in RELATIVE_MSE_LABELS if relative_mse < limit), "poor")


def label_correlation(correlation: float | None) -> str:
    """Above 0.9999 excellent, above 0.999 good, above 0.99 fair, else poor (NaN too); None is undefined."""
    if correlation is None:
        return "undefined"
    return next((label for limit, label in CORRELATION_LABELS if correlation > limit), "poor")
