"""Text in the layouts of the users' own scripts, with the headings and emoji that those print.

`probe compare` prints a block for every layer and a table of the modes; `probe scaling` prints two blocks for a sweep.
"""

import math
from collections.abc import Sequence

from probe.comparisons.modes import LayerComparison, ModeComparison
from probe.formats import Format
from probe.scaling.advice import Recommendation
from probe.scaling.results import Level, ScalingResult
from probe.words import printable

DOUBLE, SINGLE, SHORT = "=" * 80, "-" * 80, "-" * 40
_TABLE_RULE = "-" * 100
#: The columns of the summary with their widths; the last, Avg Corr, needs none.
_COLUMNS = (("Mode", 11), ("Layer 0 MSE", 16), ("Layer 0 MAE", 13), ("Last Layer MSE", 16), ("Last Layer MAE", 16))
#: Marks of the advice of a sweep.
MARKS = {"good": "✅", "fair": "⚠️ ", "poor": "🔴"}


def layer_block(layer: LayerComparison, comparison: ModeComparison) -> str:
    """The figures of one layer, line by line as the users' own script prints them, and then cosine and label."""
    m = layer.metrics
    reference = printable(comparison.reference_mode.upper())
    lines = [
        DOUBLE,
        f"{printable(_layer_title(layer.name))} - Comparison Results",
        DOUBLE,
        "",
        f"📊 {reference} Reference Statistics:",
        *_statistics(m.mean_reference, m.std_reference, m.min_reference, m.max_reference),
        "",
        "📊 Mode Output Statistics:",
        *_statistics(m.mean_output, m.std_output, m.min_output, m.max_output),
        "",
        f"📏 Difference (Mode - {reference}):",
        _line("Mean Diff", _fixed(m.mean_difference)),
        _line("Std Diff", _fixed(m.std_difference)),
        _line("Mean Abs Diff", _fixed(m.mae)),
        _line("Max Abs Diff", _fixed(m.max_abs)),
        "",
        "❌ Error Metrics:",
        _line("MSE", _exponent(m.mse)),
        _line("RMSE", _fixed(m.rmse)),
        _line("MAE", _fixed(m.mae)),
        "",
        "📈 Relative Metrics:",
        _line("Relative MSE", _relative(m.relative_mse)),
        _line("Relative MAE", _relative(m.relative_mae)),
        _line("Correlation", _likeness(m.correlation)),
        _line("Cosine", _likeness(m.cosine)),
        "",
        "📊 Absolute Difference Percentiles:",
        _line("50th (Median)", _fixed(m.p50)),
        _line("90th", _fixed(m.p90)),
        _line("95th", _fixed(m.p95)),
        _line("99th", _fixed(m.p99)),
        "",
        _line("Label", layer.label),
        DOUBLE,
    ]
    return "\n".join(lines)


def summary_table(comparisons: Sequence[ModeComparison]) -> str:
    """A row for every mode: its first and last layer, and the mean of all correlations."""
    modes = [printable(one.compared_mode) for one in comparisons]
    widths = [max(10, *map(len, modes)) + 1, *(width for _, width in _COLUMNS[1:])]
    head = "".join(name.ljust(width) for (name, _), width in zip(_COLUMNS, widths, strict=True)) + "Avg Corr"
    title = f"SUMMARY TABLE - All Modes vs {printable(comparisons[0].reference_mode)}"
    lines = [DOUBLE, title, DOUBLE, "", head, _TABLE_RULE]
    for mode, one in zip(modes, comparisons, strict=True):
        first, last = (list(one.layers.values())[place].metrics for place in (0, -1))
        cells = (mode, _exponent(first.mse), _fixed(first.mae), _exponent(last.mse), _fixed(last.mae))
        row = "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(row + _likeness(one.summary["avg_correlation"]))
    return "\n".join([*lines, DOUBLE])


def comparison_heading(comparison: ModeComparison) -> str:
    """Which mode, against what, from where."""
    mode, reference = printable(comparison.compared_mode), printable(comparison.reference_mode)
    folders = dict.fromkeys(comparison.recordings)
    return f"Mode {mode} vs {reference} ({', '.join(map(printable, folders))})"


def failure_lines(comparison: ModeComparison, failures: Sequence[str]) -> str:
    """What is wrong, loudly."""
    name = f"{comparison.compared_mode} vs {comparison.reference_mode}"
    return "\n".join(printable(f"❌ {name}: {failure}") for failure in failures)


def _layer_title(name: str) -> str:
    head, _, number = name.rpartition("_")
    return f"Layer {number}" if head == "layer" and number.isdecimal() else name


def _statistics(mean: float | None, std: float | None, low: float | None, high: float | None) -> list[str]:
    return [
        f"  Mean:      {_fixed(mean, width=9)}",
        f"  Std:       {_fixed(std, width=9)}",
        f"  Range:     [{_fixed(low, width=9)}, {_fixed(high, width=9)}]",
    ]


def _line(name: str, value: str) -> str:
    return f"  {f'{name}:':<19}{value}"


def _relative(value: float | None) -> str:
    return "none" if value is None else f"{_exponent(value)} ({100 * value:6.3f}%)"


def _fixed(value: float | None, *, width: int = 0) -> str:
    """0.123456; what is too small or too large to be read so is 1.234567e-09."""
    if value is None:
        return "none".rjust(width)
    if value != 0 and (abs(value) < 1e-6 or abs(value) >= 1e6) and math.isfinite(value):
        return f"{value:.6e}".rjust(width)
    return f"{value:.6f}".rjust(width)


def _exponent(value: float | None) -> str:
    return "none" if value is None else f"{value:.6e}"


def _likeness(value: float | None) -> str:
    """0.999999; what is not 1 does not read as 1.000000."""
    if value is None:
        return "none"
    text = f"{value:.6f}"
    return f"{value:.15f}".rstrip("0") if text == "1.000000" and value != 1 else text


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
