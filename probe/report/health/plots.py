"""The pictures of health: how layers change, and what one layer holds."""

import math
from typing import Any

import numpy as np

from probe.comparisons.health import Health, LayerHealth
from probe.comparisons.samples import first_features, first_values, histogram
from probe.comparisons.selection import Side
from probe.report.figure import BAD, COLOURS, GREY, layer_axis, log_axis, panels, png, say, shown_name, style

VALUES, FEATURES = 1000, 100


def health_by_layer(health: Health) -> bytes:
    """Mean and spread of every tensor; how far adjacent layers differ, with what is usual."""
    layers = health.layers
    with style():
        figure, (left, right) = panels(2, height=3.8, across=2)
        left.set_title("mean, and one standard deviation around it")
        means = np.array([math.nan if layer.mean is None else layer.mean for layer in layers])
        spreads = np.array([math.nan if layer.std is None else layer.std for layer in layers])
        left.fill_between(
            range(len(layers)), means - spreads, means + spreads, color=COLOURS[0], alpha=0.18, linewidth=0
        )
        left.plot(means, color=COLOURS[0], marker="o", markersize=4 if len(layers) <= 32 else 2.5, linewidth=1.3)
        _mark(left, layers)
        layer_axis(left, [layer.name for layer in layers])
        right.set_title("change from the layer before")
        changes = [_positive(layer.mean_change) for layer in layers]
        if not any(map(math.isfinite, changes)):
            say(right, "no two adjacent layers of one shape were recorded")
            return png(figure)
        right.plot(changes, color=COLOURS[0], marker="o", markersize=4, linewidth=1.3, label="mean |change|")
        most = [_positive(layer.max_change) for layer in layers]
        right.plot(most, color=COLOURS[1], marker="s", markersize=4, linewidth=1.3, label="max |change|")
        if health.median_change:
            usual = health.factor * health.median_change
            right.axhline(usual, color=GREY, linestyle=(0, (4, 2)), label=f"{health.factor:g} x median of the mean")
        log_axis(right)
        right.legend(fontsize=8, loc="best")
        _mark(right, layers)
        layer_axis(right, [layer.name for layer in layers])
        return png(figure)


def layer_picture(side: Side, layer: LayerHealth) -> bytes:
    """A layer by itself: a histogram of all values, the first 1000, and a map of the first 100 features."""
    name = shown_name(layer.name, most=30)
    with style():
        figure, axes = panels(3, height=4.2, across=3, width=15)
        _histogram(axes[0], side, layer, name)
        _first_values(axes[1], side, layer)
        _features(figure, axes[2], side, layer)
        return png(figure)


def _histogram(axes: Any, side: Side, layer: LayerHealth, name: str) -> None:
    axes.set_title(f"{name} output distribution")
    if layer.min is None or layer.max is None:
        say(axes, "not one value is finite")
        return
    counts, edges = histogram(layer.name, side, layer.min, layer.max)
    axes.stairs(counts, edges, fill=True, color=COLOURS[0])
    log_axis(axes, counts=True)
    axes.set_xlabel("value")
    axes.set_ylabel("frequency")
    if layer.nan or layer.inf:
        note = f"left out: {layer.nan} NaN, {layer.inf} Inf"
        axes.text(0.98, 0.98, note, transform=axes.transAxes, ha="right", va="top", color=BAD)


def _first_values(axes: Any, side: Side, layer: LayerHealth) -> None:
    values = first_values(layer.name, side, VALUES)
    lost = np.flatnonzero(~np.isfinite(values))
    axes.set_title(f"first {len(values)} values")
    axes.plot(np.where(np.isfinite(values), values, np.nan), color=COLOURS[0], linewidth=0.7)
    if len(lost):
        axes.plot(lost, [0.02] * len(lost), "|", color=BAD, transform=axes.get_xaxis_transform(), label="not finite")
        axes.legend(fontsize=8)
    axes.set_xlabel("index")
    axes.set_ylabel("value")


def _features(figure: Any, axes: Any, side: Side, layer: LayerHealth) -> None:
    import matplotlib

    values = first_features(layer.name, side, FEATURES)
    good = values[np.isfinite(values)]
    axes.set_title(f"first {values.shape[1]} features of the first sample")
    if not len(good):
        say(axes, "not one value is finite")
        return
    low, high = np.quantile(good, (0.005, 0.995))
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=BAD)
    masked = np.ma.masked_invalid(values)
    shown = axes.imshow(
        masked, aspect="auto", cmap=colours, interpolation="nearest", vmin=low, vmax=max(high, low + 1e-12)
    )
    axes.grid(False)
    axes.set_xlabel("feature" + ("  (red: not finite)" if len(good) < values.size else ""))
    axes.set_ylabel("position")
    figure.colorbar(shown, ax=axes, extend="both")


def _mark(axes: Any, layers: tuple[LayerHealth, ...]) -> None:
    """A band behind every suspicious layer."""
    for place, layer in enumerate(layers):
        if layer.problems:
            axes.axvspan(place - 0.5, place + 0.5, color=BAD, alpha=0.15, linewidth=0)


def _positive(value: float | None) -> float:
    return value if value is not None and value > 0 else math.nan
