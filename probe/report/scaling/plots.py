"""The pictures of a sweep: six panels over the scale exponent, and a summary of three of them."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from probe.report.figure import BAD, COLOURS, DASHED, GREY, LARGEST, label, log_ticks, sheet, widths
from probe.report.script_layouts import at
from probe.scaling.advice import Recommendation
from probe.scaling.results import Level, ScalingResult

#: Backgrounds of levels with overflow and underflow; the curves of underflow; the recommended and the best levels.
OVERFLOW, UNDERFLOW, UNDERFLOW_LINE, CHOSEN = "#f9dadd", "#fcf0cc", "#a87800", "#1c2733"
_BEHIND = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1}


#: The figures over the exponents: their titles, and whether their axes are logarithmic.
PANELS = {
    "mse": ("MSE", True),
    "cosine": ("Cosine similarity", False),
    "psnr": ("PSNR, dB", False),
    "mae": ("MAE", True),
    "relative_error": ("Relative error, %", True),
}
#: The counts of a level in the panel of losses: their names, colours and line styles.
LOSSES = {
    "overflow": ("overflow", BAD, "-"),
    "underflow": ("underflow", UNDERFLOW_LINE, "-"),
    "flushed": ("flushed to zero", UNDERFLOW_LINE, ":"),
    "subnormal": ("subnormal", GREY, "--"),
}


#: The line styles of the two alignments.
ALIGNED: dict[str, Any] = {"max_aligned": "-", "min_aligned": ":"}


def pictures(result: ScalingResult, found: Recommendation) -> tuple[bytes, bytes]:
    """PNGs of the six panels and of the summary."""
    six = _picture(result, found, (*PANELS, "losses"), height=4.0)
    return six, _picture(result, found, ("mse", "cosine", "psnr"), height=4.3)


def _picture(result: ScalingResult, found: Recommendation, names: Sequence[str], *, height: float) -> bytes:
    from matplotlib.ticker import MaxNLocator

    with sheet(len(names), size=(4.4, height)) as page:
        _statistics_box(page.figure, result, found)
        for axes, name in zip(page.panels, names, strict=True):
            _regions(axes, result, found)
            if name == "losses":
                _losses(axes, result, found)
            else:
                _curves(axes, name, result, found)
            for place, style in ALIGNED.items():
                axes.axvline(getattr(result, place), color=GREY, linewidth=1.2, linestyle=style, zorder=1.4)
            axes.axvline(found.scale_exponent, color=CHOSEN, linewidth=1.2, linestyle=DASHED, zorder=1.5)
            axes.set_xlim(*_span([level.scale_exponent for level in result.levels]))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=result.block_size is not None))
        for axes in page.panels[-3:]:
            axes.set_xlabel("scale exponent" if result.block_size is None else "added to the exponent of every block")
        _legend(page.figure, result)
        return page.png()


def _headline(result: ScalingResult, found: Recommendation) -> str:
    rule = f", rule {found.rule}" if found.rule else ""
    levels = f"{len(result.levels)} levels, recommended {found.scale_exponent:.2f}{rule}"
    return f"{label(result.name, most=60)}: {result.format}, {levels}"


def _statistics_box(figure: Any, result: ScalingResult, found: Recommendation) -> None:
    """A framed box above the panels: the tensor, its alignments, the recommended level and the best one."""
    from matplotlib.lines import Line2D

    level, best = found.level, found.best["mse"]
    low, high = found.range
    shape = " x ".join(map(str, result.shape)) or "scalar"
    lines = [
        f"{shape}, {result.dtype}; {result.elements} values, {result.zeros} zeros",
        f"range [{result.minimum:.4g}, {result.maximum:.4g}], mean |x| {result.mean_abs:.4g}, "
        f"smallest {result.smallest:.3g}",
        f"max alignment {result.max_aligned}, min alignment {result.min_aligned}; within 1 dB {low:.2f} to {high:.2f}",
        f"best MSE {best.mse:.4g} at {at(best)}, worst {found.spreads['mse'].high:.4g}",
        f"recommended {at(level)}: MSE {level.mse:.4g}, cosine {level.cosine:.6f}, PSNR {level.psnr:.2f} dB",
        f"overflow {level.percent(level.overflow):.2f} %, underflow {level.percent(level.underflow):.2f} %, "
        f"relative error {level.relative_error:.2f} %",
    ]
    style = {"frameon": True, "edgecolor": GREY, "fancybox": False, "handlelength": 0, "handletextpad": 0}
    blank = [Line2D([], [], linestyle="", label=line) for line in lines]
    title = {"title": _headline(result, found), "title_fontsize": 12, "alignment": "left"}
    figure.legend(handles=blank, loc="outside upper left", ncols=3, fontsize=8, **title, **style)


def _span(exponents: Sequence[float]) -> tuple[float, float]:
    low, high = min(exponents), max(exponents)
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def _regions(axes: Any, result: ScalingResult, found: Recommendation) -> None:
    """Shade the levels of the recommended rule that have more than 0.1 % overflow or underflow."""
    levels = sorted(_levels_of(result, found.rule), key=lambda level: level.scale_exponent)
    places = [level.scale_exponent for level in levels]
    low, high = _span(places)
    edges = [low, *((a + b) / 2 for a, b in pairwise(places)), high]
    for index, level in enumerate(levels):
        over, under = level.overflow_severity != "none", level.underflow_severity != "none"
        style = {"linewidth": 0, "zorder": 0}
        if over:
            axes.axvspan(edges[index], edges[index + 1], 0.5 if under else 0, 1, color=OVERFLOW, **style)
        if under:
            axes.axvspan(edges[index], edges[index + 1], 0, 0.5 if over else 1, color=UNDERFLOW, **style)


def _curves(axes: Any, name: str, result: ScalingResult, found: Recommendation) -> None:
    title, log = PANELS[name]
    axes.set_title(title)
    best = found.best[name]
    groups = [_levels_of(result, rule) for rule in result.rules or (None,)]
    curves = [[_drawable(getattr(level, name), log=log) for level in levels] for levels in groups]
    for levels, values, colour, width in zip(groups, curves, COLOURS, widths(curves, step=1.1), strict=False):
        places = [level.scale_exponent for level in levels]
        axes.plot(places, values, color=colour, marker="o", markersize=2 + width, linewidth=width)
    known = [x for values in curves for x in values if math.isfinite(x)]
    if log and known and max(known) > 3 * min(known):  # a linear axis shows less than that better
        axes.set_yscale("log")
        log_ticks(axes.yaxis)
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    if not known:
        axes.set_yticks([])
    top = _drawable(getattr(best, name), log=log)
    if math.isfinite(top):
        axes.plot([best.scale_exponent], [top], marker="*", markersize=13, color=CHOSEN, zorder=3, linestyle="")
        return
    edge = 0.04 if log else 0.96  # zero on a logarithmic axis, or a psnr of inf
    across = axes.get_xaxis_transform()
    for level in (level for level in result.levels if level.lossless):
        first = level.level == best.level
        style = {"marker": "*", "markersize": 13} if first else {"marker": "o", "markersize": 4}
        axes.plot([level.scale_exponent], [edge], transform=across, color=CHOSEN, linestyle="", zorder=3, **style)
    right = best.scale_exponent > sum(_span([one.scale_exponent for one in result.levels])) / 2
    place = {"xytext": (-11, 0), "ha": "right"} if right else {"xytext": (11, 0), "ha": "left"}
    style = {"textcoords": "offset points", "va": "center", "color": CHOSEN, "bbox": _BEHIND}
    axes.annotate("lossless", (best.scale_exponent, edge), xycoords=across, **place, **style)


def _levels_of(result: ScalingResult, rule: str | None) -> list[Level]:
    return [level for level in result.levels if level.rule == rule]


def _losses(axes: Any, result: ScalingResult, found: Recommendation) -> None:
    axes.set_title("Overflow and underflow, %" + (f" ({found.rule})" if found.rule else ""))
    levels = _levels_of(result, found.rule)
    places = [level.scale_exponent for level in levels]
    for count, (name, colour, style) in LOSSES.items():
        values = [level.percent(getattr(level, count)) for level in levels]
        axes.plot(places, values, color=colour, linestyle=style, linewidth=1.5, label=name)
    axes.axhline(0.1, color=GREY, linewidth=0.8)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(0, 150)
    axes.set_yticks([0, 0.1, 1, 10, 100], ["0", "0.1", "1", "10", "100"])
    axes.legend(ncols=2, loc="best", frameon=True, framealpha=0.85, edgecolor="none")


def _legend(figure: Any, result: ScalingResult) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks: list[Any] = [
        Line2D([], [], color=colour, marker="o", markersize=3.5, label=rule)
        for rule, colour in zip(result.rules, COLOURS, strict=False)
    ]
    marks += [
        Line2D([], [], color=CHOSEN, linestyle=DASHED, label="recommended level"),
        Line2D([], [], color=CHOSEN, marker="*", markersize=11, linestyle="", label="best level of the panel"),
        Line2D([], [], color=GREY, linestyle=ALIGNED["max_aligned"], label="max alignment"),
        Line2D([], [], color=GREY, linestyle=ALIGNED["min_aligned"], label="min alignment"),
        Patch(color=OVERFLOW, label="more than 0.1 % overflow"),
        Patch(color=UNDERFLOW, label="more than 0.1 % underflow"),
    ]
    figure.legend(handles=marks, loc="outside lower left", ncols=6 if result.rules else len(marks), fontsize=9)


def _drawable(x: float, *, log: bool) -> float:
    """The value if the axis can show it, else NaN, which is drawn as a gap."""
    return x if math.isfinite(x) and abs(x) < LARGEST and (x > 1 / LARGEST or not log) else math.nan
