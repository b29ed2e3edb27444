"""The report of `probe diff`: two devices as text, and as a page with its JSON and its pictures."""

import json
from collections.abc import Sequence
from pathlib import Path

from probe.comparisons.devices.diff import DeviceComparison
from probe.comparisons.devices.differences import LayerDifference
from probe.comparisons.samples import DrawnTensor
from probe.files.atomic import write
from probe.report.devices.plots import error_picture, value_picture
from probe.report.document import Document
from probe.words import columns, printable

PAGE, FIGURES = "diff.html", "diff.json"


def write_device_page(folder: Path | str, found: DeviceComparison, drawn: DrawnTensor | None) -> Path:
    """Write diff.html, diff.json, and the pictures beside it; the page needs none of the others.

    `drawn` is the tensor whose values are shown, or None where there is nothing to draw.
    """
    folder = Path(folder)
    page = Document("Two devices", f"A: {found.a} ({found.device_a}). B: {found.b} ({found.device_b}).")
    page.heading("Verdict")
    page.text(headline(found))
    page.text("Passed." if found.passed else "Failed.")
    page.pre("\n".join(f"- {reason}" for reason in found.verdict.evidence))
    page.text(f"Inputs: {found.inputs.reason}. Limits: {limits_text(found)}.")
    for note in found.notes:
        page.text(f"Note: {note}.")
    if drawn is not None:
        _pictures(page, folder, found, drawn)
    if found.layers:
        _layers(page, found)
    write(folder / FIGURES, json.dumps(found.as_dict(), indent=2, allow_nan=False) + "\n")
    return page.write(folder / PAGE)


def _pictures(page: Document, folder: Path, found: DeviceComparison, drawn: DrawnTensor) -> None:
    page.heading("Error by layer")
    errors = error_picture(found)
    write(folder / "error_by_layer.png", errors)
    page.picture(errors, alt="differences by layer", caption="Left: dashed, the limits. Right: grey, the noise bound.")
    page.heading(f"Values of {drawn.label}")
    values = value_picture(drawn)
    write(folder / "values.png", values)
    page.picture(
        values, alt=f"values of {drawn.label} on both devices", caption="A sample of the values; the map is of all."
    )


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


def device_text(found: DeviceComparison) -> str:
    """Sides and inputs, a line for every tensor, the worst by two rankings, the verdict and why."""
    blocks = [_sides(found)]
    if found.layers:
        blocks += [_layer_lines(found), _worst(found)]
    blocks += [verdict_text(found), _result_line(found)]
    return "\n\n".join(printable_lines(block) for block in blocks)


def printable_lines(text: str) -> str:
    """Names and devices come from files: nothing of them reaches the terminal as a command."""
    return "\n".join(map(printable, text.split("\n")))


def headline(found: DeviceComparison) -> str:
    """The verdict in one line."""
    verdict = found.verdict
    where = f" from {verdict.layer} on" if verdict.layer else ""
    cause = f": {verdict.cause}" if verdict.cause else ""
    return f"{verdict.kind}{where} ({verdict.sure}){cause}"


def verdict_text(found: DeviceComparison) -> str:
    """The verdict, and the figures that led to it."""
    lines = [f"Verdict: {headline(found)}", *(f"  - {reason}" for reason in found.verdict.evidence)]
    return "\n".join([*lines, *(f"  note: {note}" for note in found.notes)])


def limits_text(found: DeviceComparison) -> str:
    """What has to be kept."""
    limits = found.limits
    return f"max abs < {limits.max_abs:g}, mean abs < {limits.mean_abs:g}, cosine > {limits.cosine:g}"


def rows(found: DeviceComparison) -> list[dict[str, object]]:
    """The table, for text and page alike; figures of a reference and of what is not finite where there are any."""
    odd = any(layer.nan_a or layer.inf_a or layer.nan_b or layer.inf_b for layer in found.layers)
    return [_row(layer, odd=odd, three=found.reference is not None) for layer in found.layers]


def _row(layer: LayerDifference, *, odd: bool, three: bool) -> dict[str, object]:
    row: dict[str, object] = {
        "layer": layer.label,
        "max abs": layer.max_abs,
        "mean abs": layer.mean_abs,
        "median abs": layer.median_abs,
        "max rel": layer.max_relative,
        "mean rel": layer.mean_relative,
        "median rel": layer.median_relative,
        "within": layer.within,
        "cosine": layer.cosine,
        "pearson": layer.correlation,
        "added": layer.added,
        "noise": layer.noise,
    }
    if three:
        row |= {"recipe error": layer.recipe_error, "x recipe": layer.recipe_errors}
    if odd:
        row |= {"NaN A": layer.nan_a, "Inf A": layer.inf_a, "NaN B": layer.nan_b, "Inf B": layer.inf_b}
    return row


def _sides(found: DeviceComparison) -> str:
    sides = [("A", found.a, found.recipe_a, found.device_a), ("B", found.b, found.recipe_b, found.device_b)]
    lines = [f"{name}  {folder}: {recipe} on {device}" for name, folder, recipe, device in sides]
    if found.reference is not None:
        lines.append(f"R  {found.reference}: float reference of A")
    return "\n".join([*lines, f"Inputs: {found.inputs.reason}"])


def _layer_lines(found: DeviceComparison) -> str:
    texts = [{key: _cell(key, value) for key, value in row.items()} for row in rows(found)]
    signs = [" ", *(mark(layer, found) for layer in found.layers)]
    lines = [f"{sign} {line}".rstrip() for sign, line in zip(signs, columns(texts, left=["layer"]), strict=True)]
    key = "rel: of |A| + 1e-8; added: difference in what the layer adds, of it; noise: what sound devices stay below"
    return "\n".join([*lines, key])


def mark(layer: LayerDifference, found: DeviceComparison) -> str:
    """> where the verdict says it began, ✗ beyond a limit, = identical, else nothing to say."""
    if layer.label == found.verdict.layer and found.verdict.kind != "dtype noise":
        return ">"
    return "✗" if layer.exceeded else "=" if layer.identical else " "


def _cell(key: str, value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        if key in ("cosine", "pearson"):
            return _likeness(value)
        if key == "within":
            return f"{100 * value:.4g}%"
        return "0" if value == 0 else f"{value:.2e}"
    return str(value)


def _likeness(value: float) -> str:
    """0.999987; what is not 1 does not read as 1."""
    return "1" if value == 1 else f"{value:.6f}" if abs(value) < 0.9999995 else f"1-{1 - value:.0e}"


def _worst(found: DeviceComparison) -> str:
    def listed(layers: Sequence[LayerDifference], key: str) -> str:
        return ", ".join(f"{layer.label} {_cell(key, getattr(layer, key.replace(' ', '_')))}" for layer in layers)

    return (
        f"Worst by max abs: {listed(found.worst_by_max_abs, 'max abs')}\n"
        f"Worst by cosine:  {listed(found.worst_by_cosine, 'cosine')}"
    )


def _result_line(found: DeviceComparison) -> str:
    beyond = [layer for layer in found.layers if layer.exceeded]
    if found.passed:
        return f"PASSED: {limits_text(found)} in all {len(found.layers)} tensors"
    if beyond:
        first = f"{beyond[0].label}: {', '.join(name.replace('_', ' ') for name in beyond[0].exceeded)}"
        return f"FAILED: {len(beyond)} of {len(found.layers)} tensors exceed {limits_text(found)}; first {first}"
    return f"FAILED: {found.verdict.kind}"
