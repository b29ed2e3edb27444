"""A failing recipe as text: where the error begins, how it grows, the figures of the baseline, and what to run next."""

import re
import shlex
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from urllib.parse import quote

from probe.formats import FORMATS
from probe.gate.cases import HEADINGS, NEXT, Outcome
from probe.report.gate.recipes import Run, got_worse, is_inherited
from probe.report.numbers import change, number, ranked, tolerance
from probe.words import single_line

MOST_LINES = 22
MOST_COLUMNS = 118
MOST_FIGURES = 5

Row = tuple[str, str]


def story(outcomes: Sequence[Outcome], *, report: str | None, environment: Sequence[str] = ()) -> list[str]:
    """The failure of one recipe on one device, from all its outcomes in the order of the model; empty if none failed.

    At most MOST_LINES lines of MOST_COLUMNS characters; commands are never cut short. `report` is the path of the HTML
    report; `environment` has a line for each difference from the environment of the baseline.
    """
    run = Run(tuple(outcomes))
    if not run.failing:
        return []
    first = run.failing[0]
    figures = _figure_rows(first)
    room = _room(figures)
    before = [*figures, *_wrapped("what", first.message, room)]
    commands = _commands(run.failing, selection(first))
    after = [
        *_first_seen(first, room),
        *_growth(run, room),
        *_failing_layers(run, room),
        *_failing_beside(run, room),
        *_whole_model(run),
        *([("baseline", first.baseline_file)] if first.baseline_file else []),
        *_labelled("environment", _first_lines(environment, 2, room)),
        *([("look", f"{report}#{quote(run.case.recipe)}")] if report else []),
    ]
    left = min(3, MOST_LINES - 1 - len(before) - len(after) - len(commands))
    return _lines(first, [*before, *_labelled("", _first_lines(first.details, left, room)), *after], commands)


def case_text(outcome: Outcome) -> list[str]:
    """One case in at most 10 lines: what moved, what is wrong with it and the likely cause."""
    figures = _figure_rows(outcome)
    room = _room(figures)
    rows = [*figures, *_wrapped("what", outcome.message, room), *_wrapped("likely cause", outcome.cause, room)]
    return _lines(outcome, rows)


def golden_text(outcome: Outcome) -> list[str]:
    """A golden case that belongs to no recipe.

    If its settings differ from those of the baseline, they are shown instead of the figures, which mean nothing then.
    """
    figures = _figure_rows(outcome)
    room = _room(figures)
    rows = [
        *figures,
        *_wrapped("what", outcome.message, room),
        *_labelled("" if outcome.verdict else "changed", outcome.details),
        *_wrapped("likely cause", outcome.cause, room),
        *([("baseline", outcome.baseline_file)] if outcome.baseline_file else []),
    ]
    return _lines(outcome, rows, _commands([outcome], case_selection(outcome)))


def one_line(outcome: Outcome, *, explained_at: str = "") -> str:
    """A failing case in one line; the failure of its recipe is explained at the case `explained_at`, if given."""
    what = _worst_figure(outcome) or outcome.message or heading(outcome)
    text = f"{outcome.verdict or 'failed'}: {what.rstrip('.')}"
    return single_line(f"{text}; explained at {explained_at}" if explained_at else text, most=MOST_COLUMNS)


def heading(outcome: Outcome) -> str:
    """mode_2_1-layer_0-cpu-fp8_e4m3 drifted from its baseline."""
    return f"{outcome.case} {HEADINGS[outcome.verdict] if outcome.verdict else outcome.status}"


def names_in_order(names: Sequence[str], order: Sequence[str], *, most: int) -> str:
    """layer_0, layer_2 .. layer_23: runs of `order` by their ends; beyond `most` characters, how many more."""
    place = {name: index for index, name in enumerate(order)}
    stretches: list[list[str]] = []
    for name in names:
        if stretches and place[name] == place[stretches[-1][-1]] + 1:
            stretches[-1].append(name)
        else:
            stretches.append([name])
    parts = [(f"{s[0]} .. {s[-1]}", len(s)) if len(s) > 2 else (", ".join(s), len(s)) for s in stretches]
    for shown in range(len(parts), 0, -1):
        left = sum(count for _, count in parts[shown:])
        text = ", ".join(part for part, _ in parts[:shown]) + (f" and {left} more" if left else "")
        if len(text) <= most:
            return text
    return f"{len(names)} layers"


def selection(outcome: Outcome) -> str:
    """The command that runs this recipe and no other: -k matches parts of names, and int8 is a part of mxint8.

    It names the file of the test, so that pytest collects nothing else.
    """
    mode, format = outcome.case.mode, outcome.case.format
    parts = [mode if re.fullmatch(r"mode_\d(_\d)?", mode) else f"{mode}-"]
    if format:
        part_of_another = format not in FORMATS or any(format in other and format != other for other in FORMATS)
        parts.append(f"{outcome.case.device}-{format}" if part_of_another else format)
    file = outcome.nodeid.partition("::")[0]
    return f'{shlex.join(["pytest", *filter(None, [file])])} -k "{" and ".join(parts)}"'


def case_selection(outcome: Outcome) -> str:
    """The command that runs this case and no other: by its id, or, where -k cannot spell that, by the test's name."""
    return f"pytest {shlex.quote(outcome.nodeid)}"


def _figure_rows(outcome: Outcome) -> list[Row]:
    """The figures that moved, or else the two most important; none if nothing could be compared."""
    if outcome.status == "failed" and not outcome.verdict:
        return []
    shown = ranked(outcome.figures, moved=True)[:MOST_FIGURES] or ranked(outcome.figures)[:2]
    cells = [change(figure.old, figure.new) for _, figure in shown]
    old, new = (max((len(cell[side]) for cell in cells), default=0) for side in (0, 1))
    rows = []
    for (name, figure), cell in zip(shown, cells, strict=True):
        limit = f"(tolerance {tolerance(figure)})" if tolerance(figure) else ""
        text = f"{cell[0]:<{old}} -> {cell[1]:<{new}}   {limit:<19}   {figure.direction}".rstrip()
        is_new = figure.old is None and not figure.moved
        rows.append((single_line(name, most=26), number(figure.new) if is_new else text))
    return rows


def _first_seen(outcome: Outcome, room: int) -> list[Row]:
    """The first failing layer and the likely cause; empty if no figure moved (no baseline, or only a limit)."""
    only_limited = outcome.verdict == "over the limit" and not any(one.moved for one in outcome.figures.values())
    if outcome.verdict in ("missing", "obsolete") or only_limited:
        return []
    layer, cause = outcome.case.layer, outcome.cause
    if outcome.verdict == "reference moved":
        return _wrapped("first seen", cause, room)
    is_named = cause.startswith((f"{layer};", f"{layer} "))
    return _wrapped("first seen", cause if is_named else "; ".join(filter(None, (layer, cause))), room)


def _worst_figure(outcome: Outcome, *, direction: bool = False) -> str:
    """mse 2.31e-04 -> 5.02e-04 (tolerance 4.6e-06), with its direction if requested; empty if no figure moved."""
    for name, figure in ranked(outcome.figures, moved=True)[:1]:
        limit = f" (tolerance {tolerance(figure)})" if tolerance(figure) else ""
        return f"{name} {' -> '.join(change(figure.old, figure.new))}{limit}" + f" {figure.direction}" * direction
    return ""


def _growth(run: Run, room: int) -> list[Row]:
    """The mse from the first failing layer on, for as many evenly spaced layers as fit in two lines."""
    names = [outcome.case.layer for outcome in run.layers]
    known: list[tuple[int, str]] = []
    for outcome in run.layers:
        figure = outcome.figures.get("propagated.mse") or outcome.figures.get("injected.mse")
        if figure and figure.new is not None and (known or outcome.status == "failed"):
            old, new = change(figure.old, figure.new)
            text = new if figure.old is None else f"{old} -> {new}"
            known.append((names.index(outcome.case.layer), f"{outcome.case.layer} {text}"))
    if len(known) < 2:
        return []
    for count in range(min(len(known), 8), 1, -1):
        chosen = [known[round(step * (len(known) - 1) / (count - 1))] for step in range(count)]
        lines = [chosen[0][1]]
        for (before, _), (index, part) in pairwise(chosen):
            lines[-1] += "," if index == before + 1 else " .."
            if len(lines[-1]) + len(part) < room - 3:
                lines[-1] += f" {part}"
            else:
                lines.append(part)
        if len(lines) <= 2:
            return _labelled("mse by layer", lines)
    return []


def _failing_layers(run: Run, room: int) -> list[Row]:
    """How many layers failed, which by their own error and which by an inherited one, and any other verdicts."""
    order = [outcome.case.layer for outcome in run.layers]
    failing = [outcome for outcome in run.layers if outcome.status == "failed"]
    if len(order) < 2 or not failing:
        return []
    groups = {
        "own": [outcome.case.layer for outcome in failing if outcome.is_own],
        "inherited": [outcome.case.layer for outcome in failing if is_inherited(outcome)],
    }
    if not any(groups.values()):
        groups = {"which": [outcome.case.layer for outcome in failing]}
    shown = [(name, names) for name, names in groups.items() if names]
    each = (room - 32) // len(shown)
    parts = [f"{name}: {names_in_order(names, order, most=each)}" for name, names in shown]
    rows = [("failing", f"{len(failing)} of {len(order)} layers; " + "; ".join(parts))]
    others: dict[str, list[str]] = {}
    for outcome in failing:
        if outcome.verdict != run.failing[0].verdict:
            others.setdefault(outcome.verdict or "failed", []).append(outcome.case.layer)
    if others:
        each = room // len(others) - 16
        rows.append(("also", "; ".join(f"{v}: {names_in_order(n, order, most=each)}" for v, n in others.items())))
    return rows


def _failing_beside(run: Run, room: int) -> list[Row]:
    """Which of embedding, norm, head and paths failed too, with their verdicts."""
    failing = [one for one in run.beside if one.status == "failed" and one is not run.failing[0]]
    verdicts: dict[str, list[str]] = {}
    for one in failing:
        verdicts.setdefault(one.verdict or "failed", []).append(one.case.layer)
    if not failing or set(verdicts) == {run.failing[0].verdict} == {"reference moved"}:
        return []
    text = "; ".join(f"{', '.join(labels)} ({verdict})" for verdict, labels in verdicts.items())
    return [("beside layers", single_line(text, most=room))]


def _whole_model(run: Run) -> list[Row]:
    """The worst figure of the whole model, if it failed too."""
    if run.whole is None or run.whole.status != "failed" or run.whole is run.failing[0]:
        return []
    return [("whole model", _worst_figure(run.whole, direction=True) or run.whole.message or heading(run.whole))]


def _commands(failing: Sequence[Outcome], command: str) -> list[Row]:
    verdicts = [outcome.verdict or "" for outcome in failing]
    if set(verdicts) == {"obsolete"}:
        return [("accept", "pytest --update-baselines   (of all cases, without -k: it drops what is obsolete)")]
    if "reference moved" in verdicts:
        return [("rerun", command), ("accept", "pytest --update-baselines   (of all cases, without -k)")]
    refused = next((NEXT[verdict] for verdict in verdicts if verdict in NEXT), None)
    if refused:
        return [("rerun", command), ("next", refused)]
    reason = ' --allow-worse "REASON"' if got_worse(failing) else ""
    label = "create" if verdicts[0] == "missing" else "accept"
    return [("rerun", command), (label, f"{command} --update-baselines{reason}")]


def _width(rows: Sequence[Row]) -> int:
    """The width of the column of labels."""
    return max([13, *(len(label) for label, _ in rows)]) + 2


def _room(figures: Sequence[Row]) -> int:
    """The width left for text beside the labels; those of the figures are the longest."""
    return MOST_COLUMNS - 2 - _width(figures)


def _wrapped(label: str, text: str, room: int) -> list[Row]:
    """The text in at most two lines; --options are not broken."""
    lines = textwrap.wrap(single_line(text, most=10_000), room, max_lines=2, placeholder=" ...", break_on_hyphens=False)
    return _labelled(label, lines)


def _labelled(label: str, lines: Sequence[str]) -> list[Row]:
    """The lines as rows; the first has the label."""
    return [("" if index else label, line) for index, line in enumerate(lines)]


def _first_lines(lines: Sequence[str], most: int, room: int) -> list[str]:
    """At most `most` lines; if some are left out, the last line ends with how many."""
    if len(lines) <= most or most < 1:
        return list(lines[: max(most, 0)])
    left = len(lines) - most
    return [*lines[: most - 1], f"{single_line(lines[most - 1], most=room - 16)} (and {left} more)"]


def _lines(outcome: Outcome, rows: Sequence[Row], commands: Sequence[Row] = ()) -> list[str]:
    """The heading, and the rows as a table; commands are not cut short."""
    width = _width(rows)
    lines = [heading(outcome), *(f"  {label:<{width}}{text}" for label, text in rows)]
    whole = [single_line(f"  {label:<{width}}{text}", most=10_000) for label, text in commands]
    return [single_line(line, most=MOST_COLUMNS).rstrip() for line in lines] + whole
