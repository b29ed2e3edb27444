"""What a format would do to a tensor: counts of values that would saturate, become coarse, or become zero."""

import warnings
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from probe.formats import Format
from probe.numerics import fast
from probe.numerics.native import in_threads, is_native, numba_twin
from probe.numerics.quantize import Job, check_job, on_grid

#: Shares of the finite elements from which the severity is moderate or high; above the first there is a warning.
MODERATE, HIGH = 0.001, 0.01


#: The counts of an `Underflow`.
COUNTS = ("zeros", "overflow", "subnormal", "underflow", "flushed", "nonfinite")


class UnderflowWarning(UserWarning):
    """More than 0.1 % of a tensor would overflow, or fall below the smallest number of the format."""


@dataclass(frozen=True)
class Underflow:
    """Counts over the elements of a tensor; y is an element divided by the scale it would get.

    overflow     |y| > max: would saturate
    subnormal    0 < |y| < smallest normal: kept, on a coarse grid (includes underflow; none for integers)
    underflow    0 < |y| < smallest subnormal (one step, for integers)
    flushed      0 < |y| <= half of that: becomes zero when rounded half to even
    nonfinite    NaN or Inf, and the elements whose block they spoil; in no other count
    """

    format: str
    elements: int
    zeros: int
    overflow: int
    subnormal: int
    underflow: int
    flushed: int
    nonfinite: int

    def share(self, count: int) -> float:
        """A count as a share of the elements that are finite."""
        return count / max(1, self.elements - self.nonfinite)

    @property
    def severity(self) -> str:
        """high above 1 % overflow or underflow, moderate above 0.1 %, else none."""
        worst = self.share(max(self.overflow, self.underflow))
        return "high" if worst > HIGH else "moderate" if worst > MODERATE else "none"


def analyze_underflow(
    x: Tensor, format: str, *, axis: int = -1, block_size: int | None = None, scale_rule: str = "floor"
) -> Underflow:
    """Count what quantizing `x` would lose, in one pass, changing nothing; warns above 0.1 %."""
    return analyze_job(check_job(x, format, axis=axis, block_size=block_size, scale_rule=scale_rule))


def analyze_job(job: Job, *, stacklevel: int = 3) -> Underflow:
    """`analyze_underflow` of a checked request, which the quantizers call with check_underflow=True."""
    x, format = job.x, job.format.name
    counts = dict.fromkeys(COUNTS, 0)
    if x.numel():
        scales = _scales(job)
        counts = _count_rows(job.rows, scales, job.format)
        spoiled = job.blocks.padding * int(scales.reshape(-1, job.blocks.count)[:, -1].isnan().sum())
        counts["nonfinite"] -= spoiled
        counts["zeros"] -= job.rows.numel() - x.numel() - spoiled
    result = Underflow(format, x.numel(), **counts)
    if result.severity != "none":
        warnings.warn(
            f"{format}: {result.share(result.overflow):.2%} of the elements would saturate and "
            f"{result.share(result.underflow):.2%} lie below the smallest number ({result.share(result.flushed):.2%} "
            "become zero). Try another scale_rule, a smaller block_size or a format with more exponent bits.",
            UnderflowWarning,
            stacklevel=stacklevel,
        )
    return result


def _scales(job: Job) -> Tensor:
    """One positive scale per row, NaN where the row has a NaN or Inf; float64 where it is not a power of two."""
    if job.format.scale is None:
        return torch.ones(job.rows.shape[0], 1, dtype=torch.float64, device=job.x.device)
    if job.format.scale != "e8m0" or job.rule == "mse":
        scales = on_grid(job).scales
        assert scales is not None
        return scales
    amax = job.rows.abs().amax(-1, keepdim=True).to(job.plan.machine.dtype)
    return fast.scales_for(amax, job.plan) + (amax - amax)


def _count_rows(rows: Tensor, scales: Tensor, fmt: Format) -> dict[str, int]:
    """The counts of rows with one scale each, by name, in pieces that fit the cache."""
    twin = numba_twin("probe.numerics.underflow_counts", "counts") if is_native(rows, scales) else None
    step = max(1, fast.CHUNK // rows.shape[-1])

    def count(start: int, stop: int) -> dict[str, int]:
        found = dict.fromkeys(COUNTS, 0)
        for first in range(start, stop, step):
            here = slice(first, min(first + step, stop))
            part = (
                _count(rows[here], scales[here], fmt) if twin is None else _by_loop(twin, rows[here], scales[here], fmt)
            )
            found = {name: found[name] + part[name] for name in COUNTS}
        return found

    parts = in_threads(count, len(rows), rows.numel()) if twin is not None else [count(0, len(rows))]
    return {name: sum(part[name] for part in parts) for name in COUNTS}


def _by_loop(twin: ModuleType, rows: Tensor, scales: Tensor, fmt: Format) -> dict[str, int]:
    """The counts by the loop of underflow_counts.py."""
    rows = rows if rows.dtype in (torch.float32, torch.float64) else rows.to(scales.dtype)
    given, scale = rows.detach().contiguous().numpy(), scales.detach().reshape(-1).contiguous().numpy()
    counts = np.zeros(len(COUNTS), np.int64)
    twin.count(given, scale, np.array(_ends(fmt), scale.dtype), counts)
    return dict(zip(COUNTS, counts.tolist(), strict=True))


def _ends(fmt: Format) -> tuple[float, float, float, float]:
    """Above the first it overflows; below the others it is subnormal, underflows, and (or equal) becomes zero."""
    # a plain integer up to half a step beyond is the last code itself: amax / scale may be an ulp above max
    limit = fmt.max + 0.5 if fmt.scale == "float32" else fmt.max
    return limit, fmt.min_normal or 0.0, fmt.min_subnormal, fmt.min_subnormal / 2


def _count(rows: Tensor, scales: Tensor, fmt: Format) -> dict[str, int]:
    """The readable twin. Zeros are counted by the element, because the quotient may have underflowed."""
    magnitude = rows.to(scales.dtype).abs()
    y = magnitude / scales
    finite = y.isfinite()
    some = finite & (magnitude > 0)
    limit, normal, smallest, half = _ends(fmt)
    found = (
        finite & (magnitude == 0),
        some & (y > limit),
        some & (y < normal),
        some & (y < smallest),
        some & (y <= half),
        ~finite,
    )
    return {name: int(mask.sum()) for name, mask in zip(COUNTS, found, strict=True)}
