"""The figures of a case as an HTML table, for its row of the report. All text is escaped: it comes from models."""

from html import escape

from probe.gate.cases import Figure, Outcome
from probe.report.gate.story import heading, plain
from probe.report.numbers import change, number, ranked, tolerance


def figure_table(outcome: Outcome) -> str:
    """What is wrong, and every figure with its baseline and its tolerance: those that moved come first.

    End tags and quotes that HTML does not need are left out: a report embeds hundreds of these, escaped once more.
    """
    order = sorted(ranked(outcome.figures), key=lambda item: not item[1].moved)
    rows = "".join(_row(name, figure) for name, figure in order)
    head = "<tr><th>figure<th>baseline<th>now<th>tolerance<th>"
    table = f"<table>{head}{rows}</table>" if rows else "<p>No figures: the case was not measured.</p>"
    return f"<div class=probe-figures>{_lead(outcome)}{table}</div>"


def _lead(outcome: Outcome) -> str:
    lines = [f"<b>{text_html(heading(outcome))}</b>", *map(text_html, (outcome.message, *outcome.details))]
    if outcome.cause:
        lines.append(f"likely cause: {text_html(outcome.cause)}")
    if outcome.baseline_file:
        lines.append(f"baseline: {text_html(outcome.baseline_file)}")
    return f"<p>{'<br>'.join(line for line in lines if line)}</p>"


def _row(name: str, figure: Figure) -> str:
    old, new = change(figure.old, figure.new) if figure.old is not None else ("", number(figure.new))
    why = figure.direction + (f" (accepted: {figure.reason})" if figure.reason else "")
    cells = (name, old, new, tolerance(figure), why or ("moved" if figure.moved else ""))
    return f"<tr{' class=moved' if figure.moved else ''}>" + "".join(f"<td>{text_html(cell)}" for cell in cells)


def text_html(text: str) -> str:
    """Printable and harmless, as text and inside quotes."""
    return escape(plain(text, most=500))


def name_cell(nodeid: str) -> str:
    """The cell of a test's name. pytest-html does not escape it, and the id of a case holds the name of a layer."""
    return f'<td class="col-testId">{escape(nodeid)}</td>'
