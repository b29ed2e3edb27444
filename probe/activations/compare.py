"""Comparison of two analyses: what changed in every tensor, e.g. by smoothing or a fine-tune."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.activations.export import FORMAT

#: The figures that are compared, in the order of the table.
FIGURES = ("amax", "max_to_median", "max_to_p99", "kurtosis", "outliers")

Key = tuple[str, str]


@dataclass(frozen=True)
class SavedAnalysis:
    """The exported JSON of an analysis, checked."""

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


_NO_FIGURE = ("module", "kind", "predicted")


def read_run(path: str | Path) -> SavedAnalysis:
    """Read the analysis.json of a run from its folder."""
    folder = Path(path)
    file = folder / "analysis.json"
    if not file.is_file():
        what = "has no analysis.json" if folder.is_dir() else f"does not exist (looked for {folder.absolute()})"
        raise ValueError(
            f"run {str(path)!r} {what}. Expected the folder of a run (visualization.save_dir) with json among its "
            "output.formats."
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = {(row["module"], row["kind"]): dict(row) for row in found["tables"]["statistics"]}
        outliers = {row["module"]: row["outliers"] for row in found["tables"].get("outlier_layer_wise", [])}
        predicted = found["tables"].get("predicted_error", [])
        version, facts, settings = found["format"], found["facts"], found["settings"]
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(
            f"{str(file)!r} is not what probe analyze writes ({type(problem).__name__}: {problem}). Run it again."
        ) from None
    if version != FORMAT:
        raise ValueError(f"{str(file)!r} has the format {version}; this probe reads {FORMAT}. Run the analysis again.")
    for (module, kind), row in rows.items():
        row["outliers"] = outliers.get(module) if kind == "output" else None
    names = tuple(dict.fromkeys(name for row in predicted for name in row if name not in _NO_FIGURE))
    for row in predicted:
        if (row["module"], row["kind"]) in rows:
            rows[row["module"], row["kind"]] |= row
    return SavedAnalysis(folder, facts, settings, rows, names)


def compare_runs(path_a: str | Path, path_b: str | Path) -> Comparison:
    """Compare the tensors that both runs have; an error if there are none."""
    a, b = read_run(path_a), read_run(path_b)
    shared = [key for key in a.figures if key in b.figures]
    if not shared:
        raise ValueError(
            f"the runs {str(a.folder)!r} ({_first(a)}) and {str(b.folder)!r} ({_first(b)}) have no tensor in common. "
            "Compare runs of the same layers of the same model."
        )
    names = (*FIGURES, *(name for name in a.predicted if name in b.predicted))
    figures = tuple(
        name for name in names if any(run.figures[key].get(name) is not None for run in (a, b) for key in shared)
    )
    rows = tuple(_row(key, a.figures[key], b.figures[key], figures) for key in shared)
    only = tuple(
        tuple(f"{m} {k}" for m, k in one.figures if (m, k) not in other.figures) for one, other in ((a, b), (b, a))
    )
    return Comparison(a, b, rows, figures, (only[0], only[1]), _differences(a, b))


def _first(run: SavedAnalysis) -> str:
    return ", ".join(f"{module} {kind}" for module, kind in list(run.figures)[:1]) or "no tensor"


def _row(key: Key, a: Mapping[str, Any], b: Mapping[str, Any], figures: tuple[str, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {"module": key[0], "kind": key[1]}
    for name in figures:
        row |= {f"{name} A": a.get(name), f"{name} B": b.get(name), f"{name} B/A": _ratio(a.get(name), b.get(name))}
    return row


def _ratio(a: float | None, b: float | None) -> float | None:
    """b / a; None where it has no meaning, 1 for 0 and 0."""
    if a is None or b is None:
        return None
    if a == b:
        return 1.0
    return b / a if a and math.isfinite(b / a) else None


def _differences(a: SavedAnalysis, b: SavedAnalysis) -> tuple[str, ...]:
    """Warnings about what makes the runs hard to compare."""
    found = []
    for key, what in (("data_fingerprint", "tokens"), ("samples", "number of samples")):
        if a.facts.get(key) != b.facts.get(key):
            found.append(f"the {what} differ: {a.facts.get(key)} and {b.facts.get(key)}")
    threshold = [run.settings["visualization"]["outlier"]["threshold"] for run in (a, b)]
    if threshold[0] != threshold[1]:
        found.append(f"the outlier thresholds differ: {threshold[0]:g} and {threshold[1]:g}")
    return tuple(found)


def ranked(comparison: Comparison, figure: str) -> list[dict[str, Any]]:
    """The rows in which a figure changed, largest |log(B/A)| first; rows without a ratio come before all."""

    def change(row: Mapping[str, Any]) -> float:
        ratio = row.get(f"{figure} B/A")
        return abs(math.log(ratio)) if ratio else math.inf

    rows = [row for row in comparison.rows if row.get(f"{figure} A") != row.get(f"{figure} B")]
    return sorted(rows, key=change, reverse=True)
