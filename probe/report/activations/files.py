"""The files of an analysis: its pictures, tables and page, and the names of the files that a plan leads to."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from probe.activations.export import MOST_HEAT, as_json, drawn_heat, tables
from probe.activations.plan import Plan
from probe.activations.run import Analysis
from probe.activations.settings import Settings
from probe.files.atomic import write
from probe.files.checked_json import finite
from probe.files.paths import replacing_earlier_files
from probe.report.activations import layer_plots, page, tensor_plots
from probe.report.numbers import csv_text

#: Added to the name of a planned file that is written only if there are data for it.
IF_ANY = " (if there are outliers)"


def write_analysis(analysis: Analysis, *, progress: Callable[[str], Any] = print) -> list[Path]:
    """Write the files of `output.formats` to `visualization.save_dir`; returns their paths in order.

    Files of an earlier run that are not written again are deleted.
    """
    folder = Path(analysis.settings.visualization.save_dir)
    formats = analysis.settings.output.formats
    rows = tables(analysis)
    with replacing_earlier_files(folder, progress=progress) as written:
        if "csv" in formats:
            written += [write(folder / f"{name}.csv", csv_text(finite(table))) for name, table in rows.items()]
        if "json" in formats:
            written.append(write(folder / "analysis.json", json_text(as_json(analysis, rows))))
        if "png" in formats or "html" in formats:
            progress("drawing")
            pictures = list(pictures_of(analysis, rows))
            if "png" in formats:
                written += [write(folder / f"{picture.file}.png", picture.png) for picture in pictures]
            if "html" in formats:
                written.append(page.page_of(analysis, rows, pictures).write(folder / "analysis_report.html"))
    return written


def pictures_of(analysis: Analysis, tables: Mapping[str, list[dict[str, Any]]]) -> Iterator[page.Picture]:
    """The pictures of everything that is enabled and has data."""
    drawing = analysis.settings.visualization
    dpi = drawing.dpi
    magnitudes = partial(layer_plots.magnitude_picture, reduce_dim=drawing.magnitude.reduce_dim)
    outliers = partial(layer_plots.outlier_picture, threshold=drawing.outlier.threshold)
    positions = partial(tensor_plots.position_picture, layers=list(analysis.outliers), length=analysis.facts["longest"])
    kinds = ("input", "output", "weight")
    drawings: tuple[tuple[str, str, str, Callable[..., bytes]], ...] = (
        ("predicted_error", page.PREDICTED, f"{page.CAPTIONS['predicted_error']}.", layer_plots.noise_picture),
        *((f"magnitude_{kind}", page.MAGNITUDES, f"Magnitudes of {kind}s.", magnitudes) for kind in kinds),
        ("outlier_layer_wise", page.OUTLIERS, "Outliers by layer.", outliers),
        ("outlier_position", page.OUTLIERS, "Outliers by position.", positions),
        ("outlier_token", page.OUTLIERS, "Outliers by token.", tensor_plots.token_picture),
        ("distribution_boxplot", page.DISTRIBUTIONS, "|x| of {kind}s.", layer_plots.box_picture),
        ("distribution_histogram", page.DISTRIBUTIONS, "|x| of {kind}s, histograms.", tensor_plots.histogram_picture),
    )
    for name, section, caption, draw in drawings:
        if rows := tables.get(name):
            yield page.Picture(name, section, caption.format(kind=rows[0].get("kind")), draw(rows, dpi=dpi))
    heats = drawn_heat(analysis)
    for index, heat in enumerate(heats):
        png = tensor_plots.heat_picture(heat, view_angle=drawing.heatmap_3d.view_angle, dpi=dpi)
        caption = f"{heat.module}."
        if index == 0 and len(heats) < len(analysis.heat):
            caption += f" {len(heats)} of {len(analysis.heat)} layers are drawn: largest max / median."
        yield page.Picture(heat_file(index, heat.module), page.HEAT, caption, png)
    if analysis.bands:
        png = tensor_plots.band_picture(list(analysis.bands.values()), dpi=dpi)
        of = analysis.plan.bands_of
        some = f" {len(analysis.bands)} of {of} layers, evenly spaced." * (len(analysis.bands) < of)
        yield page.Picture("percentile_range", page.BANDS, f"Percentiles of every channel.{some}", png)


def heat_file(index: int, module: str) -> str:
    """The file name of a heat map, safe whatever the module is called."""
    return f"heatmap_3d_{index:02d}_{re.sub(r'[^A-Za-z0-9_-]', '_', module)[-60:]}"


def planned_files(settings: Settings, plan: Plan) -> list[str]:
    """The names of the files that a run with this plan will write, as far as they are known beforehand."""
    enabled, drawing = settings.visualization.enabled, settings.visualization
    drawn = ["predicted_error", *(f"magnitude_{kind}" for kind, names in plan.magnitude.items() if names)]
    drawn += ["outlier_layer_wise"] * enabled.outlier_layer_wise
    found = [name for name in ("outlier_position", "outlier_token") if getattr(enabled, name)]
    drawn += [f"distribution_{kind}" for kind in drawing.distribution.plot_types if enabled.distribution]
    bands = ["percentile_range"] * enabled.percentile_range
    maps = [heat_file(i, name) for i, name in enumerate(plan.heat[1])]
    if len(maps) > MOST_HEAT:
        maps = [f"heatmap_3d_NN_LAYER (the {MOST_HEAT} of {len(maps)} layers with the largest max / median)"]
    formats, files = settings.output.formats, []
    if "png" in formats:
        files += [f"{name}.png" for name in (*drawn, *maps, *bands)] + [f"{name}.png{IF_ANY}" for name in found]
    if "csv" in formats:
        found += ["outlier_worst"] * enabled.outlier_token
        always = ("statistics", "top_channels", "keep_in_higher_precision")
        files += [f"{name}.csv" for name in (*always, *drawn, *["heatmap_3d"] * enabled.heatmap_3d, *bands)]
        files += [f"{name}.csv{IF_ANY}" for name in found]
    return files + ["analysis.json"] * ("json" in formats) + ["analysis_report.html"] * ("html" in formats)


def json_text(document: dict[str, Any]) -> str:
    """JSON with a line for every row of a table, so that people can read and compare it."""
    parts = []
    for key, value in document.items():
        if isinstance(value, list):
            shown = _lines(value, " ")
        elif key == "tables":
            shown = "{\n" + ",\n".join(f" {json.dumps(k)}: {_lines(v, '  ')}" for k, v in value.items()) + "\n}"
        else:
            shown = json.dumps(value, indent=1, allow_nan=False)
        parts.append(f"{json.dumps(key)}: {shown}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(rows: Sequence[Any], indent: str) -> str:
    return "[\n" + ",\n".join(indent + json.dumps(row, allow_nan=False) for row in rows) + "\n]" if rows else "[]"
