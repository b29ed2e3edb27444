"""The picture of a failing case, or of a recipe: now beside the baseline.

layers, embedding, norm, head, logits   mse by layer, old and new; output - reference; output - golden values
paths                                   difference from the prefill by layer, old and new; by token

A panel without data is left out. The panels have fixed positions: a report has many pictures, and a computed layout
takes most of the time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probe.gate.cases import Figure, Outcome
from probe.report import figure
from probe.report.gate.elements import Element, elements
from probe.report.gate.recipes import Run, is_layer
from probe.report.numbers import number
from probe.words import OUTSIDE, PATHS, WHOLE

#: Pixels: the height of a picture, the width of a panel of layers and of any other one; the room around and between.
HEIGHT, FIRST, OTHER = 360, 540, 330
LEFT, RIGHT, BOTTOM, TOP, BETWEEN = 54, 12, 50, 46, 62
#: The colour of the band behind a layer that failed.
BAND = "#f9dfe2"
#: The number of colours that a picture needs.
COLOURS = 64

#: Values of a histogram beyond so many times the 90th percentile are counted, not drawn.
FAR = 5

Draw = Callable[[Any], None]


@dataclass(frozen=True)
class Panel:
    """How to draw a panel, and how many pixels wide it is."""

    draw: Draw
    width: int = OTHER


@dataclass(frozen=True)
class Curve:
    """A figure by layer."""

    label: str
    colour: str
    marker: str
    figures: list[Figure | None]

    def values(self, side: str) -> list[float]:
        """The old or the new figures; NaN, a gap, where a logarithmic axis has no place for one."""
        return [figure.positive(getattr(one, side) if one else None) for one in self.figures]


@dataclass(frozen=True)
class Marks:
    """The places of layers that are marked."""

    failed: Sequence[int] = ()
    not_finite: Sequence[int] = ()


def recipe_picture(outcomes: Sequence[Outcome], shown: Outcome) -> bytes | None:
    """A PNG of what is known of `shown`, one of the outcomes of a recipe; None where nothing was measured."""
    panels = _panels(Run(tuple(outcomes)), shown)
    if not panels:
        return None
    widths = [panel.width for panel in panels]
    width, count = sum(widths), len(panels)
    inside = width - LEFT - RIGHT - BETWEEN * (count - 1)
    places = {
        "left": LEFT / width,
        "right": 1 - RIGHT / width,
        "bottom": BOTTOM / HEIGHT,
        "top": 1 - TOP / HEIGHT,
        "wspace": BETWEEN * count / inside,
        "width_ratios": widths,
    }
    size = (width / figure.DPI / count, HEIGHT / figure.DPI)
    with figure.sheet(count, size=size, narrowest=0, layout="none", gridspec_kw=places) as page:
        for axes, panel in zip(page.panels, panels, strict=True):
            panel.draw(axes)
        return page.png(colours=COLOURS)


def _panels(run: Run, shown: Outcome) -> list[Panel]:
    """The panels that have something to show, by kind of case."""
    if shown.case.layer in PATHS and not is_layer(shown):
        return [*_path_by_layer(shown), *_by_token(shown)]
    return [*_mse_by_layer(run, shown), *_of_values(shown)]


def _mse_by_layer(run: Run, shown: Outcome) -> list[Panel]:
    """injected.mse and propagated.mse of every layer; of a case beside them, its own mse after the last layer."""
    beside = shown.case.layer in (*OUTSIDE, *WHOLE) and not is_layer(shown)
    cases = [*run.layers, *[shown] * beside]
    curves = [
        Curve(name.removesuffix(".mse"), colour, marker, [one.figures.get(name) for one in cases])
        for name, colour, marker in (
            ("injected.mse", figure.BLUE, "o"),
            ("propagated.mse", figure.VERMILION, "s"),
        )
    ]
    if beside:
        own = next(
            (shown.figures[name] for name in ("outside.mse", "logits.mse", "output.mse") if name in shown.figures), None
        )
        curves.append(Curve(shown.case.layer, figure.GREEN, "D", [*[None] * len(run.layers), own]))
    marks = Marks(
        failed=[place for place, one in enumerate(cases) if one.status == "failed"],
        not_finite=[place for place, one in enumerate(cases) if one.verdict == "not finite"],
    )
    names = [one.case.layer for one in cases]
    return _by_layer("mse" if beside else "mse by layer", "", names, curves, marks, "no error: every mse is 0")


def _path_by_layer(shown: Outcome) -> list[Panel]:
    """Of a path: relation to the prefill and distance from the baseline, by layer."""
    parts = [name.partition(".") for name in shown.figures]
    names = list(dict.fromkeys(layer for kind, _, layer in parts if kind in ("relation", "distance")))
    curves = [
        Curve(label, colour, marker, [shown.figures.get(f"{kind}.{layer}") for layer in names])
        for kind, label, colour, marker in (
            ("relation", "from prefill", figure.BLUE, "o"),
            ("distance", "from baseline", figure.VERMILION, "s"),
        )
    ]
    rows = list(enumerate(zip(*(curve.figures for curve in curves), strict=True)))
    marks = Marks(failed=[place for place, both in rows if any(one and one.moved for one in both)])
    below = "difference in units of the layer's own error"
    return _by_layer(f"{shown.case.layer} by layer", below, names, curves, marks, "no difference: every figure is 0")


def _by_layer(
    title: str, below: str, names: Sequence[str], curves: Sequence[Curve], marks: Marks, zeros: str
) -> list[Panel]:
    """Figures of every layer, with their baselines, on a logarithmic axis; nothing if none is known."""
    known = [one for curve in curves for one in curve.figures if one]
    if not known:
        return []

    def draw(axes: Any) -> None:
        axes.set_title(title, y=1.02)
        drawn = [x for one in known for x in map(figure.positive, (one.old, one.new)) if x > 0]
        lost = {n for curve in curves for n, one in enumerate(curve.figures) if one and not math.isfinite(one.new or 0)}
        lost |= set(marks.not_finite)
        if not drawn:
            figure.note(axes, "not finite" if lost else zeros)
            return
        across = axes.get_xaxis_transform()
        if marks.failed:
            bands = [(place - 0.5, 1) for place in marks.failed]
            axes.broken_barh(bands, (0, 1), transform=across, color=BAND, linewidth=0, zorder=0.1, label="failed")
        for row, curve in enumerate(curves):
            _draw_curve(axes, curve, 4.5 if len(names) <= 24 else 3, row)
        if any(one.old for one in known):
            axes.plot([], color=figure.GREY, linestyle=figure.DASHED, linewidth=1.1, label="baseline")
        if lost:
            figure.mark_places(axes, sorted(lost), "x", height=0.05)
            axes.text(min(lost), 0.09, "not finite", transform=across, color=figure.BAD, ha="center")
        figure.layer_axis(axes, names)
        axes.set_xlabel(below)
        margin = max(1.5, (max(drawn) / min(drawn)) ** 0.06)  # at least 1.5, so that there is a tick between the limits
        room = margin * (3 if lost or _has_zeros(curves) else 1)
        axes.set(yscale="log", ylim=(min(drawn) / room, max(drawn) * margin))
        figure.log_ticks(axes.yaxis)
        axes.minorticks_off()
        place = {"loc": "lower right", "bbox_to_anchor": (1.02, 0.98)}
        axes.legend(ncols=5, handlelength=1.4, handletextpad=0.5, columnspacing=0.9, **place)

    return [Panel(draw, FIRST)]


def _has_zeros(curves: Sequence[Curve]) -> bool:
    return any(one.new == 0 for curve in curves for one in curve.figures if one)


def _draw_curve(axes: Any, curve: Curve, size: float, row: int) -> None:
    """Solid now and dashed in the baseline; a 0, which a logarithmic axis has no place for, in a row at the bottom."""
    style: Mapping[str, Any] = {"color": curve.colour, "linewidth": 1.1, "linestyle": figure.DASHED}
    axes.plot(curve.values("old"), marker="_", markersize=2 * size, **style)
    new = curve.values("new")
    axes.plot(new, color=curve.colour, linewidth=1.4, marker=curve.marker, markersize=size, label=curve.label)
    across = axes.get_xaxis_transform()
    for place, one in enumerate(curve.figures):
        if one and one.new == 0:
            axes.text(place, 0.02 + 0.055 * row, "0", transform=across, color=curve.colour, ha="center")


def _by_token(shown: Outcome) -> list[Panel]:
    """Of a failing path: the difference of every token from the prefill, of the layers that moved."""
    profile = shown.profile
    curves = {label: figure.positives(values) for label, values in profile.relations.items()}
    drawn = [float(x) for values in curves.values() for x in values if x > 0]
    if not drawn:
        return []

    def draw(axes: Any) -> None:
        axes.set_title("difference from the prefill by token", y=1.02)
        figure.log_axis(axes, drawn, floor=1e-8)
        bottom = axes.get_ylim()[0]
        for (label, values), colour in zip(curves.items(), figure.COLOURS, strict=False):
            text = figure.label(label, most=16)
            axes.plot(profile.tokens, values, color=colour, linewidth=1.2, marker=".", markersize=3, label=text)
            agree = [token for token, x in zip(profile.tokens, profile.relations[label], strict=True) if x == 0]
            axes.plot(agree, [bottom] * len(agree), "v", color=colour, markersize=3, clip_on=False)
        axes.minorticks_off()
        axes.set_xlim(min(profile.tokens) - 0.5, max(profile.tokens) + 0.5)
        figure.count_ticks(axes.xaxis)
        zeros = any(x == 0 for values in profile.relations.values() for x in values)
        axes.set_xlabel("token (triangles: no difference)" if zeros else "token")
        axes.legend(loc="best", handlelength=1.2)

    return [Panel(draw)]


def _of_values(shown: Outcome) -> list[Panel]:
    """The panels of single elements; none where all are as in the float model, which the table of elements says."""
    found = [one for one in elements(shown) if _can_be_drawn(one.reference, one.output)]
    golden = [one for one in found if one.golden is not None and _can_be_drawn(one.golden)]
    if not found or len({one.error for one in found}) == 1:
        return []
    moved = any(one.change for one in golden)
    return [_differences(shown, found, golden), _changes(shown, golden) if moved else _values(found)]


def _can_be_drawn(*values: float) -> bool:
    return all(abs(x) < figure.LARGEST for x in values)  # False for NaN


def _differences(shown: Outcome, found: Sequence[Element], golden: Sequence[Element]) -> Panel:
    """A histogram of output - reference with its mean; below it, the same differences of the baseline's sample."""

    def draw(axes: Any) -> None:
        axes.set_title(f"output - reference of {figure.label(shown.case.layer, most=20)}", y=1.02)
        errors = [one.error for one in found]
        _histogram(axes, errors)
        mean = sum(errors) / len(errors)
        axes.axvline(mean, color=figure.BAD, linewidth=1.2, linestyle=figure.DASHED)
        label = f"mean {mean:.1e}"
        if golden:
            low, high = axes.get_xlim()
            before = [(one.golden or 0.0) - one.reference for one in golden]
            before = [x for x in before if low <= x <= high]
            across = axes.get_xaxis_transform()
            style = {"color": figure.VERMILION, "marker": "|", "markersize": 9, "linestyle": "", "clip_on": False}
            axes.plot(before, [0.03] * len(before), transform=across, **style)
            label += f"; marks: {len(before)} of the baseline"
        axes.set_xlabel(label)
        _note_lost(axes, shown, len(found))

    return Panel(draw)


def _changes(shown: Outcome, golden: Sequence[Element]) -> Panel:
    """A histogram of output - golden values, with their rms beside the recipe's own error."""

    def draw(axes: Any) -> None:
        axes.set_title(f"output - golden values of {figure.label(shown.case.layer, most=20)}", y=1.02)
        changes = [one.change or 0.0 for one in golden]
        _histogram(axes, changes, all_values=True)
        rms = math.sqrt(sum(x * x for x in changes) / len(changes))
        own = shown.figures.get("injected.mse")
        of_recipe = f"; own error {math.sqrt(own.old):.1e}" if own and own.old is not None and own.old > 0 else ""
        axes.set_xlabel(f"{len(changes)} values: rms {rms:.1e}{of_recipe}")

    return Panel(draw)


def _values(found: Sequence[Element]) -> Panel:
    """Output against reference, with the line on which they are equal."""

    def draw(axes: Any) -> None:
        axes.set_title("output against reference", y=1.02)
        reference, output = zip(*((one.reference, one.output) for one in found), strict=True)
        low, high = min(reference + output), max(reference + output)
        axes.plot((low, high), (low, high), color=figure.GREY, linewidth=1)
        axes.plot(reference, output, color=figure.BLUE, linestyle="", marker=".", markersize=3.5, alpha=0.55)
        axes.set_xlabel(f"{len(found)} sampled values")
        _few_ticks(axes.xaxis)
        _few_ticks(axes.yaxis)

    return Panel(draw)


def _histogram(axes: Any, values: Sequence[float], *, all_values: bool = False) -> None:
    """A histogram that includes 0; unless of all values, those beyond FAR times the 90th percentile are counted."""
    import numpy as np

    sizes = sorted(map(abs, values))
    far = sizes[-1] if all_values else FAR * sizes[int(0.9 * (len(sizes) - 1))] or sizes[-1]
    near = [x for x in values if abs(x) <= far]
    ends = min(0.0, *near), max(0.0, *near)  # equal differences have a bar beside 0, not one of no width
    counts, edges = np.histogram(near, bins=min(40, max(8, 2 * round(len(near) ** 0.5))), range=ends)
    axes.stairs(counts, edges, fill=True, color=figure.BLUE)
    axes.axvline(0, color=figure.GREY, linewidth=1)
    axes.set_ylim(0, 1.1 * max(counts))
    if len(near) < len(values):
        largest = max((x for x in values if abs(x) > far), key=abs)
        figure.corner_note(axes, f"{len(values) - len(near)} beyond, up to {largest:.1e}")
    _few_ticks(axes.xaxis)
    figure.count_ticks(axes.yaxis)


def _note_lost(axes: Any, shown: Outcome, drawn: int) -> None:
    count = len(shown.points.output)
    if drawn < count:
        text = f"{number(count - drawn)} of {number(count)} not finite"
        axes.text(0.02, 0.95, text, transform=axes.transAxes, color=figure.BAD)


def _few_ticks(axis: Any) -> None:
    """At most five ticks, each a whole number of its own: a factor at the end of an axis would be in the way."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(lambda value, _: f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e"))
