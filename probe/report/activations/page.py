"""`analysis_report.html`: what stands out, the pictures, and the tables behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from probe.activations.run import Analysis
from probe.report.document import Document


@dataclass(frozen=True)
class Picture:
    """A PNG with the name of its file, the section of the page that it belongs to, and its caption."""

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
#: Rows of a table on the page at most; the CSV file has them all.
MOST_ROWS = 200

Rows = list[dict[str, Any]]


def page_of(analysis: Analysis, tables: Mapping[str, Rows], pictures: Sequence[Picture]) -> Document:
    """The page of an analysis."""
    facts, modules = analysis.facts, len({name for name, _ in analysis.statistics})
    lead = f"{facts['samples']} samples, {facts['tokens']} tokens of {facts['data']}; {modules} modules."
    page = Document(f"Activations of {analysis.facts['model']}", lead)
    page.heading("What stands out")
    for note in analysis.notes:
        page.text(f"Note: {note}")
    _standing_out(page, analysis)
    csv = "csv" in analysis.settings.output.formats
    for section, text, names in _SECTIONS:
        drawn = [one for one in pictures if one.section == section]
        rows = [(name, tables[name]) for name in names if name in tables]
        if not drawn and not rows:
            continue
        page.heading(section)
        page.text(text)
        if section == OUTLIERS and analysis.outliers and not any(one.count for one in analysis.outliers.values()):
            page.text(_no_outliers(analysis))
        for picture in drawn:
            page.picture(picture.png, alt=picture.caption, caption=picture.caption)
        for name, some in rows:
            _table(page, name, some, csv=csv)
    page.heading("All statistics")
    _table(page, "statistics", tables.get("statistics", []), csv=csv)
    page.heading("Configuration")
    page.pre(yaml.safe_dump(analysis.settings.as_dict(), sort_keys=False, allow_unicode=True))
    return page


_SECTIONS = (
    (
        PREDICTED,
        "The mean square error of each format over the mean square, predicted from these statistics before any run. "
        "Spoiled blocks: the share of blocks of 32 in which the median lies 5 octaves or more below the largest value. "
        "The layers to keep in higher precision are the fewest that hold half of the noise of a format.",
        ("keep_in_higher_precision", "predicted_error"),
    ),
    (
        MAGNITUDES,
        "The largest, second and third largest magnitude, the median and the smallest. If they are far apart, a few "
        "values determine the scale of a tensor. A triangle on the lower edge is a value below it, or 0.",
        ("magnitude_input", "magnitude_output", "magnitude_weight"),
    ),
    (
        OUTLIERS,
        "A token is an outlier in a layer if its largest |x| exceeds the threshold times the median of the largest |x| "
        "of the tokens of that layer and sample. Padding does not count.",
        ("outlier_layer_wise", "outlier_token", "outlier_worst"),
    ),
    (DISTRIBUTIONS, "Sizes |x| of all elements.", ("distribution_boxplot",)),
    (
        HEAT,
        "The largest |x| of every field of tokens and channels. A ridge along the tokens is an outlier channel.",
        (),
    ),
    (BANDS, "Where the values of every channel lie, and the channels with the largest |x|.", ("top_channels",)),
)


def _no_outliers(analysis: Analysis) -> str:
    threshold = analysis.settings.visualization.outlier.threshold
    farthest = max(analysis.outliers.values(), key=lambda one: one.largest_ratio)
    return (
        f"No token is an outlier: none exceeds {threshold:g} times the median of its layer and sample. The farthest is "
        f"at {farthest.largest_ratio:.3g} times, in {farthest.module}: lower outlier.threshold to see more."
    )


def _standing_out(page: Document, analysis: Analysis) -> None:
    outliers = {name: tokens.count for name, tokens in analysis.outliers.items()}
    rows = [
        {
            "module": s.module,
            "kind": s.kind,
            "max |x|": s.amax,
            "max / median": s.max_to_median,
            "max / p99": s.max_to_p99,
            "kurtosis": s.moments.kurtosis,
            "outlier tokens": outliers.get(s.module) if s.kind == "output" else None,
        }
        for s in analysis.hardest()[:15]
    ]
    if rows:
        page.table(rows, caption="The tensors with the largest max / 99th percentile of |x|: hardest to quantize.")


#: The caption of the table of each file.
CAPTIONS = {
    "keep_in_higher_precision": "The layers that hold half of the predicted noise of each format, the noisiest first",
    "predicted_error": "Predicted noise / signal of every layer in each format",
    **{f"magnitude_{kind}": f"Magnitudes of the {kind}s" for kind in ("input", "output", "weight")},
    "outlier_layer_wise": "Outlier tokens of every layer, and how far out the farthest is",
    "outlier_token": "Which tokens are outliers, and in how many layers, the most frequent first",
    "outlier_worst": "The tokens of every layer that are farthest out, one by one",
    "distribution_boxplot": "Percentiles of |x| of every tensor, as drawn above",
    "top_channels": "The channels of every tensor with the largest |x|, beside its median channel",
    "statistics": "Every figure of every tensor",
}


def _table(page: Document, name: str, rows: Rows, *, csv: bool) -> None:
    """The first rows, with texts as Python writes them, so that spaces and line ends can be seen."""
    if rows:
        caption = f"{CAPTIONS[name]}{shown_rows(len(rows), name if csv else None)}."
        texts = ({key: repr(row[key]) for key in ("text", "around") if row.get(key) is not None} for row in rows)
        page.table([row | text for row, text in zip(rows[:MOST_ROWS], texts, strict=False)], caption=caption)


def shown_rows(count: int, file: str | None) -> str:
    """Which rows the page shows of how many, and the file that has them all, if one is written."""
    if count <= MOST_ROWS:
        return f" ({file}.csv)" if file else ""
    return f": the first {MOST_ROWS} of {count} rows" + (f"; all are in {file}.csv" if file else "")
