"""Pictures of outlier tokens: by layer, by position, by what they are."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from probe.report.activations.drawing import (
    BLUE,
    GREY,
    MOST_MARKS,
    RED,
    bins,
    count_ticks,
    drawable,
    label_height,
    layer_axis,
    log_axis,
    sheet,
    short,
)

#: Tokens that are listed by name.
MOST_TOKENS = 25
#: Lines and columns of the map of positions.
LINES, COLUMNS = 80, 256

Rows = Sequence[Mapping[str, Any]]


def layer_picture(rows: Rows, *, threshold: float, dpi: int) -> bytes:
    """How many outliers each layer has, if there are any, and how far out the farthest token is."""
    names = [row["module"] for row in rows]
    parts = bins(len(rows))
    any_outlier = any(row["outliers"] for row in rows)
    width = 5.5 if any_outlier else 11.0
    with sheet(1 + any_outlier, dpi=dpi, columns=2, size=(width, 2.8 + label_height(names, width))) as page:
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
        axes.bar([(part.start + part.stop - 1) / 2 for part in parts], heights, width=0.8, color=RED)
    else:
        axes.stairs(heights, [part.start - 0.5 for part in parts] + [len(rows) - 0.5], fill=True, color=RED)
    axes.set_ylim(0, 1.1 * max(heights))
    count_ticks(axes.yaxis)
    gathered = f", the most of {parts[0].stop} layers" if len(parts) < len(rows) else ""
    axes.set_title(f"outlier tokens{gathered}: {sum(counts)} of {sum(row['tokens'] for row in rows)}")


def _ratios(axes: Any, rows: Rows, parts: Sequence[slice], threshold: float) -> None:
    ratios = [row["largest_ratio"] for row in rows]
    tops = [max((r for r in ratios[part] if math.isfinite(r)), default=math.nan) for part in parts]
    marks: dict[str, Any] = {"marker": "o", "markersize": 3} if len(parts) <= MOST_MARKS else {}
    x = [(part.start + part.stop - 1) / 2 for part in parts]
    axes.plot(x, drawable(tops), color=BLUE, linewidth=1.3, **marks)
    axes.axhline(threshold, color=RED, linewidth=1, linestyle="--")
    axes.text(
        0.01,
        threshold,
        f"threshold {threshold:g}",
        transform=axes.get_yaxis_transform(),
        color=RED,
        va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
    )
    log_axis(axes, [*tops, threshold])
    axes.set_title("largest max |x| of a token / median of its sample")


def position_picture(rows: Rows, layers: Sequence[str], *, length: int, dpi: int) -> bytes:
    """Outliers by position, over all layers and layer by layer."""
    places = {name: i for i, name in enumerate(layers)}
    counts = np.zeros((len(layers), length), np.int64)
    for row in rows:
        counts[places[row["module"]], row["position"]] += row["outliers"]
    across, down = bins(length, COLUMNS), bins(len(layers), LINES)
    with sheet(2, dpi=dpi, columns=1, size=(11, 1.9 + min(2.4, 0.06 * len(down)))) as page:
        upper, lower = page.panels
        by_place = [int(counts[:, part].sum()) for part in across]
        ends = [part.start - 0.5 for part in across] + [length - 0.5]
        upper.stairs(by_place, ends, fill=True, color=RED)
        upper.set_xlim(-0.5, length - 0.5)
        upper.set_ylim(0, max(1.0, 1.1 * max(by_place)))
        count_ticks(upper.yaxis)
        width = across[0].stop
        upper.set_title("outliers by position, all layers" + (f", {width} positions in a column" if width > 1 else ""))
        grid = np.stack([np.stack([counts[d, a].sum() for a in across]) for d in down])
        lower.grid(False)
        image = lower.imshow(
            np.where(grid > 0, grid, np.nan),
            aspect="auto",
            cmap="viridis_r",
            interpolation="nearest",
            extent=(-0.5, length - 0.5, len(down) - 0.5, -0.5),
            vmin=0,
            vmax=max(2, int(grid.max())),
        )
        bar = page.figure.colorbar(image, ax=lower, label="outliers", shrink=0.9)
        count_ticks(bar.ax.yaxis)
        texts, step = short(layers), -(-len(down) // 16)
        lower.set_yticks(range(0, len(down), step), [texts[down[i].start] for i in range(0, len(down), step)])
        lower.set_xlabel("position in the sample")
        lower.set_title("layer by layer" + (f", {down[0].stop} layers in a line" if down[0].stop > 1 else ""))
        return page.png()


def token_picture(rows: Rows, *, dpi: int) -> bytes:
    """The tokens that are outliers most often."""
    shown = list(rows[:MOST_TOKENS])
    rest = sum(row["outliers"] for row in rows[MOST_TOKENS:])
    labels = [token_label(row) for row in shown]
    counts = [row["outliers"] for row in shown]
    if rest:
        labels.append(f"{len(rows) - MOST_TOKENS} others")
        counts.append(rest)
    with sheet(1, dpi=dpi, size=(11, 0.8 + 0.19 * len(labels))) as page:
        axes = page.panels[0]
        colours = [RED] * len(shown) + [GREY] * (len(labels) - len(shown))
        axes.barh(range(len(labels)), counts, color=colours, height=0.75)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(counts))
        count_ticks(axes.xaxis)
        for place, count in enumerate(counts):
            axes.text(count, place, f" {count}", va="center", color=GREY)
        axes.set_title("outliers by token, all layers")
        return page.png()


def token_label(row: Mapping[str, Any]) -> str:
    """'the' (262), its text as Python writes it, or the id alone."""
    text = row["text"]
    if text is None:
        return f"id {row['token']}"
    shown = ascii(text) if any(ord(c) > 0x24F for c in text) else repr(text)
    return f"{shown[:24]} ({row['token']})"
