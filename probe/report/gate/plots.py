"""The picture of a recipe: its error by layer against the baseline, and the values of one layer."""

import math
from collections.abc import Sequence
from typing import Any

from probe.gate.cases import Outcome
from probe.report import figure
from probe.report.gate.recipes import Run
from probe.report.numbers import number
from probe.words import LOGITS, PATHS

WIDTH, HEIGHT = 1200, 360  # pixels
#: The colour of the band behind a layer that failed.
BAND = "#f9dfe2"
#: Colours and markers of the two errors of a layer.
CURVES = {"injected.mse": (figure.BLUE, "o"), "propagated.mse": (figure.VERMILION, "s")}
#: The number of colours that a picture needs.
COLOURS = 64


def recipe_picture(outcomes: Sequence[Outcome], shown: Outcome) -> bytes:
    """A PNG of three panels: the mse of every layer of the recipe, and the differences and the values of `shown`.

    The panels have fixed positions: a report has many pictures, and a computed layout takes most of the time.
    """
    places = {"left": 0.045, "right": 0.99, "bottom": 0.13, "top": 0.87, "wspace": 0.2, "width_ratios": (4, 2.2, 2.2)}
    size = (WIDTH / figure.DPI / 3, HEIGHT / figure.DPI)
    with figure.sheet(3, size=size, layout="none", gridspec_kw=places) as page:
        left, middle, right = page.panels
        _errors(left, Run(tuple(outcomes)))
        _differences(middle, shown)
        _values(right, shown)
        return page.png(colours=COLOURS)


def _errors(axes: Any, run: Run) -> None:
    """injected.mse and propagated.mse by layer, with their baselines, on a logarithmic axis."""
    axes.set_title("mse by layer", y=1.02)
    layers = run.layers
    known = [f for outcome in layers for name, f in outcome.figures.items() if name in CURVES]
    drawn = [x for one in known for x in map(figure.positive, (one.old, one.new)) if x > 0]
    if not drawn:
        lossless = any(one.new == 0 for one in known)
        figure.note(axes, "no error: every mse is 0" if lossless else "no mse: no layer was measured")
        return
    across = axes.get_xaxis_transform()
    failing = [place for place, outcome in enumerate(layers) if outcome.status == "failed"]
    if failing:
        bands = [(place - 0.5, 1) for place in failing]
        axes.broken_barh(bands, (0, 1), transform=across, color=BAND, linewidth=0, zorder=0.1, label="failed")
    size, lost = 4.5 if len(layers) <= 24 else 3, []
    for name, (colour, marker) in CURVES.items():
        figures = [outcome.figures.get(name) for outcome in layers]
        old = [figure.positive(one.old if one else None) for one in figures]
        new = [figure.positive(one.new if one else None) for one in figures]
        axes.plot(old, color=colour, linestyle=figure.DASHED, linewidth=1.1, marker="_", markersize=2 * size)
        axes.plot(new, color=colour, linewidth=1.4, marker=marker, markersize=size, label=name.removesuffix(".mse"))
        for place, one in enumerate(figures):
            if one and one.new == 0:
                axes.text(place, 0.02, "0", transform=across, color=colour, ha="center")
        lost += [place for place, one in enumerate(figures) if one and not math.isfinite(one.new or 0)]
    axes.plot([], color=figure.GREY, linestyle=figure.DASHED, linewidth=1.1, label="baseline")
    if lost:
        figure.mark_places(axes, sorted(set(lost)), "x", height=0.05)
        axes.text(min(lost), 0.09, "not finite", transform=across, color=figure.BAD, ha="center")
    figure.layer_axis(axes, [outcome.case.layer for outcome in layers])
    axes.set_xlabel("")
    margin = max(1.5, (max(drawn) / min(drawn)) ** 0.06)  # at least 1.5, so that there is a tick between the limits
    axes.set(yscale="log", ylim=(min(drawn) / margin, max(drawn) * margin))
    figure.log_ticks(axes.yaxis)
    axes.minorticks_off()
    axes.legend(loc="lower right", bbox_to_anchor=(1.02, 0.98), ncols=4, handlelength=1.6, columnspacing=1.2)


def _differences(axes: Any, shown: Outcome) -> None:
    """A histogram of output - reference, with its mean."""
    import numpy as np

    axes.set_title(f"output - reference of {figure.label(shown.case.layer, most=20)}", y=1.02)
    pairs = _pairs(axes, shown)
    if not pairs:
        return
    found = [output - reference for reference, output in pairs]
    if max(found) == min(found):
        figure.note(axes, f"every difference is {number(found[0])} ({len(found)} values)")
        return
    counts, edges = np.histogram(found, bins=min(40, max(8, 2 * round(len(found) ** 0.5))))
    axes.stairs(counts, edges, fill=True, color=figure.BLUE)
    mean = sum(found) / len(found)
    axes.axvline(0, color=figure.GREY, linewidth=1)
    axes.axvline(mean, color=figure.BAD, linewidth=1.2, linestyle=figure.DASHED)
    figure.corner_note(axes, f"mean {mean:.1e}", colour=figure.BAD)
    axes.set_ylim(0, 1.1 * max(counts))
    _few_ticks(axes.xaxis)
    figure.count_ticks(axes.yaxis)


def _values(axes: Any, shown: Outcome) -> None:
    """Output against reference, with the line on which they are equal."""
    axes.set_title("output against reference", y=1.02)
    pairs = _pairs(axes, shown)
    if not pairs:
        return
    reference, output = zip(*pairs, strict=True)
    low, high = min(reference + output), max(reference + output)
    axes.plot((low, high), (low, high), color=figure.GREY, linewidth=1)
    axes.plot(reference, output, color=figure.BLUE, linestyle="", marker=".", markersize=3.5, alpha=0.55)
    _few_ticks(axes.xaxis)
    _few_ticks(axes.yaxis)


def _few_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    form = ScalarFormatter(useMathText=False)
    form.set_powerlimits((-3, 4))
    axis.set_major_formatter(form)


def _pairs(axes: Any, shown: Outcome) -> list[tuple[float, float]]:
    """Reference and output where both can be drawn; if none can, the panel says why."""
    pairs = list(zip(shown.points.get("reference", ()), shown.points.get("output", ()), strict=False))
    good = [pair for pair in pairs if all(x is not None and abs(x) < figure.LARGEST for x in pair)]
    if not pairs and shown.case.layer in (*PATHS, LOGITS) and shown.figures:
        figure.note(axes, f"no values: those of {shown.case.layer} are not kept")
    elif not pairs:
        figure.note(axes, "no values: the case was not measured")
    elif not good:
        figure.note(axes, f"no values: none of {len(pairs)} is finite")
    elif len(good) < len(pairs):
        text = f"{len(pairs) - len(good)} of {len(pairs)} not finite"
        axes.text(0.02, 0.95, text, transform=axes.transAxes, color=figure.BAD)
    return good
