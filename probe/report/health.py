"""The report of `probe check`: the health of a recipe as text, as pictures and as a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from probe.comparisons.health import EXPLOSION, LARGEST, PEAK, Health, LayerHealth
from probe.comparisons.samples import DrawnLayer
from probe.files.atomic import write
from probe.files.paths import safe_name
from probe.report import figure
from probe.report.document import Document
from probe.words import printable


def health_text(health: Health) -> str:
    """A line for every tensor with its mark, its problems below it, and the layer to look at first at the end."""
    width = max(len(layer.name) for layer in health.layers)
    lines = [printable(f"Mode {health.mode} of {health.recording}"), ""]
    for layer in health.layers:
        facts = [f"Mean={_number(layer.mean)}", f"Std={_number(layer.std)}"]
        if layer.growth is not None:
            facts.append(f"Growth={_number(layer.growth)}")
        if layer.mean_change is not None:
            facts += [f"Change={_number(layer.mean_change)}", f"(max {_number(layer.max_change).strip()})"]
        lines.append(printable(f"{layer.mark} {layer.name:<{width}}  {'  '.join(facts)}".rstrip()))
        lines += [printable(f"    {problem}") for problem in layer.problems]
    if health.first is None:
        return "\n".join([*lines, "", f"✓ All {len(health.layers)} outputs look normal"])
    count = len(health.suspicious)
    layers = "1 layer looks" if count == 1 else f"{count} layers look"
    return "\n".join([*lines, "", printable(f"{health.first.mark} {layers} wrong. {_where(health, health.first)}.")])


def _where(health: Health, first: LayerHealth) -> str:
    """The layer to look at, and the one before it if that has a less severe problem."""
    earliest = health.suspicious[0]
    if earliest is first:
        return f"The first is {first.name}"
    return f"Look at {first.name} first ({first.kind}); {earliest.name} before it is less severe ({earliest.kind})"


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
        if health.first:
            page.pre("\n".join(f"{layer.name}: {text}" for layer in health.suspicious for text in layer.problems))
        caption = "Dashed: limits. Shaded: what looks wrong. A typical |x| is the median of the tokens' mean |x|. "
        if any(layer.growth is not None for layer in health.layers):
            caption += "The growth of the first layer is that from the embedding, of which only more than "
            caption += f"{EXPLOSION:g} is wrong."
        else:
            caption += "No two adjacent layers of one shape were recorded, so growth and change are not known."
        page.picture(health_by_layer(health), alt=f"size and steps of every layer of {health.mode}", caption=caption)
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
    return f"{count} {_where(health, health.first)}: {'; '.join(health.first.problems)}"


def _row(layer: LayerHealth) -> dict[str, object]:
    figures = {name: getattr(layer, name) for name in ("mean", "std", "min", "max")}
    counts = {"NaN": layer.nan, "Inf": layer.inf, "dead channels": layer.dead}
    steps = {"typical |x|": layer.size, "growth": layer.growth, "relative change": layer.relative_change}
    steps |= {"mean |change|": layer.mean_change, "max |change|": layer.max_change}
    problem = {"problem": "; ".join(layer.problems)}
    return {"": layer.mark, "layer": layer.name, **problem, **figures, **counts, **steps}


def health_by_layer(health: Health) -> bytes:
    """Size, growth and change of every tensor with their limits, and a panel for each kind of limit that was given.

    A panel without a value to draw is left out, but for that of the sizes.
    """
    layers, limits = health.layers, health.limits
    peaks = [None if x.min is None or x.max is None else max(-x.min, x.max) for x in layers]
    sizes = [layer.size for layer in layers]
    panels: list[_Panel] = [
        _Panel("size of the values", {"typical |x|": sizes, "max |x|": peaks}, _size_limits(layers)),
        _Panel("growth from the layer before", {"growth": [x.growth for x in layers]}, _growth_limits(health)),
        _Panel(
            "change from the layer before, relative to it",
            {"relative change": [layer.relative_change for layer in layers]},
            {"odd in this model": limits.get("relative_change")},
        ),
    ]
    if "max_mean" in limits:
        means = [None if layer.mean is None else abs(layer.mean) for layer in layers]
        panels.append(_Panel("|mean|", {"|mean|": means}, {"--max-mean": limits["max_mean"]}))
    if {"max_change", "mean_change"} & limits.keys():
        changes = {"mean |change|": [x.mean_change for x in layers], "max |change|": [x.max_change for x in layers]}
        given = {"--factor x median": limits.get("mean_change"), "--max-change": limits.get("max_change")}
        panels.append(_Panel("change from the layer before", changes, given))
    panels = [panels[0], *(panel for panel in panels[1:] if panel.has_values)]
    names, suspicious = [layer.name for layer in layers], [i for i, layer in enumerate(layers) if layer.problems]
    with figure.sheet(len(panels), columns=3, size=(12.5 / 3, 3.4)) as page:
        for axes, panel in zip(page.panels, panels, strict=True):
            _draw(axes, panel)
            figure.shade_layers(axes, suspicious, colour=figure.BAD, alpha=0.15)
            figure.layer_axis(axes, names)
        return page.png()


class _Panel(NamedTuple):
    """Curves by layer on a logarithmic axis, and lines for the limits that are not None."""

    title: str
    curves: Mapping[str, Sequence[float | None]]
    limits: Mapping[str, float | None]

    @property
    def has_values(self) -> bool:
        """Whether a logarithmic axis has a place for one of the values."""
        return any(bool(np.isfinite(figure.positives(values)).any()) for values in self.curves.values())


def _size_limits(layers: Sequence[LayerHealth]) -> dict[str, float | None]:
    """The limits of sizes, where one of them was broken."""
    sizes = [layer.size for layer in layers if layer.size]
    largest = max((abs(end) for layer in layers for end in (layer.min or 0.0, layer.max or 0.0)), default=0.0)
    limits: dict[str, float | None] = {}
    if max(sizes, default=0.0) > LARGEST:
        limits[f"limit of typical |x|, {LARGEST:g}"] = LARGEST
    if sizes and largest > PEAK * float(np.median(sizes)):
        limits[f"{PEAK:g} x typical |x|"] = PEAK * float(np.median(sizes))
    return limits


def _growth_limits(health: Health) -> dict[str, float | None]:
    """What is usual in the model, and the growth that no model has where a layer has it."""
    limits: dict[str, float | None] = {
        "usual in this model, up to": health.limits.get("growth_high"),
        "usual in this model, from": health.limits.get("growth_low"),
    }
    known = [layer.growth for layer in health.layers if layer.growth]
    if max(known, default=1.0) > EXPLOSION:
        limits["explosion"] = EXPLOSION
    if min(known, default=1.0) < 1 / EXPLOSION:
        limits["collapse"] = 1 / EXPLOSION
    return limits


def _draw(axes: Any, panel: _Panel) -> None:
    axes.set_title(panel.title)
    if not panel.has_values:
        figure.note(axes, "every value is 0 or not finite")
        return
    for colour, (name, values) in zip(figure.COLOURS, panel.curves.items(), strict=False):
        figure.line(axes, values, colour=colour, label=name)
    for name, limit in panel.limits.items():
        if limit is not None:
            axes.axhline(figure.positive(limit), color=figure.BAD, linestyle=figure.DASHED, linewidth=1.2)
            place = {"xycoords": ("axes fraction", "data"), "xytext": (-2, 2), "textcoords": "offset points"}
            backing = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 0.5}
            style = {"ha": "right", "va": "bottom", "fontsize": 7.5, "color": figure.BAD, "bbox": backing}
            axes.annotate(f"{name} {limit:.3g}", (1, figure.positive(limit)), **place, **style)
    figure.log_axis(axes)
    if len(panel.curves) > 1:
        axes.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none")


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
