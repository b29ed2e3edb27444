"""Two runs compared: a table in the terminal, CSV, a picture and a page."""

from collections.abc import Sequence
from itertools import groupby
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
from probe.words import columns, first_few

_DPI = 150
#: The statistic by whose change tensors are ranked.
FIGURE = "max_to_median"
#: Rows in the terminal at most.
MOST_LINES = 12

#: The rows of each family of modules, by family and kind.
Panels = dict[tuple[str, str], list[dict[str, Any]]]


def write_comparison(a: str, b: str, *, folder: str | None = None) -> tuple[str, list[Path]]:
    """Compare the folders of two runs and write the files; returns the text for the terminal and the paths."""
    comparison = compare_runs(a, b)
    target = Path(folder) if folder else Path(b) / "compared"
    pictures = [one for name in comparison.figures for one in change_pictures(comparison, name)]
    written = [write(target / "comparison.csv", csv_text(finite(list(comparison.rows))))]
    written += [write(target / f"{one.file}.png", one.png) for one in pictures]
    written.append(comparison_page(comparison, pictures).write(target / "comparison_report.html"))
    return comparison_text(comparison), written


def comparison_text(comparison: Comparison) -> str:
    """The tensors that changed most, as text."""
    lines = [f"A {_run_line(comparison.a)}", f"B {_run_line(comparison.b)}", *_note_lines(comparison), ""]
    rows = ranked(comparison, FIGURE)
    if rows:
        keys = {"max/median A": f"{FIGURE} A", "B": f"{FIGURE} B", "B/A": f"{FIGURE} B/A"}
        keys |= {"kurtosis A": "kurtosis A", "kurtosis B": "kurtosis B"}
        texts = []
        for row in rows[:MOST_LINES]:
            values = {name: row.get(key) for name, key in keys.items()}
            cells = {name: "-" if value is None else f"{value:.4g}" for name, value in values.items()}
            texts.append({"tensor": f"{row['module']} {row['kind']}", **cells})
        lines += columns(texts, left=["tensor"])
    if len(rows) < len(comparison.rows):
        lines.append(_same(comparison, len(rows)))
    if "outliers" in comparison.figures:
        a, b = (sum(row.get(f"outliers {side}") or 0 for row in comparison.rows) for side in "AB")
        lines.append(f"outlier tokens: {a} in A, {b} in B")
    return "\n".join(lines)


def _same(comparison: Comparison, changed: int) -> str:
    """How many tensors have the same max / median. It says "Nothing changed" only if every statistic is equal."""
    every = len(comparison.rows)
    if comparison.unchanged:
        return f"Nothing changed: every statistic of the {every} tensors that both runs have is the same."
    others = [name for name in comparison.figures if name != FIGURE and ranked(comparison, name)]
    also = f" What changed otherwise: {', '.join(others)}." if others and not changed else ""
    return f"max / median is the same in {every - changed} of {every} tensors.{also}"


def _run_line(run: Any) -> str:
    facts = run.facts
    model = f"{facts['model']} ({facts['model_fingerprint']})"
    return f"{run.folder}: {model}, {facts['samples']} samples of {facts['data']}"


def _note_lines(comparison: Comparison) -> list[str]:
    only = zip("AB", comparison.only, strict=True)
    notes = [f"{len(names)} tensors are in {side} only: {first_few(names, most=3)}" for side, names in only if names]
    return [f"note: {note}" for note in (*comparison.warnings, *notes)]


def change_pictures(comparison: Comparison, figure: str) -> list[Picture]:
    """A statistic of both runs by layer: a panel for each family of modules and kind, or a picture for each kind."""
    kinds: dict[str, Panels] = {}
    for kind in ("input", "output", "weight"):
        some = [row for row in comparison.rows if row["kind"] == kind]
        rows = {row["module"]: row for row in some if any(row.get(f"{figure} {side}") is not None for side in "AB")}
        for family, modules in families(list(rows)).items() if rows else ():
            kinds.setdefault(kind, {})[family, kind] = [rows[module] for module in modules]
    panels = {key: rows for some in kinds.values() for key, rows in some.items()}
    file = figure.replace(" ", "_")
    caption = "A grey and wide, B orange. A triangle on the lower edge is 0, or too small to be seen."
    if len(panels) <= MOST_PANELS:
        return [Picture(file, figure, f"{figure}: {caption}", _drawn(panels, figure))]
    return [
        Picture(f"{file}_{kind}", figure, f"{figure} of {kind}s: {caption}", _drawn(some, figure))
        for kind, some in kinds.items()
    ]


def _drawn(panels: Panels, figure: str) -> bytes:
    groups = {f"{family} {kind}": [row["module"] for row in rows] for (family, kind), rows in panels.items()}
    with family_sheet(groups, dpi=_DPI) as page:
        for axes, ((family, kind), rows) in zip(page.panels, panels.items(), strict=True):
            a, b = ([row[f"{figure} {side}"] for row in rows] for side in "AB")
            for values, colour, name, width in ((a, GREY, "A", 3.5), (b, VERMILION, "B", 1.2)):
                line(axes, values, colour=colour, label=name, width=width, joined=family != MIXED)
            log_axis(axes, [*a, *b])
            mark_below(axes, a, colour=GREY, size=8)
            mark_below(axes, b, colour=VERMILION, size=4)
            layer_axis(axes, [row["module"] for row in rows])
            axes.set(title=label(f"{family} {kind}", most=44), ylabel=figure)
        page.legend()
        return page.png()


def comparison_page(comparison: Comparison, pictures: Sequence[Picture]) -> Document:
    """The page of a comparison."""
    page = Document("Activations of two runs", f"A: {_run_line(comparison.a)}. B: {_run_line(comparison.b)}.")
    page.heading("What changed most")
    for note in _note_lines(comparison):
        page.text(note)
    rows = ranked(comparison, FIGURE)
    if rows:
        page.table(rows[:15], caption="By the change of max |x| / median |x|.")
    if len(rows) < len(comparison.rows):
        page.text(_same(comparison, len(rows)))
    for section, some in groupby(pictures, key=lambda one: one.section):
        page.heading(section)
        for one in some:
            page.picture(one.png, alt=f"{one.file} of both runs by layer", caption=one.caption)
    page.heading("All tensors")
    shown = list(comparison.rows[:MOST_ROWS])
    page.table(shown, caption=f"Both runs and their ratio{shown_rows(len(comparison.rows), 'comparison')}.")
    return page
