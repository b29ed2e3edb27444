"""A comparison of modes as text: a block for every layer, and a table for several modes."""

import math
from collections.abc import Sequence

from probe.comparisons.modes import LayerComparison, ModeComparison
from probe.words import printable

WIDTH = 80
RULE = "=" * WIDTH
_TABLE_RULE = "-" * 100
#: The columns of the summary with their widths; the last, Avg Corr, needs none.
_COLUMNS = (("Mode", 11), ("Layer 0 MSE", 16), ("Layer 0 MAE", 13), ("Last Layer MSE", 16), ("Last Layer MAE", 16))


def layer_block(layer: LayerComparison, comparison: ModeComparison) -> str:
    """The figures of one layer, line by line as the users' own script prints them, and then cosine and label."""
    m = layer.metrics
    reference = printable(comparison.reference_mode.upper())
    lines = [
        RULE,
        f"{printable(_title(layer.name))} - Comparison Results",
        RULE,
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
        RULE,
    ]
    return "\n".join(lines)


def summary_table(comparisons: Sequence[ModeComparison]) -> str:
    """A row for every mode: its first and last layer, and the mean of all correlations."""
    modes = [printable(one.compared_mode) for one in comparisons]
    widths = [max(10, *map(len, modes)) + 1, *(width for _, width in _COLUMNS[1:])]
    head = "".join(name.ljust(width) for (name, _), width in zip(_COLUMNS, widths, strict=True)) + "Avg Corr"
    title = f"SUMMARY TABLE - All Modes vs {printable(comparisons[0].reference_mode)}"
    lines = [RULE, title, RULE, "", head, _TABLE_RULE]
    for mode, one in zip(modes, comparisons, strict=True):
        first, last = (list(one.layers.values())[place].metrics for place in (0, -1))
        cells = (mode, _exponent(first.mse), _fixed(first.mae), _exponent(last.mse), _fixed(last.mae))
        row = "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(row + _likeness(one.summary["avg_correlation"]))
    return "\n".join([*lines, RULE])


def heading(comparison: ModeComparison) -> str:
    """Which mode, against what, from where."""
    mode, reference = printable(comparison.compared_mode), printable(comparison.reference_mode)
    folders = dict.fromkeys(comparison.recordings)
    return f"Mode {mode} vs {reference} ({', '.join(map(printable, folders))})"


def failure_lines(comparison: ModeComparison, failures: Sequence[str]) -> str:
    """What is wrong, loudly."""
    name = f"{comparison.compared_mode} vs {comparison.reference_mode}"
    return "\n".join(printable(f"❌ {name}: {failure}") for failure in failures)


def _title(name: str) -> str:
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
