"""Pictures with the layers across: magnitudes and boxes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from probe.formats import GATE_FORMATS
from probe.report.activations.drawing import (
    BLUE,
    GREEN,
    GREY,
    MIXED,
    MOST_PANELS,
    ORANGE,
    RED,
    SKY,
    bins,
    drawable,
    families,
    family_sheet,
    layer_axis,
    legend,
    line,
    log_axis,
    mark_below,
    octave_ticks,
    sheet,
    short,
    tail,
)
from probe.report.ticks import plain_log, plain_log_bar

#: Key, label, colour and width; the wide ones lie below, so that curves that meet are all seen.
_CURVES = (
    ("top1", "Top-1", RED, 4.0),
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
    (RED, 1.2),
    (ORANGE, 1.2),
    ("#cc79a7", 1.2),
)
_OF = {None: "|x|", -1: "max |x| of a token", -2: "max |x| of a channel"}
#: Boxes across a panel, above which percentiles are drawn as bands.
MOST_BOXES = 40

Rows = Sequence[Mapping[str, Any]]


def magnitude_picture(rows: Rows, *, reduce_dim: int | None, dpi: int) -> bytes:
    """Top-1/2/3, median and min by layer; a panel for each family of modules."""
    by_name = {row["module"]: row for row in rows}
    groups = families(list(by_name))
    with family_sheet(groups, dpi=dpi) as page:
        for axes, (family, names) in zip(page.panels, groups.items(), strict=True):
            for key, label, colour, width in _CURVES:
                values = [by_name[name][key] for name in names]
                line(axes, values, colour=colour, label=label, width=width, joined=family != MIXED)
            log_axis(axes, [by_name[name][key] for name in names for key, *_ in _CURVES])
            for key, _, colour, _ in _CURVES:
                mark_below(axes, [by_name[name][key] for name in names], colour=colour)
            layer_axis(axes, names)
            axes.set_title(tail(family))
            axes.set_ylabel(_OF[reduce_dim])
        legend(page, page.panels[0])
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
            axes.set_title(tail(family))
            axes.set_ylabel("noise / signal")
        legend(page, page.panels[0])
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
            axes.set_title(tail(family))
            axes.set_ylabel("|x|")
        legend(page, page.panels[0])
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
    for key, label, colour in (("p99.99", "99.99 %", ORANGE), ("max", "max", RED)):
        axes.plot(places, drawable([row[key] for row in rows]), "o", color=colour, markersize=3, label=label)
    axes.plot([], [], "s", color=SKY, markeredgecolor=BLUE, label="25 to 75 %, whiskers 1 to 99 %")


def _bands(axes: Any, rows: Rows) -> None:
    parts = bins(len(rows))
    x = [(part.start + part.stop - 1) / 2 for part in parts]

    def of(key: str, reduce: Any) -> list[float]:
        points = np.nan_to_num(drawable([row[key] for row in rows]), nan=1e-45)
        return [float(reduce(points[part])) for part in parts]

    axes.fill_between(x, of("p1", np.min), of("p99", np.max), color=SKY, alpha=0.35, linewidth=0, label="1 to 99 %")
    axes.fill_between(x, of("p25", np.min), of("p75", np.max), color=BLUE, alpha=0.45, linewidth=0, label="25 to 75 %")
    axes.plot(x, of("p50", np.median), color=BLUE, linewidth=1.2, label="median")
    axes.plot(x, of("p99.99", np.max), color=ORANGE, linewidth=1, label="99.99 %")
    axes.plot(x, of("max", np.max), color=RED, linewidth=1, label="max")


def histogram_picture(rows: Rows, *, dpi: int) -> bytes:
    """|x| in buckets of a quarter of an octave: a panel per tensor, or of many tensors a heat map of shares."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["module"], []).append(row)
    if len(by_name) > MOST_PANELS:
        return _histogram_map(by_name, dpi)
    with sheet(len(by_name), dpi=dpi) as page:
        for axes, (name, some) in zip(page.panels, by_name.items(), strict=True):
            zeros, counted = some[0]["count"], some[1:]
            total = max(1, sum(row["count"] for row in some))
            axes.set_title(tail(name))
            if not counted:
                axes.text(0.5, 0.5, "all values are 0", transform=axes.transAxes, ha="center", color=GREY)
                continue
            ends = [max(row["low"], 2.0**-149) for row in counted] + [counted[-1]["high"]]
            shares = [row["count"] / total for row in counted]
            axes.stairs(shares, ends, fill=True, color=BLUE)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            octave_ticks(axes.xaxis)
            plain_log(axes.yaxis)
            axes.set_xlim(max(ends[0], ends[-1] * 2.0**-30), ends[-1])
            axes.set_ylim(0.5 / total, 1)
            axes.set_ylabel("share")
            axes.set_xlabel(f"|x|, {zeros / total:.2%} zeros" if zeros else "|x|")
        return page.png()


def _histogram_map(by_name: Mapping[str, Sequence[Mapping[str, Any]]], dpi: int) -> bytes:
    """Tensors down, log2 |x| across, the share of a tensor's elements as a colour."""
    names = [name for some in families(list(by_name)).values() for name in some]  # alike side by side
    lows = [row["low"] for some in by_name.values() for row in some[1:] if row["count"]]
    high = int(np.ceil(np.log2(max(row["high"] for some in by_name.values() for row in some[1:])))) if lows else 0
    low = max(int(np.floor(np.log2(max(min(lows, default=1.0), 2.0**-149)))), high - 32)
    shares = np.zeros((len(names), (high - low) * 4))
    for i, name in enumerate(names):
        total = max(1, sum(row["count"] for row in by_name[name]))
        for row in by_name[name][1:]:
            place = round(np.log2(max(row["low"], 2.0**-149)) * 4 - low * 4 - 0.49)
            if 0 <= place < shares.shape[1]:
                shares[i, place] += row["count"] / total
    parts = bins(len(names), 160)
    drawn = np.stack([shares[part].max(0) for part in parts])
    height = min(9.0, 2.0 + 0.16 * len(parts))
    with sheet(1, dpi=dpi, size=(11, height)) as page:
        axes = page.panels[0]
        axes.grid(False)
        image = axes.imshow(
            np.where(drawn > 0, drawn, np.nan),
            aspect="auto",
            cmap="viridis",
            norm="log",
            interpolation="nearest",
            extent=(low, high, len(parts) - 0.5, -0.5),
        )
        bar = page.figure.colorbar(image, ax=axes, label="share of the elements", shrink=0.9)
        plain_log_bar(bar)
        step = -(-len(parts) // 50)
        texts = short(names, most=40)
        axes.set_yticks(range(0, len(parts), step), [texts[parts[i].start] for i in range(0, len(parts), step)])
        axes.set_xlabel("log2 |x|")
        axes.set_title(f"{len(names)} tensors" + (f", {parts[0].stop} in a line" if len(parts) < len(names) else ""))
        return page.png()
