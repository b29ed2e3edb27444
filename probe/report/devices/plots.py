"""The pictures of two devices: the error by layer, and the values of one tensor on both."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from probe.comparisons.devices.diff import DeviceComparison
from probe.comparisons.samples import DrawnTensor
from probe.report import figure

#: Points of the scatter at most.
MOST_DOTS = 4000


def error_picture(found: DeviceComparison) -> bytes:
    """Differences by layer with their limits; and what each layer adds, with the noise bound."""
    with figure.sheet(2, columns=2, size=(6.25, 3.8)) as page:
        left, right = page.panels
        limits = {"max abs": found.limits.max_abs, "mean abs": found.limits.mean_abs}
        left.set_title("|B - A| by layer")
        differences = {
            "max abs": [layer.max_abs for layer in found.layers],
            "mean abs": [layer.mean_abs for layer in found.layers],
        }
        if _curves(left, differences):
            for colour, (name, limit) in zip(figure.COLOURS, limits.items(), strict=False):
                if limit > 0:
                    left.axhline(limit, color=colour, linestyle=figure.DASHED, linewidth=1)
                    _limit_note(left, limit, f"limit of {name}", colour)
            _finish(left, found)
        added: dict[str, list[float | None]] = {"added": [layer.added for layer in found.layers]}
        if found.reference is not None:
            added["recipe's own error"] = [layer.recipe_error for layer in found.layers]
        right.set_title("difference in what the layer adds, relative to it")
        if _curves(right, added):
            noise = figure.positives([layer.noise for layer in found.layers])
            places = range(len(noise))
            right.fill_between(places, 0, noise, color=figure.GREY, alpha=0.15, linewidth=0, label="noise bound")
            right.plot(places, noise, color=figure.GREY, linewidth=1)
            _finish(right, found)
        return page.png()


def value_picture(drawn: DrawnTensor) -> bytes:
    """One tensor: histogram of B - A, B against A, and where the difference lies."""
    with figure.sheet(3, size=(12.5 / 3, 3.6)) as page:
        left, middle, right = page.panels
        left.set_title(f"B - A of {figure.label(drawn.label, most=28)}")
        middle.set_title("B against A")
        right.set_title("mean |B - A| by token and channel")
        pairs, found = drawn.pairs, drawn.differences
        if not len(pairs.output):
            for axes in (left, middle):
                figure.note(axes, "not one value of the sample is finite on both")
        else:
            if found is None:
                figure.note(left, "every difference is 0")
            else:
                left.axvline(0, color=figure.GREY, linewidth=1)
                figure.histogram(left, found.counts, found.edges, mean=found.mean)
                beyond = f"\n{found.beyond} beyond" if found.beyond else ""
                figure.corner_note(left, f"mean {found.mean:.1e}\nrms {found.rms:.1e}{beyond}")
            low, high = (float(end([pairs.output, pairs.reference])) for end in (np.min, np.max))
            middle.plot((low, high), (low, high), color=figure.GREY, linewidth=1)
            some = slice(None, None, max(1, len(pairs.output) // MOST_DOTS))
            middle.plot(pairs.reference[some], pairs.output[some], ".", color=figure.BLUE, markersize=3, alpha=0.5)
            middle.set_xlabel("A")
            middle.set_ylabel("B")
        finite = bool(np.isfinite(drawn.errors).all())
        if drawn.scale is None:
            figure.note(right, "every difference is 0" if finite else "no difference is finite")
            return page.png()
        shown = figure.log_shade_map(right, drawn.errors, drawn.scale, drawn.shape)
        figure.log_colour_ticks(page.figure.colorbar(shown, ax=right, shrink=0.9, pad=0.02))
        right.set_xlabel("channel")
        right.set_ylabel("token")
        if not finite:
            right.set_title("mean |B - A|; red: not finite")
        return page.png()


def _curves(axes: Any, values: Mapping[str, Sequence[float | None]]) -> bool:
    """Every figure by layer on a logarithmic axis; zeros have no point. False, and a note, if there is nothing."""
    drawn = {name: figure.positives(some) for name, some in values.items()}
    if not any(np.isfinite(some).any() for some in drawn.values()):
        same = all(x == 0 for some in values.values() for x in some)
        figure.note(axes, "no difference at all" if same else "nothing finite")
        return False
    for place, (name, some) in enumerate(drawn.items()):
        axes.plot(some, color=figure.COLOURS[place], marker="os"[place % 2], markersize=4.5, linewidth=1.3, label=name)
    figure.log_axis(axes)
    return True


def _finish(axes: Any, found: DeviceComparison) -> None:
    """Mark where the fault began and what is finite on one device only; name the layers."""
    labels = [layer.label for layer in found.layers]
    where = found.verdict.layer
    if where is not None and where in labels and found.verdict.kind != "dtype noise":
        place = labels.index(where)
        axes.axvspan(place - 0.5, place + 0.5, color=figure.BAD, alpha=0.12, linewidth=0, label=found.verdict.kind)
    lost = [place for place, layer in enumerate(found.layers) if layer.lost]
    if lost:
        across = axes.get_xaxis_transform()
        axes.plot(lost, [0.04] * len(lost), "x", color=figure.BAD, transform=across, label="finite on one only")
    figure.layer_axis(axes, labels)
    axes.legend(loc="best")


def _limit_note(axes: Any, height: float, text: str, colour: str) -> None:
    axes.annotate(
        text, (1, height), xycoords=("axes fraction", "data"), xytext=(-2, 2), textcoords="offset points",
        ha="right", va="bottom", fontsize=7.5, color=colour,
    )  # fmt: skip
