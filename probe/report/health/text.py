"""The health of a recipe as text: every layer with its mark, and the first suspicious one."""

from probe.comparisons.health import Health
from probe.words import printable


def health_text(health: Health) -> str:
    """A line for every tensor; below, what is wrong, first things first."""
    width = max(len(layer.name) for layer in health.layers)
    lines = [printable(f"Mode {health.mode} of {health.recording}"), ""]
    for layer in health.layers:
        facts = [f"Mean={_number(layer.mean)}", f"Std={_number(layer.std)}"]
        if layer.mean_change is not None:
            facts += [f"Change={_number(layer.mean_change)}", f"(max {_number(layer.max_change).strip()})"]
        lines.append(printable(f"{layer.mark} {layer.name:<{width}}  {'  '.join(facts)}".rstrip()))
        lines += [printable(f"    {problem}") for problem in layer.problems]
    lines += ["", *_verdict(health)]
    return "\n".join(lines)


def _verdict(health: Health) -> list[str]:
    if health.first is None:
        return [f"✓ All {len(health.layers)} outputs look normal"]
    count = len(health.suspicious)
    layers = "1 layer looks" if count == 1 else f"{count} layers look"
    return [f"{health.first.mark} {layers} wrong. The first is {printable(health.first.name)}."]


def _number(value: float | None) -> str:
    if value is None:
        return "    none"
    return f"{value:8.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:8.2e}"
