"""The pictures of modes against their reference: error by layer, differences, values, and where the error lies."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.comparisons.modes import ModeComparison
from probe.comparisons.samples import Pairs
from probe.metrics import Metrics
from probe.report.figure import (
    BAD,
    COLOURS,
    DASHES,
    GREY,
    MARKERS,
    layer_axis,
    log_axis,
    panels,
    png,
    say,
    shown_name,
    style,
)
from probe.report.ticks import plain_log_bar

#: A mode whose differences are so many times the median of all modes would make lines of the others on one axis.
_FAR = 50
#: Points of a line on which no other is drawn.
THIN = 1.7


def error_by_layer(comparisons: Sequence[ModeComparison]) -> bytes:
    """mse and 1 - correlation of every mode, on logarithmic axes; a layer without loss has no point."""
    names = list(comparisons[0].layers)
    with style():
        figure, (left, right) = panels(2, height=3.8, across=2)
        for axes, title, figure_of in ((left, "mse by layer", _mse), (right, "1 - correlation by layer", _unlikeness)):
            curves = [[_positive(figure_of(layer.metrics)) for layer in one.layers.values()] for one in comparisons]
            drawn = any(math.isfinite(x) for values in curves for x in values)
            wide = widths(curves)
            for place, (one, values, width) in enumerate(zip(comparisons, curves, wide, strict=True)):
                axes.plot(
                    values,
                    color=COLOURS[place % len(COLOURS)],
                    marker=MARKERS[place % len(MARKERS)],
                    markersize=(4.5 if len(names) <= 32 else 2.5) + width - THIN,
                    linestyle=DASHES[place % len(DASHES)]
                    if max(wide) == THIN
                    else "-",  # gaps would hide the thin in the wide
                    linewidth=width,
                    label=shown_name(one.compared_mode, most=20),
                )
            axes.set_title(title)
            if not drawn:
                say(axes, "nothing to draw: every layer is without loss, or undefined")
                continue
            log_axis(axes)
            layer_axis(axes, names)
        figure.legend(*_handles(left), loc="outside lower center", ncols=8, fontsize=8)
        return png(figure)


def widths(curves: Sequence[Sequence[float]]) -> list[float]:
    """Of the line of each curve, so that where some meet all are seen: the more are drawn on it, the wider it is.

    Two meet if they are within 5 % of one another at some layer.
    """

    def meet(a: Sequence[float], b: Sequence[float]) -> bool:
        return any(abs(x - y) < 0.05 * max(x, y) for x, y in zip(a, b, strict=True))  # NaN meets nothing

    above = [sum(meet(one, later) for later in curves[place + 1 :]) for place, one in enumerate(curves)]
    return [THIN + 2.6 * min(count, 4) for count in above]


def difference_histograms(layer: str, samples: Mapping[str, Pairs], reference: str) -> bytes:
    """mode - reference of a layer, side by side: on one axis, but for modes that are far apart; counts on log axes."""
    found = {mode: pairs.difference for mode, pairs in samples.items()}
    ends = {mode: float(np.quantile(np.abs(d), 0.999)) if len(d) else 0.0 for mode, d in found.items()}
    shared = max(ends.values()) <= _FAR * statistics.median(ends.values())
    with style():
        figure, axes = panels(len(found), sharex=shared, sharey=True, height=2.6)
        for panel, (mode, difference) in zip(axes, found.items(), strict=True):
            largest = max(ends.values()) if shared else ends[mode]
            panel.set_title(f"{shown_name(mode, most=22)} - {shown_name(reference, most=12)}")
            if not len(difference):
                say(panel, "not one value of the sample is finite")
                continue
            if largest == 0:
                say(panel, "every difference is 0")
                continue
            outside = int((np.abs(difference) > largest).sum())
            counts, edges = np.histogram(difference, bins=61, range=(-largest, largest))
            panel.stairs(counts, edges, fill=True, color=COLOURS[0])
            panel.axvline(float(difference.mean()), color=BAD, linewidth=1.2, linestyle=(0, (4, 2)))
            log_axis(panel, counts=True)
            note = f"mean {difference.mean():.1e}\nstd {difference.std():.1e}" + (
                f"\n{outside} beyond" if outside else ""
            )
            panel.text(0.98, 0.97, note, transform=panel.transAxes, ha="right", va="top", fontsize=8, color=GREY)
            panel.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
            panel.locator_params(axis="x", nbins=5)
        figure.supxlabel(f"difference of {shown_name(layer, most=40)}", fontsize=9, color=GREY)
        figure.supylabel("values in the sample", fontsize=9, color=GREY)
        return png(figure)


def value_scatter(layer: str, samples: Mapping[str, Pairs], reference: str) -> bytes:
    """Output against reference as densities, with the line on which they are equal."""
    with style():
        figure, axes = panels(len(samples), height=3.0)
        shown = None
        for panel, (mode, pairs) in zip(axes, samples.items(), strict=True):
            panel.set_title(shown_name(mode, most=30))
            both = np.concatenate([pairs.output, pairs.reference])
            low, high = float(both.min(initial=math.inf)), float(both.max(initial=-math.inf))
            if not len(pairs.output) or low == high:
                say(
                    panel,
                    "not one value of the sample is finite" if not len(pairs.output) else "every value is the same",
                )
                continue
            panel.plot((low, high), (low, high), color=BAD, linewidth=0.8, zorder=3)
            shown = panel.hexbin(
                pairs.reference, pairs.output, gridsize=48, bins="log", mincnt=1, extent=(low, high, low, high),
                cmap="viridis", linewidths=0.1,
            )  # fmt: skip
            panel.locator_params(nbins=5)
        if shown is not None:
            plain_log_bar(figure.colorbar(shown, ax=axes, label="values", shrink=0.85, pad=0.01))
        figure.supxlabel(f"{shown_name(layer, most=40)} of {shown_name(reference, most=12)}", fontsize=9, color=GREY)
        figure.supylabel("of the mode", fontsize=9, color=GREY)
        return png(figure)


def error_maps(layer: str, maps: Mapping[str, npt.NDArray[np.float64]], shape: tuple[int, ...]) -> bytes:
    """mean |difference| by position and feature, all modes on one logarithmic scale of colours; red is not finite."""
    from matplotlib.colors import LogNorm

    drawn = np.concatenate([one[np.isfinite(one) & (one > 0)] for one in maps.values()])
    with style():
        figure, axes = panels(len(maps), sharex=True, sharey=True, height=2.9)
        shown = None
        extent = (0, shape[-1], math.prod(shape[1:-1]) or 1, 0)
        for panel, (mode, values) in zip(axes, maps.items(), strict=True):
            panel.grid(False)
            panel.set_title(shown_name(mode, most=30))
            if not len(drawn):
                say(panel, "every difference is 0" if np.isfinite(values).all() else "no difference is finite")
                continue
            low, high = np.quantile(drawn, (0.001, 1.0))
            colours = _with_bad("magma")
            floor = np.where(values == 0, low / 2, values)
            shown = panel.imshow(
                floor, aspect="auto", extent=extent, cmap=colours, norm=LogNorm(low, max(high, low * 1.001)),
                interpolation="nearest",
            )  # fmt: skip
            panel.locator_params(nbins=5)
        if shown is not None:
            plain_log_bar(figure.colorbar(shown, ax=axes, label="mean |difference|", shrink=0.85, pad=0.01))
        figure.supxlabel(f"feature of {shown_name(layer, most=40)}", fontsize=9, color=GREY)
        figure.supylabel("position", fontsize=9, color=GREY)
        return png(figure)


def _mse(m: Metrics) -> float | None:
    return m.mse


def _unlikeness(m: Metrics) -> float | None:
    return None if m.correlation is None else 1 - m.correlation


def _with_bad(name: str) -> Any:
    import matplotlib

    return matplotlib.colormaps[name].with_extremes(bad=BAD)


def _handles(axes: Any) -> Any:
    return axes.get_legend_handles_labels()


def _positive(value: float | None) -> float:
    """What a logarithmic axis can show; the rest is a gap."""
    return value if value is not None and math.isfinite(value) and value > 0 else math.nan
