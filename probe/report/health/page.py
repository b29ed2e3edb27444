"""The page of `probe check`, and the picture of one layer."""

from collections.abc import Sequence
from pathlib import Path

from probe.comparisons.health import Health
from probe.comparisons.selection import Side
from probe.files.atomic import write
from probe.report.document import Document
from probe.report.health.plots import health_by_layer, layer_picture
from probe.words import look_up


def write_health_page(folder: Path | str, checked: Sequence[tuple[Health, Side]]) -> Path:
    """Write check.html: every recipe, and what its first suspicious layer holds."""
    page = Document("Health of a recording", _lead([health for health, _ in checked]))
    for health, side in checked:
        page.heading(f"Mode {health.mode}")
        page.text(_verdict(health))
        page.picture(health_by_layer(health), alt=f"mean and change of every layer of {health.mode}")
        if health.first:
            picture = layer_picture(side, health.first)
            page.picture(picture, alt=f"the values of {health.first.name}", caption=f"The first: {health.first.name}")
        rows = [
            {
                "": layer.mark,
                "layer": layer.name,
                "mean": layer.mean,
                "std": layer.std,
                "min": layer.min,
                "max": layer.max,
                "NaN": layer.nan,
                "Inf": layer.inf,
                "mean |change|": layer.mean_change,
                "max |change|": layer.max_change,
                "problem": "; ".join(layer.problems),
            }
            for layer in health.layers
        ]
        page.table(rows, bad=[bool(layer.problems) for layer in health.layers])
    return page.write(Path(folder) / "check.html")


def write_layer_picture(folder: Path | str, health: Health, side: Side, name: str) -> Path:
    """Write layer_30_analysis.png."""
    number = f"layer_{name}" if name.isdecimal() else name
    layer = look_up("layer", number, {layer.name: layer for layer in health.layers})
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in layer.name).lstrip(".")
    return write(Path(folder) / f"{safe}_analysis.png", layer_picture(side, layer))


def _verdict(health: Health) -> str:
    if health.first is None:
        return f"{len(health.layers)} outputs look normal."
    return (
        f"{len(health.suspicious)} of {len(health.layers)} look wrong. The first is {health.first.name}: "
        + "; ".join(health.first.problems)
    )


def _lead(all_of_them: Sequence[Health]) -> str:
    notes = "; ".join(dict.fromkeys(note for health in all_of_them for note in health.notes))
    return all_of_them[0].recording + (f". {notes}." if notes else "")
