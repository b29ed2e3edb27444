"""The summary of a test run: as JSON for programs, and as Markdown for a pull request."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

from probe.files.checked_json import finite
from probe.gate.accounting import NOTHING_STORED, Account
from probe.gate.cases import Outcome
from probe.report.gate.recipes import HeatMap, Run, cell_text, heat_maps, is_inherited, runs, totals, weight_lines
from probe.report.gate.text import selection
from probe.report.numbers import change, ranked, tolerance
from probe.running.environment import differences
from probe.version import VERSION
from probe.words import BESIDE, first_few, single_line

Facts = Mapping[str, str]
#: The version of the layout of summary.json; it goes up when a key changes its meaning or disappears.
LAYOUT = 1
#: GitHub accepts 65536 characters in a comment.
MOST_CHARACTERS = 60_000
#: Lines of the weights in such a comment; the report has all.
MOST_WEIGHT_LINES = 8


def summary(
    outcomes: Sequence[Outcome],
    *,
    environment: Facts,
    baseline_environment: Facts | None,
    exit_status: int,
    account: Account = NOTHING_STORED,
) -> dict[str, Any]:
    """Everything but the sampled values, as plain JSON: NaN and Inf are null."""
    found = runs(outcomes)
    return {
        "version": LAYOUT,
        "probe": VERSION,
        "exit_status": exit_status,
        "totals": totals(outcomes),
        "accounting": account.as_dict(),
        "environment": dict(environment),
        "baseline_environment": None if baseline_environment is None else dict(baseline_environment),
        "recipes": [_recipe(run) for run in found],
        "cases": [_case(outcome) for run in found for outcome in run.outcomes],
    }


def markdown(
    outcomes: Sequence[Outcome],
    *,
    environment: Facts,
    baseline_environment: Facts | None,
    exit_status: int,
    account: Account = NOTHING_STORED,
) -> str:
    """A comment for a pull request, of at most MOST_CHARACTERS; it says how much is left out."""
    found = runs(outcomes)
    failing = [run for run in found if run.failing]
    counts = ", ".join(f"**{count}** {name}" for name, count in totals(outcomes).items()) or "no case was judged"
    passed = exit_status == 0 and not failing
    text = f"### probe: {'passed' if passed else 'failed'}\n\n{counts} in {len(found)} recipes.\n"
    text += f"\n{harmless(account.line, most=400)}.\n" if account.line else ""
    text += "".join(f"\n{harmless(line, most=400)}.\n" for line in weight_lines(outcomes)[:MOST_WEIGHT_LINES])
    not_run = dict.fromkeys(f"{one.model}: {one.not_run}" for one in outcomes if one.not_run)
    text += "".join(f"\n{harmless(line, most=400)}.\n" for line in not_run)
    changed = differences(baseline_environment, environment)
    if changed and failing:
        listed = first_few([harmless(line, most=100) for line in changed], "; ")
        text += f"\nThe environment is not that of the baselines: {listed}.\n"
    if failing:
        text += "\n| recipe | first layer | verdict | worst figure | tolerance | likely cause |\n"
        text += "|---|---|---|---|---|---|\n"
        text += _as_fits([_row(run) for run in failing], MOST_CHARACTERS // 2, "failing recipes")
        command = selection(failing[0].failing[0])
        if len(text) + len(command) < MOST_CHARACTERS // 2 + 5000:
            text += f"\nRerun the first with: {code(command)}\n"
    maps = heat_maps(outcomes)
    tables = [_heat_table(heat) for heat in maps]
    if tables:
        head = f"\n<details><summary>Error by mode and layer</summary>\n\n{_columns(maps)}.\n\n"
        foot = "\n</details>\n"
        text += head + _as_fits(tables, MOST_CHARACTERS - len(text) - len(head) - len(foot), "tables") + foot
    return text


def harmless(text: str, *, most: int = 120) -> str:
    """Text that Markdown, HTML and GitHub's links to people, issues and pages leave alone."""
    written = _literal(single_line(text, most=most))
    return written.replace("@", "@\u200b").replace("&num;", "&num;\u200b").replace("://", ":\u200b//")


def code(text: str, *, most: int = 120) -> str:
    """The text as code, in which GitHub makes no links."""
    return f"<code>{_literal(single_line(text, most=most))}</code>"


def _literal(text: str) -> str:
    """The text with the characters that Markdown and HTML interpret written as entities."""
    return "".join(_ENTITIES.get(c, c) for c in text)


_ENTITIES = {c: f"&#{ord(c)};" for c in "\\`*_{}[]()<>|~!&"} | {"#": "&num;"}


def _recipe(run: Run) -> dict[str, Any]:
    failing = run.failing
    return {
        "model": run.model,
        **{name: getattr(run.case, name) for name in ("device", "mode", "format", "recipe")},
        "totals": totals(run.outcomes),
        "weights": next((outcome.weights for outcome in run.outcomes if outcome.weights), ""),
        "paths_not_run": next((outcome.not_run for outcome in run.outcomes if outcome.not_run), ""),
        "first_failing_layer": failing[0].case.layer if failing else None,
        "verdict": failing[0].verdict if failing else None,
        "cause": failing[0].cause if failing else "",
        "own": [outcome.case.layer for outcome in failing if outcome.is_own],
        "inherited": [outcome.case.layer for outcome in failing if is_inherited(outcome)],
    }


def _case(outcome: Outcome) -> dict[str, Any]:
    facts = outcome.as_dict()
    del facts["weights"], facts["not_run"]
    return dict(finite({"id": str(outcome.case), **facts.pop("case"), **facts}))


def _row(run: Run) -> str:
    first = run.failing[0]
    worst = ranked(first.figures, moved=True)[:1] if first.verdict else []  # without a verdict, nothing was compared
    figures = "; ".join(f"{name} {' → '.join(change(f.old, f.new))} {f.direction}" for name, f in worst)
    cells = [
        code(run.case.recipe),
        code(first.case.layer),
        harmless(f"{first.verdict or 'failed'} ({len(run.failing)} of {len(run.outcomes)} cases)"),
        harmless(figures or first.message),
        tolerance(worst[0][1]) if worst else "",
        harmless(first.cause),
    ]
    return f"| {' | '.join(cells)} |\n"


def _heat_table(heat: HeatMap) -> str:

    def text(cell: Outcome | None) -> str:
        return "" if cell is None else f"**✗ {cell_text(cell)}**" if cell.status == "failed" else cell_text(cell)

    labels = [harmless(label, most=30) for label in heat.labels]
    head = f"**{harmless(heat.title)}**\n\n| layer | {' | '.join(labels)} |"
    rows = [f"| {code(label)} | {' | '.join(map(text, cells))} |" for label, cells in heat.rows]
    return "\n".join([head, "|---" * (len(labels) + 1) + "|", *rows]) + "\n\n"


def _columns(maps: Sequence[HeatMap]) -> str:
    """What the columns of the tables show, each kind of column once."""
    found: dict[str, dict[str, list[str]]] = {}
    for heat in maps:
        for name, one in zip(heat.layers, heat.shown, strict=True):
            titles = found.setdefault(one.sentence, {}).setdefault(name if name in BESIDE else "layers", [])
            titles += [heat.title] if heat.title not in titles else []
    several = sum("layers" in names for names in found.values()) > 1
    parts = []
    for sentence, names in found.items():
        of_maps = f" of {first_few(names['layers'], ', ', most=4)}" if several and "layers" in names else ""
        parts.append(f"{', '.join(names)}{of_maps}: {sentence}")
    return harmless("; ".join(parts), most=1000)


def _as_fits(parts: Sequence[str], room: int, name: str) -> str:
    """As many of the parts as fit into `room` characters, and how many are left out."""
    note = "\n{} more {} are left out: GitHub has no room for them. They are in the report.\n"
    ends = accumulate(map(len, parts))
    kept = sum(1 for _ in takewhile(lambda end: end <= room - len(note) - len(name) - 8, ends))
    rest = len(parts) - kept
    return "".join(parts[:kept]) + (note.format(rest, name) if rest else "")
