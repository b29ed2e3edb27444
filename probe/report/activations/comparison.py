"""Two runs compared: a table in the terminal, CSV, a picture and a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.activations.export import Comparison, compare_runs, ranked
from probe.files.atomic import write
from probe.files.checked_json import finite
from probe.report.activations.layer_plots import MIXED, families, family_sheet
from probe.report.activations.page import MOST_ROWS, Picture, shown_rows
from probe.report.activations.tensor_plots import MOST_PANELS
from probe.report.document import Document
from probe.report.figure import GREY, VERMILION, label, layer_axis, line, log_axis, mark_below
from probe.report.numbers import csv_text
from probe.words import columns

_DPI = 150
#: Tensors are ranked by its change.
FIGURE = "max_to_median"
#: Rows in the terminal.
MOST_LINES = 12


def write_comparison(a: str, b: str, *, folder: str | None = None) -> tuple[str, list[Path]]:
    """Compare the folders of two runs and write what differs; the text for the terminal, and the files."""
    comparison = compare_runs(a, b)
    target = Path(folder) if folder else Path(b) / "compared"
    pictures = [one for name in comparison.figures for one in change_pictures(comparison, name)]
    written = [write(target / "comparison.csv", csv_text(finite(list(comparison.rows))))]
    written += [write(target / f"{one.file}.png", one.png) for one in pictures]
    written.append(comparison_page(comparison, pictures).write(target / "comparison_report.html"))
    return comparison_text(comparison), written


def comparison_text(comparison: Comparison) -> str:
    """The tensors that changed most."""
    lines = [f"A {_run_line(comparison.a)}", f"B {_run_line(comparison.b)}", *_note_lines(comparison), ""]
    rows = ranked(comparison, FIGURE)
    if rows:
        lines += _changes(rows[:MOST_LINES])
    if len(rows) < len(comparison.rows):
        lines.append(_same(comparison, len(rows)))
    counts = [sum(row.get(f"outliers {side}") or 0 for row in comparison.rows) for side in ("A", "B")]
    if "outliers" in comparison.figures:
        lines.append(f"outlier tokens: {counts[0]} in A, {counts[1]} in B")
    return "\n".join(lines)


def _changes(rows: Sequence[dict[str, Any]]) -> list[str]:
    texts = []
    for row in rows:
        figures = {"max/median A": f"{FIGURE} A", "B": f"{FIGURE} B", "B/A": f"{FIGURE} B/A"}
        figures |= {"kurtosis A": "kurtosis A", "kurtosis B": "kurtosis B"}
        cells = {name: _cell(row.get(key)) for name, key in figures.items()}
        texts.append({"tensor": f"{row['module']} {row['kind']}", **cells})
    return columns(texts, left=["tensor"])


def _same(comparison: Comparison, changed: int) -> str:
    """How many tensors have the same max / median; that nothing changed is said only where every figure is equal."""
    every = len(comparison.rows)
    if comparison.unchanged:
        return f"Nothing changed: every statistic of the {every} tensors that both runs have is the same."
    others = [name for name in comparison.figures if name != FIGURE and ranked(comparison, name)]
    also = f" What changed otherwise: {', '.join(others)}." if others and not changed else ""
    return f"max / median is the same in {every - changed} of {every} tensors.{also}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _run_line(run: Any) -> str:
    facts = run.facts
    return (
        f"{run.folder}: {facts['model']} ({facts['model_fingerprint']}), {facts['samples']} samples of {facts['data']}"
    )


def _note_lines(comparison: Comparison) -> list[str]:
    notes = [f"note: {one}" for one in comparison.warnings]
    for side, names in zip("AB", comparison.only, strict=True):
        if names:
            notes.append(
                f"note: {len(names)} tensors are in {side} only: {', '.join(names[:3])}{', ...' * (len(names) > 3)}"
            )
    return notes


def change_pictures(comparison: Comparison, figure: str) -> list[Picture]:
    """A figure of both runs by layer, a panel for each family of modules and kind; of many, a picture for each kind."""
    kinds = {}
    for kind in ("input", "output", "weight"):
        rows = {row["module"]: row for row in comparison.rows if row["kind"] == kind and _has(row, figure)}
        if rows:
            kinds[kind] = [
                Panel(name, kind, [rows[one] for one in some]) for name, some in families(list(rows)).items()
            ]
    panels = [panel for some in kinds.values() for panel in some]
    file = figure.replace(" ", "_")
    caption = "A grey and wide, B orange. A triangle on the lower edge is 0, or too small to be seen."
    if len(panels) <= MOST_PANELS:
        return [Picture(file, figure, f"{figure}: {caption}", _drawn(panels, figure))]
    return [
        Picture(f"{file}_{kind}", figure, f"{figure} of {kind}s: {caption}", _drawn(some, figure))
        for kind, some in kinds.items()
    ]


@dataclass(frozen=True)
class Panel:
    """The rows of a family of modules, all of one kind."""

    family: str
    kind: str
    rows: list[dict[str, Any]]


def _drawn(panels: Sequence[Panel], figure: str) -> bytes:
    groups = {f"{one.family} {one.kind}": [row["module"] for row in one.rows] for one in panels}
    with family_sheet(groups, dpi=_DPI) as page:
        for axes, one, (title, names) in zip(page.panels, panels, groups.items(), strict=True):
            a, b = ([row[f"{figure} {side}"] for row in one.rows] for side in "AB")
            for values, colour, name, width in ((a, GREY, "A", 3.5), (b, VERMILION, "B", 1.2)):
                line(axes, values, colour=colour, label=name, width=width, joined=one.family != MIXED)
            log_axis(axes, [*a, *b])
            mark_below(axes, a, colour=GREY, size=8)
            mark_below(axes, b, colour=VERMILION, size=4)
            layer_axis(axes, names)
            axes.set_title(label(title, most=44))
            axes.set_ylabel(figure)
        page.legend()
        return page.png()


def _has(row: dict[str, Any], figure: str) -> bool:
    return any(row.get(f"{figure} {side}") is not None for side in "AB")


def comparison_page(comparison: Comparison, pictures: Sequence[Picture]) -> Document:
    """The page."""
    page = Document("Activations of two runs", f"A: {_run_line(comparison.a)}. B: {_run_line(comparison.b)}.")
    page.heading("What changed most")
    for note in _note_lines(comparison):
        page.text(note)
    rows = ranked(comparison, FIGURE)
    if rows:
        page.table(rows[:15], caption="By the change of max |x| / median |x|.")
    if len(rows) < len(comparison.rows):
        page.text(_same(comparison, len(rows)))
    for name in dict.fromkeys(one.section for one in pictures):
        page.heading(name)
        for one in pictures:
            if one.section == name:
                page.picture(one.png, alt=f"{one.file} of both runs by layer", caption=one.caption)
    page.heading("All tensors")
    shown = list(comparison.rows[:MOST_ROWS])
    page.table(shown, caption=f"Both runs and their ratio{shown_rows(len(comparison.rows), 'comparison')}.")
    return page
