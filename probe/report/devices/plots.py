"""The pictures of two devices: the error by layer, and the values of one tensor on both."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from probe.comparisons.devices.diff import DeviceComparison
from probe.comparisons.samples import error_map, sample_pairs
from probe.comparisons.selection import Side
from probe.report.figure import (
    BAD,
    COLOURS,
    GREY,
    layer_axis,
    log_axis,
    panels,
    png,
    say,
    shown_name,
    style,
)  # fmt: skip
from probe.report.ticks import plain_log_bar

_DASHED = (0, (4, 2))


def error_picture(found: DeviceComparison) -> bytes:
    """Differences by layer with their limits; and what each layer adds, with what noise may reach."""
    labels = [layer.label for layer in found.layers]
    with style():
        figure, (left, right) = panels(2, height=3.8, across=2)
        limits = {"max abs": found.limits.max_abs, "mean abs": found.limits.mean_abs}
        values = {
            "max abs": [layer.max_abs for layer in found.layers],
            "mean abs": [layer.mean_abs for layer in found.layers],
        }
        left.set_title("|B - A| by layer")
        if _curves(left, values):
            for place, (name, limit) in enumerate(limits.items()):
                if limit > 0:
                    left.axhline(limit, color=COLOURS[place], linestyle=_DASHED, linewidth=1)
                    _note(left, limit, f"limit of {name}", COLOURS[place])
            _finish(left, labels, found)
        added: dict[str, list[float | None]] = {"added": [layer.added for layer in found.layers]}
        if found.reference is not None:
            added["recipe's own error"] = [layer.recipe_error for layer in found.layers]
        right.set_title("difference in what the layer adds, relative to it")
        if _curves(right, added):
            noise = [_positive(layer.noise) for layer in found.layers]
            places = range(len(noise))
            right.fill_between(places, 0, noise, color=GREY, alpha=0.15, linewidth=0, label="noise may reach")
            right.plot(places, noise, color=GREY, linewidth=1)
            _finish(right, labels, found)
        return png(figure)


def value_picture(found: DeviceComparison, a: Side, b: Side, label: str) -> bytes:
    """One tensor: histogram of B - A, B against A, and where the difference lies."""
    from matplotlib.colors import LogNorm

    pairs = sample_pairs(label, b, a)
    with style():
        figure, (left, middle, right) = panels(3, height=3.6, across=3)
        left.set_title(f"B - A of {shown_name(label, most=28)}")
        middle.set_title("B against A")
        right.set_title("mean |B - A| by token and channel")
        if not len(pairs.output):
            for axes in (left, middle):
                say(axes, "not one value of the sample is finite on both")
        else:
            _histogram(left, pairs.difference)
            low, high = (float(end([pairs.output, pairs.reference])) for end in (np.min, np.max))
            middle.plot((low, high), (low, high), color=GREY, linewidth=1)
            some = slice(None, None, max(1, len(pairs.output) // 4000))
            middle.plot(pairs.reference[some], pairs.output[some], ".", color=COLOURS[0], markersize=3, alpha=0.5)
            middle.set_xlabel("A")
            middle.set_ylabel("B")
        where = error_map(label, b, a)
        drawn = where[np.isfinite(where) & (where > 0)]
        right.grid(False)
        if not len(drawn):
            say(right, "every difference is 0" if np.isfinite(where).all() else "no difference is finite")
        else:
            low, high = (float(end) for end in np.quantile(drawn, (0.001, 1.0)))
            shape = a.shape(label)
            shown = right.imshow(
                np.where(where == 0, low / 2, where),  # below the scale, not off it
                aspect="auto",
                interpolation="nearest",
                norm=LogNorm(low, max(high, low * 1.001)),
                cmap=_palette(),
                extent=(0, shape[-1], math.prod(shape[1:-1]) or shape[0], 0),
            )
            plain_log_bar(figure.colorbar(shown, ax=right, shrink=0.9, pad=0.02))
            right.set_xlabel("channel")
            right.set_ylabel("token")
            if not np.isfinite(where).all():
                right.set_title("mean |B - A|; red: not finite")
        return png(figure)


def _palette() -> Any:
    """What is not finite is red."""
    import matplotlib

    return matplotlib.colormaps["viridis"].with_extremes(bad=BAD)


def _curves(axes: Any, values: dict[str, list[float | None]]) -> bool:
    """Every figure by layer on a logarithmic axis; zeros have no point. False, and words, if there is nothing."""
    drawn = {name: [_positive(x) for x in some] for name, some in values.items()}
    if not any(math.isfinite(x) for some in drawn.values() for x in some):
        say(axes, "no difference at all" if all(x == 0 for some in values.values() for x in some) else "nothing finite")
        return False
    for place, (name, some) in enumerate(drawn.items()):
        axes.plot(some, color=COLOURS[place], marker="os"[place % 2], markersize=4.5, linewidth=1.3, label=name)
    log_axis(axes)
    return True


def _finish(axes: Any, labels: Sequence[str], found: DeviceComparison) -> None:
    where = found.verdict.layer
    if where is not None and where in labels and found.verdict.kind != "dtype noise":
        place = list(labels).index(where)
        axes.axvspan(place - 0.5, place + 0.5, color=BAD, alpha=0.12, linewidth=0, label=found.verdict.kind)
    lost = [place for place, layer in enumerate(found.layers) if layer.lost]
    if lost:
        heights = [0.04] * len(lost)
        across = axes.get_xaxis_transform()
        axes.plot(lost, heights, "x", color=BAD, transform=across, label="finite on one only")
    layer_axis(axes, labels)
    axes.legend(loc="best", fontsize=8)


def _note(axes: Any, height: float, text: str, colour: str) -> None:
    axes.annotate(
        text, (1, height), xycoords=("axes fraction", "data"), xytext=(-2, 2), textcoords="offset points",
        ha="right", va="bottom", fontsize=7.5, color=colour,
    )  # fmt: skip


def _histogram(axes: Any, difference: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> None:
    if not np.abs(difference).max():
        say(axes, "every difference is 0")
        return
    reach = float(np.quantile(np.abs(difference), 0.999)) or float(np.abs(difference).max())
    counts, edges = np.histogram(difference, bins=61, range=(-reach, reach))
    axes.stairs(counts, edges, fill=True, color=COLOURS[0])
    axes.axvline(0, color=GREY, linewidth=1)
    axes.axvline(float(difference.mean()), color=BAD, linewidth=1.2, linestyle=_DASHED)
    log_axis(axes, counts=True)
    beyond = int((np.abs(difference) > reach).sum())
    note = f"mean {difference.mean():.1e}\nrms {np.sqrt(np.square(difference).mean()):.1e}"
    note += f"\n{beyond} beyond" if beyond else ""
    axes.text(0.98, 0.97, note, transform=axes.transAxes, ha="right", va="top", fontsize=8, color=GREY)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
    axes.locator_params(axis="x", nbins=5)


def _positive(x: float | None) -> float:
    """What a logarithmic axis can show; the rest is a gap."""
    return x if x is not None and math.isfinite(x) and x > 0 else math.nan
