"""The picture of a recipe: its error by layer against the baseline, and the values of one layer.

What matplotlib lays out by itself (legends, places of titles, choice of ticks) is placed by hand: that is most of
its time, and a report has a picture per failing case.
"""

import io
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from probe.gate.cases import Outcome
from probe.report.figure import shown_name
from probe.report.gate.recipes import Run
from probe.report.numbers import number
from probe.words import LOGITS, short_names

WIDTH, HEIGHT = 1200, 360  # pixels
#: Of Okabe and Ito: told apart by colour-blind people too.
INJECTED, PROPAGATED = "#0072b2", "#d55e00"
FAILED, GREY, _GRID, _BAND = "#b00020", "#5f6b7a", "#dde2e8", "#f9dfe2"

_DPI = 100
_DRAWABLE = 1e100  # beyond, the arithmetic of an axis overflows
_DASHED = (0, (4, 2))
#: left, bottom, width, height of the panels, as parts of the picture
_PANELS = ((0.05, 0.12, 0.4, 0.76), (0.5, 0.12, 0.22, 0.76), (0.77, 0.12, 0.22, 0.76))
_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.parse_math": False,  # a $ in the name of a layer is a $
}


def recipe_picture(outcomes: Sequence[Outcome], shown: Outcome) -> bytes:
    """A PNG of three panels: the mse of every layer of the recipe, and the differences and the values of `shown`."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what the user has set for plots of their own
        matplotlib.rcParams.update(_SETTINGS)
        canvas, (left, middle, right) = _sheet()
        for axes in (left, middle, right):
            for old in (*axes.lines, *axes.texts, *axes.collections, *axes.patches):
                old.remove()
            axes.plot((0, 0, 1), (1, 0, 0), transform=axes.transAxes, color=GREY, linewidth=1, clip_on=False)
        _errors(left, Run(tuple(outcomes)))
        _differences(middle, shown)
        _values(right, shown)
        canvas.draw()
        return _png(canvas)


@cache
def _sheet() -> tuple[Any, tuple[Any, Any, Any]]:
    """The canvas and its panels, made once: that takes a third of the time of a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI)
    left, middle, right = (figure.add_axes(panel) for panel in _PANELS)
    left.set_yscale("log")
    for axes in (left, middle, right):
        axes.set_axis_off()
        axes.autoscale(False)
    return FigureCanvasAgg(figure), (left, middle, right)


def _png(canvas: Any) -> bytes:
    """With a palette: half the size, and nothing that is drawn here needs more colours."""
    from PIL import Image

    pixels = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
    kept = io.BytesIO()
    pixels.convert("RGB").quantize(64, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(kept, "png")
    return kept.getvalue()


def _errors(axes: Any, run: Run) -> None:
    """injected.mse and propagated.mse by layer, new against old, on a logarithmic axis."""
    layers = run.layers
    known = [f for outcome in layers for name, f in outcome.figures.items() if name in _CURVES]
    drawn = [_positive(x) for figure in known for x in (figure.old, figure.new) if _positive(x) > 0]
    if not drawn:
        lossless = any(figure.new == 0 for figure in known)
        _say(axes, "mse by layer", "no error: every mse is 0" if lossless else "no mse: no layer was measured")
        return
    failing = [place for place, outcome in enumerate(layers) if outcome.status == "failed"]
    bands = [(place - 0.5, 1) for place in failing]
    axes.broken_barh(bands, (0, 1), transform=axes.get_xaxis_transform(), color=_BAND, linewidth=0, zorder=0.1)
    size = 4.5 if len(layers) <= 24 else 3
    for name, (colour, marker) in _CURVES.items():
        figures = [outcome.figures.get(name) for outcome in layers]
        old = [_positive(figure.old if figure else None) for figure in figures]
        new = [_positive(figure.new if figure else None) for figure in figures]
        axes.plot(old, color=colour, linestyle=_DASHED, linewidth=1.1, marker="_", markersize=2 * size)
        axes.plot(new, color=colour, linewidth=1.4, marker=marker, markersize=size)
        for place, figure in enumerate(figures):
            if figure and figure.new == 0:
                axes.text(place, 0.02, "0", transform=axes.get_xaxis_transform(), color=colour, ha="center")
    lost = [place for place, outcome in enumerate(layers) if any(map(_is_lost, _curve_values(outcome)))]
    if lost:
        axes.plot(lost, [0.05] * len(lost), "x", color=FAILED, transform=axes.get_xaxis_transform())
        axes.text(lost[0], 0.09, "not finite", transform=axes.get_xaxis_transform(), color=FAILED, ha="center")
    _layer_axis(axes, [outcome.case.layer for outcome in layers])
    _log_axis(axes, min(drawn), max(drawn))
    _title(axes, "mse by layer")
    _legend(axes, failing=bool(failing))


_CURVES = {"injected.mse": (INJECTED, "o"), "propagated.mse": (PROPAGATED, "s")}


def _curve_values(outcome: Outcome) -> list[float | None]:
    return [figure.new for name, figure in outcome.figures.items() if name in _CURVES]


def _is_lost(x: float | None) -> bool:
    return x is not None and not math.isfinite(x)


def _legend(axes: Any, *, failing: bool) -> None:
    """Beside the title."""
    line = {"transform": axes.transAxes, "clip_on": False}
    for place, text, colour, style in (
        (0.35, "injected", INJECTED, {"marker": "o", "markersize": 4.5, "markevery": [1]}),
        (0.52, "propagated", PROPAGATED, {"marker": "s", "markersize": 4.5, "markevery": [1]}),
        (0.75, "baseline", GREY, {"linestyle": _DASHED}),
    ):
        axes.plot((place - 0.055, place - 0.03, place - 0.005), (1.055,) * 3, color=colour, **line, **style)
        axes.text(place + 0.008, 1.035, text, transform=axes.transAxes, color=colour)
    if failing:
        axes.plot((0.91,), (1.055,), color=_BAND, marker="s", markersize=9, **line)
        axes.text(0.93, 1.035, "failed", transform=axes.transAxes, color=FAILED)


def _layer_axis(axes: Any, names: Sequence[str]) -> None:
    """The names of as many layers as have room; of long names, what tells them apart."""
    texts = [shown_name(name, most=14) for name in (names if max(map(len, names)) <= 10 else short_names(names))]
    step = math.ceil(len(texts) * (max(map(len, texts)) + 2) / 84)
    axes.set_xlim(-0.5, len(texts) - 0.5)
    _ticks(axes, "x", range(0, len(texts), step), texts[::step])


def _log_axis(axes: Any, low: float, high: float) -> None:
    """Ticks at 1, 2, 3 and 5 of every decade, or at some of the decades where there are many."""
    margin = max(1.5, (high / low) ** 0.06)  # of 1.5 at the least, so that a tick is between the two
    low, high = low / margin, high * margin
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = math.ceil((last - first) / 7)
    parts = (1, 2, 3, 5) if last - first <= 3 else (1,)
    chosen = [(part, exponent) for exponent in range(first, last + 1, step) for part in parts]
    inside = [(part, exponent) for part, exponent in chosen if low <= part * 10.0**exponent <= high]
    axes.set_ylim(low, high)
    _ticks(axes, "y", [p * 10.0**e for p, e in inside], [f"{p}e{e}" for p, e in inside])


def _differences(axes: Any, shown: Outcome) -> None:
    """A histogram of output - reference, with its mean."""
    import numpy as np

    title = f"output - reference of {shown_name(shown.case.layer, most=22)}"
    pairs = _pairs(axes, title, shown)
    if not pairs:
        return
    found = [output - reference for reference, output in pairs]
    if max(found) == min(found):
        _say(axes, title, f"every difference is {number(found[0])} ({len(found)} values)")
        return
    counts, edges = np.histogram(found, bins=min(40, max(8, 2 * round(len(found) ** 0.5))))
    axes.stairs(counts, edges, fill=True, color=INJECTED)
    mean = sum(found) / len(found)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.axvline(mean, color=FAILED, linewidth=1.2, linestyle=_DASHED)
    axes.text(0.99, 0.95, f"mean {mean:.1e}", transform=axes.transAxes, ha="right", color=FAILED)
    _linear_axis(axes, "x", min(0, *found), max(0, *found))
    _linear_axis(axes, "y", 0, 1.1 * max(counts), whole=True)
    _title(axes, title)


def _values(axes: Any, shown: Outcome) -> None:
    """Output against reference, with the line on which they are equal."""
    title = "output against reference"
    pairs = _pairs(axes, title, shown)
    if not pairs:
        return
    reference, output = zip(*pairs, strict=True)
    low, high = min(reference + output), max(reference + output)
    axes.plot((low, high), (low, high), color=GREY, linewidth=1)
    axes.plot(reference, output, color=INJECTED, linestyle="", marker=".", markersize=3.5, alpha=0.55)
    _linear_axis(axes, "x", low, high)
    _linear_axis(axes, "y", low, high)
    _title(axes, title)


def _linear_axis(axes: Any, which: str, low: float, high: float, *, whole: bool = False) -> None:
    """A margin, and three to six round ticks."""
    span = max(high - low, 1e-6 * abs(high), 1e-300)
    step = 10.0 ** math.floor(math.log10(span))
    step = next(step * part for part in (0.2, 0.5, 1, 2) if span / (step * part) <= 5.5)
    if whole:
        step = max(1.0, step)
    places = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    digits = max(0, -math.floor(math.log10(step)))
    fixed = digits <= 4 and max(abs(low), abs(high)) < 1e5
    labels = [f"{x:.{digits}f}" if fixed else f"{x:.1e}" if x else "0" for x in places]
    getattr(axes, f"set_{which}lim")(low - (0 if whole else 0.05 * span), high + 0.05 * span)
    _ticks(axes, which, places, labels)


def _ticks(axes: Any, which: str, places: Sequence[float], labels: Sequence[str]) -> None:
    """Lines across the panel and text beside it. A tick of matplotlib's own is five objects and a layout."""
    across = {"zorder": 0.5, "color": _GRID, "linewidth": 0.8}
    if which == "x":
        axes.vlines(places, 0, 1, transform=axes.get_xaxis_transform(), **across)
        for place, label in zip(places, labels, strict=True):
            axes.text(place, -0.03, label, transform=axes.get_xaxis_transform(), ha="center", va="top", color=GREY)
    else:
        axes.hlines(places, 0, 1, transform=axes.get_yaxis_transform(), **across)
        for place, label in zip(places, labels, strict=True):
            axes.text(-0.015, place, label, transform=axes.get_yaxis_transform(), ha="right", va="center", color=GREY)


def _pairs(axes: Any, title: str, shown: Outcome) -> list[tuple[float, float]]:
    """Reference and output where both can be drawn; where none can, the panel says why."""
    pairs = list(zip(shown.points.get("reference", ()), shown.points.get("output", ()), strict=False))
    good = [pair for pair in pairs if all(x is not None and abs(x) < _DRAWABLE for x in pair)]
    if not pairs and shown.case.layer == LOGITS:
        _say(axes, title, "no values: of the logits none are kept")
    elif not pairs:
        _say(axes, title, "no values: the case was not measured")
    elif not good:
        _say(axes, title, f"no values: none of {len(pairs)} is finite")
    elif len(good) < len(pairs):
        note = f"{len(pairs) - len(good)} of {len(pairs)} not finite"
        axes.text(0.02, 0.95, note, transform=axes.transAxes, color=FAILED)
    return good


def _say(axes: Any, title: str, why: str) -> None:
    _title(axes, title)
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=GREY, fontsize=9)


def _title(axes: Any, text: str) -> None:
    axes.text(0, 1.035, text, transform=axes.transAxes, fontsize=9)


def _positive(x: float | None) -> float:
    """What a logarithmic axis can show; the rest is a gap."""
    return min(max(x, 1 / _DRAWABLE), _DRAWABLE) if x is not None and math.isfinite(x) and x > 0 else math.nan
