"""Pictures with the channels across: heat maps in two and three dimensions, percentile bands."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.activations.collecting import HeatGrid, pooled
from probe.activations.statistics import BANDS, ChannelBands
from probe.report.activations.drawing import (
    BLUE,
    COLOURS,
    ORANGE,
    RED,
    SKY,
    Sheet,
    Values,
    bins,
    legend,
    sheet,
    styled,
    tail,
)
from probe.report.ticks import plain_log_bar

#: Fields of the surface: more are slow to draw and hide one another.
SURFACE = (64, 96)
_BANDS = ((0, 6, SKY, "0.01 to 99.99 %"), (1, 5, BLUE, "1 to 99 %"), (2, 4, ORANGE, "25 to 75 %"))


def heat_picture(heat: HeatGrid, *, view_angle: tuple[float, float], dpi: int) -> bytes:
    """|x| of one sample by token and channel: a surface, and a map."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(11, 4.2), dpi=dpi)
        page = Sheet(figure, [])
        left: Any = figure.add_axes((0.01, 0.02, 0.42, 0.9), projection="3d")
        coarse = pooled(heat.values, *SURFACE)
        rows = np.linspace(0, heat.tokens - 1, coarse.shape[0])
        columns = np.linspace(0, heat.channels - 1, coarse.shape[1])
        across, down = np.meshgrid(columns, rows)
        if min(coarse.shape) > 1:
            left.plot_surface(
                across, down, coarse, cmap=COLOURS, rcount=SURFACE[0], ccount=SURFACE[1], linewidth=0, antialiased=False
            )
        else:
            left.plot(across.reshape(-1), down.reshape(-1), coarse.reshape(-1), color=BLUE)
        left.view_init(*view_angle)
        left.set_xlabel("channel")
        left.set_ylabel("token")
        left.set_zlabel("|x|")
        right = figure.add_axes((0.5, 0.12, 0.42, 0.78))
        right.grid(False)
        image = right.imshow(
            heat.values,
            aspect="auto",
            cmap=COLOURS,
            norm=_norm(heat.values),
            interpolation="nearest",
            extent=(-0.5, heat.channels - 0.5, heat.tokens - 0.5, -0.5),
        )
        right.set_xlabel("channel")
        right.set_ylabel("token")
        bar = figure.colorbar(image, cax=figure.add_axes((0.935, 0.12, 0.015, 0.78)), label="|x|")
        if bar.ax.get_yscale() == "log":
            plain_log_bar(bar)
        figure.suptitle(f"{tail(heat.module, 80)} {heat.kind}, sample {heat.sample}", x=0.01, ha="left", fontsize=9)
        return page.png()


def band_picture(bands: Sequence[ChannelBands], *, dpi: int) -> bytes:
    """The percentiles of every channel; of many channels, the outermost of neighbours."""
    with sheet(len(bands), dpi=dpi, columns=2, size=(6, 2.4)) as page:
        for axes, band in zip(page.panels, bands, strict=True):
            found = band.percentiles()
            parts = bins(found.shape[1])
            x = [(part.start + part.stop - 1) / 2 for part in parts]
            for low, high, colour, label in _BANDS:
                lower = [found[low, part].min() for part in parts]
                upper = [found[high, part].max() for part in parts]
                axes.fill_between(x, lower, upper, color=colour, linewidth=0, label=label, step="mid")
            axes.plot(
                x,
                [np.median(found[BANDS.index(50.0), part]) for part in parts],
                color=RED,
                linewidth=0.8,
                label="median",
            )
            _outliers_beside_the_rest(axes, found)
            axes.set_xlim(-0.5, found.shape[1] - 0.5)
            axes.set_xlabel("channel" + (f", {parts[0].stop} at a time" if len(parts) < found.shape[1] else ""))
            axes.set_ylabel("x")
            axes.set_title(tail(f"{band.module} {band.kind}", 60))
        legend(page, page.panels[0])
        return page.png()


def _norm(values: npt.NDArray[np.float32]) -> Any:
    """Linear; where a few values would leave all others in the dark, logarithmic over four decades."""
    from matplotlib.colors import LogNorm

    high, usual = float(values.max()), float(np.median(values))
    return LogNorm(max(high * 1e-4, 1e-38), high, clip=True) if high > 50 * usual and high > 1e-30 else None


def _outliers_beside_the_rest(axes: Any, found: Values) -> None:
    """A linear axis; where a channel is far out, linear up to twice what is usual and logarithmic beyond."""
    usual = 2 * float(np.median(np.abs(found[[0, -1]]).max(0)))
    high = float(np.abs(found).max())
    if 0 < 4 * usual < high:
        axes.set_yscale("symlog", linthresh=usual, linscale=1.0)
        powers = [10.0**e for e in range(math.ceil(math.log10(1.5 * usual)), math.floor(math.log10(high)) + 1)]
        some = powers[:: math.ceil(len(powers) / 3)] if powers else [high]
        ticks = [x for x in (*(-x for x in some), 0.0, *some) if found.min() * 2 <= x <= found.max() * 2]
        axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_yticks([], minor=True)
