"""The page of `probe compare`: the summary, what failed, the pictures, and all figures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from probe.comparisons.modes import LayerComparison, ModeComparison
from probe.comparisons.samples import error_map, sample_pairs
from probe.comparisons.selection import Side
from probe.report.document import Document
from probe.report.modes.plots import difference_histograms, error_by_layer, error_maps, value_scatter


def write_modes_page(
    folder: Path | str,
    compared: Sequence[tuple[ModeComparison, Side, Side]],
    failures: Mapping[str, Sequence[str]],
    *,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write compare.html: each comparison with its sides, and by mode what failed."""
    comparisons = [one for one, _, _ in compared]
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
    for label in _shown_layers(comparisons):
        if progress:
            progress(f"pictures of {label}")
        page.heading(f"Differences of {label}")
        _pictures(page, label, compared, reference)
    for one in comparisons:
        page.heading(f"All layers of {one.compared_mode}")
        marked = [not layer.metrics.finite or layer.metrics.identical for layer in one.layers.values()]
        page.table([_layer_row(layer) for layer in one.layers.values()], bad=marked)
    return page.write(Path(folder) / "compare.html")


def _pictures(
    page: Document, label: str, compared: Sequence[tuple[ModeComparison, Side, Side]], reference: str
) -> None:
    samples = {one.compared_mode: sample_pairs(label, side, plain) for one, side, plain in compared}
    maps = {one.compared_mode: error_map(label, side, plain) for one, side, plain in compared}
    taken = next(iter(samples.values()))
    lost = sum(pairs.left_out for pairs in samples.values())
    spread = f"A sample of {len(taken.output) + taken.left_out} values, evenly spread" + (
        f"; {lost} of all modes are not finite and left out." if lost else "."
    )
    page.picture(
        difference_histograms(label, samples, reference),
        alt=f"histograms of the differences of {label}",
        caption=f"{spread} The dashed line is the mean; the axis ends where one in a thousand lies beyond.",
    )
    page.picture(
        value_scatter(label, samples, reference),
        alt=f"{label} of each mode against {reference}",
        caption="The same sample. On the red line output and reference are equal.",
    )
    page.picture(
        error_maps(label, maps, compared[0][1].shape(label)),
        alt=f"mean |difference| of {label} by position and feature",
        caption="All values, means over samples; neighbours share a cell where there are many. Red is not finite.",
    )


def _shown_layers(comparisons: Sequence[ModeComparison]) -> list[str]:
    """The first, the last, and the one with the largest relative error in any mode."""
    names = list(comparisons[0].layers)

    def error(name: str) -> float:
        return max(one.layers[name].metrics.relative_mse or 0.0 for one in comparisons)

    chosen = {names[0], max(names, key=error), names[-1]}
    return [name for name in names if name in chosen]


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
    percentiles = {f"{n} %": getattr(m, f"p{n}") for n in (50, 90, 95, 99)}
    odd = m.nan_output + m.inf_output
    return {
        "layer": layer.name,
        "label": layer.label,
        **{name.replace("_", " "): getattr(m, name) for name in names},
        **{f"|d| at {name}": value for name, value in percentiles.items()},
        "mean difference": m.mean_difference,
        "not finite": odd,
    }
