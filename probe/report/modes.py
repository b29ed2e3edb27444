"""The report of `probe compare`: a page with the summary, the failures, the pictures and all figures of every mode."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from probe.comparisons.modes import LayerComparison, ModeComparison
from probe.comparisons.samples import DrawnTensor
from probe.metrics import Metrics
from probe.report import figure
from probe.report.document import Document
from probe.words import shared_lines


def write_modes_page(
    folder: Path | str,
    comparisons: Sequence[ModeComparison],
    failures: Mapping[str, Sequence[str]],
    drawn: Mapping[str, Mapping[str, DrawnTensor]],
) -> Path:
    """Write compare.html. `failures` are by mode; `drawn` has the tensors of the pictures by layer and mode."""
    reference = comparisons[0].reference_mode
    modes = ", ".join(one.compared_mode for one in comparisons)
    folders = ", ".join(dict.fromkeys(folder for one in comparisons for folder in one.recordings))
    notes = "; ".join(dict.fromkeys(note for one in comparisons for note in one.notes))
    page = Document(f"{modes} against {reference}", folders + (f". {notes}." if notes else ""))
    page.heading("Summary")
    rows = [_summary_row(one) for one in comparisons]
    page.table(rows, bad=[bool(failures.get(one.compared_mode)) for one in comparisons])
    for line in shared_lines((one.compared_mode, one.weights.line) for one in comparisons if one.weights is not None):
        page.text(f"{line}.")
    wrong = [f"{mode}: {text}" for mode, texts in failures.items() for text in texts]
    if wrong:
        page.heading("Failures")
        page.pre("\n".join(wrong))
    page.heading("Error by layer")
    page.picture(error_by_layer(comparisons), alt="relative mse and 1 - correlation by layer")
    for label, tensors in drawn.items():
        page.heading(f"Differences of {label}")
        _pictures(page, label, tensors, reference)
    for one in comparisons:
        page.heading(f"All layers of {one.compared_mode}")
        marked = [_is_bad(layer, one) for layer in one.layers.values()]
        page.table([_layer_row(layer) for layer in one.layers.values()], bad=marked)
    return page.write(Path(folder) / "compare.html")


def _is_bad(layer: LayerComparison, one: ModeComparison) -> bool:
    """Not finite, of poor quality, or identical where it must not be."""
    may_be_identical = one.is_equal or layer.name in one.may_be_identical
    wrong = not layer.metrics.finite or layer.quality in ("poor", "undefined")
    return wrong or (layer.metrics.identical and not may_be_identical)


def _pictures(page: Document, label: str, tensors: Mapping[str, DrawnTensor], reference: str) -> None:
    pairs = [one.pairs for one in tensors.values()]
    left_out = sum(one.left_out for one in pairs)
    lost = f"; {left_out} of all modes are not finite and left out" if left_out else ""
    sample = f"A sample of {len(pairs[0].output) + pairs[0].left_out} values, evenly spread{lost}."
    caption = f"{sample} The dashed line is the mean; the axis ends where one in a thousand lies beyond."
    histograms = difference_histograms(tensors, reference)
    page.picture(histograms, alt=f"histograms of the differences of {label}", caption=caption)
    caption = "The same sample. On the red line output and reference are equal."
    page.picture(value_scatter(tensors, reference), alt=f"{label} of each mode against {reference}", caption=caption)
    caption = "All values, means over samples; neighbours share a cell where there are many. Red is not finite."
    page.picture(error_maps(tensors), alt=f"mean |difference| of {label} by position and feature", caption=caption)


def _summary_row(one: ModeComparison) -> dict[str, object]:
    layers, worst = list(one.layers.values()), one.worst[0]
    return {
        "Mode": one.compared_mode,
        "Layer 0 MSE": layers[0].metrics.mse,
        "Layer 0 MAE": layers[0].metrics.mae,
        "Last Layer MSE": layers[-1].metrics.mse,
        "Last Layer MAE": layers[-1].metrics.mae,
        "Avg MSE": one.summary["avg_mse"],
        "Avg MAE": one.summary["avg_mae"],
        "Avg Corr": one.summary["avg_correlation"],
        "Worst Layer": worst.name,
        "Worst SQNR": worst.metrics.sqnr,
        "Quality": worst.quality,
    }


def _layer_row(layer: LayerComparison) -> dict[str, object]:
    m = layer.metrics
    names = ("sqnr", "relative_mse", "correlation", "cosine", "mse", "rmse", "mae", "max_abs", "relative_mae")
    return {
        "layer": layer.name,
        "quality": layer.quality,
        **{name.replace("_", " "): getattr(m, name) for name in names},
        **{f"|d| at {n} %": getattr(m, f"p{n}") for n in (50, 90, 95, 99)},
        "mean difference": m.mean_difference,
        "not finite": m.nan_output + m.inf_output,
    }


#: Markers and dashes tell modes apart when there are more of them than colours.
MARKERS = "osD^vP*X"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)))
#: The figures by layer. A lossless layer has the figure 0, which a logarithmic axis cannot show.
FIGURES: dict[str, Callable[[Metrics], float | None]] = {
    "relative mse by layer": lambda m: m.relative_mse,
    "1 - correlation by layer": lambda m: None if m.correlation is None else 1 - m.correlation,
}


def error_by_layer(comparisons: Sequence[ModeComparison]) -> bytes:
    """Relative mse and 1 - correlation of every mode, on logarithmic axes; a layer without loss has no point."""
    names = list(comparisons[0].layers)
    with figure.sheet(2, columns=2, size=(6.25, 3.8)) as page:
        for axes, (title, figure_of) in zip(page.panels, FIGURES.items(), strict=True):
            curves = [figure.positives([figure_of(x.metrics) for x in one.layers.values()]) for one in comparisons]
            wide = figure.widths(curves)
            apart = max(wide) == figure.THIN  # elsewhere the gaps of dashes would hide the thin lines
            size = (4.5 if len(names) <= 32 else 2.5) - figure.THIN
            for place, (one, values, width) in enumerate(zip(comparisons, curves, wide, strict=True)):
                colour, marker = figure.COLOURS[place % len(figure.COLOURS)], MARKERS[place % len(MARKERS)]
                style = {"linestyle": DASHES[place % len(DASHES)] if apart else "-", "linewidth": width}
                name = figure.label(one.compared_mode, most=20)
                axes.plot(values, color=colour, marker=marker, markersize=size + width, label=name, **style)
            axes.set_title(title)
            if not np.isfinite(curves).any():
                figure.note(axes, "nothing to draw: every layer is without loss, or undefined")
                continue
            figure.log_axis(axes)
            figure.layer_axis(axes, names)
        page.legend()
        return page.png()


def difference_histograms(drawn: Mapping[str, DrawnTensor], reference: str) -> bytes:
    """Histograms of mode - reference of a layer, on one x axis unless modes are far apart; counts are logarithmic."""
    ends = {one.differences.edges[-1] for one in drawn.values() if one.differences}
    with _panels(drawn, 2.6, "difference of {}", "values in the sample", sharex=len(ends) == 1, sharey=True) as page:
        for axes, (mode, one) in zip(page.panels, drawn.items(), strict=True):
            axes.set_title(f"{figure.label(mode, most=22)} - {figure.label(reference, most=12)}")
            found, any_finite = one.differences, len(one.pairs.output)
            if found is None:
                figure.note(axes, "every difference is 0" if any_finite else "no value of the sample is finite")
                continue
            figure.histogram(axes, found.counts, found.edges, mean=found.mean)
            beyond = f"\n{found.beyond} beyond" if found.beyond else ""
            figure.corner_note(axes, f"mean {found.mean:.1e}\nstd {found.std:.1e}{beyond}")
        return page.png()


def value_scatter(drawn: Mapping[str, DrawnTensor], reference: str) -> bytes:
    """Output against reference as densities, with the line on which they are equal."""
    with _panels(drawn, 3.0, f"{{}} of {figure.label(reference, most=12)}", "of the mode") as page:
        shown = None
        for axes, (mode, one) in zip(page.panels, drawn.items(), strict=True):
            axes.set_title(figure.label(mode, most=30))
            pairs = one.pairs
            both = np.concatenate([pairs.output, pairs.reference])
            low, high = float(both.min(initial=math.inf)), float(both.max(initial=-math.inf))
            if not len(both) or low == high:
                figure.note(axes, "every value is the same" if len(both) else "no value of the sample is finite")
                continue
            axes.plot((low, high), (low, high), color=figure.BAD, linewidth=0.8, zorder=3)
            style = {"extent": (low, high, low, high), "cmap": "viridis", "linewidths": 0.1}
            shown = axes.hexbin(pairs.reference, pairs.output, gridsize=48, bins="log", mincnt=1, **style)
            axes.locator_params(nbins=5)
        if shown is not None:
            page.log_colour_bar(shown, page.panels, label="values", shrink=0.85, pad=0.01)
        return page.png()


def error_maps(drawn: Mapping[str, DrawnTensor]) -> bytes:
    """mean |difference| by position and feature, all modes on one logarithmic scale of colours; red is not finite."""
    with _panels(drawn, 2.9, "feature of {}", "position", sharex=True, sharey=True) as page:
        shown = None
        for axes, (mode, one) in zip(page.panels, drawn.items(), strict=True):
            axes.set_title(figure.label(mode, most=30))
            if one.scale is None:
                finite = np.isfinite(one.errors).all()
                figure.note(axes, "every difference is 0" if finite else "no difference is finite")
                continue
            shown = figure.log_shade_map(axes, one.errors, one.scale, one.shape)
            axes.locator_params(nbins=5)
        if shown is not None:
            page.log_colour_bar(shown, page.panels, label="mean |difference|", shrink=0.85, pad=0.01)
        return page.png()


@contextmanager
def _panels(
    drawn: Mapping[str, DrawnTensor], height: float, across: str, down: str, **options: Any
) -> Iterator[figure.Sheet]:
    """A sheet with a panel for each mode, and names for the axes of all; `across` has a place for the layer's."""
    layer = figure.label(next(iter(drawn.values())).label, most=40)
    with figure.sheet(len(drawn), columns=4, size=(3.125, height), **options) as page:
        page.figure.supxlabel(across.format(layer), fontsize=9, color=figure.GREY)
        page.figure.supylabel(down, fontsize=9, color=figure.GREY)
        yield page
