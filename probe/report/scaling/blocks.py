"""The two analysis blocks of a sweep, in the layout that users of the original tool know, and the table of blocks."""

import math
from collections.abc import Sequence

from probe.formats import Format
from probe.scaling.advice import Recommendation
from probe.scaling.results import Level, ScalingResult
from probe.scaling.rules import RuleResult

DOUBLE, SINGLE, SHORT = "=" * 80, "-" * 80, "-" * 40
MARKS = {"good": "✅", "fair": "⚠️ ", "poor": "🔴"}


def grid_name(fmt: Format) -> str:
    """e4m3; of integers the step."""
    if fmt.is_integer:
        return f"integers, step {fmt.min_subnormal:g}"
    return f"e{fmt.exponent_bits}m{fmt.mantissa_bits}"


def factor(scale: float) -> str:
    """1.000000, or with an exponent where six decimals would say little."""
    return f"{scale:.6f}" if 1e-3 <= scale < 1e7 else f"{scale:.6e}"


def at(level: Level) -> str:
    """Scale Exp = 0.00, with the rule where there are several."""
    return f"{level.scale_exponent:.2f}" + (f" [{level.rule}]" if level.rule else "")


def decibels(psnr: float) -> str:
    """41.34, or inf where nothing is lost."""
    return f"{psnr:.2f}"


def overflow_block(result: ScalingResult, found: Recommendation) -> list[str]:
    """OVERFLOW/UNDERFLOW ANALYSIS SUMMARY: which levels lose values, how many, and what to avoid."""
    levels = result.levels
    significant = [level for level in levels if level.significant]
    lines = [
        *(DOUBLE, "OVERFLOW/UNDERFLOW ANALYSIS SUMMARY", DOUBLE),
        f"Format: {result.format}",
        f"Analyzed {len(levels)} scaling levels",
    ]
    if significant:
        lines.append(f"Significant overflow/underflow detected in {len(significant)} levels")
    else:
        lines.append("No significant overflow/underflow detected in any level")
    lines.append(SINGLE)
    over = [level for level in levels if level.overflow_severity != "none"]
    under = [level for level in levels if level.underflow_severity != "none"]
    if over:
        lines += ["🔴 OVERFLOW ISSUES:", SHORT, *(line for level in over for line in _overflow(result, level))]
    if under:
        lines += ["🟡 UNDERFLOW ISSUES:", SHORT, *(line for level in under for line in _underflow(result, level))]
    if significant:
        lines += _extremes(levels)
    return [*lines, *([SINGLE] if significant else []), *_avoid(found, over, under), DOUBLE]


def _head(level: Level) -> str:
    return f"  Scale Exp: {at(level)} (Factor: {factor(level.scale)})"


def _ranges(result: ScalingResult, level: Level) -> str:
    before = f"[{result.minimum:.2e}, {result.maximum:.2e}]"
    return f"    Tensor Range: {before} -> [{level.min_output:.2e}, {level.max_output:.2e}]"


def _overflow(result: ScalingResult, level: Level) -> list[str]:
    return [
        _head(level),
        f"    Overflow: {level.overflow} ({level.percent(level.overflow):.2f}%)",
        f"    Max Normal: {result.element.max:.2e}",
        _ranges(result, level),
        f"    Severity: {level.overflow_severity.upper()}",
        "",
    ]


def _underflow(result: ScalingResult, level: Level) -> list[str]:
    fmt = result.element
    normal = [] if fmt.min_normal is None else [f"    Min Normal: {fmt.min_normal:.2e}"]
    coarse = f"    Subnormal: {level.subnormal} ({level.percent(level.subnormal):.2f}%)"
    return [
        _head(level),
        f"    Underflow: {level.underflow} ({level.percent(level.underflow):.2f}%)",
        f"    Flush to Zero: {level.flushed} ({level.percent(level.flushed):.2f}%)",
        *([] if fmt.min_normal is None else [coarse]),
        *normal,
        f"    Min Subnormal: {fmt.min_subnormal:.2e}",
        _ranges(result, level),
        f"    Severity: {level.underflow_severity.upper()}",
        "",
    ]


def _extremes(levels: Sequence[Level]) -> list[str]:
    most = max(levels, key=lambda level: level.overflow)
    worst = max(levels, key=lambda level: (level.underflow, level.flushed))
    best = min(levels, key=lambda level: (level.underflow, level.flushed))
    return [
        *("OVERFLOW EXTREMES:", SHORT),
        f"Worst Overflow: Scale Exp {at(most)}",
        f"  {most.percent(most.overflow):.2f}% overflow",
        "",
        *("UNDERFLOW EXTREMES:", SHORT),
        f"Worst Underflow: Scale Exp {at(worst)}",
        f"  {worst.percent(worst.underflow):.2f}% underflow, {worst.percent(worst.flushed):.2f}% flushed to zero",
        f"Best Underflow: Scale Exp {at(best)}",
        f"  {best.percent(best.underflow):.2f}% underflow, {best.percent(best.flushed):.2f}% flushed to zero",
    ]


def _avoid(found: Recommendation, over: Sequence[Level], under: Sequence[Level]) -> list[str]:
    lines = ["OVERFLOW/UNDERFLOW RECOMMENDATIONS:", SHORT]
    if any("high" in (level.overflow_severity, level.underflow_severity) for level in (*over, *under)):
        lines += ["⚠️  AVOID scaling factors with HIGH overflow/underflow severity"]
        lines += ["   These factors cause significant precision loss"]
    if over:
        lines += ["🔴 OVERFLOW WARNING:", "   Avoid scaling factors that cause overflow"]
        lines += ["   These values will be saturated to max representable value"]
    if under:
        lines += ["🟡 UNDERFLOW CONSIDERATIONS:", "   Moderate underflow may be acceptable depending on use case"]
        lines += ["   Balance between underflow and overflow risks"]
    if found.range is not None:
        low, high = found.range
        lines += [f"✅ Recommended scaling range: {low:.2f} to {high:.2f}", f"   {found.range_reason}"]
    elif found.least_bad is not None:
        least = found.least_bad
        lines += ["⚠️  All scaling levels have some overflow/underflow - choose least problematic"]
        lines += [f"💡 Least problematic scaling: {at(least)}"]
        lost = f"{least.percent(least.overflow):.2f}%, Underflow: {least.percent(least.underflow):.2f}%"
        lines += [f"   Overflow: {lost}", f"   Why: {found.range_reason}"]
    return lines


def recommendation_block(result: ScalingResult, found: Recommendation) -> list[str]:
    """SCALING FACTOR ANALYSIS & RECOMMENDATIONS: the best level by each figure and by all, and what to use."""
    first, last = result.max_scale_exp, result.min_scale_exp
    chosen = found.level
    lines = [
        *(DOUBLE, "SCALING FACTOR ANALYSIS & RECOMMENDATIONS", DOUBLE),
        f"Format: {result.format} ({grid_name(result.element)})",
        f"Tested {len(result.levels)} scaling levels from {first:.2f} to {last:.2f}",
        *(SINGLE, "INDIVIDUAL METRIC OPTIMA:", SHORT),
        *_optimum("🏆 Best MSE", found.best["mse"]),
        *_optimum("🎯 Best Cosine Similarity", found.best["cosine"]),
        *_optimum("📊 Best PSNR", found.best["psnr"]),
        *(SINGLE, "COMPOSITE RECOMMENDATION:", SHORT),
        f"⭐ RECOMMENDED Scaling Factor: {factor(chosen.scale)}",
        f"   Scale Exponent: {chosen.scale_exponent:.2f}",
        *([f"   Scale Rule: {chosen.rule}"] if chosen.rule else []),
        f"   Composite Score: {found.score:.4f}",
        "   Balanced Performance:",
        f"     - MSE: {chosen.mse:.6e}",
        f"     - Cosine Similarity: {chosen.cosine:.6f}",
        f"     - PSNR: {decibels(chosen.psnr)} dB",
        f"     - MAE: {chosen.mae:.6e}",
        f"     - Relative Error: {chosen.relative_error:.2f}%",
        *(SINGLE, "PERFORMANCE ANALYSIS:", SHORT),
        *_spreads(found),
        *(SINGLE, "RECOMMENDATIONS:", SHORT),
        *(f"{MARKS[kind]} {text}" for kind, text in found.advice),
        *(SINGLE, "FINAL RECOMMENDATION:", SHORT),
        f"🎯 Use scaling factor: {factor(chosen.scale)}",
        f"   This provides the best balance of accuracy and stability for {result.format} quantization",
        f"   Scale exponent: {chosen.scale_exponent:.2f}" + (f", scale rule {chosen.rule}" if chosen.rule else ""),
        f"   📍 {found.position}",
    ]
    if chosen.significant:
        lost = f"{chosen.percent(chosen.overflow):.2f}% overflow and {chosen.percent(chosen.underflow):.2f}% underflow"
        lines.append(f"   ⚠️  It has {lost}: less error in all than at the other levels")
    return [*lines, DOUBLE]


def _optimum(title: str, level: Level) -> list[str]:
    figures = f"MSE: {level.mse:.6e}, Cosine: {level.cosine:.6f}, PSNR: {decibels(level.psnr)} dB"
    return [f"{title}: Scale Exp = {at(level)}, Factor = {factor(level.scale)}", f"    {figures}"]


def _spreads(found: Recommendation) -> list[str]:
    mse, cosine, psnr = (found.spreads[name] for name in ("mse", "cosine", "psnr"))
    lines = [
        f"MSE Range: {mse.low:.6e} to {mse.high:.6e} (Δ: {mse.range:.6e})",
        f"Cosine Range: {cosine.low:.6f} to {cosine.high:.6f} (Δ: {cosine.range:.6f})",
        f"PSNR Range: {decibels(psnr.low)} to {decibels(psnr.high)} dB (Δ: {decibels(psnr.range)} dB)",
        f"MSE Stability (std): {mse.std or 0.0:.6e}",
        f"Cosine Stability (std): {cosine.std or 0.0:.6f}",
    ]
    return lines if psnr.std is None else [*lines, f"PSNR Stability (std): {psnr.std:.2f} dB"]


def truth_block(truths: Sequence[RuleResult]) -> list[str]:
    """BLOCK-LEVEL ANALYSIS: the scale rules of real MX blocks side by side."""
    rows = truth_rows(truths)
    names = list(rows[0])
    widths = {name: max(len(name), *(len(_cell(row[name])) for row in rows)) for name in names}
    first = truths[0]
    return [
        *(DOUBLE, "BLOCK-LEVEL ANALYSIS", DOUBLE),
        f"{first.blocks} blocks of {first.block_size}, a power-of-two scale each; {first.zero_blocks} are all zeros",
        SINGLE,
        "  ".join(name.rjust(widths[name]) for name in names),
        *("  ".join(_cell(row[name]).rjust(widths[name]) for name in names) for row in rows),
        SINGLE,
        "blocks with: share of the blocks with at least one such value. worst: largest share of one block.",
        "spoiled: blocks whose other values lose more than 4 times as much (squared) to the scale of one outlier.",
        DOUBLE,
    ]


def truth_rows(truths: Sequence[RuleResult]) -> list[dict[str, object]]:
    """A row for every rule; shares in percent."""
    rows: list[dict[str, object]] = []
    for one in truths:
        level = one.level

        def share(count: int, blocks: int = one.blocks) -> float:
            return round(100 * count / blocks, 2)

        codes = {} if level.codes is None else {"codes used": f"{level.codes_used}/{len(level.codes)}"}
        rows.append(
            {
                "rule": one.rule,
                "mse": float(f"{level.mse:.4g}"),
                "psnr dB": round(level.psnr, 2) if math.isfinite(level.psnr) else "inf",
                "overflow %": round(level.percent(level.overflow), 2),
                "underflow %": round(level.percent(level.underflow), 2),
                "flushed %": round(level.percent(level.flushed), 2),
                "blocks with overflow %": share(one.overflowing_blocks),
                "underflow in %": share(one.underflowing_blocks),
                "flush in %": share(one.flushing_blocks),
                "worst flush %": round(100 * one.worst_flush, 1),
                "scale exp mean": round(one.mean_exponent, 2),
                "std": round(one.std_exponent, 2),
                "min": one.min_exponent,
                "max": one.max_exponent,
                "spoiled": one.spoiled_blocks,
                **codes,
            }
        )
    return rows


def _cell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
