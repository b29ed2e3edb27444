"""An analysis as tables and as JSON, and the comparison of two analyses that were written as JSON."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.activations.collecting import HeatGrid, Key
from probe.activations.prediction import keep_in_higher_precision, predict_layers, spoiled_share
from probe.activations.reference import SIZES
from probe.activations.run import Analysis
from probe.activations.statistics import BANDS, LayerStatistics
from probe.files.checked_json import finite
from probe.formats import GATE_FORMATS
from probe.numerics.histogram import Trimmed
from probe.version import VERSION

#: The version of the JSON; it goes up when a key changes its meaning.
FORMAT = 1
#: Channels of a tensor that are listed, the largest first.
TOP_CHANNELS = 10
#: Buckets per octave of an exported histogram; 64 are counted.
PER_OCTAVE = 4
#: The most heat maps that are drawn: those of the layers with the largest max / median.
MOST_HEAT = 12
#: The figures that two analyses are compared by, in the order of the table; predicted errors follow.
FIGURES = ("amax", "max_to_median", "max_to_p99", "kurtosis", "outliers")

#: Tables that JSON has as lists of numbers, not as rows.
_LARGE = ("heatmap_3d", "percentile_range")
_BAND_NAMES = [f"p{percent:g}" for percent in BANDS]

Rows = list[dict[str, Any]]


def tables(analysis: Analysis) -> dict[str, Rows]:
    """The tables that are written, by file name; empty ones are left out."""
    visualization, plan, statistics = analysis.settings.visualization, analysis.plan, analysis.statistics
    enabled, reduce_dim = visualization.enabled, visualization.magnitude.reduce_dim
    found: dict[str, Rows] = {"statistics": [s.figures() for s in statistics.values()]}
    found["top_channels"] = [row for s in statistics.values() for row in top_channels(s)]
    chosen = {name for names in plan.magnitude.values() for name in names} | set(plan.distribution[1])
    found |= quantization({key: s for key, s in statistics.items() if key[0] in chosen} or statistics)
    for kind, names in plan.magnitude.items():
        measured = [statistics[name, kind] for name in names if (name, kind) in statistics]
        found[f"magnitude_{kind}"] = [{"module": s.module, **s.magnitudes(reduce_dim)} for s in measured]
    if enabled.outlier_layer_wise:
        found["outlier_layer_wise"] = [layer.figures() for layer in analysis.outliers.values()]
    if enabled.outlier_position:
        found["outlier_position"] = [
            {"module": layer.module, "position": position, "outliers": count}
            for layer in analysis.outliers.values()
            for position, count in sorted(layer.positions.items())
        ]
    if enabled.outlier_token:
        found["outlier_token"] = outliers_by_token(analysis)
        found["outlier_worst"] = worst_tokens(analysis)
    if enabled.distribution:
        side, names = plan.distribution
        measured = [statistics[name, side] for name in names if (name, side) in statistics]
        if "boxplot" in visualization.distribution.plot_types:
            found["distribution_boxplot"] = [_box(s) for s in measured]
        if "histogram" in visualization.distribution.plot_types:
            found["distribution_histogram"] = [row for s in measured for row in histogram(s)]
    if enabled.heatmap_3d:
        found["heatmap_3d"] = heat_rows(analysis)
    if enabled.percentile_range:
        found["percentile_range"] = band_rows(analysis)
    return {name: rows for name, rows in found.items() if rows}


def quantization(statistics: Mapping[Key, LayerStatistics]) -> dict[str, Rows]:
    """The predicted error of every layer in every format, and the layers that cause half of it."""
    usable = {key: s for key, s in statistics.items() if s.count}
    predictions = predict_layers(usable, GATE_FORMATS)
    noise = {(prediction.module, prediction.format): prediction.noise for prediction in predictions}
    rows: Rows = []
    for module, predicted in {prediction.module: prediction.of for prediction in predictions}.items():
        kind = next(kind for kind in ("input", "output", "weight") if (module, kind) in usable)
        spoiled = spoiled_share(usable[module, kind])
        by_format = {f"noise {format}": noise[module, format] for format in GATE_FORMATS}
        rows.append({"module": module, "kind": kind, "predicted": predicted, "spoiled_blocks": spoiled, **by_format})
    kept: Rows = []
    for format in GATE_FORMATS:
        names = keep_in_higher_precision([prediction for prediction in predictions if prediction.format == format])
        for rank, name in enumerate(names, 1):
            kept.append({"format": format, "rank": rank, "module": name, "noise": noise[name, format]})
    return {"predicted_error": rows, "keep_in_higher_precision": kept}


def top_channels(s: LayerStatistics) -> Rows:
    """The channels of a tensor with the largest max |x|, and their ratio to the median channel."""
    median = float(np.median(s.channel_amax)) if s.channels else 0.0
    rows = []
    for channel in np.argsort(-s.channel_amax, kind="stable")[:TOP_CHANNELS]:
        amax = float(s.channel_amax[channel])
        sizes = {"amax": amax, "to_median_channel": amax / median if median else None}
        rows.append({"module": s.module, "kind": s.kind, "channel": int(channel), **sizes})
    return rows


def outliers_by_token(analysis: Analysis) -> Rows:
    """Outlier counts by token over all layers, the most frequent first."""
    total: Counter[int] = sum((layer.token_ids for layer in analysis.outliers.values()), Counter())
    layers = Counter(token for layer in analysis.outliers.values() for token in layer.token_ids)
    return [
        {"token": token, "text": analysis.token_texts.get(token), "outliers": count, "layers": layers[token]}
        for token, count in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    ]


def worst_tokens(analysis: Analysis) -> Rows:
    """The worst tokens of every layer, one by one."""
    rows = []
    for module, outlier in ((layer.module, outlier) for layer in analysis.outliers.values() for outlier in layer.worst):
        place = {"module": module, "sample": outlier.sample, "position": outlier.position, "token": outlier.token}
        sizes = {"text": analysis.token_texts.get(outlier.token), "value": outlier.value, "ratio": outlier.ratio}
        rows.append({**place, **sizes, "around": analysis.around.get((outlier.sample, outlier.position))})
    return rows


def _box(s: LayerStatistics) -> dict[str, Any]:
    moments = {name: getattr(s.moments, name) for name in ("mean", "std", "kurtosis")}
    return {"module": s.module, "kind": s.kind, **s.percentiles(), "max": s.amax, **moments}


def histogram(s: LayerStatistics) -> Rows:
    """|x| in PER_OCTAVE buckets per octave, without empty ones at the ends; the first row counts the zeros."""
    step = (1 << SIZES.mantissa_bits) // PER_OCTAVE
    counts = Trimmed.of(s.buckets.whole().reshape(-1, step).sum(1))
    ends = SIZES.edges[::step].tolist()
    rows = [(0.0, 0.0, s.zeros)]
    rows += [(ends[i], ends[i + 1], count) for i, count in enumerate(counts.counts.tolist(), counts.first)]
    return [{"module": s.module, "kind": s.kind, "low": low, "high": high, "count": n} for low, high, n in rows]


def heat_rows(analysis: Analysis) -> Rows:
    """Every cell of every heat map that is drawn: its first token and channel, and the largest |x| in it."""
    rows = []
    for heat in drawn_heat(analysis):
        down, across = heat.values.shape
        for (i, j), value in np.ndenumerate(heat.values):
            place = {"token": i * heat.tokens // down, "channel": j * heat.channels // across}
            rows.append({"module": heat.module, "kind": heat.kind, **place, "max": float(value)})
    return rows


def drawn_heat(analysis: Analysis) -> list[HeatGrid]:
    """The heat maps that are drawn, at most MOST_HEAT, in the order of the model."""

    def ratio(name: str) -> float:
        s = analysis.statistics.get((name, analysis.plan.heat[0]))
        return (s.max_to_median or 0.0) if s else 0.0

    chosen = set(sorted(analysis.heat, key=ratio, reverse=True)[:MOST_HEAT])
    return [heat for name, heat in analysis.heat.items() if name in chosen]


def band_rows(analysis: Analysis) -> Rows:
    """The percentiles of every channel."""
    return [
        {"module": band.module, "kind": band.kind, "channel": channel, **dict(zip(_BAND_NAMES, values, strict=True))}
        for band in analysis.bands.values()
        for channel, values in enumerate(band.percentiles().T.tolist())
    ]


def as_json(analysis: Analysis, made: Mapping[str, Rows]) -> dict[str, Any]:
    """The whole analysis: facts, settings, notes, the tables, heat maps, and the counts that percentiles come from."""
    return {
        "format": FORMAT,
        "probe": VERSION,
        "facts": analysis.facts,
        "settings": analysis.settings.as_dict(),
        "notes": list(analysis.notes),
        "tables": {name: finite(rows) for name, rows in made.items() if name not in _LARGE},
        "percentile_range": [
            {
                "module": band.module,
                "kind": band.kind,
                **dict(zip(_BAND_NAMES, _digits(band.percentiles()), strict=True)),
            }
            for band in analysis.bands.values()
        ],
        "heat": [
            {name: value for name, value in vars(heat).items() if name != "values"} | {"max": _digits(heat.values)}
            for heat in drawn_heat(analysis)
        ],
        "counts": [_counts(s) for s in analysis.statistics.values()],
    }


def _digits(rows: npt.NDArray[np.floating]) -> list[list[float]]:
    return [[float(f"{x:.6g}") for x in row] for row in rows]


def _counts(s: LayerStatistics) -> dict[str, Any]:
    """Moments and tables of counts of a tensor, without the zeros at the ends."""
    moments, depths = s.moments, s.depths.whole()
    return {
        "module": s.module,
        "kind": s.kind,
        "moments": [moments.mean, moments.second, moments.third, moments.fourth],
        **{name: getattr(s, name).as_list() for name in ("buckets", "row_buckets", "block_buckets")},
        "depths": [[int(e), *Trimmed.of(depths[e]).as_list()] for e in np.flatnonzero(depths.sum(1))],
        "median_depths": s.median_depths.as_list(),
    }


@dataclass(frozen=True)
class SavedAnalysis:
    """An analysis that was read back from its JSON."""

    folder: Path
    facts: Mapping[str, Any]
    settings: Mapping[str, Any]
    figures: Mapping[Key, Mapping[str, Any]]
    """Statistics, outliers of outputs and predicted errors, by module and kind."""
    predicted: tuple[str, ...]
    """The names of predicted figures, such as `noise fp4_e2m1`."""


@dataclass(frozen=True)
class Comparison:
    """A row for every tensor that both runs have, and the tensors that only one of them has."""

    a: SavedAnalysis
    b: SavedAnalysis
    rows: tuple[dict[str, Any], ...]
    figures: tuple[str, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    warnings: tuple[str, ...]

    @property
    def unchanged(self) -> bool:
        """Whether all statistics of the shared tensors are equal, also those that have no column here."""
        return all(self.a.figures[key] == self.b.figures[key] for key in self.a.figures if key in self.b.figures)


def read_run(path: str | Path) -> SavedAnalysis:
    """Read the analysis.json of a run from its folder."""
    folder = Path(path)
    file = folder / "analysis.json"
    if not file.is_file():
        what = "has no analysis.json" if folder.is_dir() else f"does not exist (looked for {folder.absolute()})"
        expected = "Expected the folder of a run (visualization.save_dir) with json among its output.formats."
        raise ValueError(f"run {str(path)!r} {what}. {expected}")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        rows = {(row["module"], row["kind"]): dict(row) for row in document["tables"]["statistics"]}
        outliers = {row["module"]: row["outliers"] for row in document["tables"].get("outlier_layer_wise", [])}
        predicted = document["tables"].get("predicted_error", [])
        version, facts, settings = document["format"], document["facts"], document["settings"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        reason = f"{type(problem).__name__}: {problem}"
        raise ValueError(f"{str(file)!r} is not what probe analyze writes ({reason}). Run it again.") from None
    if version != FORMAT:
        raise ValueError(f"{str(file)!r} has the format {version}; this probe reads {FORMAT}. Run the analysis again.")
    for (module, kind), row in rows.items():
        row["outliers"] = outliers.get(module) if kind == "output" else None
    names = {name: None for row in predicted for name in row if name not in ("module", "kind", "predicted")}
    for row in predicted:
        if (row["module"], row["kind"]) in rows:
            rows[row["module"], row["kind"]] |= row
    return SavedAnalysis(folder, facts, settings, rows, tuple(names))


def compare_runs(path_a: str | Path, path_b: str | Path) -> Comparison:
    """Compare the tensors that both runs have; an error if there are none."""
    a, b = read_run(path_a), read_run(path_b)
    shared = [key for key in a.figures if key in b.figures]
    if not shared:
        first = [next((" ".join(key) for key in run.figures), "no tensor") for run in (a, b)]
        raise ValueError(
            f"the runs {str(a.folder)!r} ({first[0]}) and {str(b.folder)!r} ({first[1]}) have no tensor in common. "
            "Compare runs of the same layers of the same model."
        )
    names = (*FIGURES, *(name for name in a.predicted if name in b.predicted))
    cells = [run.figures[key] for run in (a, b) for key in shared]
    figures = tuple(name for name in names if any(row.get(name) is not None for row in cells))
    rows = []
    for key in shared:
        row: dict[str, Any] = {"module": key[0], "kind": key[1]}
        for name in figures:
            x, y = a.figures[key].get(name), b.figures[key].get(name)
            row |= {f"{name} A": x, f"{name} B": y, f"{name} B/A": _ratio(x, y)}
        rows.append(row)
    only_a, only_b = (tuple(" ".join(key) for key in run.figures if key not in shared) for run in (a, b))
    return Comparison(a, b, tuple(rows), figures, (only_a, only_b), tuple(_differences(a, b)))


def _ratio(a: float | None, b: float | None) -> float | None:
    """b / a; None where it has no meaning, 1 for 0 and 0."""
    if a is None or b is None:
        return None
    if a == b:
        return 1.0
    return b / a if a and math.isfinite(b / a) else None


def _differences(a: SavedAnalysis, b: SavedAnalysis) -> list[str]:
    """Warnings about differences that make the runs hard to compare."""
    warnings = []
    for key, differ in (("data_fingerprint", "tokens differ"), ("samples", "numbers of samples differ")):
        if a.facts.get(key) != b.facts.get(key):
            warnings.append(f"the {differ}: {a.facts.get(key)} and {b.facts.get(key)}")
    thresholds = [run.settings["visualization"]["outlier"]["threshold"] for run in (a, b)]
    if thresholds[0] != thresholds[1]:
        warnings.append(f"the outlier thresholds differ: {thresholds[0]:g} and {thresholds[1]:g}")
    return warnings


def ranked(comparison: Comparison, figure: str) -> list[dict[str, Any]]:
    """The rows in which a figure changed, largest |log(B/A)| first; rows without a ratio come before all."""

    def change(row: Mapping[str, Any]) -> float:
        ratio = row.get(f"{figure} B/A")
        return abs(math.log(ratio)) if ratio else math.inf

    rows = [row for row in comparison.rows if row.get(f"{figure} A") != row.get(f"{figure} B")]
    return sorted(rows, key=change, reverse=True)
