"""Pictures of an analysis by layer: magnitudes, predicted noise, box plots, and outlier tokens."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from probe.formats import GATE_FORMATS
from probe.report import figure

#: One colour more than the palette of the style has.
BROWN = "#a6761d"

Rows = Sequence[Mapping[str, Any]]
#: The key of the values in their rows, the label, the colour and the width.
Curve = tuple[str, str, str, float]

#: The wide curves are drawn first, so that curves that meet can all be seen.
MAGNITUDES: tuple[Curve, ...] = (
    ("top1", "Top-1", figure.VERMILION, 4.0),
    ("top2", "Top-2", figure.ORANGE, 2.4),
    ("top3", "Top-3", figure.GREEN, 1.0),
    ("median", "median", figure.BLUE, 1.3),
    ("min", "min", figure.GREY, 1.0),
)
#: Colour and width by format. The curves of formats with equal mantissas meet: the first is wide, so both are seen.
FORMAT_STYLES = (
    *((figure.GREY, 3.5), (figure.BLUE, 3.5), (figure.SKY, 3.5)),
    *((figure.GREEN, 1.2), (BROWN, 1.2), (figure.VERMILION, 1.2), (figure.ORANGE, 1.2), (figure.PURPLE, 1.2)),
)
#: The label of the magnitudes by the axis that is reduced.
UNITS = {None: "|x|", -1: "max |x| of a token", -2: "max |x| of a channel"}
#: Boxes in a panel at most; with more layers, percentiles are drawn as bands.
MOST_BOXES = 40
#: Families of modules with a panel each; if there are more, all layers share one panel.
MOST_FAMILIES = 24
#: The title of a panel with modules of several families.
MIXED = "all layers"
#: The width of the narrowest sheet in inches: the legend has to fit.
NARROWEST = 8.0


@contextmanager
def family_sheet(groups: Mapping[str, Sequence[str]], *, dpi: int) -> Iterator[figure.Sheet]:
    """A sheet with a panel for each family, high enough for the names of its layers."""
    across = min(3, len(groups))
    width = figure.sheet_width(across, 3, 4.0, NARROWEST) / across
    room = max(figure.layer_axis_height(names, width) for names in groups.values())
    with figure.sheet(len(groups), dpi=dpi, size=(4.0, 2.6 + room), narrowest=NARROWEST) as page:
        yield page


def families(names: Sequence[str]) -> dict[str, list[str]]:
    """Modules by name without numbers, `layers.#.mlp.fc1`; all are MIXED if there are too many or tiny groups."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(".".join("#" if part.isdecimal() else part for part in name.split(".")), []).append(name)
    if len(found) > MOST_FAMILIES or (len(found) > 3 and max(map(len, found.values())) == 1):
        return {MIXED: list(names)}
    return found


def _family_picture(rows: Rows, draw: Callable[[Any, Rows, bool], None], *, unit: str, dpi: int) -> bytes:
    """A panel for each family of modules; `draw` gets the axes, the rows, and whether they are one family."""
    by_name = {row["module"]: row for row in rows}
    groups = families(list(by_name))
    with family_sheet(groups, dpi=dpi) as page:
        for axes, (family, names) in zip(page.panels, groups.items(), strict=True):
            draw(axes, [by_name[name] for name in names], family != MIXED)
            figure.layer_axis(axes, names)
            axes.set(title=figure.label(family, most=46), ylabel=unit)
        page.legend()
        return page.png()


def _draw_curves(axes: Any, rows: Rows, joined: bool, curves: Sequence[Curve]) -> None:
    for key, name, colour, width in curves:
        figure.line(axes, [row[key] for row in rows], colour=colour, label=name, width=width, joined=joined)
    figure.log_axis(axes, [row[key] for row in rows for key, *_ in curves])
    for key, _, colour, _ in curves:
        figure.mark_below(axes, [row[key] for row in rows], colour=colour)


def magnitude_picture(rows: Rows, *, reduce_dim: int | None, dpi: int) -> bytes:
    """Top-1/2/3, median and min by layer; a panel for each family of modules."""
    return _family_picture(rows, partial(_draw_curves, curves=MAGNITUDES), unit=UNITS[reduce_dim], dpi=dpi)


def noise_picture(rows: Rows, *, dpi: int) -> bytes:
    """Predicted noise / signal by layer, a line for each format; a panel for each family of modules."""
    styles = dict(zip(GATE_FORMATS, FORMAT_STYLES, strict=True))
    formats = [key.removeprefix("noise ") for key in rows[0] if key.startswith("noise ")]
    curves = [(f"noise {format}", format, *styles[format]) for format in formats]
    return _family_picture(rows, partial(_draw_curves, curves=curves), unit="noise / signal", dpi=dpi)


def box_picture(rows: Rows, *, dpi: int) -> bytes:
    """|x| by layer: box 25 to 75 %, whiskers 1 to 99 %, points 99.99 % and max; bands where there are many layers."""
    return _family_picture(rows, _draw_boxes, unit="|x|", dpi=dpi)


def _draw_boxes(axes: Any, rows: Rows, _: bool) -> None:
    (_boxes if len(rows) <= MOST_BOXES else _bands)(axes, rows)
    figure.log_axis(axes, [row[key] for row in rows for key in ("p1", "p25", "p50", "p99", "p99.99", "max")])


def _boxes(axes: Any, rows: Rows) -> None:
    stats = [
        {"whislo": row["p1"], "q1": row["p25"], "med": row["p50"], "q3": row["p75"], "whishi": row["p99"], "fliers": []}
        for row in rows
    ]
    style = {"boxprops": {"facecolor": figure.SKY, "edgecolor": figure.BLUE}, "medianprops": {"color": figure.BLUE}}
    lines = {"whiskerprops": {"color": figure.BLUE}, "capprops": {"color": figure.BLUE}}
    places = list(range(len(rows)))
    options = {"patch_artist": True, "showfliers": False, "manage_ticks": False}
    axes.bxp(stats, positions=places, widths=0.6, **options, **style, **lines)
    for key, name, colour in (("p99.99", "99.99 %", figure.ORANGE), ("max", "max", figure.VERMILION)):
        axes.plot(places, figure.positives([row[key] for row in rows]), "o", color=colour, markersize=3, label=name)
    axes.plot([], [], "s", color=figure.SKY, markeredgecolor=figure.BLUE, label="25 to 75 %, whiskers 1 to 99 %")


def _bands(axes: Any, rows: Rows) -> None:
    parts = figure.bins(len(rows))
    x = figure.middles(parts)

    def of(key: str, reduce: Any) -> list[float]:
        points = np.nan_to_num(figure.positives([row[key] for row in rows]), nan=1e-45)
        return [float(reduce(points[part])) for part in parts]

    for low, high, colour, alpha in (("1", "99", figure.SKY, 0.35), ("25", "75", figure.BLUE, 0.45)):
        band = (of(f"p{low}", np.min), of(f"p{high}", np.max))
        axes.fill_between(x, *band, color=colour, alpha=alpha, linewidth=0, label=f"{low} to {high} %")
    axes.plot(x, of("p50", np.median), color=figure.BLUE, linewidth=1.2, label="median")
    axes.plot(x, of("p99.99", np.max), color=figure.ORANGE, linewidth=1, label="99.99 %")
    axes.plot(x, of("max", np.max), color=figure.VERMILION, linewidth=1, label="max")


def outlier_picture(rows: Rows, *, threshold: float, dpi: int) -> bytes:
    """The number of outliers of each layer, if there are any, and the ratio of the farthest token."""
    names = [row["module"] for row in rows]
    parts = figure.bins(len(rows))
    any_outlier = any(row["outliers"] for row in rows)
    width = 5.5 if any_outlier else 11.0
    height = 2.8 + figure.layer_axis_height(names, width)
    with figure.sheet(1 + any_outlier, dpi=dpi, columns=2, size=(width, height)) as page:
        if any_outlier:
            _counts(page.panels[0], rows, parts)
        _ratios(page.panels[-1], rows, parts, threshold)
        for axes in page.panels:
            figure.layer_axis(axes, names)
        return page.png()


def _counts(axes: Any, rows: Rows, parts: Sequence[slice]) -> None:
    counts = np.array([row["outliers"] for row in rows])
    heights = [int(counts[part].max()) for part in parts]
    if len(parts) <= 60:
        axes.bar(figure.middles(parts), heights, width=0.8, color=figure.VERMILION)
    else:
        edges = [part.start - 0.5 for part in parts] + [len(rows) - 0.5]
        axes.stairs(heights, edges, fill=True, color=figure.VERMILION)
    axes.set_ylim(0, 1.1 * max(heights))
    figure.count_ticks(axes.yaxis)
    gathered = f", the most of {parts[0].stop} layers" if len(parts) < len(rows) else ""
    axes.set_title(f"outlier tokens{gathered}: {sum(counts)} of {sum(row['tokens'] for row in rows)}")


def _ratios(axes: Any, rows: Rows, parts: Sequence[slice], threshold: float) -> None:
    ratios = [row["largest_ratio"] for row in rows]
    tops = [max((r for r in ratios[part] if math.isfinite(r)), default=math.nan) for part in parts]
    marks: dict[str, Any] = {"marker": "o", "markersize": 3} if len(parts) <= figure.MOST_MARKS else {}
    x = figure.middles(parts)
    axes.plot(x, figure.positives(tops), color=figure.BLUE, linewidth=1.3, **marks)
    axes.axhline(threshold, color=figure.VERMILION, linewidth=1, linestyle="--")
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
    place = {"transform": axes.get_yaxis_transform(), "va": "bottom"}
    axes.text(0.01, threshold, f"threshold {threshold:g}", color=figure.VERMILION, bbox=behind, **place)
    figure.log_axis(axes, [*tops, threshold])
    axes.set_title("largest max |x| of a token / median of its sample")
