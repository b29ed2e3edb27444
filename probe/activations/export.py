"""An analysis as tables and as JSON: every number behind every plot."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from probe.activations.prediction import keep_in_higher_precision, predict_layers, spoiled_share
from probe.activations.reference import SIZES
from probe.activations.run import Analysis
from probe.activations.statistics import BANDS, PERCENTILES, LayerStatistics
from probe.files.checked_json import finite
from probe.formats import GATE_FORMATS
from probe.numerics.histogram import Trimmed
from probe.version import VERSION

#: Goes up when a key changes its meaning.
FORMAT = 1
#: Channels of a tensor that are listed, the largest first.
TOP_CHANNELS = 10
#: Buckets per octave of an exported histogram; 64 are counted.
PER_OCTAVE = 4

Rows = list[dict[str, Any]]


def tables(analysis: Analysis) -> dict[str, Rows]:
    """The tables that are written, by file name; empty ones are left out."""
    seen = analysis.settings.visualization
    enabled, plan = seen.enabled, analysis.plan
    found: dict[str, Rows] = {
        "statistics": [s.figures() for s in analysis.statistics.values()],
        "top_channels": top_channels(analysis.statistics.values()),
    }
    found |= quantization(_quantized(analysis))
    for kind, names in plan.magnitude.items():
        found[f"magnitude_{kind}"] = [
            {"module": name, **analysis.statistics[name, kind].magnitudes(cast(Any, seen.magnitude.reduce_dim))}
            for name in names
            if (name, kind) in analysis.statistics
        ]
    if enabled.outlier_layer_wise:
        found["outlier_layer_wise"] = outliers_by_layer(analysis)
    if enabled.outlier_position:
        found["outlier_position"] = outliers_by_position(analysis)
    if enabled.outlier_token:
        found["outlier_token"] = outliers_by_token(analysis)
        found["outlier_worst"] = worst_tokens(analysis)
    if enabled.distribution:
        chosen = [s for (name, kind), s in analysis.statistics.items() if (kind, name) in _distributed(analysis)]
        if "boxplot" in seen.distribution.plot_types:
            found["distribution_boxplot"] = [_box(s) for s in chosen]
        if "histogram" in seen.distribution.plot_types:
            found["distribution_histogram"] = [row for s in chosen for row in histogram(s)]
    if enabled.heatmap_3d:
        found["heatmap_3d"] = heat_rows(analysis)
    if enabled.percentile_range:
        found["percentile_range"] = band_rows(analysis)
    return {name: rows for name, rows in found.items() if rows}


def _quantized(analysis: Analysis) -> dict[tuple[str, str], LayerStatistics]:
    """The statistics of the layers with magnitudes or distributions; of all layers if there are none."""
    plan = analysis.plan
    chosen = {name for names in plan.magnitude.values() for name in names} | set(plan.distribution[1])
    found = {key: s for key, s in analysis.statistics.items() if key[0] in chosen}
    return found or analysis.statistics


def quantization(statistics: Mapping[tuple[str, str], LayerStatistics]) -> dict[str, Rows]:
    """The predicted error of every layer in every format, and the layers that cause half of it."""
    usable = {key: s for key, s in statistics.items() if s.count}
    predictions = predict_layers(usable, GATE_FORMATS)
    noise = {(one.module, one.format): one.noise for one in predictions}
    predicted = {one.module: one.of for one in predictions}
    rows = []
    for module in dict.fromkeys(module for module, _ in usable):
        kind = next(one for one in ("input", "output", "weight") if (module, one) in usable)
        spoiled = spoiled_share(usable[module, kind])
        by_format = {f"noise {format}": noise[module, format] for format in GATE_FORMATS}
        what = {"kind": kind, "predicted": predicted[module]}
        rows.append({"module": module, **what, "spoiled_blocks": spoiled, **by_format})
    kept: Rows = []
    for format in GATE_FORMATS if rows else ():
        names = keep_in_higher_precision([one for one in predictions if one.format == format])
        kept += [
            {"format": format, "rank": i, "module": name, "noise": noise[name, format]}
            for i, name in enumerate(names, 1)
        ]
    return {"predicted_error": rows, "keep_in_higher_precision": kept}


def _distributed(analysis: Analysis) -> set[tuple[str, str]]:
    side, names = analysis.plan.distribution
    return {(side, name) for name in names}


def top_channels(statistics: Iterable[LayerStatistics]) -> Rows:
    """The channels with the largest max |x| of every tensor, and their ratio to the median channel."""
    rows = []
    for s in statistics:
        median = float(np.median(s.channel_amax)) if s.channel_amax.size else 0.0
        for channel in np.argsort(-s.channel_amax, kind="stable")[:TOP_CHANNELS]:
            amax = float(s.channel_amax[channel])
            ratio = amax / median if median else None
            rows.append(
                {"module": s.module, "kind": s.kind, "channel": int(channel), "amax": amax, "to_median_channel": ratio}
            )
    return rows


def outliers_by_layer(analysis: Analysis) -> Rows:
    """Outlier counts by layer."""
    return [
        {
            "module": one.module,
            "outliers": one.count,
            "tokens": one.tokens,
            "share": one.count / one.tokens if one.tokens else 0.0,
            "samples": one.samples,
            "largest_ratio": one.largest_ratio,
        }
        for one in analysis.outliers.values()
    ]


def outliers_by_position(analysis: Analysis) -> Rows:
    """Outlier counts by layer and position, without zeros."""
    return [
        {"module": one.module, "position": position, "outliers": one.positions[position]}
        for one in analysis.outliers.values()
        for position in sorted(one.positions)
    ]


def outliers_by_token(analysis: Analysis) -> Rows:
    """Outlier counts by token over all layers, the most frequent first."""
    total: Counter[int] = sum((one.token_ids for one in analysis.outliers.values()), Counter())
    layers = Counter(token for one in analysis.outliers.values() for token in one.token_ids)
    return [
        {"token": token, "text": analysis.token_texts.get(token), "outliers": count, "layers": layers[token]}
        for token, count in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    ]


def worst_tokens(analysis: Analysis) -> Rows:
    """The worst tokens of every layer, one by one."""
    return [
        {
            "module": layer.module,
            "sample": one.sample,
            "position": one.position,
            "token": one.token,
            "text": analysis.token_texts.get(one.token),
            "value": one.value,
            "ratio": one.ratio,
            "around": analysis.around.get((one.sample, one.position)),
        }
        for layer in analysis.outliers.values()
        for one in layer.worst
    ]


def _box(s: LayerStatistics) -> dict[str, Any]:
    return {
        "module": s.module,
        "kind": s.kind,
        **{f"p{percent:g}": s.percentile(percent) for percent in PERCENTILES},
        "max": s.amax,
        "mean": s.mean,
        "std": s.std,
        "kurtosis": s.kurtosis,
    }


def histogram(s: LayerStatistics) -> Rows:
    """|x| in PER_OCTAVE buckets per octave, without empty ones at the ends; the first row counts the zeros."""
    step = (1 << SIZES.mantissa_bits) // PER_OCTAVE
    counts = s.buckets.reshape(-1, step).sum(1)
    ends = SIZES.edges[::step]
    some = np.flatnonzero(counts)
    rows: Rows = [{"module": s.module, "kind": s.kind, "low": 0.0, "high": 0.0, "count": s.zeros}]
    for bucket in range(int(some[0]), int(some[-1]) + 1) if some.size else ():
        low, high = float(ends[bucket]), float(ends[bucket + 1])
        rows.append({"module": s.module, "kind": s.kind, "low": low, "high": high, "count": int(counts[bucket])})
    return rows


def heat_rows(analysis: Analysis) -> Rows:
    """Every cell of every heat map that is drawn: its first token and channel, and the largest |x| in it."""
    rows = []
    for heat in drawn_heat(analysis):
        down, across = heat.values.shape
        for i in range(down):
            for j in range(across):
                token, channel = i * heat.tokens // down, j * heat.channels // across
                value = float(heat.values[i, j])
                rows.append(
                    {"module": heat.module, "kind": heat.kind, "token": token, "channel": channel, "max": value}
                )
    return rows


#: The most heat maps that are drawn: those of the layers with the largest max / median.
MOST_HEAT = 12


def drawn_heat(analysis: Analysis) -> list[Any]:
    """The heat maps worth drawing, in the order of the model."""
    side = analysis.plan.heat[0]

    def ratio(name: str) -> float:
        s = analysis.statistics.get((name, side))
        return (s.max_to_median or 0.0) if s else 0.0

    chosen = set(sorted(analysis.heat, key=ratio, reverse=True)[:MOST_HEAT])
    return [heat for name, heat in analysis.heat.items() if name in chosen]


def band_rows(analysis: Analysis) -> Rows:
    """The percentiles of every channel."""
    rows = []
    for band in analysis.bands.values():
        found = band.percentiles()
        for channel in range(found.shape[1]):
            values = {f"p{percent:g}": float(found[i, channel]) for i, percent in enumerate(BANDS)}
            rows.append({"module": band.module, "kind": band.kind, "channel": channel, **values})
    return rows


#: Tables that JSON has as lists of numbers, not as rows.
_LARGE = ("heatmap_3d", "percentile_range")


def _digits(values: Iterable[float]) -> list[float]:
    return [float(f"{x:.6g}") for x in values]


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
                **{f"p{p:g}": _digits(row) for p, row in zip(BANDS, band.percentiles(), strict=True)},
            }
            for band in analysis.bands.values()
        ],
        "heat": [
            {
                "module": one.module,
                "kind": one.kind,
                "sample": one.sample,
                "tokens": one.tokens,
                "channels": one.channels,
                "max": [_digits(row) for row in one.values],
            }
            for one in drawn_heat(analysis)
        ],
        "counts": [_counts(s) for s in analysis.statistics.values()],
    }


def _counts(s: LayerStatistics) -> dict[str, Any]:
    """Moments and tables of counts of a tensor, without the zeros at the ends."""
    return {
        "module": s.module,
        "kind": s.kind,
        "moments": [s.moments.mean, s.moments.second, s.moments.third, s.moments.fourth],
        **{name: s.kept[name].as_list() for name in ("buckets", "row_buckets", "block_buckets")},
        "depths": [[int(e), *Trimmed.of(s.depths[e]).as_list()] for e in np.flatnonzero(s.depths.sum(1))],
        "median_depths": s.kept["median_depths"].as_list(),
    }
