"""The figures of a comparison, by name."""

from dataclasses import asdict, dataclass
from typing import Any


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

    count: int
    """All elements seen."""
    compared: int
    """Those finite on both sides: n."""
    finite: bool
    """No NaN and no Inf on either side."""
    identical: bool
    """Every bit of the output is that of the reference."""
    mse: float | None
    rmse: float | None
    mae: float | None
    max_abs: float | None
    relative_mse: float | None
    relative_mae: float | None
    correlation: float | None
    cosine: float | None
    psnr: float | None
    sqnr: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    percentiles_exact: bool | None
    """Whether p50 .. p99 are numpy's own, or within PERCENTILE_ERROR of them."""
    mean_output: float | None
    std_output: float | None
    min_output: float | None
    max_output: float | None
    mean_reference: float | None
    std_reference: float | None
    min_reference: float | None
    max_reference: float | None
    mean_difference: float | None
    std_difference: float | None
    nan_output: int
    inf_output: int
    nan_reference: int
    inf_reference: int
    first_nonfinite: int | None
    """Index, over the whole stream, of the first output that is NaN or Inf while its reference is finite."""
    zeroed: float | None
    saturated: float | None
    moved: float

    def as_dict(self) -> dict[str, Any]:
        """Name -> figure, in the order above."""
        return asdict(self)
