"""Which pictures an analysis has: their files, in the order of the page."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from probe.activations.export import MOST_HEAT, drawn_heat
from probe.activations.plan import Plan
from probe.activations.run import Analysis
from probe.activations.settings import Settings
from probe.report.activations import channels, layers, tokens


@dataclass(frozen=True)
class Picture:
    """A PNG with the name of its file, the section that it belongs to, and what to say about it."""

    file: str
    section: str
    caption: str
    png: bytes


MAGNITUDES = "Magnitudes"
OUTLIERS = "Outlier tokens"
DISTRIBUTIONS = "Distributions"
HEAT = "Tokens and channels of one sample"
BANDS = "Channels"
PREDICTED = "What quantization would cost"
#: Behind the name of a file that a run may have no data for.
IF_ANY = " (if there are outliers)"


def pictures_of(analysis: Analysis, tables: Mapping[str, list[dict[str, Any]]]) -> Iterator[Picture]:
    """The pictures of all that is enabled and has data."""
    seen = analysis.settings.visualization
    dpi = seen.dpi
    if rows := tables.get("predicted_error"):
        png = layers.noise_picture(rows, dpi=dpi)
        yield Picture("predicted_error", PREDICTED, "Predicted noise / signal of every layer in each format.", png)
    for kind in ("input", "output", "weight"):
        if rows := tables.get(f"magnitude_{kind}"):
            png = layers.magnitude_picture(rows, reduce_dim=seen.magnitude.reduce_dim, dpi=dpi)
            yield Picture(f"magnitude_{kind}", MAGNITUDES, f"Magnitudes of {kind}s.", png)
    if rows := tables.get("outlier_layer_wise"):
        png = tokens.layer_picture(rows, threshold=seen.outlier.threshold, dpi=dpi)
        yield Picture("outlier_layer_wise", OUTLIERS, "Outliers by layer.", png)
    if rows := tables.get("outlier_position"):
        length, names = analysis.facts["longest"], list(analysis.outliers)
        png = tokens.position_picture(rows, names, length=length, dpi=dpi)
        yield Picture("outlier_position", OUTLIERS, "Outliers by position.", png)
    if rows := tables.get("outlier_token"):
        yield Picture("outlier_token", OUTLIERS, "Outliers by token.", tokens.token_picture(rows, dpi=dpi))
    if rows := tables.get("distribution_boxplot"):
        png = layers.box_picture(rows, dpi=dpi)
        yield Picture("distribution_boxplot", DISTRIBUTIONS, f"|x| of {rows[0]['kind']}s.", png)
    if rows := tables.get("distribution_histogram"):
        png = layers.histogram_picture(rows, dpi=dpi)
        yield Picture("distribution_histogram", DISTRIBUTIONS, f"|x| of {rows[0]['kind']}s, histograms.", png)
    heats = drawn_heat(analysis)
    for index, heat in enumerate(heats):
        png = channels.heat_picture(heat, view_angle=seen.heatmap_3d.view_angle, dpi=dpi)
        some = f" {len(heats)} of {len(analysis.heat)} layers are drawn: largest max / median." * (
            len(heats) < len(analysis.heat)
        )
        yield Picture(
            heat_file(index, heat.module), HEAT, f"{heat.module}.{some}" if not index else f"{heat.module}.", png
        )
    if analysis.bands:
        png = channels.band_picture(list(analysis.bands.values()), dpi=dpi)
        of = analysis.plan.bands_of
        some = f" {len(analysis.bands)} of {of} layers, evenly spaced." * (len(analysis.bands) < of)
        yield Picture("percentile_range", BANDS, f"Percentiles of every channel.{some}", png)


def heat_file(index: int, module: str) -> str:
    """A name that is safe as a file's, whatever the module is called."""
    return f"heatmap_3d_{index:02d}_{re.sub(r'[^A-Za-z0-9_-]', '_', module)[-60:]}"


def planned_files(settings: Settings, plan: Plan) -> list[str]:
    """The names of the files that a run with this plan writes, as far as they are known beforehand."""
    enabled, seen = settings.visualization.enabled, settings.visualization
    drawn = ["predicted_error", *(f"magnitude_{kind}" for kind, names in plan.magnitude.items() if names)]
    drawn += ["outlier_layer_wise"] * enabled.outlier_layer_wise
    found = [name for name in ("outlier_position", "outlier_token") if getattr(enabled, name)]
    drawn += [f"distribution_{kind}" for kind in seen.distribution.plot_types if enabled.distribution]
    bands = ["percentile_range"] * enabled.percentile_range
    maps = [heat_file(i, name) for i, name in enumerate(plan.heat[1])]
    if len(maps) > MOST_HEAT:
        maps = [f"heatmap_3d_NN_LAYER (the {MOST_HEAT} of {len(maps)} layers with the largest max / median)"]
    formats, files = settings.output.formats, []
    if "png" in formats:
        files += [f"{name}.png" for name in (*drawn, *maps, *bands)] + [f"{name}.png{IF_ANY}" for name in found]
    if "csv" in formats:
        found += ["outlier_worst"] * enabled.outlier_token
        heat = ["heatmap_3d"] * enabled.heatmap_3d
        files += [
            f"{name}.csv" for name in ("statistics", "top_channels", "keep_in_higher_precision", *drawn, *heat, *bands)
        ]
        files += [f"{name}.csv{IF_ANY}" for name in found]
    if "json" in formats:
        files.append("analysis.json")
    if "html" in formats:
        files.append("analysis_report.html")
    return files
