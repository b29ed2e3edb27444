"""The report of `probe check`: the health of a recipe as text, as pictures and as a page."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from probe.comparisons.health import Health, LayerHealth
from probe.comparisons.samples import DrawnLayer
from probe.files.atomic import write
from probe.files.paths import safe_name
from probe.report import figure
from probe.report.document import Document
from probe.words import printable


def health_text(health: Health) -> str:
    """A line for every tensor with its mark, its problems below it, and the first suspicious layer at the end."""
    width = max(len(layer.name) for layer in health.layers)
    lines = [printable(f"Mode {health.mode} of {health.recording}"), ""]
    for layer in health.layers:
        facts = [f"Mean={_number(layer.mean)}", f"Std={_number(layer.std)}"]
        if layer.mean_change is not None:
            facts += [f"Change={_number(layer.mean_change)}", f"(max {_number(layer.max_change).strip()})"]
        lines.append(printable(f"{layer.mark} {layer.name:<{width}}  {'  '.join(facts)}".rstrip()))
        lines += [printable(f"    {problem}") for problem in layer.problems]
    if health.first is None:
        return "\n".join([*lines, "", f"✓ All {len(health.layers)} outputs look normal"])
    count = len(health.suspicious)
    layers = "1 layer looks" if count == 1 else f"{count} layers look"
    return "\n".join([*lines, "", f"{health.first.mark} {layers} wrong. The first is {printable(health.first.name)}."])


def _number(value: float | None) -> str:
    if value is None:
        return "    none"
    return f"{value:8.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:8.2e}"


def write_health_page(folder: Path | str, checked: Sequence[Health], firsts: Sequence[DrawnLayer | None]) -> Path:
    """Write check.html: every recipe, with the values of its first suspicious layer."""
    notes = "; ".join(dict.fromkeys(note for health in checked for note in health.notes))
    page = Document("Health of a recording", checked[0].recording + (f". {notes}." if notes else ""))
    for health, drawn in zip(checked, firsts, strict=True):
        page.heading(f"Mode {health.mode}")
        page.text(_verdict(health))
        page.picture(health_by_layer(health), alt=f"mean and change of every layer of {health.mode}")
        if health.first and drawn:
            picture = layer_picture(health.first, drawn)
            page.picture(picture, alt=f"the values of {health.first.name}", caption=f"The first: {health.first.name}")
        page.table([_row(layer) for layer in health.layers], bad=[bool(layer.problems) for layer in health.layers])
    return page.write(Path(folder) / "check.html")


def write_layer_picture(folder: Path | str, layer: LayerHealth, drawn: DrawnLayer) -> Path:
    """Write the picture of a layer, such as layer_30_analysis.png."""
    return write(Path(folder) / f"{safe_name(layer.name)}_analysis.png", layer_picture(layer, drawn))


def _verdict(health: Health) -> str:
    if health.first is None:
        return f"{len(health.layers)} outputs look normal."
    count = f"{len(health.suspicious)} of {len(health.layers)} look wrong."
    return f"{count} The first is {health.first.name}: {'; '.join(health.first.problems)}"


def _row(layer: LayerHealth) -> dict[str, object]:
    figures = {name: getattr(layer, name) for name in ("mean", "std", "min", "max")}
    counts = {"NaN": layer.nan, "Inf": layer.inf}
    changes = {"mean |change|": layer.mean_change, "max |change|": layer.max_change}
    return {"": layer.mark, "layer": layer.name, **figures, **counts, **changes, "problem": "; ".join(layer.problems)}


def health_by_layer(health: Health) -> bytes:
    """Mean and spread of every tensor; and the change between adjacent layers, with the limit of what is usual."""
    layers = health.layers
    names, suspicious = [layer.name for layer in layers], [i for i, layer in enumerate(layers) if layer.problems]
    with figure.sheet(2, columns=2, size=(6.25, 3.8)) as page:
        left, right = page.panels
        left.set_title("mean, and one standard deviation around it")
        means, spreads = np.array([(layer.mean, layer.std) for layer in layers], np.float64).T  # None becomes NaN
        band = (means - spreads, means + spreads)
        left.fill_between(range(len(layers)), *band, color=figure.BLUE, alpha=0.18, linewidth=0)
        left.plot(means, color=figure.BLUE, marker="o", markersize=4 if len(layers) <= 32 else 2.5, linewidth=1.3)
        figure.shade_layers(left, suspicious, colour=figure.BAD, alpha=0.15)
        figure.layer_axis(left, names)
        right.set_title("change from the layer before")
        changes = figure.positives([layer.mean_change for layer in layers])
        if not np.isfinite(changes).any():
            figure.note(right, "no two adjacent layers of one shape were recorded")
            return page.png()
        right.plot(changes, color=figure.BLUE, marker="o", markersize=4, linewidth=1.3, label="mean |change|")
        most = figure.positives([layer.max_change for layer in layers])
        right.plot(most, color=figure.VERMILION, marker="s", markersize=4, linewidth=1.3, label="max |change|")
        if health.median_change:
            limit, name = health.factor * health.median_change, f"{health.factor:g} x median of the mean"
            right.axhline(limit, color=figure.GREY, linestyle=figure.DASHED, label=name)
        figure.log_axis(right)
        right.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none")
        figure.shade_layers(right, suspicious, colour=figure.BAD, alpha=0.15)
        figure.layer_axis(right, names)
        return page.png()


def layer_picture(layer: LayerHealth, drawn: DrawnLayer) -> bytes:
    """One layer: a histogram of all values, the first values, and a map of the first features."""
    with figure.sheet(3, size=(5, 4.2)) as page:
        left, middle, right = page.panels
        left.set_title(f"{figure.label(layer.name, most=30)} output distribution")
        if layer.min is None:
            figure.note(left, "no value is finite")
        else:
            figure.histogram(left, drawn.counts, drawn.edges)
            left.set(xlabel="value", ylabel="frequency")
            if layer.nan or layer.inf:
                figure.corner_note(left, f"left out: {layer.nan} NaN, {layer.inf} Inf", colour=figure.BAD)
        middle.set(title=f"first {len(drawn.first_values)} values", xlabel="index", ylabel="value")
        finite = np.isfinite(drawn.first_values)
        middle.plot(np.where(finite, drawn.first_values, np.nan), color=figure.BLUE, linewidth=0.7)
        if not finite.all():
            figure.mark_places(middle, np.flatnonzero(~finite).tolist(), "|", height=0.02, label="not finite")
            middle.legend()
        right.set_title(f"first {drawn.features.shape[1]} features of the first sample")
        if drawn.feature_scale is None:
            figure.note(right, "no value is finite")
            return page.png()
        low, high = drawn.feature_scale
        shown = figure.shade_map(right, np.ma.masked_invalid(drawn.features), vmin=low, vmax=high)
        lost = "" if np.isfinite(drawn.features).all() else "  (red: not finite)"
        right.set(xlabel=f"feature{lost}", ylabel="position")
        page.figure.colorbar(shown, ax=right, extend="both")
        return page.png()
