"""Two runs compared: a table in the terminal, CSV, a picture and a page."""

from pathlib import Path
from typing import Any

from probe.activations.compare import Comparison, compare_runs, ranked
from probe.report.activations.drawing import BLUE, GREY, RED, drawable, families, layer_axis, log_axis, sheet, tail
from probe.report.activations.page import MOST_ROWS
from probe.report.activations.writing import csv_text
from probe.report.document import Document
from probe.report.files import write

_DPI = 150
#: Rows in the terminal.
MOST_LINES = 12


def write_comparison(a: str, b: str, *, folder: str | None = None) -> tuple[str, list[Path]]:
    """Compare the folders of two runs and write what differs; the text for the terminal, and the files."""
    comparison = compare_runs(a, b)
    target = Path(folder) if folder else Path(b) / "compared"
    pictures = {name: change_picture(comparison, name) for name in comparison.figures}
    written = [write(target / "comparison.csv", csv_text(list(comparison.rows)))]
    written += [write(target / f"{name.replace(' ', '_')}.png", png) for name, png in pictures.items()]
    written.append(comparison_page(comparison, pictures).write(target / "comparison_report.html"))
    return comparison_text(comparison), written


def comparison_text(comparison: Comparison) -> str:
    """The tensors that changed most."""
    figure = "max_to_median"
    lines = [f"A {_said(comparison.a)}", f"B {_said(comparison.b)}", *_warned(comparison), ""]
    rows = ranked(comparison, figure)[:MOST_LINES]
    width = max(len(f"{row['module']} {row['kind']}") for row in rows)
    lines.append(f"{'tensor'.ljust(width)}  {'max/median A':>14} {'B':>12} {'B/A':>9}  {'kurtosis A':>12} {'B':>12}")
    for row in rows:
        cells = [row.get(f"{figure} {side}") for side in ("A", "B", "B/A")]
        more = [row.get(f"kurtosis {side}") for side in ("A", "B")]
        name = f"{row['module']} {row['kind']}".ljust(width)
        lines.append(
            f"{name}  {_cell(cells[0]):>14} {_cell(cells[1]):>12} {_cell(cells[2]):>9}  "
            f"{_cell(more[0]):>12} {_cell(more[1]):>12}"
        )
    counts = [sum(row.get(f"outliers {side}") or 0 for row in comparison.rows) for side in ("A", "B")]
    if "outliers" in comparison.figures:
        lines.append(f"outlier tokens: {counts[0]} in A, {counts[1]} in B")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _said(run: Any) -> str:
    facts = run.facts
    return (
        f"{run.folder}: {facts['model']} ({facts['model_fingerprint']}), {facts['samples']} samples of {facts['data']}"
    )


def _warned(comparison: Comparison) -> list[str]:
    notes = [f"note: {one}" for one in comparison.warnings]
    for side, names in zip("AB", comparison.only, strict=True):
        if names:
            notes.append(
                f"note: {len(names)} tensors are in {side} only: {', '.join(names[:3])}{', ...' * (len(names) > 3)}"
            )
    return notes


def change_picture(comparison: Comparison, figure: str) -> bytes:
    """A figure of both runs by layer; a panel for each family of modules and kind."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for kind in dict.fromkeys(row["kind"] for row in comparison.rows):
        by_name = {row["module"]: row for row in comparison.rows if row["kind"] == kind and _has(row, figure)}
        for family, names in families(list(by_name)).items() if by_name else ():
            groups[f"{family} {kind}"] = [by_name[name] for name in names]
    if len(groups) > 12:
        groups = {"all tensors": [row for rows in groups.values() for row in rows]}
    with sheet(len(groups), dpi=_DPI) as page:
        for axes, (title, rows) in zip(page.panels, groups.items(), strict=True):
            a, b = ([row[f"{figure} {side}"] for row in rows] for side in "AB")
            mark = {"marker": "o", "markersize": 4} if len(rows) <= 40 else {}
            axes.plot(drawable(a), color=GREY, linewidth=3, label="A", **mark)
            axes.plot(drawable(b), color=RED, linewidth=1.2, label="B", **mark)
            log_axis(axes, [*a, *b])
            layer_axis(axes, [row["module"] for row in rows])
            axes.set_title(tail(title, 40))
        page.panels[0].legend(fontsize=7)
        page.figure.suptitle(figure, x=0.01, ha="left", fontsize=9, color=BLUE)
        return page.png()


def _has(row: dict[str, Any], figure: str) -> bool:
    return any(row.get(f"{figure} {side}") is not None for side in "AB")


def comparison_page(comparison: Comparison, pictures: dict[str, bytes]) -> Document:
    """The page."""
    page = Document("Activations of two runs", f"A: {_said(comparison.a)}. B: {_said(comparison.b)}.")
    page.heading("What changed most")
    for note in _warned(comparison):
        page.text(note)
    page.table(ranked(comparison, "max_to_median")[:15], caption="By the change of max |x| / median |x|.")
    for name, png in pictures.items():
        page.heading(name)
        page.picture(png, alt=f"{name} of both runs by layer", caption=f"{name}: A grey, B red.")
    page.heading("All tensors")
    more = f" The first {MOST_ROWS} of {len(comparison.rows)}; all are in comparison.csv." * (
        len(comparison.rows) > MOST_ROWS
    )
    page.table(list(comparison.rows[:MOST_ROWS]), caption=f"Both runs and their ratio.{more}")
    return page
