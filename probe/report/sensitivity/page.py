"""Sensitivity as text, as a picture and as a page of its own."""

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from probe.files.atomic import write
from probe.report.document import Document
from probe.report.ticks import plain_log
from probe.sensitivity.results import Effect, Sensitivity

ALONE, WITHOUT, KEPT, GREY = "#0072b2", "#d55e00", "#fbe9cf", "#5f6b7a"
#: Bars or rows of a picture; of more the most sensitive are drawn.
MOST = 40
_DPI = 100
_SETTINGS: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": 9, "text.parse_math": False}

EXPLAINED = (
    "alone: only this one is quantized; without: all but this one are. kl: of the logits from those of the float "
    "model, in nats, mean over positions; mse: of the logits. gain: the share of the KL of the whole quantized model "
    "that goes when this one is kept float; below 0 the KL grows."
)


def describe(found: Sensitivity, model: str) -> str:
    """One line: what was measured, and the whole quantized model."""
    whole = found.everything
    kl = "not finite" if whole.kl is None else f"{whole.kl:.4g}"
    return f"{model}, {found.recipe}, {len(found.effects)} {found.kind}, {found.tokens} tokens; KL of the whole: {kl}"


def table_rows(found: Sensitivity, *, top: int | None = None) -> list[dict[str, object]]:
    """The most sensitive first, by KL alone."""
    by_mse = {effect.name: place for place, effect in enumerate(found.by_mse(), 1)}
    kept = set(found.advice.keep)
    rows: list[dict[str, object]] = [
        {
            "rank": place,
            found.kind.removesuffix("s"): effect.name,
            "kl alone": _number(effect.alone.kl),
            "mse alone": _number(effect.alone.mse),
            "by mse": by_mse[effect.name],
            "top-1 alone": _share(effect.alone.top1_agreement),
            "bits alone": _signed(effect.alone.change_in_bits),
            "kl without": _number(effect.without.kl),
            "gain": _percent(found.gain(effect)),
            "keep": "keep" if effect.name in kept else "",
        }
        for place, effect in enumerate(found.by_kl(), 1)
    ]
    return rows[:top]


def write_report(found: Sensitivity, folder: str | Path, *, model: str) -> Path:
    """sensitivity.html and sensitivity.json in the folder; the path of the page."""
    write(Path(folder) / "sensitivity.json", json.dumps(found.as_dict(), indent=2) + "\n")
    return page(found, model=model).write(Path(folder) / "sensitivity.html")


def page(found: Sensitivity, *, model: str) -> Document:
    """Advice, picture and every figure."""
    document = Document(f"Sensitivity of {model} under {found.recipe}", describe(found, model))
    document.heading("What to keep in higher precision")
    document.text(found.advice.text)
    for note in found.notes:
        document.text(f"Note: {note}")
    document.heading("Picture")
    document.picture(picture(found), alt=f"KL of each of the {found.kind}", caption=_caption(found))
    document.heading("Every figure")
    kept = [effect.name in found.advice.keep for effect in found.by_kl()]
    document.table(_page_rows(found), EXPLAINED, bad=kept)
    document.text("Marked rows are those to keep.")
    return document


def _page_rows(found: Sensitivity) -> list[dict[str, object]]:
    by_mse = {effect.name: place for place, effect in enumerate(found.by_mse(), 1)}
    return [
        {
            "rank": place,
            found.kind.removesuffix("s"): effect.name,
            "kl alone": effect.alone.kl,
            "mse alone": effect.alone.mse,
            "rank by mse": by_mse[effect.name],
            "top-1 alone": effect.alone.top1_agreement,
            "bits alone": effect.alone.change_in_bits,
            "kl without": effect.without.kl,
            "mse without": effect.without.mse,
            "gain": found.gain(effect),
        }
        for place, effect in enumerate(found.by_kl(), 1)
    ]


def _caption(found: Sensitivity) -> str:
    if found.kind == "layers":
        return "Layers in the order of the model; those to keep are shaded. Dashed: the whole model quantized."
    if found.kind == "sites":
        return "Sites, each quantized in all layers, the most sensitive on top. Dashed: the whole model quantized."
    return "KL of every site of every layer, quantized alone, as a power of ten; kept ones are framed."


def picture(found: Sensitivity) -> bytes:
    """A PNG: curves over the layers, bars of sites, or a map of layers and sites."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        figure = Figure(figsize=(12, _height(found)), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        draw = {"layers": _curves, "sites": _bars, "layer sites": _map}[found.kind]
        draw(figure.add_subplot(), found)
        kept = io.BytesIO()
        figure.savefig(kept, format="png", metadata={"Software": None})
        return kept.getvalue()


def _height(found: Sensitivity) -> float:
    if found.kind == "layers":
        return 4.4
    rows = len({effect.layer for effect in found.effects}) if found.kind == "layer sites" else len(found.effects)
    return 1.8 + 0.28 * min(rows, MOST)


def _curves(axes: Any, found: Sensitivity) -> None:
    """KL alone and KL without, over the layers, on one logarithmic axis."""
    effects = found.effects
    for place, effect in enumerate(effects):
        if effect.name in found.advice.keep:
            axes.axvspan(place - 0.5, place + 0.5, color=KEPT, linewidth=0, zorder=0)
    size = 5 if len(effects) <= 48 else 2
    for side, colour, marker in (("alone", ALONE, "o"), ("without", WITHOUT, "s")):
        values = [_positive(getattr(effect, side).kl) for effect in effects]
        label = "only this layer quantized" if side == "alone" else "all but this layer quantized"
        axes.plot(values, color=colour, marker=marker, markersize=size, linewidth=1.2, label=label)
    _finish(axes, found)
    step = max(1, math.ceil(len(effects) / 24))
    names = _short([effect.name for effect in effects])
    axes.set_xticks(range(0, len(effects), step), names[::step], rotation=0 if max(map(len, names)) <= 4 else 60)
    axes.set_xlim(-0.5, len(effects) - 0.5)
    axes.set_xlabel("layer")


def _finish(axes: Any, found: Sensitivity) -> None:
    if _positive(found.everything.kl) > 0:
        axes.axhline(found.everything.kl, color=GREY, linestyle="--", linewidth=1, label="everything quantized")
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_ylabel("KL from the float model, nats")
    axes.grid(axis="y", color="#dde2e8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _bars(axes: Any, found: Sensitivity) -> None:
    """Both figures of every site, the most sensitive on top."""
    shown = found.by_kl()[:MOST]
    places = range(len(shown))
    for side, colour, shift in (("alone", ALONE, -0.19), ("without", WITHOUT, 0.19)):
        values = [_positive(getattr(effect, side).kl) for effect in shown]
        label = "only this site quantized" if side == "alone" else "all but this site quantized"
        axes.barh([place + shift for place in places], values, height=0.36, color=colour, label=label)
    if _positive(found.everything.kl) > 0:
        axes.axvline(found.everything.kl, color=GREY, linestyle="--", linewidth=1, label="everything quantized")
    axes.set_yticks(places, [_kept_name(effect, found) for effect in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xscale("log")
    plain_log(axes.xaxis)
    axes.set_axisbelow(True)
    axes.set_xlabel("KL from the float model, nats")
    axes.grid(axis="x", color="#dde2e8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _kept_name(effect: Effect, found: Sensitivity) -> str:
    return f"{effect.name} (keep)" if effect.name in found.advice.keep else effect.name


def _map(axes: Any, found: Sensitivity) -> None:
    """Layers down, sites across, colour by the KL alone; of many layers those that hold the most sensitive sites."""
    import numpy as np

    layers = list(dict.fromkeys(effect.layer for effect in found.by_kl()))[:MOST]
    layers = [name for name in dict.fromkeys(effect.layer for effect in found.effects) if name in layers]
    sites = list(dict.fromkeys(_site(effect) for effect in found.effects))
    values = np.full((len(layers), len(sites)), np.nan)
    for effect in found.effects:
        if effect.layer in layers:
            row, column = layers.index(effect.layer), sites.index(_site(effect))
            values[row, column] = math.log10(_positive(effect.alone.kl)) if _positive(effect.alone.kl) > 0 else np.nan
            if effect.name in found.advice.keep:
                frame = {"fill": False, "edgecolor": "#b00020", "linewidth": 2}
                axes.add_patch(_rectangle(column, row, frame))
    shown = axes.imshow(values, aspect="auto", cmap="cividis")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2 if np.isfinite(values).any() else 0.0
    if len(layers) * len(sites) <= 600:
        for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
            colour = "white" if values[row, column] < middle else "black"
            axes.text(column, row, f"{values[row, column]:.1f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(sites)), sites, rotation=30, ha="right")
    axes.set_yticks(range(len(layers)), [str(name) for name in layers])
    axes.figure.colorbar(shown, ax=axes, label="log10 KL, alone", fraction=0.03, pad=0.01)


def _rectangle(column: int, row: int, style: dict[str, Any]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.47, row - 0.47), 0.94, 0.94, **style)


def _site(effect: Effect) -> str:
    return effect.name.partition(" ")[2]


def _short(names: Sequence[str]) -> list[str]:
    """layer_3 is 3; of other names the last 24 letters."""
    numbers = [name.removeprefix("layer_") for name in names]
    return numbers if all(one.isdecimal() for one in numbers) else [name[-24:] for name in names]


def _positive(x: float | None) -> float:
    """What a logarithmic axis can show; the rest is a gap."""
    return x if x is not None and math.isfinite(x) and x > 0 else math.nan


def _number(x: float | None) -> str:
    return "not finite" if x is None else f"{x:.3e}"


def _share(x: float | None) -> str:
    return "-" if x is None else f"{x:.4f}"


def _signed(x: float | None) -> str:
    return "-" if x is None else f"{x:+.4f}"


def _percent(x: float | None) -> str:
    return "-" if x is None else f"{x:+.1%}"
