"""The page of `probe compare`: the summary, what failed, the pictures, and all figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from probe.comparisons.modes import LayerComparison, ModeComparison
from probe.comparisons.samples import DrawnTensor
from probe.report.document import Document
from probe.report.modes.plots import difference_histograms, error_by_layer, error_maps, value_scatter


def write_modes_page(
    folder: Path | str,
    comparisons: Sequence[ModeComparison],
    failures: Mapping[str, Sequence[str]],
    drawn: Mapping[str, Mapping[str, DrawnTensor]],
) -> Path:
    """Write compare.html: every comparison, by mode what failed, and by layer and mode what is drawn."""
    reference = comparisons[0].reference_mode
    modes = ", ".join(one.compared_mode for one in comparisons)
    page = Document(f"{modes} against {reference}", _lead(comparisons))
    page.heading("Summary")
    rows = [_summary_row(one) for one in comparisons]
    page.table(rows, bad=[bool(failures.get(one.compared_mode)) for one in comparisons])
    wrong = [f"{mode}: {text}" for mode, texts in failures.items() for text in texts]
    if wrong:
        page.heading("Failures")
        page.pre("\n".join(wrong))
    page.heading("Error by layer")
    page.picture(error_by_layer(comparisons), alt="mse and 1 - correlation of every mode by layer")
    for label, tensors in drawn.items():
        page.heading(f"Differences of {label}")
        _pictures(page, label, tensors, reference)
    for one in comparisons:
        page.heading(f"All layers of {one.compared_mode}")
        marked = [not layer.metrics.finite or layer.metrics.identical for layer in one.layers.values()]
        page.table([_layer_row(layer) for layer in one.layers.values()], bad=marked)
    return page.write(Path(folder) / "compare.html")


def _pictures(page: Document, label: str, tensors: Mapping[str, DrawnTensor], reference: str) -> None:
    pairs = [one.pairs for one in tensors.values()]
    lost = sum(one.left_out for one in pairs)
    spread = f"A sample of {len(pairs[0].output) + pairs[0].left_out} values, evenly spread" + (
        f"; {lost} of all modes are not finite and left out." if lost else "."
    )
    page.picture(
        difference_histograms(tensors, reference),
        alt=f"histograms of the differences of {label}",
        caption=f"{spread} The dashed line is the mean; the axis ends where one in a thousand lies beyond.",
    )
    page.picture(
        value_scatter(tensors, reference),
        alt=f"{label} of each mode against {reference}",
        caption="The same sample. On the red line output and reference are equal.",
    )
    page.picture(
        error_maps(tensors),
        alt=f"mean |difference| of {label} by position and feature",
        caption="All values, means over samples; neighbours share a cell where there are many. Red is not finite.",
    )


def _lead(comparisons: Sequence[ModeComparison]) -> str:
    folders = ", ".join(dict.fromkeys(folder for one in comparisons for folder in one.recordings))
    notes = "; ".join(dict.fromkeys(note for one in comparisons for note in one.notes))
    return f"{folders}" + (f". {notes}." if notes else "")


def _summary_row(one: ModeComparison) -> dict[str, object]:
    layers = list(one.layers.values())
    return {
        "Mode": one.compared_mode,
        "Layer 0 MSE": layers[0].metrics.mse,
        "Layer 0 MAE": layers[0].metrics.mae,
        "Last Layer MSE": layers[-1].metrics.mse,
        "Last Layer MAE": layers[-1].metrics.mae,
        "Avg MSE": one.summary["avg_mse"],
        "Avg MAE": one.summary["avg_mae"],
        "Avg Corr": one.summary["avg_correlation"],
    }


def _layer_row(layer: LayerComparison) -> dict[str, object]:
    m = layer.metrics
    names = ("mse", "rmse", "mae", "max_abs", "relative_mse", "relative_mae", "correlation", "cosine")
    return {
        "layer": layer.name,
        "label": layer.label,
        **{name.replace("_", " "): getattr(m, name) for name in names},
        **{f"|d| at {n} %": getattr(m, f"p{n}") for n in (50, 90, 95, 99)},
        "mean difference": m.mean_difference,
        "not finite": m.nan_output + m.inf_output,
    }
