"""Text in the layouts of the users' own scripts, with their headings and emoji.

`probe compare` prints a block for a layer and a table of the modes; `probe scaling` prints two blocks for a sweep.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from probe.comparisons.modes import QUALITIES, LayerComparison, ModeComparison
from probe.formats import Format
from probe.metrics import Metrics
from probe.scaling.advice import Alternative, Recommendation
from probe.scaling.results import Level, ScalingResult
from probe.words import columns, printable, shared_lines

DOUBLE, SINGLE, SHORT = "=" * 80, "-" * 80, "-" * 40
_TABLE_RULE = "-" * 100
#: The columns of the summary with their widths; the last, Avg Corr, needs none.
_COLUMNS = (("Mode", 11), ("Layer 0 MSE", 16), ("Layer 0 MAE", 13), ("Last Layer MSE", 16), ("Last Layer MAE", 16))
#: Said of a recommended level where the sweep has no whole exponent.
_NO_POWER = "Not a power of two, which the scale of this format is: sweep a range with a whole exponent"
#: Levels with overflow, or with underflow, that have a paragraph of their own.
MOST_ISSUES = 4
#: The marks of each kind of advice on a sweep.
MARKS = {"good": "✅", "fair": "⚠️ ", "poor": "🔴"}


def layer_block(layer: LayerComparison, comparison: ModeComparison) -> str:
    """The figures of one layer as the users' own script prints them, with cosine and quality added."""
    m = layer.metrics
    reference = printable(comparison.reference_mode.upper())
    differences = {"Mean Diff": m.mean_difference, "Std Diff": m.std_difference}
    differences |= {"Mean Abs Diff": m.mae, "Max Abs Diff": m.max_abs}
    relative = {"Relative MSE": _relative(m.relative_mse), "Relative MAE": _relative(m.relative_mae)}
    relative |= {"Correlation": _likeness(m.correlation), "Cosine": _likeness(m.cosine)}
    percentiles = {"50th (Median)": m.p50, "90th": m.p90, "95th": m.p95, "99th": m.p99}
    lines = [
        *(DOUBLE, f"{printable(_layer_title(layer.name))} - Comparison Results", DOUBLE),
        *("", f"📊 {reference} Reference Statistics:", *_statistics(m, "reference")),
        *("", "📊 Mode Output Statistics:", *_statistics(m, "output")),
        *("", f"📏 Difference (Mode - {reference}):"),
        *(_line(name, _fixed(value)) for name, value in differences.items()),
        *("", "❌ Error Metrics:", _line("MSE", _exponent(m.mse)), _line("RMSE", _fixed(m.rmse))),
        _line("MAE", _fixed(m.mae)),
        *("", "📈 Relative Metrics:", *(_line(name, text) for name, text in relative.items())),
        *("", "📊 Absolute Difference Percentiles:"),
        *(_line(name, _fixed(value)) for name, value in percentiles.items()),
        *("", _line("Quality", f"{layer.quality} ({_decibels(m.sqnr)})"), DOUBLE),
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


def worst_layers(comparisons: Sequence[ModeComparison], *, most: int) -> list[str]:
    """The qualities of the layers of every mode; and its worst layers, `most` lines of all modes together."""
    lines = ["Worst layers by relative error (every layer: --verbose, or --report DIR)", ""]
    each = max(1, most // len(comparisons))
    rows = []
    for one in comparisons:
        qualities = Counter(layer.quality for layer in one.layers.values())
        counts = ", ".join(f"{qualities[name]} {name}" for name in QUALITIES if qualities[name])
        for place, layer in enumerate(one.worst[:each]):
            m = layer.metrics
            named = {"Mode": "" if place else printable(one.compared_mode), "Layer": printable(layer.name)}
            figures = {"Quality": layer.quality, "SQNR": _decibels(m.sqnr), "Rel MSE": _short(m.relative_mse)}
            figures |= {"Corr": _likeness(m.correlation), "Max Abs Diff": _short(m.max_abs)}
            rows.append({**named, **figures, "All layers": "" if place else counts})
    return [*lines, *columns(rows, left=["Mode", "Layer", "Quality", "All layers"])]


def comparison_heading(*comparisons: ModeComparison) -> str:
    """The modes, their reference, the folders of the recordings, and how much each mode put on a grid."""
    modes, folders = ", ".join(one.compared_mode for one in comparisons), comparisons[0].recordings
    title = f"Mode{'s' * (len(comparisons) > 1)} {modes} vs {comparisons[0].reference_mode}"
    weights = shared_lines((one.compared_mode, one.weights.line) for one in comparisons if one.weights is not None)
    return "\n".join(map(printable, [f"{title} ({', '.join(dict.fromkeys(folders))})", *weights]))


def failure_lines(comparison: ModeComparison, failures: Sequence[str], *, most: int) -> str:
    """A marked line for each failure; of more than `most`, the first ones and how many there are."""
    name = f"{comparison.compared_mode} vs {comparison.reference_mode}"
    more = [f"and {len(failures) - most} more (all: --verbose)"] if len(failures) > most else []
    return "\n".join(printable(f"❌ {name}: {failure}") for failure in [*failures[:most], *more])


def _layer_title(name: str) -> str:
    head, _, number = name.rpartition("_")
    return f"Layer {number}" if head == "layer" and number.isdecimal() else name


def _statistics(m: Metrics, side: str) -> list[str]:
    mean, std, low, high = (_fixed(getattr(m, f"{name}_{side}"), width=9) for name in ("mean", "std", "min", "max"))
    return [f"  Mean:      {mean}", f"  Std:       {std}", f"  Range:     [{low}, {high}]"]


def _line(name: str, value: str) -> str:
    return f"  {f'{name}:':<19}{value}"


def _relative(value: float | None) -> str:
    return "none" if value is None else f"{_exponent(value)} ({100 * value:6.3f}%)"


def _fixed(value: float | None, *, width: int = 0) -> str:
    """0.123456, or 1.234567e-09 for numbers below 1e-6 or from 1e6."""
    if value is None:
        return "none".rjust(width)
    is_readable = value == 0 or 1e-6 <= abs(value) < 1e6 or not math.isfinite(value)
    return (f"{value:.6f}" if is_readable else f"{value:.6e}").rjust(width)


def _decibels(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f} dB"


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _exponent(value: float | None) -> str:
    return "none" if value is None else f"{value:.6e}"


def _likeness(value: float | None) -> str:
    """0.999999; a number other than 1 has so many digits that it does not read as 1.000000."""
    if value is None:
        return "none"
    text = f"{value:.6f}"
    return f"{value:.15f}".rstrip("0") if text == "1.000000" and value != 1 else text


def overflow_block(result: ScalingResult, found: Recommendation) -> list[str]:
    """OVERFLOW/UNDERFLOW ANALYSIS SUMMARY: which levels lose values, how many, and what to avoid."""
    levels = result.levels
    significant = sum(level.significant for level in levels)
    over = [level for level in levels if level.overflow_severity != "none"]
    under = [level for level in levels if level.underflow_severity != "none"]
    found_any, where = ("Significant", f"{significant} levels") if significant else ("No significant", "any level")
    lines = [
        *(DOUBLE, "OVERFLOW/UNDERFLOW ANALYSIS SUMMARY", DOUBLE),
        f"Format: {result.format}",
        f"Analyzed {len(levels)} scaling levels",
        f"{found_any} overflow/underflow detected in {where}",
        SINGLE,
    ]
    if over:
        lines += ["🔴 OVERFLOW ISSUES:", SHORT, *_issues(result, over, "overflow", _overflow)]
    if under:
        lines += ["🟡 UNDERFLOW ISSUES:", SHORT, *_issues(result, under, "underflow", _underflow)]
    if significant:
        lines += [*_extremes(levels), SINGLE]
    return [*lines, *_avoid(found, over, under), DOUBLE]


def _issues(
    result: ScalingResult, levels: Sequence[Level], loss: str, write: Callable[[ScalingResult, Level], list[str]]
) -> list[str]:
    """A paragraph for every level; of many, for those that lose least and for the one that loses most."""
    ranked = sorted(levels, key=lambda level: int(getattr(level, loss)))
    shown = levels if len(levels) <= MOST_ISSUES else [*ranked[: MOST_ISSUES - 1], ranked[-1]]
    lines = [line for level in levels if level in shown for line in write(result, level)]
    if len(shown) < len(levels):
        rest = [level.percent(getattr(level, loss)) for level in ranked[MOST_ISSUES - 1 : -1]]
        left = f"  and {len(rest)} more levels, {min(rest):.2f}% to {max(rest):.2f}% {loss}"
        lines += [f"{left}: every level is in the results (.txt, .csv, .json)", ""]
    return lines


def _issue(result: ScalingResult, level: Level, figures: dict[str, str], severity: str) -> list[str]:
    before, after = f"[{result.minimum:.2e}, {result.maximum:.2e}]", f"[{level.min_output:.2e}, {level.max_output:.2e}]"
    figures |= {"Tensor Range": f"{before} -> {after}", "Severity": severity.upper()}
    head = f"  Scale Exp: {at(level)} (Factor: {factor(level.scale)})"
    return [head, *(f"    {name}: {text}" for name, text in figures.items()), ""]


def _share(level: Level, count: int) -> str:
    return f"{count} ({level.percent(count):.2f}%)"


def _overflow(result: ScalingResult, level: Level) -> list[str]:
    figures = {"Overflow": _share(level, level.overflow), "Max Normal": f"{result.element.max:.2e}"}
    return _issue(result, level, figures, level.overflow_severity)


def _underflow(result: ScalingResult, level: Level) -> list[str]:
    fmt = result.element
    figures = {"Underflow": _share(level, level.underflow), "Flush to Zero": _share(level, level.flushed)}
    if fmt.min_normal is not None:
        figures |= {"Subnormal": _share(level, level.subnormal), "Min Normal": f"{fmt.min_normal:.2e}"}
    figures["Min Subnormal"] = f"{fmt.min_subnormal:.2e}"
    return _issue(result, level, figures, level.underflow_severity)


def _extremes(levels: Sequence[Level]) -> list[str]:
    most = max(levels, key=lambda level: level.overflow)
    lines = ["OVERFLOW EXTREMES:", SHORT, f"Worst Overflow: Scale Exp {at(most)}"]
    lines += [f"  {most.percent(most.overflow):.2f}% overflow", "", "UNDERFLOW EXTREMES:", SHORT]
    for name, extreme in (("Worst", max), ("Best", min)):
        level = extreme(levels, key=lambda level: (level.underflow, level.flushed))
        flushed = f"{level.percent(level.flushed):.2f}% flushed to zero"
        lines += [f"{name} Underflow: Scale Exp {at(level)}"]
        lines += [f"  {level.percent(level.underflow):.2f}% underflow, {flushed}"]
    return lines


def _avoid(found: Recommendation, over: Sequence[Level], under: Sequence[Level]) -> list[str]:
    """What to avoid, but for losses that the recommended level has too, and that level or the range around it."""
    lines, chosen = ["OVERFLOW/UNDERFLOW RECOMMENDATIONS:", SHORT], found.level
    kinds = [kind for kind in ("overflow", "underflow") if _severity(chosen, kind) != "high"]
    kinds = [kind for kind in kinds if any(_severity(level, kind) == "high" for level in (*over, *under))]
    if kinds:
        lines += [f"⚠️  AVOID scaling factors with HIGH {'/'.join(kinds)} severity"]
        lines += ["   These factors cause significant precision loss"]
    if over:
        lines += ["🔴 OVERFLOW WARNING:"]
        lines += ["   Avoid scaling factors that cause overflow"] if chosen.overflow_severity == "none" else []
        lines += ["   These values will be saturated to max representable value"]
    if under:
        lines += ["🟡 UNDERFLOW CONSIDERATIONS:", "   Moderate underflow may be acceptable depending on use case"]
        lines += ["   Balance between underflow and overflow risks"]
    if not chosen.significant:
        low, high = found.range
        lines += [f"✅ Recommended scaling range: {low:.2f} to {high:.2f}, best {at(chosen)}", f"   {found.losses}"]
        return lines
    if found.losses.startswith("every"):
        lines += ["⚠️  All scaling levels have some overflow/underflow - choose least problematic"]
    lines += [f"💡 Least problematic scaling: {at(chosen)}"]
    lost = f"{chosen.percent(chosen.overflow):.2f}%, Underflow: {chosen.percent(chosen.underflow):.2f}%"
    return [*lines, f"   Overflow: {lost}", f"   Why: {found.losses}"]


def _severity(level: Level, kind: str) -> str:
    return level.overflow_severity if kind == "overflow" else level.underflow_severity


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
        *([f"   ⚠️  {_NO_POWER}"] if result.powers_only and not chosen.is_power else []),
        *([f"   Scale Rule: {chosen.rule}"] if chosen.rule else []),
        f"   Composite Score: {found.score:.4f}",
        "   Balanced Performance:",
        f"     - MSE: {chosen.mse:.6e}",
        f"     - Cosine Similarity: {chosen.cosine:.6f}",
        f"     - PSNR: {chosen.psnr:.2f} dB",
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
        among = "powers of two" if result.powers_only else "levels"
        lines.append(f"   ⚠️  It has {lost}: and yet the best score of the {among}")
    if found.edge:
        lines.append(f"   ⚠️  {found.edge}")
    return [*lines, DOUBLE]


def alternatives_block(result: ScalingResult, found: Recommendation, others: Sequence[Alternative]) -> list[str]:
    """COST OF THE ALTERNATIVES: the error of other scales beside that of the recommended one."""
    chosen = found.level
    rows = [
        {
            "scale": one.what,
            "scale exp": "" if one.scale_exponent is None else f"{one.scale_exponent:.2f}",
            "MSE": f"{one.mse:.6e}",
            "times": "" if one.times is None else f"{one.times:.4g}",
            "PSNR dB": f"{one.psnr:.2f}",
        }
        for one in (Alternative("recommended", chosen.scale_exponent, chosen.mse, chosen.psnr, 1.0), *others)
    ]
    title = f"{result.format}: MSE in times that of the recommended scale exponent {at(chosen)}"
    return [*(DOUBLE, "COST OF THE ALTERNATIVES", DOUBLE), title, SINGLE, *columns(rows, left={"scale"}), DOUBLE]


def _optimum(title: str, level: Level) -> list[str]:
    figures = f"MSE: {level.mse:.6e}, Cosine: {level.cosine:.6f}, PSNR: {level.psnr:.2f} dB"
    return [f"{title}: Scale Exp = {at(level)}, Factor = {factor(level.scale)}", f"    {figures}"]


def _spreads(found: Recommendation) -> list[str]:
    mse, cosine, psnr = (found.spreads[name] for name in ("mse", "cosine", "psnr"))
    lines = [
        f"MSE Range: {mse.low:.6e} to {mse.high:.6e} (Δ: {mse.range:.6e})",
        f"Cosine Range: {cosine.low:.6f} to {cosine.high:.6f} (Δ: {cosine.range:.6f})",
        f"PSNR Range: {psnr.low:.2f} to {psnr.high:.2f} dB (Δ: {psnr.range:.2f} dB)",
        f"MSE Stability (std): {mse.std or 0.0:.6e}",
        f"Cosine Stability (std): {cosine.std or 0.0:.6f}",
    ]
    return lines if psnr.std is None else [*lines, f"PSNR Stability (std): {psnr.std:.2f} dB"]


def grid_name(fmt: Format) -> str:
    """e4m3, or for integers their step."""
    if fmt.is_integer:
        return f"integers, step {fmt.min_subnormal:g}"
    return f"e{fmt.exponent_bits}m{fmt.mantissa_bits}"


def factor(scale: float) -> str:
    """1.000000, or with an exponent for very small and very large scales."""
    return f"{scale:.6f}" if 1e-3 <= scale < 1e7 else f"{scale:.6e}"


def at(level: Level) -> str:
    """The scale exponent of a level, and its rule if there are several: 0.00 [floor]."""
    return f"{level.scale_exponent:.2f}" + (f" [{level.rule}]" if level.rule else "")
