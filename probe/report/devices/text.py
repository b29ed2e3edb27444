"""Two devices as text: every tensor, the worst, and what it is."""

from collections.abc import Sequence

from probe.comparisons.devices.diff import DeviceComparison
from probe.comparisons.devices.differences import LayerDifference
from probe.words import printable


def device_text(found: DeviceComparison) -> str:
    """Sides and inputs, a line for every tensor, the worst by two rankings, the verdict and why."""
    blocks = [_sides(found)]
    if found.layers:
        blocks += [_layers(found), _worst(found)]
    blocks += [verdict_text(found), _result(found)]
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
    lines = [f"Verdict: {headline(found)}", *(f"  - {said}" for said in found.verdict.evidence)]
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


def _layers(found: DeviceComparison) -> str:
    texts = [{key: _cell(key, value) for key, value in row.items()} for row in rows(found)]
    widths = {key: max(len(key), *(len(text[key]) for text in texts)) for key in texts[0]}
    marks = [mark(layer, found) for layer in found.layers]

    def line(cells: dict[str, str], sign: str) -> str:
        parts = (cells[k].ljust(w) if k == "layer" else cells[k].rjust(w) for k, w in widths.items())
        return f"{sign} {'  '.join(parts)}".rstrip()

    head = line({key: key for key in widths}, " ")
    body = [line(text, sign) for text, sign in zip(texts, marks, strict=True)]
    key = "rel: of |A| + 1e-8; added: difference in what the layer adds, of it; noise: what sound devices stay below"
    return "\n".join([head, *body, key])


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
    def told(layers: Sequence[LayerDifference], key: str) -> str:
        return ", ".join(f"{layer.label} {_cell(key, getattr(layer, key.replace(' ', '_')))}" for layer in layers)

    return (
        f"Worst by max abs: {told(found.worst_by_max_abs, 'max abs')}\n"
        f"Worst by cosine:  {told(found.worst_by_cosine, 'cosine')}"
    )


def _result(found: DeviceComparison) -> str:
    beyond = [layer for layer in found.layers if layer.exceeded]
    if found.passed:
        return f"PASSED: {limits_text(found)} in all {len(found.layers)} tensors"
    if beyond:
        first = f"{beyond[0].label}: {', '.join(name.replace('_', ' ') for name in beyond[0].exceeded)}"
        return f"FAILED: {len(beyond)} of {len(found.layers)} tensors exceed {limits_text(found)}; first {first}"
    return f"FAILED: {found.verdict.kind}"
