"""Pictures of an analysis by channel, magnitude, position and token: heat maps, bands, histograms and outliers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.activations.collecting import HeatGrid, pooled
from probe.activations.statistics import BANDS, ChannelBands
from probe.report import figure
from probe.report.activations.layer_plots import families
from probe.words import short_names

#: Rows and columns of the surface: more are slow to draw and hide each other.
SURFACE = (64, 96)
_BANDS = ((0, 6, figure.SKY, "0.01 to 99.99 %"), (1, 5, figure.BLUE, "1 to 99 %"), (2, 4, figure.ORANGE, "25 to 75 %"))
#: Panels of single tensors on a sheet at most.
MOST_PANELS = 12
#: Tokens that are listed by name at most.
MOST_TOKENS = 25
#: Lines and columns of the map of positions at most.
LINES, COLUMNS = 80, 256

Rows = Sequence[Mapping[str, Any]]


def heat_picture(heat: HeatGrid, *, view_angle: tuple[float, float], dpi: int) -> bytes:
    """|x| of one sample by token and channel: a surface, and a map."""
    with figure.sheet(2, columns=2, size=(5.5, 4.2), dpi=dpi) as page:
        left, right = page.panels
        left.remove()
        surface: Any = page.figure.add_subplot(1, 2, 1, projection="3d")
        coarse = pooled(heat.values, *SURFACE)
        rows = np.linspace(0, heat.tokens - 1, coarse.shape[0])
        columns = np.linspace(0, heat.channels - 1, coarse.shape[1])
        across, down = np.meshgrid(columns, rows)
        if min(coarse.shape) > 1:
            counts = {"rcount": SURFACE[0], "ccount": SURFACE[1]}
            surface.plot_surface(across, down, coarse, cmap="viridis", linewidth=0, antialiased=False, **counts)
        else:
            surface.plot(across.reshape(-1), down.reshape(-1), coarse.reshape(-1), color=figure.BLUE)
        surface.view_init(*view_angle)
        surface.set(xlabel="channel", ylabel="token", zlabel="|x|")
        edges = (-0.5, heat.channels - 0.5, heat.tokens - 0.5, -0.5)
        image = figure.shade_map(right, heat.values, norm=_norm(heat.values), extent=edges)
        right.set(xlabel="channel", ylabel="token")
        bar = page.figure.colorbar(image, ax=right, label="|x|")
        if bar.ax.get_yscale() == "log":
            figure.log_ticks(bar.ax.yaxis)
        title = f"{figure.label(heat.module, most=80)} {heat.kind}, sample {heat.sample}"
        page.figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        return page.png()


def band_picture(bands: Sequence[ChannelBands], *, dpi: int) -> bytes:
    """The percentiles of every channel; of many channels, the outermost of neighbours."""
    with figure.sheet(len(bands), dpi=dpi, columns=2, size=(6, 2.4)) as page:
        for axes, band in zip(page.panels, bands, strict=True):
            found = band.percentiles()
            parts = figure.bins(found.shape[1])
            x = figure.middles(parts)
            for low, high, colour, name in _BANDS:
                lower = [found[low, part].min() for part in parts]
                upper = [found[high, part].max() for part in parts]
                axes.fill_between(x, lower, upper, color=colour, linewidth=0, label=name, step="mid")
            medians = [np.median(found[BANDS.index(50.0), part]) for part in parts]
            axes.plot(x, medians, color=figure.VERMILION, linewidth=0.8, label="median")
            _outliers_beside_the_rest(axes, found)
            some = f", {parts[0].stop} at a time" if len(parts) < found.shape[1] else ""
            axes.set(xlim=(-0.5, found.shape[1] - 0.5), xlabel=f"channel{some}", ylabel="x")
            axes.set_title(figure.label(f"{band.module} {band.kind}", most=60))
        page.legend()
        return page.png()


def _norm(values: npt.NDArray[np.float32]) -> Any:
    """A linear scale of colours, or logarithmic over four decades if a few values are far above all others."""
    from matplotlib.colors import LogNorm

    high, usual = float(values.max()), float(np.median(values))
    return LogNorm(max(high * 1e-4, 1e-38), high, clip=True) if high > 50 * usual and high > 1e-30 else None


def _outliers_beside_the_rest(axes: Any, found: figure.Values) -> None:
    """A linear y axis; if a channel is far out, it is logarithmic beyond twice the usual magnitude."""
    usual = 2 * float(np.median(np.abs(found[[0, -1]]).max(0)))
    high = float(np.abs(found).max())
    if 0 < 4 * usual < high:
        axes.set_yscale("symlog", linthresh=usual, linscale=1.0)
        powers = [10.0**e for e in range(math.ceil(math.log10(1.5 * usual)), math.floor(math.log10(high)) + 1)]
        some = powers[:: math.ceil(len(powers) / 3)] if powers else [high]
        ticks = [x for x in (*(-x for x in some), 0.0, *some) if found.min() * 2 <= x <= found.max() * 2]
        axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_yticks([], minor=True)


def histogram_picture(rows: Rows, *, dpi: int) -> bytes:
    """|x| in buckets of a quarter of an octave: a panel per tensor, or of many tensors a heat map of shares."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["module"], []).append(row)
    if len(by_name) > MOST_PANELS:
        return _histogram_map(by_name, dpi)
    with figure.sheet(len(by_name), dpi=dpi) as page:
        for axes, (name, some) in zip(page.panels, by_name.items(), strict=True):
            zeros, counted = some[0]["count"], some[1:]
            total = max(1, sum(row["count"] for row in some))
            axes.set_title(figure.label(name, most=46))
            if not counted:
                axes.text(0.5, 0.5, "all values are 0", transform=axes.transAxes, ha="center", color=figure.GREY)
                continue
            ends = [max(row["low"], 2.0**-149) for row in counted] + [counted[-1]["high"]]
            shares = [row["count"] / total for row in counted]
            axes.stairs(shares, ends, fill=True, color=figure.BLUE)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            octave_ticks(axes.xaxis)
            figure.log_ticks(axes.yaxis)
            axes.set(xlim=(max(ends[0], ends[-1] * 2.0**-30), ends[-1]), ylim=(0.5 / total, 1), ylabel="share")
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
    parts = figure.bins(len(names), 160)
    drawn = np.stack([shares[part].max(0) for part in parts])
    height = min(9.0, 2.0 + 0.16 * len(parts))
    with figure.sheet(1, dpi=dpi, size=(11, height)) as page:
        axes = page.panels[0]
        values, edges = np.where(drawn > 0, drawn, np.nan), (low, high, len(parts) - 0.5, -0.5)
        image = figure.shade_map(axes, values, empty="none", norm="log", extent=edges)
        page.log_colour_bar(image, axes, label="share of the elements", shrink=0.9)
        _name_lines(axes, short_names(names, most=40), parts, most=50)
        some = f", {parts[0].stop} in a line" if len(parts) < len(names) else ""
        axes.set(xlabel="log2 |x|", title=f"{len(names)} tensors{some}")
        return page.png()


def _name_lines(axes: Any, names: Sequence[str], parts: Sequence[slice], *, most: int) -> None:
    """The y ticks of a map whose lines are bins of names: the first name of at most `most` lines, evenly spaced."""
    step = math.ceil(len(parts) / most)
    axes.set_yticks(range(0, len(parts), step), [names[part.start] for part in parts[::step]])


def octave_ticks(axis: Any) -> None:
    """A few ticks at powers of 2, in plain text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axis.set_major_locator(LogLocator(base=2, numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"2^{math.log2(x):.0f}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def position_picture(rows: Rows, *, layers: Sequence[str], length: int, dpi: int) -> bytes:
    """Outliers by position, over all layers and layer by layer."""
    places = {name: i for i, name in enumerate(layers)}
    counts = np.zeros((len(layers), length), np.int64)
    for row in rows:
        counts[places[row["module"]], row["position"]] += row["outliers"]
    across, down = figure.bins(length, COLUMNS), figure.bins(len(layers), LINES)
    with figure.sheet(2, dpi=dpi, columns=1, size=(11, 1.9 + min(2.4, 0.06 * len(down)))) as page:
        upper, lower = page.panels
        by_place = [int(counts[:, part].sum()) for part in across]
        ends = [part.start - 0.5 for part in across] + [length - 0.5]
        upper.stairs(by_place, ends, fill=True, color=figure.VERMILION)
        some = f", {across[0].stop} positions in a column" if across[0].stop > 1 else ""
        upper.set(xlim=(-0.5, length - 0.5), ylim=(0, max(1.0, 1.1 * max(by_place))))
        upper.set_title(f"outliers by position, all layers{some}")
        figure.count_ticks(upper.yaxis)
        grid = np.stack([np.stack([counts[d, a].sum() for a in across]) for d in down])
        values, edges = np.where(grid > 0, grid, np.nan), (-0.5, length - 0.5, len(down) - 0.5, -0.5)
        scale = {"vmin": 0, "vmax": max(2, int(grid.max()))}
        image = figure.shade_map(lower, values, colours="viridis_r", empty="none", extent=edges, **scale)
        bar = page.figure.colorbar(image, ax=lower, label="outliers", shrink=0.9)
        figure.count_ticks(bar.ax.yaxis)
        _name_lines(lower, short_names(layers, most=24), down, most=16)
        some = f", {down[0].stop} layers in a line" if down[0].stop > 1 else ""
        lower.set(xlabel="position in the sample", title=f"layer by layer{some}")
        return page.png()


def token_picture(rows: Rows, *, dpi: int) -> bytes:
    """Bars of the tokens that are outliers most often."""
    bars = [(token_label(row), row["outliers"], figure.VERMILION) for row in rows[:MOST_TOKENS]]
    if rest := rows[MOST_TOKENS:]:
        bars.append((f"{len(rest)} others", sum(row["outliers"] for row in rest), figure.GREY))
    labels, counts, colours = zip(*bars, strict=True)
    with figure.sheet(1, dpi=dpi, size=(11, 0.8 + 0.19 * len(labels))) as page:
        axes = page.panels[0]
        axes.barh(range(len(labels)), counts, color=colours, height=0.75)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set(xlim=(0, 1.12 * max(counts)), title="outliers by token, all layers")
        figure.count_ticks(axes.xaxis)
        for place, count in enumerate(counts):
            axes.text(count, place, f" {count}", va="center", color=figure.GREY)
        return page.png()


def token_label(row: Mapping[str, Any]) -> str:
    """'the' (262): the text of a token as Python writes it, and its id; or the id alone."""
    text = row["text"]
    if text is None:
        return f"id {row['token']}"
    shown = ascii(text) if any(ord(c) > 0x24F for c in text) else repr(text)
    return f"{shown[:24]} ({row['token']})"
