"""The report of `probe sensitivity`: text, a picture and a page."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from probe.files.atomic import write
from probe.report import figure
from probe.report.document import Document
from probe.running.declarations import declaration_text
from probe.sensitivity.results import LOSSES, Effect, Sensitivity

#: The background of the layers to keep.
KEPT = "#fbe9cf"
#: The two figures of every layer or site: colour, marker and legend.
SIDES = {
    "alone": (figure.BLUE, "o", "only this {} quantized"),
    "without": (figure.VERMILION, "s", "all but this {} quantized"),
}
#: The format of each figure in the terminal, and the text of a missing one.
FORMS = {
    **dict.fromkeys(("kl alone", "mse alone", "kl without"), (".3e", "not finite")),
    "top-1 alone": (".4f", "-"),
    "bits alone": ("+.4f", "-"),
    "gain": ("+.1%", "-"),
}
#: Bars or rows of a picture at most; the most sensitive are drawn.
MOST = 40

EXPLAINED = {
    "kl": "alone: only this one is quantized; without: all but this one are. kl: of the logits from those of the float "
    "model, in nats, mean over positions; mse: of the logits. gain: the share of the KL of the quantized model that "
    "is removed by keeping this one float; below 0 the KL grows.",
    "mse": "alone: only this one is quantized; without: all but this one are. mse: of the output. gain: the share of "
    "the mse of the quantized model that is removed by keeping this one float; below 0 the mse grows.",
}


def describe(found: Sensitivity, model: str) -> str:
    """One line: what was measured, and the loss of the quantized model."""
    loss = found.loss(found.everything)
    size = f"{found.tokens} tokens" if found.tokens else f"{found.samples} samples"
    shown = "not finite" if loss is None else f"{loss:.4g}"
    measured = f"{model}, {found.recipe}, {len(found.effects)} {found.kind}, {size}"
    return f"{measured}; {LOSSES[found.measure]} of the quantized model: {shown}"


def table_rows(found: Sensitivity, *, top: int | None = None) -> list[dict[str, object]]:
    """The figures as text, the most sensitive first, by their loss alone."""
    return [
        {name: _text(name, value) for name, value in row.items() if name != "mse without" or found.measure == "mse"}
        | {"keep": "keep" if effect.name in found.advice.keep else ""}
        for row, effect in list(zip(_rows(found), found.by_loss(), strict=True))[:top]
    ]


def _text(name: str, value: Any) -> object:
    form, none = FORMS.get(name, ("", ""))
    return value if not form else none if value is None else format(value, form)


def _rows(found: Sensitivity) -> list[dict[str, object]]:
    by_mse = {effect.name: place for place, effect in enumerate(found.by_mse(), 1)}
    absent: tuple[str, ...] = () if found.measure == "kl" else ("kl alone", "by mse", "top-1 alone", "kl without")
    absent += ("bits alone",) if found.reference_bits_per_token is None else ()
    rows = [
        {
            "rank": place,
            found.kind.removesuffix("s"): effect.name,
            "kl alone": effect.alone.kl,
            "mse alone": effect.alone.mse,
            "by mse": by_mse[effect.name],
            "top-1 alone": effect.alone.top1_agreement,
            "bits alone": effect.alone.change_in_bits,
            "kl without": effect.without.kl,
            "mse without": effect.without.mse,
            "gain": found.gain(effect),
        }
        for place, effect in enumerate(found.by_loss(), 1)
    ]
    return [{name: value for name, value in row.items() if name not in absent} for row in rows]


def write_report(found: Sensitivity, folder: str | Path, *, model: str) -> Path:
    """sensitivity.html and sensitivity.json in the folder; the path of the page."""
    write(Path(folder) / "sensitivity.json", json.dumps(found.as_dict(), indent=2) + "\n")
    return page(found, model=model).write(Path(folder) / "sensitivity.html")


def page(found: Sensitivity, *, model: str) -> Document:
    """Advice, picture and every figure."""
    document = Document(
        f"Sensitivity of {model} under {found.recipe}", f"{describe(found, model)}. {found.weights.line}."
    )
    document.heading("What to keep in higher precision")
    document.text(found.advice.text)
    if found.advice.declared:
        document.pre(declaration_text("mixed", found.advice.declared))
    for note in found.notes:
        document.text(f"Note: {note}")
    document.heading("Picture")
    document.picture(
        picture(found), alt=f"{LOSSES[found.measure]} of each of the {found.kind}", caption=_caption(found)
    )
    document.heading("Every figure")
    kept = [effect.name in found.advice.keep for effect in found.by_loss()]
    rows = [{"rank by mse" if name == "by mse" else name: value for name, value in row.items()} for row in _rows(found)]
    document.table(rows, EXPLAINED[found.measure], bad=kept)
    document.text("Marked rows are those to keep.")
    return document


def _caption(found: Sensitivity) -> str:
    if found.kind == "layers":
        return "Layers in the order of the model; those to keep are shaded. Dashed: the whole model quantized."
    if found.kind == "sites":
        return "Sites, each quantized in all layers, the most sensitive on top. Dashed: the whole model quantized."
    loss = LOSSES[found.measure]
    return f"{loss} of every site of every layer, quantized alone, as a power of ten; kept ones are framed."


def picture(found: Sensitivity) -> bytes:
    """A PNG: curves over the layers, bars of sites, or a map of layers and sites."""
    draw = {"layers": _curves, "sites": _bars, "layer sites": _map}[found.kind]
    rows = len({effect.layer for effect in found.effects}) if found.kind == "layer sites" else len(found.effects)
    height = 4.4 if found.kind == "layers" else 1.8 + 0.28 * min(rows, MOST)
    with figure.sheet(1, columns=1, size=(12, height)) as page:
        axes = page.panels[0]
        draw(axes, found)
        if found.kind != "layer sites":
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9)
        return page.png()


def _curves(axes: Any, found: Sensitivity) -> None:
    """The loss alone and without, over the layers, on one logarithmic axis."""
    effects = found.effects
    kept = [place for place, effect in enumerate(effects) if effect.name in found.advice.keep]
    figure.shade_layers(axes, kept, colour=KEPT, zorder=0)
    size = 5 if len(effects) <= 48 else 2
    for side, (colour, marker, name) in SIDES.items():
        values = [figure.positive(found.loss(getattr(effect, side))) for effect in effects]
        axes.plot(values, color=colour, marker=marker, markersize=size, linewidth=1.2, label=name.format("layer"))
    if figure.positive(found.loss(found.everything)) > 0:
        axes.axhline(
            found.loss(found.everything), color=figure.GREY, linestyle="--", linewidth=1, label="everything quantized"
        )
    figure.log_axis(axes)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(_axis(found))
    figure.layer_axis(axes, [effect.name for effect in effects])


def _bars(axes: Any, found: Sensitivity) -> None:
    """Both figures of every site, the most sensitive on top."""
    shown = found.by_loss()[:MOST]
    places = np.arange(len(shown))
    for shift, (side, (colour, _, name)) in zip((-0.19, 0.19), SIDES.items(), strict=True):
        values = [figure.positive(found.loss(getattr(effect, side))) for effect in shown]
        axes.barh(places + shift, values, height=0.36, color=colour, label=name.format("site"))
    if figure.positive(found.loss(found.everything)) > 0:
        axes.axvline(
            found.loss(found.everything), color=figure.GREY, linestyle="--", linewidth=1, label="everything quantized"
        )
    kept = set(found.advice.keep)
    axes.set_yticks(places, [f"{one.name} (keep)" if one.name in kept else one.name for one in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set(xscale="log", xlabel=_axis(found))
    figure.log_ticks(axes.xaxis)


def _map(axes: Any, found: Sensitivity) -> None:
    """Layers down, sites across, coloured by the loss alone; of many layers, those with the most sensitive sites."""
    from matplotlib.patches import Rectangle

    most = list(dict.fromkeys(effect.layer for effect in found.by_loss()))[:MOST]
    layers = [name for name in dict.fromkeys(effect.layer for effect in found.effects) if name in most]
    sites = list(dict.fromkeys(_site(effect) for effect in found.effects))
    values = np.full((len(layers), len(sites)), np.nan)
    for effect in found.effects:
        if effect.layer in layers:
            row, column = layers.index(effect.layer), sites.index(_site(effect))
            values[row, column] = np.log10(figure.positive(found.loss(effect.alone)))
            if effect.name in found.advice.keep:
                corner = (column - 0.47, row - 0.47)
                axes.add_patch(Rectangle(corner, 0.94, 0.94, fill=False, edgecolor=figure.BAD, linewidth=2))
    axes.grid(visible=False)
    shown = axes.imshow(values, aspect="auto", cmap="cividis")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2 if np.isfinite(values).any() else 0.0
    if len(layers) * len(sites) <= 600:
        for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
            colour = "white" if values[row, column] < middle else "black"
            axes.text(column, row, f"{values[row, column]:.1f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(sites)), sites, rotation=30, ha="right")
    axes.set_yticks(range(len(layers)), layers)
    axes.figure.colorbar(shown, ax=axes, label=f"log10 {LOSSES[found.measure]}, alone", fraction=0.03, pad=0.01)


def _axis(found: Sensitivity) -> str:
    return "KL from the float model, nats" if found.measure == "kl" else "mse of the output"


def _site(effect: Effect) -> str:
    return effect.name.partition(" ")[2]
