"""The files of an analysis, each written whole or not at all."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from probe.activations.export import as_json, tables
from probe.activations.run import Analysis
from probe.files.atomic import write
from probe.files.checked_json import finite
from probe.report.activations.earlier import in_place_of_earlier
from probe.report.activations.page import page_of
from probe.report.activations.pictures import pictures_of


def write_analysis(analysis: Analysis, *, progress: Callable[[str], Any] = print) -> list[Path]:
    """Write what `output.formats` asks for to `visualization.save_dir`; the paths, in the order of writing.

    The files of an earlier run that are not written again are deleted.
    """
    folder = Path(analysis.settings.visualization.save_dir)
    formats = analysis.settings.output.formats
    made = tables(analysis)
    with in_place_of_earlier(folder, progress=progress) as written:
        if "csv" in formats:
            for name, rows in made.items():
                written.append(write(folder / f"{name}.csv", csv_text(rows)))
        if "json" in formats:
            written.append(write(folder / "analysis.json", json_text(as_json(analysis, made))))
        if "png" in formats or "html" in formats:
            progress("drawing")
            drawn = list(pictures_of(analysis, made))
            for one in drawn if "png" in formats else ():
                written.append(write(folder / f"{one.file}.png", one.png))
            if "html" in formats:
                written.append(page_of(analysis, made, drawn).write(folder / "analysis_report.html"))
    return written


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """With a head line; None, NaN and Inf are empty."""
    kept = io.StringIO()
    writer = csv.DictWriter(kept, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(finite(list(rows)))
    return kept.getvalue()


def json_text(given: dict[str, Any]) -> str:
    """A line for every row of a table, so that it can be read and compared by people too."""
    parts = []
    for key, value in given.items():
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
