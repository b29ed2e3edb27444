"""What the users' scripts show on the screen, from a recording: the blocks of the layouts npz and pt."""

from probe.recordings.reading import Recording
from probe.recordings.spelling import spelled
from probe.recordings.statistics import Figures, figures_of

RULE = "=" * 98


def first_layer_text(recording: Recording) -> str:
    """Input and output of the first layer under every mode: ten values, mean, std, range."""
    blocks = []
    for recipe in recording.recipes:
        recorded = recording.manifest.recipes[recipe]
        lines = [RULE, f"MODE {spelled(recorded.mode, recorded.format)}", RULE]
        label = recorded.layers[0]
        for title, name in (("📥 INPUT", f"{label}.input"), ("📤 OUTPUT", f"{label}.output")):
            if name in recorded.tensors:
                figures = _figures(recording, recipe, name)
                lines += [
                    "",
                    f"{title} (Shape: {list(figures.shape)}):",
                    f"  First 10 values: {[f'{value:.6f}' for value in figures.first_10]}",
                    f"  Mean: {figures.mean:.6f}",
                    f"  Std:  {figures.std:.6f}",
                    f"  Range: [{figures.min:.6f}, {figures.max:.6f}]",
                ]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def key_layers_text(recording: Recording, recipe: str) -> str:
    """The ends of the model, its first, middle and last layer: shape, mean, std, range, NaN and Inf."""
    layers = recording.layers(recipe)
    chosen = dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1]))
    lines = ["关键层统计信息:"]
    for label in ("embedding", *chosen, "final_norm"):
        if f"{label}.output" in recording.names(recipe):
            figures = _figures(recording, recipe, f"{label}.output")
            lines += [
                f"  {label}:",
                f"    Shape: {list(figures.shape)}",
                f"    Mean: {figures.mean:.6f}, Std: {figures.std:.6f}",
                f"    Range: [{figures.min:.6f}, {figures.max:.6f}]",
                f"    Has NaN: {figures.has_nan}, Has Inf: {figures.has_inf}",
                "",
            ]
    return "\n".join(lines)


def _figures(recording: Recording, recipe: str, name: str) -> Figures:
    unbiased = recording.manifest.layout == "pt"
    return figures_of(recording.tensor(recipe, name), recording.dtype(recipe, name), unbiased=unbiased)
