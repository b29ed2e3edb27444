"""The pictures of a sweep: six panels over the scale exponent, and a summary of three of them."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from probe.report.gate.plots import FAILED, GREY
from probe.scaling.advice import Recommendation
from probe.scaling.results import Level, ScalingResult

#: Of Okabe and Ito: told apart by colour-blind people too. One for each scale rule, the first where there is one scale.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00")
OVERFLOW, UNDERFLOW, CHOSEN = "#f9dadd", "#fcf0cc", "#1c2733"
_DPI = 100
_BEHIND = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1}
_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.grid": True,
    "grid.color": "#e3e7ec",
    "text.parse_math": False,  # a $ in the name of a tensor is a $
}


@dataclass(frozen=True)
class Panel:
    """One figure over the exponents; `best` names the criterion whose best level is marked."""

    title: str
    value: Callable[[Level], float]
    log: bool = False
    best: str = ""


PANELS = {
    "mse": Panel("MSE", lambda level: level.mse, log=True, best="mse"),
    "cosine": Panel("Cosine similarity", lambda level: level.cosine, best="cosine"),
    "psnr": Panel("PSNR, dB", lambda level: level.psnr, best="psnr"),
    "mae": Panel("MAE", lambda level: level.mae, log=True, best="mae"),
    "relative": Panel("Relative error, %", lambda level: level.relative_error, log=True, best="relative_error"),
}
LOSSES: dict[str, tuple[Callable[[Level], int], str, str]] = {
    "overflow": (lambda level: level.overflow, FAILED, "-"),
    "underflow": (lambda level: level.underflow, "#a87800", "-"),
    "flushed to zero": (lambda level: level.flushed, "#a87800", ":"),
    "subnormal": (lambda level: level.subnormal, GREY, "--"),
}


def pictures(result: ScalingResult, found: Recommendation) -> tuple[bytes, bytes]:
    """PNGs of the six panels and of the summary."""
    six = _picture(result, found, ("mse", "cosine", "psnr", "mae", "relative", "losses"), rows=2, size=(1320, 800))
    return six, _picture(result, found, ("mse", "cosine", "psnr"), rows=1, size=(1320, 430))


def _picture(
    result: ScalingResult, found: Recommendation, names: Sequence[str], *, rows: int, size: tuple[int, int]
) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what the user has set for plots of their own
        matplotlib.rcParams.update(_SETTINGS)
        figure = Figure(figsize=(size[0] / _DPI, size[1] / _DPI), dpi=_DPI, layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
        figure.suptitle(_headline(result, found), x=0.01, ha="left", fontsize=12)
        grid = figure.subplots(rows, len(names) // rows, squeeze=False)
        for axes, name in zip(grid.flat, names, strict=True):
            _regions(axes, result, found)
            if name == "losses":
                _losses(axes, result, found)
            else:
                _curves(axes, PANELS[name], result, found)
            axes.axvline(found.scale_exponent, color=CHOSEN, linewidth=1.2, linestyle=(0, (4, 2)), zorder=1.5)
            axes.set_xlim(*_span([level.scale_exponent for level in result.levels]))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=result.block_size is not None))
        for axes in grid[-1]:
            axes.set_xlabel("scale exponent" if result.block_size is None else "added to the exponent of every block")
        _legend(figure, result, found)
        kept = io.BytesIO()
        canvas.print_png(kept)
        return kept.getvalue()


def _headline(result: ScalingResult, found: Recommendation) -> str:
    name = result.name if len(result.name) <= 60 else f"...{result.name[-57:]}"
    rule = f", rule {found.rule}" if found.rule else ""
    return f"{name}: {result.format}, {len(result.levels)} levels, recommended {found.scale_exponent:.2f}{rule}"


def _span(exponents: Sequence[float]) -> tuple[float, float]:
    low, high = min(exponents), max(exponents)
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def _regions(axes: Any, result: ScalingResult, found: Recommendation) -> None:
    """Shade the levels, of the recommended rule, with more than 0.1 % overflow, and with that much underflow."""
    levels = sorted(
        (level for level in result.levels if level.rule == found.rule), key=lambda level: level.scale_exponent
    )
    places = [level.scale_exponent for level in levels]
    low, high = _span(places)
    edges = [low, *((a + b) / 2 for a, b in pairwise(places)), high]
    for index, level in enumerate(levels):
        over, under = level.overflow_severity != "none", level.underflow_severity != "none"
        for wanted, colour, part in (
            (over, OVERFLOW, (0.5, 1) if under else (0, 1)),
            (under, UNDERFLOW, (0, 0.5) if over else (0, 1)),
        ):
            if wanted:
                axes.axvspan(edges[index], edges[index + 1], *part, color=colour, linewidth=0, zorder=0)


def _curves(axes: Any, panel: Panel, result: ScalingResult, found: Recommendation) -> None:
    axes.set_title(panel.title)
    best = found.best[panel.best]
    for levels, colour in _lines(result):
        values = [_drawable(panel.value(level), log=panel.log) for level in levels]
        axes.plot(
            [level.scale_exponent for level in levels], values, color=colour, marker="o", markersize=3.5, linewidth=1.5
        )
    known = [x for level in result.levels if math.isfinite(x := _drawable(panel.value(level), log=panel.log))]
    if panel.log and known:
        _log_axis(axes, known)
    if not panel.log:
        axes.ticklabel_format(axis="y", useOffset=False)
    if not known:
        axes.set_yticks([])
    top = _drawable(panel.value(best), log=panel.log)
    if math.isfinite(top):
        axes.plot([best.scale_exponent], [top], marker="*", markersize=13, color=CHOSEN, zorder=3, linestyle="")
        return
    edge = 0.04 if panel.log else 0.96  # zero on a logarithmic axis, or a psnr of inf
    for level in (level for level in result.levels if level.lossless):
        first = level.level == best.level
        style = {"marker": "*", "markersize": 13} if first else {"marker": "o", "markersize": 4}
        axes.plot(
            [level.scale_exponent],
            [edge],
            transform=axes.get_xaxis_transform(),
            color=CHOSEN,
            linestyle="",
            zorder=3,
            **style,
        )
    middle = sum(_span([one.scale_exponent for one in result.levels])) / 2
    right = best.scale_exponent > middle
    axes.annotate(
        "lossless",
        (best.scale_exponent, edge),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-11 if right else 11, 0),
        textcoords="offset points",
        ha="right" if right else "left",
        va="center",
        color=CHOSEN,
        bbox=_BEHIND,
    )


def _log_axis(axes: Any, values: Sequence[float]) -> None:
    """Logarithmic where the values need it. Few ticks, as numbers that can be read: 1e-05, 0.002, 50."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    decades = math.log10(max(values) / min(values))
    if decades < 0.5:  # a linear axis shows so little better
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0), numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _lines(result: ScalingResult) -> list[tuple[list[Level], str]]:
    rules: Sequence[str | None] = result.rules or (None,)
    return [
        ([level for level in result.levels if level.rule == rule], colour)
        for rule, colour in zip(rules, COLOURS, strict=False)
    ]


def _losses(axes: Any, result: ScalingResult, found: Recommendation) -> None:
    axes.set_title("Overflow and underflow, %" + (f" ({found.rule})" if found.rule else ""))
    levels = [level for level in result.levels if level.rule == found.rule]
    for name, (count, colour, style) in LOSSES.items():
        values = [level.percent(count(level)) for level in levels]
        axes.plot(
            [level.scale_exponent for level in levels], values, color=colour, linestyle=style, linewidth=1.5, label=name
        )
    axes.axhline(0.1, color=GREY, linewidth=0.8)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(0, 150)
    axes.set_yticks([0, 0.1, 1, 10, 100], ["0", "0.1", "1", "10", "100"])
    axes.legend(fontsize=8.5, ncols=2, loc="best", framealpha=0.85, edgecolor="none")


def _legend(figure: Any, result: ScalingResult, found: Recommendation) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks: list[Any] = [
        Line2D([], [], color=colour, marker="o", markersize=3.5, label=rule)
        for rule, colour in zip(result.rules, COLOURS, strict=False)
    ]
    marks += [
        Line2D([], [], color=CHOSEN, linestyle=(0, (4, 2)), label="recommended level"),
        Line2D([], [], color=CHOSEN, marker="*", markersize=11, linestyle="", label="best level of the panel"),
        Patch(color=OVERFLOW, label="more than 0.1 % overflow"),
        Patch(color=UNDERFLOW, label="more than 0.1 % underflow"),
    ]
    figure.legend(handles=marks, loc="outside lower left", ncols=len(marks), frameon=False, fontsize=9.5)


def _drawable(x: float, *, log: bool) -> float:
    """What the axis can show; the rest is a gap."""
    return x if math.isfinite(x) and abs(x) < 1e100 and (x > 1e-100 or not log) else math.nan
