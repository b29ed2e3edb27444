"""What to conclude from a sweep: the recommended level and why, what others would cost, and the level as a grid."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
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
from probe.scaling.levels import BEYOND, element_format, largest_exponent
from probe.scaling.results import Level, ScalingResult
from probe.scaling.rules import RuleResult


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
#: The levels of the recommended range have at most so many dB less psnr than the recommended level.
AS_GOOD = 1.0


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
    best: dict[str, Level]  # by figure, the best of all levels; of equals, the nearest to maximum alignment
    spreads: dict[str, Spread]
    advice: tuple[tuple[str, str], ...]
    """Kind (good, fair, poor) and sentence: whether mse, cosine and psnr depend on the scale."""
    range: tuple[float, float]
    """The exponents around the recommended one with at most 1 dB less psnr, and no significant overflow or underflow
    unless it has some itself; it alone if there are no others."""
    losses: str
    """How many levels have no significant overflow or underflow, and why the recommended one if it has."""
    position: str
    edge: str | None
    """A sentence if the recommended or the best level is the first or the last, so that there may be better ones."""

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
            "range": list(self.range),
            "losses": self.losses,
            "position": self.position,
            "edge": self.edge,
        }


@dataclass(frozen=True)
class Alternative:
    """Another scale than the recommended one, and its error."""

    what: str
    scale_exponent: float | None  # None where every block has its own
    mse: float
    psnr: float
    times: float | None  # its mse, in times that of the recommended level; None where that is lossless

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is infinite is None."""
        return {name: finite(value) for name, value in vars(self).items()}


def recommend(result: ScalingResult) -> Recommendation:
    """The level with the best score, 0.3 mse' + 0.3 cosine' + 0.2 psnr' + 0.1 mae' + 0.1 relative_error'.

        figure' = (figure - worst) / (best - worst)      over the levels; 1 where all are equal

    Where the scale of the format is a power of two, only whole exponents are recommended, if the sweep has any. A psnr
    of inf is the limit of the formula: 1 for the lossless levels, 0 for all others. So a lossless level always wins. Of
    equal scores, the nearest to maximum alignment is taken.
    """
    levels = result.levels
    figures = {name: [getattr(level, name) for level in levels] for name in CRITERIA}
    parts = [[one.weight * x for x in normalised(figures[name], one.more_is_better)] for name, one in CRITERIA.items()]
    scores = tuple(map(math.fsum, zip(*parts, strict=True)))
    near = sorted(levels, key=lambda level: abs(level.scale_exponent - result.max_aligned))
    chosen = max(_candidates(result, near), key=lambda level: scores[level.level])
    spreads = {name: _spread(values) for name, values in figures.items()}
    best = {name: (max if one.more_is_better else min)(near, key=attrgetter(name)) for name, one in CRITERIA.items()}
    return Recommendation(
        level=chosen,
        score=scores[chosen.level],
        scores=scores,
        best=best,
        spreads=spreads,
        advice=_advice(spreads),
        range=_range(result, chosen),
        losses=_losses(result, chosen),
        position=_position(result, chosen),
        edge=_edge(result, chosen, best["mse"]),
    )


def _candidates(result: ScalingResult, levels: Sequence[Level]) -> list[Level]:
    """The levels whose scales the format has; all of them if it has none of their scales."""
    return [level for level in levels if level.is_power or not result.powers_only] or list(levels)


def alternatives(result: ScalingResult, chosen: Level, rules: Sequence[RuleResult] = ()) -> tuple[Alternative, ...]:
    """What other scales cost: the next levels, the best with another kind of exponent, and every scale rule of blocks.

    `rules` are those of `compare_rules`, for a sweep of one scale for the tensor.
    """
    own = [level for level in result.levels if level.rule == chosen.rule]
    near = sorted(_candidates(result, own), key=lambda level: level.scale_exponent)
    place = near.index(chosen)
    kind = "power of two" if all(level.is_power for level in near) else "level"
    found: list[tuple[str, Level, float | None]]
    found = [(f"next {kind} below", level, level.scale_exponent) for level in near[:place][-1:]]
    found += [(f"next {kind} above", level, level.scale_exponent) for level in near[place + 1 :][:1]]
    others = [level for level in own if level.is_power != chosen.is_power]
    if others:
        best = min(others, key=lambda level: level.mse)
        what = "best power of two" if best.is_power else "best fractional exponent"
        no_scale = ", not a scale of the format" if result.powers_only and not best.is_power else ""
        found.append((f"{what}{no_scale}", best, best.scale_exponent))
    for rule in result.rules:
        if rule != chosen.rule:
            best = min((one for one in result.levels if one.rule == rule), key=lambda level: level.mse)
            found.append((f"rule {rule}", best, best.scale_exponent))
    if not result.rules:
        found += [(f"blocks of {one.block_size}, rule {one.rule}", one.level, None) for one in rules]
    return tuple(
        Alternative(what, exponent, level.mse, level.psnr, level.mse / chosen.mse if chosen.mse else None)
        for what, level, exponent in found
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


def _range(result: ScalingResult, chosen: Level) -> tuple[float, float]:
    """The exponents of the candidates around the chosen one that are as good; with blocks, of its rule."""
    own = [level for level in result.levels if level.rule == chosen.rule]
    near = sorted(_candidates(result, own), key=lambda level: level.scale_exponent)
    low = high = near.index(chosen)

    def as_good(place: int) -> bool:
        if not 0 <= place < len(near) or (near[place].significant and not chosen.significant):
            return False
        return near[place].psnr >= chosen.psnr - AS_GOOD

    while as_good(low - 1):
        low -= 1
    while as_good(high + 1):
        high += 1
    return near[low].scale_exponent, near[high].scale_exponent


def _losses(result: ScalingResult, chosen: Level) -> str:
    """With blocks, over the levels of the recommended rule."""
    levels = [level for level in result.levels if level.rule == chosen.rule]
    safe = [level for level in levels if not level.significant]
    counted = f"{len(safe)} of {len(levels)} levels have no significant overflow or underflow"
    if not chosen.significant:
        return counted
    if safe:
        least = min(safe, key=lambda level: level.mse)
        return (
            f"{counted}; the best of them, {least.scale_exponent:.2f}, has {least.mse / chosen.mse:.3g} times its MSE"
        )
    grid = math.log2(result.element.max / result.element.min_subnormal)
    return (
        "every level has more than 0.1 % overflow or underflow: the magnitudes of the tensor span "
        f"{math.log2(result.amax / result.smallest):.1f} powers of two, those of {result.format} {grid:.1f}. This "
        "level has the best score"
    )


def _position(result: ScalingResult, chosen: Level) -> str:
    if chosen.lossless:
        return "At this scale every value lies on the grid: nothing is lost"
    if chosen.rule is not None:
        moved = f"moved by {chosen.scale_exponent:+.0f}" if chosen.scale_exponent else "as it is"
        return f"This is the scale rule {chosen.rule}, {moved}"
    exponent, most, least = chosen.scale_exponent, result.max_aligned, result.min_aligned
    if exponent == most:
        return "This is at maximum alignment: the largest magnitude just fits"
    if exponent == least:
        return "This is at minimum alignment: the smallest magnitude is just kept"
    if min(most, least) < exponent < max(most, least):
        return "This is a balanced middle ground between overflow and underflow"
    if exponent > most:
        return f"This is {exponent - most:.3g} octaves above maximum alignment: nothing overflows"
    return f"This is {most - exponent:.3g} octaves below maximum alignment: the largest magnitudes saturate"


def _edge(result: ScalingResult, chosen: Level, best: Level) -> str | None:
    """None where nothing is lost, where the sweep has one level, and where the scale has no exponent beyond."""
    first, last = (result.levels[place].scale_exponent for place in (0, -1))
    ends = {first: ("first", "--max-scale-exp", first - last), last: ("last", "--min-scale-exp", last - first)}
    for what, level in (("recommended", chosen), ("best", best)):
        exponent = level.scale_exponent
        if len(ends) == 2 and exponent in ends and abs(exponent) < largest_exponent(result.scale_bits):
            place, option, side = ends[exponent]
            return (
                None
                if chosen.lossless
                else (
                    f"The {what} level is the {place} of the sweep: the least error may lie beyond it. "
                    f"Sweep on with {option} {exponent + math.copysign(BEYOND, side):g}"
                )
            )
    return None


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
