"""What to conclude from a sweep: the recommended level and why, the range of safe scales, and the level as a grid."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probe.files.checked_json import finite
from probe.numerics.blocks import Blocks
from probe.numerics.fast import round_elements
from probe.numerics.grids import Grid, IntegerGrid
from probe.numerics.integers import IntegerParameters
from probe.numerics.quantize import fake_quantize, round_to
from probe.numerics.reference import power
from probe.numerics.rounding import narrow
from probe.scaling import blockwise
from probe.scaling.levels import element_format, largest_exponent
from probe.scaling.results import Level, ScalingResult


@dataclass(frozen=True)
class Criterion:
    """How much a figure counts in the score, and whether more of it is better."""

    weight: float
    more_is_better: bool = False


#: The score of a level is the weighted sum of these figures of it, each brought to 0 (worst level) .. 1 (best level).
CRITERIA: dict[str, Criterion] = {
    "mse": Criterion(0.3),
    "cosine": Criterion(0.3, more_is_better=True),
    "psnr": Criterion(0.2, more_is_better=True),
    "mae": Criterion(0.1),
    "relative_error": Criterion(0.1),
}
#: The thresholds of the advice: on range / smallest for mse, on the range for cosine, on the range in dB for psnr.
MSE_VARIES, COSINE_STABLE, PSNR_CRITICAL, PSNR_MODERATE = 0.1, 0.01, 20.0, 10.0


@dataclass(frozen=True)
class Spread:
    """A figure over all levels. The psnr of a lossless level is inf; then so is the range, and there is no std."""

    low: float
    high: float
    std: float | None

    @property
    def range(self) -> float:
        """high - low; 0 where both are inf."""
        return 0.0 if self.low == self.high else self.high - self.low


@dataclass(frozen=True)
class Recommendation:
    """The level to take, and why."""

    level: Level
    score: float
    scores: tuple[float, ...]  # of every level, in order
    best: dict[str, Level]  # by figure, the best level; the first of equals, which is nearest to maximum alignment
    spreads: dict[str, Spread]
    advice: tuple[tuple[str, str], ...]
    """Kind (good, fair, poor) and sentence: whether mse, cosine and psnr depend on the scale."""
    range: tuple[float, float] | None
    """The exponents from the first to the last level without significant overflow or underflow; None if all have it."""
    least_bad: Level | None  # where there is no such range: the level that loses least to overflow and underflow
    range_reason: str
    position: str

    @property
    def scale_exponent(self) -> float:
        """log2 of the recommended scale; with blocks, what to add to every exponent."""
        return self.level.scale_exponent

    @property
    def scale(self) -> float:
        """The recommended scale; with blocks, the factor to every scale."""
        return self.level.scale

    @property
    def rule(self) -> str | None:
        """The recommended scale rule of blocks."""
        return self.level.rule

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is infinite is None."""
        return {
            "level": self.level.level,
            "scale_exponent": self.scale_exponent,
            "scale": self.scale,
            "rule": self.rule,
            "score": self.score,
            "scores": list(self.scores),
            "best": {name: level.level for name, level in self.best.items()},
            "spreads": {
                name: finite({"low": one.low, "high": one.high, "range": one.range, "std": one.std})
                for name, one in self.spreads.items()
            },
            "advice": [text for _, text in self.advice],
            "range": None if self.range is None else list(self.range),
            "least_bad": None if self.least_bad is None else self.least_bad.level,
            "range_reason": self.range_reason,
            "position": self.position,
        }


def recommend(result: ScalingResult) -> Recommendation:
    """The level with the best score, 0.3 mse' + 0.3 cosine' + 0.2 psnr' + 0.1 mae' + 0.1 relative_error'.

        figure' = (figure - worst) / (best - worst)      over the levels; 1 where all are equal

    A psnr of inf is the limit of that: 1 for the lossless levels, 0 for all others. So a lossless level always wins.
    Of equal scores the first is taken, which is nearest to maximum alignment.
    """
    levels = result.levels
    figures = {name: [getattr(level, name) for level in levels] for name in CRITERIA}
    parts = [[one.weight * x for x in normalised(figures[name], one.more_is_better)] for name, one in CRITERIA.items()]
    scores = tuple(map(math.fsum, zip(*parts, strict=True)))
    chosen = levels[scores.index(max(scores))]
    spreads = {name: _spread(values) for name, values in figures.items()}
    best = {name: (max if one.more_is_better else min)(figures[name]) for name, one in CRITERIA.items()}
    hull, least_bad, reason = _safe_range(result, chosen)
    return Recommendation(
        level=chosen,
        score=max(scores),
        scores=scores,
        best={name: levels[figures[name].index(value)] for name, value in best.items()},
        spreads=spreads,
        advice=_advice(spreads),
        range=hull,
        least_bad=least_bad,
        range_reason=reason,
        position=_position(result, chosen),
    )


def normalised(values: Sequence[float], more_is_better: bool) -> list[float]:
    """0 for the worst, 1 for the best. Equal values are all best; beside an infinite one, finite ones are worst."""
    low, high = min(values), max(values)
    if low == high:
        return [1.0] * len(values)
    if math.isinf(high):
        return [float(value == high) for value in values]
    shares = [(value - low) / (high - low) for value in values]
    return shares if more_is_better else [1 - share for share in shares]


def _spread(values: Sequence[float]) -> Spread:
    known = all(math.isfinite(value) for value in values)
    return Spread(min(values), max(values), statistics.pstdev(values) if known else None)


def _advice(spreads: dict[str, Spread]) -> tuple[tuple[str, str], ...]:
    mse, cosine, psnr = spreads["mse"], spreads["cosine"], spreads["psnr"]
    varies = mse.range > 0 and (mse.low == 0 or mse.range / mse.low >= MSE_VARIES)
    return (
        ("fair", "MSE varies significantly with scaling - choose the recommended factor carefully")
        if varies
        else ("good", "MSE is stable across scaling factors - the choice costs little accuracy"),
        ("good", "Cosine similarity is very stable - scaling factor has minimal impact on direction preservation")
        if cosine.range < COSINE_STABLE
        else ("fair", "Cosine similarity varies with scaling - scaling factor affects direction preservation"),
        ("poor", "Large PSNR range - scaling factor selection is critical for quality")
        if psnr.range > PSNR_CRITICAL
        else ("fair", "Moderate PSNR range - scaling factor selection matters for quality")
        if psnr.range > PSNR_MODERATE
        else ("good", "Small PSNR range - scaling factor has limited impact on quality"),
    )


def _safe_range(result: ScalingResult, chosen: Level) -> tuple[tuple[float, float] | None, Level | None, str]:
    """With blocks, over the levels of the recommended rule."""
    levels = [level for level in result.levels if level.rule == chosen.rule]
    safe = [level.scale_exponent for level in levels if not level.significant]
    if safe:
        reason = f"{len(safe)} of {len(levels)} levels have no significant overflow or underflow"
        return (min(safe), max(safe)), None, reason
    least = min(levels, key=lambda level: (level.overflow + level.underflow, level.mse))
    grid = math.log2(result.element.max / result.element.min_subnormal)
    over, under = least.percent(least.overflow), least.percent(least.underflow)
    reason = (
        f"every level has more than 0.1 % overflow or underflow: the magnitudes of the tensor span "
        f"{math.log2(result.amax / result.smallest):.1f} powers of two, those of {result.format} {grid:.1f}. This "
        f"level has the least: {over:.2f} % above and {under:.2f} % below"
    )
    return None, least, reason


def _position(result: ScalingResult, chosen: Level) -> str:
    if chosen.rule is not None and not chosen.lossless:
        moved = f"moved by {chosen.scale_exponent:+.0f}" if chosen.scale_exponent else "as it is"
        return f"This is the scale rule {chosen.rule}, {moved}"
    if chosen.lossless:
        return "At this scale every value lies on the grid: nothing is lost"
    if chosen.scale_exponent == result.max_scale_exp:
        return "This is at maximum alignment: the largest magnitude just fits"
    if chosen.scale_exponent == result.min_scale_exp:
        return "This is at minimum alignment: the smallest magnitude is just kept"
    return "This is a balanced middle ground between overflow and underflow"


# ---------------------------------------------------------------------------------------------- a level as a grid


@dataclass(frozen=True)
class ScaledGrid:
    """One scale for the tensor: round_to(x / scale) * scale, the quotient in float64."""

    format: str
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """`x` on the grid."""
        return narrow(round_to(x.double() / self.scale, self.format) * self.scale, x.dtype)


@dataclass(frozen=True)
class ShiftedGrid:
    """Blocks whose exponents, as a scale rule has them, are all moved by the same number."""

    format: str
    rule: str
    shift: int
    axis: int = -1
    block_size: int = 32
    scale_bits: int = 8

    def __call__(self, x: Tensor) -> Tensor:
        """`x` on the grid."""
        fmt, limit = element_format(self.format, "block"), largest_exponent(self.scale_bits)
        if self.shift == 0 and self.scale_bits == 8:
            return fake_quantize(x, fmt.name, axis=self.axis, block_size=self.block_size, scale_rule=self.rule)
        blocks = Blocks.of(x, self.axis, self.block_size)
        rows = blocks.split(x).to(torch.float32)
        exponent = blockwise.rule_exponents(rows, (self.rule,), fmt, limit)[self.rule]
        scale = power((exponent + self.shift).clamp(-limit, limit))
        values = round_elements(rows.double() / scale, fmt, "half_even", None) * scale
        return blocks.join(narrow(values, x.dtype)).reshape(x.shape)


def grid_of(result: ScalingResult, level: Level | None = None) -> Grid:
    """The grid of a level, by default the recommended one: a function tensor -> tensor, as a site of a mode takes it.

    For int8 with one scale it is the static grid of the quantizers: probe.IntegerParameters with that scale.
    """
    level = recommend(result).level if level is None else level
    if level.rule is not None:
        assert result.block_size is not None
        assert result.axis is not None
        shift = int(level.scale_exponent)
        return ShiftedGrid(result.format, level.rule, shift, result.axis, result.block_size, result.scale_bits)
    if result.element.scale == "float32":
        scale = torch.tensor(level.scale, dtype=torch.float32)
        return IntegerGrid(IntegerParameters(scale, torch.zeros((), dtype=torch.int32), result.element.bits, True))
    return ScaledGrid(result.format, level.scale)


def amax_of(result: ScalingResult, level: Level | None = None) -> float:
    """The amax that gives a static int8 grid the scale of a level: what a calibration would hold for it."""
    level = recommend(result).level if level is None else level
    if level.rule is not None:
        raise ValueError("blocks take their scales from the live tensor and have no amax. Use grid_of(result) instead.")
    return result.element.max * level.scale
