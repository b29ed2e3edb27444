"""The report of `probe diff`: two devices as text, and as a page with its JSON and its pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from probe.comparisons.devices.diff import DeviceComparison
from probe.comparisons.devices.differences import LayerDifference
from probe.comparisons.samples import DrawnTensor
from probe.files.atomic import write
from probe.report import figure
from probe.report.document import Document
from probe.words import columns, printable

PAGE, FIGURES = "diff.html", "diff.json"
#: The columns of the table of layers, with the fields that they show.
COLUMNS = {
    **{"layer": "label", "max abs": "max_abs", "mean abs": "mean_abs", "median abs": "median_abs"},
    **{"max rel": "max_relative", "mean rel": "mean_relative", "median rel": "median_relative", "within": "within"},
    **{"1 - cosine": "cosine", "1 - pearson": "correlation", "added": "added", "noise": "noise"},
}
NOT_FINITE = {"NaN A": "nan_a", "Inf A": "inf_a", "NaN B": "nan_b", "Inf B": "inf_b", "compared": "compared"}


def write_device_page(folder: Path | str, found: DeviceComparison, drawn: DrawnTensor | None) -> Path:
    """Write diff.html, which is self-contained, and diff.json and the pictures beside it.

    `drawn` is the tensor whose values are shown, or None if there is nothing to draw.
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
        errors, values = error_picture(found), value_picture(drawn)
        write(folder / "error_by_layer.png", errors)
        write(folder / "values.png", values)
        page.heading("Error by layer")
        caption = "No point: identical, or not finite. Left, dashed: the limits. Right, grey: the noise bound."
        page.picture(errors, alt="differences by layer", caption=caption)
        page.heading(f"Values of {drawn.label}")
        caption = "A sample of the values; the map is of all."
        page.picture(values, alt=f"values of {drawn.label} on both devices", caption=caption)
    if found.layers:
        _layers(page, found)
    write(folder / FIGURES, json.dumps(found.as_dict(), indent=2, allow_nan=False) + "\n")
    return page.write(folder / PAGE)


def _layers(page: Document, found: DeviceComparison) -> None:
    page.heading("Layers")
    marks = [mark(layer, found) for layer in found.layers]
    page.table(
        [{"": sign, **row} for sign, row in zip(marks, rows(found), strict=True)],
        "> where it began, ✗ beyond a limit, = identical. Relative to |A| + 1e-8. "
        "added: the difference in what the layer adds, relative to it; noise: its upper bound between correct devices.",
        bad=[sign in (">", "✗") for sign in marks],
    )
    page.heading("Worst layers")
    page.table(
        [
            {
                "rank": rank,
                **{"by max abs": a.label, "max abs": a.max_abs},
                **{"by cosine": b.label, "1 - cosine": figure_of(b, "1 - cosine")},
            }
            for rank, (a, b) in enumerate(zip(found.worst_by_max_abs, found.worst_by_cosine, strict=True), 1)
        ]
    )


def device_text(found: DeviceComparison) -> str:
    """Sides and inputs, a line for every tensor, the worst by two rankings, and the verdict with its evidence."""
    sides = [f"A  {found.a}: {found.recipe_a} on {found.device_a}"]
    sides += [f"B  {found.b}: {found.recipe_b} on {found.device_b}"]
    if found.reference is not None:
        sides += [f"R  {found.reference}: float reference of A"]
    layers = [*_layer_lines(found), "", *_worst(found), ""] if found.layers else []
    verdict = [f"Verdict: {headline(found)}", *(f"  - {reason}" for reason in found.verdict.evidence)]
    verdict += [f"  note: {note}" for note in found.notes]
    lines = [*sides, f"Inputs: {found.inputs.reason}", "", *layers, *verdict, "", _result_line(found)]
    return "\n".join(map(printable, lines))  # names and devices come from files


def headline(found: DeviceComparison) -> str:
    """The verdict in one line."""
    verdict = found.verdict
    where = f" from {verdict.layer} on" if verdict.layer else ""
    cause = f": {verdict.cause}" if verdict.cause else ""
    return f"{verdict.kind}{where} ({verdict.sure}){cause}"


def limits_text(found: DeviceComparison) -> str:
    """The limits that all tensors have to keep."""
    limits = found.limits
    return f"max abs < {limits.max_abs:g}, mean abs < {limits.mean_abs:g}, cosine > {limits.cosine:g}"


def rows(found: DeviceComparison) -> list[dict[str, object]]:
    """The table of the text and of the page, with columns for a reference and for NaN and Inf if there are any."""
    keys = COLUMNS
    if found.reference is not None:
        keys = {**keys, "recipe error": "recipe_error", "x recipe": "recipe_errors"}
    if any(layer.compared < 1 for layer in found.layers):
        keys = {**keys, **NOT_FINITE}
    return [{name: figure_of(layer, name, key) for name, key in keys.items()} for layer in found.layers]


def figure_of(layer: LayerDifference, name: str, key: str = "cosine") -> object:
    """The field `key` of a layer; its distance from 1 where the column says so, which rounding would hide."""
    value = getattr(layer, key)
    return 1 - value if name.startswith("1 - ") and value is not None else value


def _layer_lines(found: DeviceComparison) -> list[str]:
    texts = [{key: _cell(key, value) for key, value in row.items()} for row in rows(found)]
    signs = [" ", *(mark(layer, found) for layer in found.layers)]
    lines = [f"{sign} {line}".rstrip() for sign, line in zip(signs, columns(texts, left=["layer"]), strict=True)]
    key = "rel: of |A| + 1e-8; added: difference in what the layer adds, of it; noise: bound between correct devices"
    return [*lines, key]


def mark(layer: LayerDifference, found: DeviceComparison) -> str:
    """> for the layer where the difference begins, ✗ beyond a limit, = identical, else a space."""
    if layer.label == found.verdict.layer and found.verdict.kind != "dtype noise":
        return ">"
    return "✗" if layer.exceeded else "=" if layer.identical else " "


def _cell(key: str, value: object) -> str:
    if not isinstance(value, float):
        return "none" if value is None else str(value)
    if key in ("within", "compared"):
        return f"{100 * value:.4g}%"
    return "0" if value == 0 else f"{value:.2e}"


def _worst(found: DeviceComparison) -> list[str]:
    largest = ", ".join(f"{layer.label} {_cell('max abs', layer.max_abs)}" for layer in found.worst_by_max_abs)
    lowest = ", ".join(f"{layer.label} {_cell('', figure_of(layer, '1 - cosine'))}" for layer in found.worst_by_cosine)
    return [f"Worst by max abs: {largest}", f"Worst by 1 - cosine: {lowest}"]


def _result_line(found: DeviceComparison) -> str:
    beyond = [layer for layer in found.layers if layer.exceeded]
    if found.passed:
        alone = "".join(f"; {count} only {side} has" for side, count in found.only_one_has.items() if count)
        both = f" that both have{alone}: not compared" if alone else ""
        return f"PASSED: {limits_text(found)} in all {len(found.layers)} tensors{both}"
    if beyond:
        first = f"{beyond[0].label}: {', '.join(name.replace('_', ' ') for name in beyond[0].exceeded)}"
        return f"FAILED: {len(beyond)} of {len(found.layers)} tensors exceed {limits_text(found)}; first {first}"
    return f"FAILED: {found.verdict.kind}"


#: Points of the scatter at most.
MOST_DOTS = 4000


def error_picture(found: DeviceComparison) -> bytes:
    """Differences by layer with their limits, and the differences that each layer adds with the noise bound."""
    with figure.sheet(2, columns=2, size=(6.25, 3.8)) as page:
        left, right = page.panels
        left.set_title("|B - A| by layer")
        keys = {"max abs": "max_abs", "mean abs": "mean_abs"}
        if _curves(left, {name: [getattr(layer, key) for layer in found.layers] for name, key in keys.items()}):
            place = {"xycoords": ("axes fraction", "data"), "xytext": (-2, 2), "textcoords": "offset points"}
            style = {"ha": "right", "va": "bottom", "fontsize": 7.5}
            for colour, (name, key) in zip(figure.COLOURS, keys.items(), strict=False):
                if (limit := getattr(found.limits, key)) > 0:
                    left.axhline(limit, color=colour, linestyle=figure.DASHED, linewidth=1)
                    left.annotate(f"limit of {name}", (1, limit), color=colour, **style, **place)
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
    """One tensor: a histogram of B - A, B against A, and a map of the differences."""
    with figure.sheet(3, size=(12.5 / 3, 3.6)) as page:
        left, middle, right = page.panels
        left.set_title(f"B - A of {figure.label(drawn.label, most=28)}")
        middle.set_title("B against A")
        pairs, found = drawn.pairs, drawn.differences
        if not len(pairs.output):
            for axes in (left, middle):
                figure.note(axes, "no value of the sample is finite on both")
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
            middle.set(xlabel="A", ylabel="B")
        finite = bool(np.isfinite(drawn.errors).all())
        right.set_title("mean |B - A| by token and channel")
        if drawn.scale is None:
            figure.note(right, "every difference is 0" if finite else "no difference is finite")
            return page.png()
        shown = figure.log_shade_map(right, drawn.errors, drawn.scale, drawn.shape)
        page.log_colour_bar(shown, right, shrink=0.9, pad=0.02)
        right.set(xlabel="channel", ylabel="token", **({} if finite else {"title": "mean |B - A|; red: not finite"}))
        return page.png()


def _curves(axes: Any, values: Mapping[str, Sequence[float | None]]) -> bool:
    """Draw figures by layer on a logarithmic axis, zeros as gaps; False, and a note, if there is nothing to draw."""
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
    """Mark the layer where the difference begins and those that are finite on one device only; name the layers."""
    labels = [layer.label for layer in found.layers]
    began = [place for place, layer in enumerate(found.layers) if mark(layer, found) == ">"]
    figure.shade_layers(axes, began, colour=figure.BAD, alpha=0.12, label=found.verdict.kind)
    lost = [place for place, layer in enumerate(found.layers) if layer.lost]
    if lost:
        figure.mark_places(axes, lost, "x", height=0.04, label="finite on one only")
    figure.layer_axis(axes, labels)
    axes.legend(loc="best")
