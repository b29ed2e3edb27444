"""The page of `probe diff`, its JSON and its pictures."""

import json
from pathlib import Path

from probe.comparisons.devices.diff import DeviceComparison
from probe.comparisons.selection import Side
from probe.files.atomic import write
from probe.recordings import read_recording
from probe.report.devices.plots import error_picture, value_picture
from probe.report.devices.text import headline, limits_text, mark, rows
from probe.report.document import Document

PAGE, FIGURES = "diff.html", "diff.json"


def write_device_page(folder: Path | str, found: DeviceComparison) -> Path:
    """Write diff.html, diff.json, and its pictures beside it; the page needs none of the others."""
    folder = Path(folder)
    page = Document("Two devices", f"A: {found.a} ({found.device_a}). B: {found.b} ({found.device_b}).")
    page.heading("Verdict")
    page.text(headline(found))
    page.text("Passed." if found.passed else "Failed.")
    page.pre("\n".join(f"- {said}" for said in found.verdict.evidence))
    page.text(f"Inputs: {found.inputs.reason}. Limits: {limits_text(found)}.")
    for note in found.notes:
        page.text(f"Note: {note}.")
    if found.layers and found.verdict.kind != "identical":  # of what is identical there is nothing to draw
        _pictures(page, folder, found)
    if found.layers:
        _layers(page, found)
    write(folder / FIGURES, json.dumps(found.as_dict(), indent=2, allow_nan=False) + "\n")
    return page.write(folder / PAGE)


def shown_layer(found: DeviceComparison) -> str:
    """The tensor whose values are drawn: where a fault began, else the worst."""
    label = found.verdict.layer
    is_there = any(layer.label == label for layer in found.layers)
    if label is not None and is_there and found.verdict.kind != "dtype noise":
        return label
    return found.worst_by_max_abs[0].label


def _pictures(page: Document, folder: Path, found: DeviceComparison) -> None:
    page.heading("Error by layer")
    errors = error_picture(found)
    write(folder / "error_by_layer.png", errors)
    page.picture(
        errors, alt="differences by layer", caption="Left: dashed, the limits. Right: grey, what noise may reach."
    )
    label = shown_layer(found)
    page.heading(f"Values of {label}")
    a, b = (
        Side(read_recording(one, verify=False), recipe)
        for one, recipe in ((found.a, found.recipe_a), (found.b, found.recipe_b))
    )
    values = value_picture(found, a, b, label)
    write(folder / "values.png", values)
    page.picture(values, alt=f"values of {label} on both devices", caption="A sample of the values; the map is of all.")


def _layers(page: Document, found: DeviceComparison) -> None:
    page.heading("Layers")
    table = rows(found)
    marks = [mark(layer, found) for layer in found.layers]
    page.table(
        [{"": sign, **row} for sign, row in zip(marks, table, strict=True)],
        "> where it began, ✗ beyond a limit, = identical. Relative to |A| + 1e-8. "
        "added: the difference in what the layer adds, relative to it; noise: what sound devices stay below there.",
        bad=[sign in (">", "✗") for sign in marks],
    )
    worst = [
        {"rank": place, "by max abs": by_size.label, "max abs": by_size.max_abs, "by cosine": by_cosine.label}
        | {"cosine": by_cosine.cosine}
        for place, (by_size, by_cosine) in enumerate(zip(found.worst_by_max_abs, found.worst_by_cosine, strict=True), 1)
    ]
    page.heading("Worst layers")
    page.table(worst)
