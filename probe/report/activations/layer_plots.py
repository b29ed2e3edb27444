"""Pictures of an analysis with the layers across: magnitudes, predicted noise, boxes, and outlier tokens."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from probe.formats import GATE_FORMATS
from probe.report.figure import (
    BLUE,
    GREEN,
    GREY,
    MOST_MARKS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Sheet,
    bins,
    count_ticks,
    label,
    layer_axis,
    layer_axis_height,
    line,
    log_axis,
    mark_below,
    middles,
    positives,
    sheet,
    sheet_width,
)

#: Key, label, colour and width; the wide ones lie below, so that curves that meet are all seen.
_CURVES = (
    ("top1", "Top-1", VERMILION, 4.0),
    ("top2", "Top-2", ORANGE, 2.4),
    ("top3", "Top-3", GREEN, 1.0),
    ("median", "median", BLUE, 1.3),
    ("min", "min", GREY, 1.0),
)
#: Colour and width by format. Of two with equal mantissas the curves meet: the first is wide, so that both are seen.
_FORMAT_STYLES = (
    (GREY, 3.5),
    (BLUE, 3.5),
    (SKY, 3.5),
    (GREEN, 1.2),
    ("#a6761d", 1.2),
    (VERMILION, 1.2),
    (ORANGE, 1.2),
    (PURPLE, 1.2),
)
_OF = {None: "|x|", -1: "max |x| of a token", -2: "max |x| of a channel"}
#: Boxes across a panel, above which percentiles are drawn as bands.
MOST_BOXES = 40

#: Panels of families of modules on a sheet; of more, all layers share one.
MOST_FAMILIES = 24
#: Title of a panel of modules that are no family.
MIXED = "all layers"
#: Inches of the narrowest sheet: a legend has to fit.
NARROWEST = 8.0

Rows = Sequence[Mapping[str, Any]]


@contextmanager
def family_sheet(groups: Mapping[str, Sequence[str]], *, dpi: int) -> Iterator[Sheet]:
    """A panel for each family, high enough for the names of its layers and the plot above them."""
    across = min(3, len(groups))
    width = sheet_width(across, 3, 4.0, NARROWEST) / across
    room = max(layer_axis_height(names, width) for names in groups.values())
    with sheet(len(groups), dpi=dpi, size=(4.0, 2.6 + room), narrowest=NARROWEST) as page:
        yield page


def families(names: Sequence[str]) -> dict[str, list[str]]:
    """Modules that differ in parts that are numbers, `layers.#.mlp.fc1`; too many, or all of one module: MIXED."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(".".join("#" if part.isdecimal() else part for part in name.split(".")), []).append(name)
    if len(found) > MOST_FAMILIES or (len(found) > 3 and max(map(len, found.values())) == 1):
        return {MIXED: list(names)}
    return found


def magnitude_picture(rows: Rows, *, reduce_dim: int | None, dpi: int) -> bytes:
    """Top-1/2/3, median and min by layer; a panel for each family of modules."""
    by_name = {row["module"]: row for row in rows}
    groups = families(list(by_name))
    with family_sheet(groups, dpi=dpi) as page:
        for axes, (family, names) in zip(page.panels, groups.items(), strict=True):
            for key, name, colour, width in _CURVES:
                values = [by_name[name][key] for name in names]
                line(axes, values, colour=colour, label=name, width=width, joined=family != MIXED)
            log_axis(axes, [by_name[name][key] for name in names for key, *_ in _CURVES])
            for key, _, colour, _ in _CURVES:
                mark_below(axes, [by_name[name][key] for name in names], colour=colour)
            layer_axis(axes, names)
            axes.set_title(label(family, most=34))
            axes.set_ylabel(_OF[reduce_dim])
        page.legend()
        return page.png()


def noise_picture(rows: Rows, *, dpi: int) -> bytes:
    """Predicted noise / signal by layer, a line for each format; a panel for each family of modules."""
    by_name = {row["module"]: row for row in rows}
    groups = families(list(by_name))
    keys = [key for key in rows[0] if key.startswith("noise ")]
    styles = dict(zip(GATE_FORMATS, _FORMAT_STYLES, strict=True))
    with family_sheet(groups, dpi=dpi) as page:
        for axes, (family, names) in zip(page.panels, groups.items(), strict=True):
            for key in keys:
                format = key.removeprefix("noise ")
                colour, width = styles[format]
                values = [by_name[name][key] for name in names]
                line(axes, values, colour=colour, label=format, width=width, joined=family != MIXED)
            log_axis(axes, [by_name[name][key] for name in names for key in keys])
            layer_axis(axes, names)
            axes.set_title(label(family, most=34))
            axes.set_ylabel("noise / signal")
        page.legend()
        return page.png()


def box_picture(rows: Rows, *, dpi: int) -> bytes:
    """|x| by layer: box 25 to 75 %, whiskers 1 to 99 %, points 99.99 % and max; bands where there are many layers."""
    by_name = {row["module"]: row for row in rows}
    groups = families(list(by_name))
    with family_sheet(groups, dpi=dpi) as page:
        for axes, (family, names) in zip(page.panels, groups.items(), strict=True):
            some = [by_name[name] for name in names]
            (_boxes if len(names) <= MOST_BOXES else _bands)(axes, some)
            log_axis(axes, [row[key] for row in some for key in ("p1", "p25", "p50", "p99", "p99.99", "max")])
            layer_axis(axes, names)
            axes.set_title(label(family, most=34))
            axes.set_ylabel("|x|")
        page.legend()
        return page.png()


def _boxes(axes: Any, rows: Rows) -> None:
    stats = [
        {"whislo": row["p1"], "q1": row["p25"], "med": row["p50"], "q3": row["p75"], "whishi": row["p99"], "fliers": []}
        for row in rows
    ]
    style = {"boxprops": {"facecolor": SKY, "edgecolor": BLUE}, "medianprops": {"color": BLUE}}
    lines = {"whiskerprops": {"color": BLUE}, "capprops": {"color": BLUE}}
    places = list(range(len(rows)))
    axes.bxp(
        stats, positions=places, widths=0.6, patch_artist=True, showfliers=False, manage_ticks=False, **style, **lines
    )
    for key, name, colour in (("p99.99", "99.99 %", ORANGE), ("max", "max", VERMILION)):
        axes.plot(places, positives([row[key] for row in rows]), "o", color=colour, markersize=3, label=name)
    axes.plot([], [], "s", color=SKY, markeredgecolor=BLUE, label="25 to 75 %, whiskers 1 to 99 %")


def _bands(axes: Any, rows: Rows) -> None:
    parts = bins(len(rows))
    x = middles(parts)

    def of(key: str, reduce: Any) -> list[float]:
        points = np.nan_to_num(positives([row[key] for row in rows]), nan=1e-45)
        return [float(reduce(points[part])) for part in parts]

    axes.fill_between(x, of("p1", np.min), of("p99", np.max), color=SKY, alpha=0.35, linewidth=0, label="1 to 99 %")
    axes.fill_between(x, of("p25", np.min), of("p75", np.max), color=BLUE, alpha=0.45, linewidth=0, label="25 to 75 %")
    axes.plot(x, of("p50", np.median), color=BLUE, linewidth=1.2, label="median")
    axes.plot(x, of("p99.99", np.max), color=ORANGE, linewidth=1, label="99.99 %")
    axes.plot(x, of("max", np.max), color=VERMILION, linewidth=1, label="max")


def outlier_picture(rows: Rows, *, threshold: float, dpi: int) -> bytes:
    """How many outliers each layer has, if there are any, and how far out the farthest token is."""
    names = [row["module"] for row in rows]
    parts = bins(len(rows))
    any_outlier = any(row["outliers"] for row in rows)
    width = 5.5 if any_outlier else 11.0
    with sheet(1 + any_outlier, dpi=dpi, columns=2, size=(width, 2.8 + layer_axis_height(names, width))) as page:
        if any_outlier:
            _counts(page.panels[0], rows, parts)
        _ratios(page.panels[-1], rows, parts, threshold)
        for axes in page.panels:
            layer_axis(axes, names)
        return page.png()


def _counts(axes: Any, rows: Rows, parts: Sequence[slice]) -> None:
    counts = np.array([row["outliers"] for row in rows])
    heights = [int(counts[part].max()) for part in parts]
    if len(parts) <= 60:
        axes.bar(middles(parts), heights, width=0.8, color=VERMILION)
    else:
        axes.stairs(heights, [part.start - 0.5 for part in parts] + [len(rows) - 0.5], fill=True, color=VERMILION)
    axes.set_ylim(0, 1.1 * max(heights))
    count_ticks(axes.yaxis)
    gathered = f", the most of {parts[0].stop} layers" if len(parts) < len(rows) else ""
    axes.set_title(f"outlier tokens{gathered}: {sum(counts)} of {sum(row['tokens'] for row in rows)}")


def _ratios(axes: Any, rows: Rows, parts: Sequence[slice], threshold: float) -> None:
    ratios = [row["largest_ratio"] for row in rows]
    tops = [max((r for r in ratios[part] if math.isfinite(r)), default=math.nan) for part in parts]
    marks: dict[str, Any] = {"marker": "o", "markersize": 3} if len(parts) <= MOST_MARKS else {}
    x = middles(parts)
    axes.plot(x, positives(tops), color=BLUE, linewidth=1.3, **marks)
    axes.axhline(threshold, color=VERMILION, linewidth=1, linestyle="--")
    axes.text(
        0.01,
        threshold,
        f"threshold {threshold:g}",
        transform=axes.get_yaxis_transform(),
        color=VERMILION,
        va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
    )
    log_axis(axes, [*tops, threshold])
    axes.set_title("largest max |x| of a token / median of its sample")
