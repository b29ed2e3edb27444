"""The gate's part of the HTML report: totals, failures, heat maps and recipes, and the figures of each case."""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from probe.gate.accounting import NOTHING_STORED, Account
from probe.gate.cases import Figure, Outcome
from probe.report.document import render
from probe.report.gate.elements import worst_elements
from probe.report.gate.recipes import (
    HeatMap,
    Run,
    cell_text,
    error_of,
    heat_maps,
    is_layer,
    run_groups,
    runs,
    totals,
    weight_lines,
)
from probe.report.gate.text import heading, story
from probe.report.numbers import change, number, ranked, short, tolerance, value
from probe.running.environment import differences
from probe.words import BESIDE, first_few, single_line

#: The shades of the heat maps, from little error to much; gate.css has a class for each.
SHADES = 33


def front(
    outcomes: Sequence[Outcome],
    *,
    environment: Mapping[str, str],
    baseline_environment: Mapping[str, str] | None,
    account: Account = NOTHING_STORED,
) -> str:
    """HTML for `prefix` of pytest_html_results_summary. Nothing in it is loaded from elsewhere."""
    found = runs(outcomes)
    changed = differences(baseline_environment, environment)
    return render(
        "gate.html",
        totals=totals(outcomes),
        accounting=account.line,
        is_complete=not account.count("not compared"),
        changed="; ".join(changed) if any(run.failing for run in found) else "",
        stories=_stories(found, changed),
        weights=[*weight_lines(outcomes), *_not_run(outcomes)],
        **_maps(heat_maps(outcomes)),
        recipes=_recipes(found),
        environment=_environment(environment, baseline_environment),
    )


def title(outcomes: Sequence[Outcome], *, problems: int) -> str:
    """The title of the report: whether the run passed, in words that a tab of a browser has room for."""
    failed = sum(one.status == "failed" for one in outcomes)
    models = first_few(list(dict.fromkeys(one.model for one in outcomes)))
    end = "passed" if not problems else f"judged, {problems} {'problems' if problems > 1 else 'problem'}"
    what = f"{failed} of {len(outcomes)} cases failed" if failed else f"{len(outcomes)} cases {end}"
    return f"probe: {what}" + (f" ({single_line(models, most=80)})" if models else "")


def figure_table(outcome: Outcome) -> str:
    """The message, and every figure with its baseline and its tolerance: those that moved come first.

    And, of a case that failed, the elements that are furthest from the baseline.
    """
    lines = [outcome.message, *outcome.details]
    lines += [f"likely cause: {outcome.cause}"] if outcome.cause else []
    lines += [f"baseline: {outcome.baseline_file}"] if outcome.baseline_file else []
    order = sorted(ranked(outcome.figures), key=lambda item: not item[1].moved)
    rows = [{"moved": figure.moved, "cells": _figure_cells(name, figure)} for name, figure in order]
    told = [line for line in lines if line]
    elements = worst_elements(outcome) if outcome.status == "failed" else None
    return render("case.html", heading=heading(outcome), lines=told, rows=rows, elements=elements)


def name_cell(nodeid: str) -> str:
    """The cell of a test's name. pytest-html does not escape it, and the id of a case contains the name of a layer."""
    return render("test_name.html", nodeid=nodeid)


def _figure_cells(name: str, figure: Figure) -> tuple[str, ...]:
    old, new = change(figure.old, figure.new) if figure.old is not None else ("", number(figure.new))
    why = figure.direction + (f" (accepted: {figure.reason})" if figure.reason else "")
    return name, old, new, tolerance(figure), why or ("moved" if figure.moved else "")


def _stories(found: Sequence[Run], changed: Sequence[str]) -> list[dict[str, Any]]:
    """The failures by recipe, whose id is the anchor; each has the texts of all its models and devices."""
    failing: dict[str, list[Run]] = {}
    for run in found:
        if run.failing:
            failing.setdefault(run.case.recipe, []).append(run)
    stories = []
    for recipe, same in failing.items():
        texts = [story(run.outcomes, report=None, environment=changed) for run in same]
        stories.append(
            {
                "recipe": recipe,
                "heading": heading(same[0].failing[0]),
                "failed": sum(len(run.failing) for run in same),
                "count": sum(len(run.outcomes) for run in same),
                "texts": [lines[1:] for lines in texts] if len(texts) == 1 else texts,  # the summary has the first
            }
        )
    return stories


def _maps(maps: Sequence[HeatMap]) -> dict[str, Any]:
    """All maps on one scale of shades, with its legend; it spans the quantized modes, far above the float modes."""
    cells = [cell for heat in maps for cell in heat.cells() if is_layer(cell)]
    cells = [cell for cell in cells if cell.case.format] or cells
    decades = [math.log10(error) for error in map(error_of, cells) if error]
    low, high = (math.floor(min(decades)), math.ceil(max(decades))) if decades else (-6, 0)
    high = max(high, low + 1)
    marks = range(low, high + 1, math.ceil((high - low) / 10))
    legend = [{"shade": _shade(10.0**mark, low, high), "text": f"1e{mark}"} for mark in marks]
    shown = dict.fromkeys(
        one.words for heat in maps for one, name in zip(heat.shown, heat.layers, strict=True) if name not in BESIDE
    )
    return {"legend": legend, "shaded": ", ".join(shown), "maps": [_map(heat, low, high) for heat in maps]}


def _map(heat: HeatMap, low: int, high: int) -> dict[str, Any]:
    shown = heat.shown
    titles = [f"{name}: {one.sentence}" for name, one in zip(heat.layers, shown, strict=True)]
    starts = [place > 0 and shown[place] != shown[place - 1] for place in range(len(shown))]
    return {
        "title": heat.title,
        "failed": sum(cell.status == "failed" for cell in heat.cells()),
        "count": heat.cases,
        "groups": [
            {"words": one.words, "title": one.sentence, "count": len(labels), "starts": place > 0}
            for place, (one, labels) in enumerate(heat.groups)
        ],
        "columns": [
            {"title": title, "label": label, "starts": start}
            for title, label, start in zip(titles, heat.labels, starts, strict=True)
        ],
        "rows": [
            {"label": label, "cells": [cell and _heat_cell(cell, low, high) for cell in cells]}
            for label, cells in heat.rows
        ],
        "starts": starts,
    }


def _heat_cell(cell: Outcome, low: int, high: int) -> dict[str, Any]:
    error = error_of(cell)
    shade = "off" if error is None else "whole" if not is_layer(cell) else _shade(error, low, high)
    failed = cell.status == "failed"
    return {
        "classes": f"{shade} bad" if failed else shade,
        "title": _cell_title(cell),
        "nodeid": cell.nodeid,
        "status": cell.status,
        "text": f"✗ {cell_text(cell)}" if failed else cell_text(cell),
    }


def _shade(error: float, low: int, high: int) -> str:
    """The class of gate.css for an error between 10^low and 10^high."""
    part = (math.log10(error) - low) / (high - low) if error > 0 else 0.0
    return f"s{round(min(max(part, 0.0), 1.0) * (SHADES - 1))}"


def _cell_title(cell: Outcome) -> str:
    """The tooltip of a cell: the figures that moved, or else the most important ones, a line each."""
    shown = ranked(cell.figures, moved=True)[:4] or ranked(cell.figures)[:4]
    lines = [str(cell.case), cell.verdict or cell.status, cell.message]
    for name, figure in shown:
        before = f"{number(figure.old)} → " if figure.old is not None else ""
        lines.append(f"{name} {before}{number(figure.new)}")
    return "\n".join(single_line(line) for line in lines if line)


def _not_run(outcomes: Sequence[Outcome]) -> list[str]:
    """By model, what was not run, and that its input is synthetic, if it is."""
    return list(dict.fromkeys(f"{one.model}: {one.not_run}" for one in outcomes if one.not_run))


def _recipes(found: Sequence[Run]) -> dict[str, Any]:
    models = len({run.model for run in found}) > 1
    devices = len({run.case.device for run in found}) > 1
    relative = any("injected.relative_mse" in o.figures for run in found for o in run.layers)
    names = ["recipe", *["model"] * models, *["device"] * devices, "passed", "failed"]
    names += ["injected relative mse" if relative else "injected mse", "propagated mse", "correlation"]
    known = {name for run in found if run.whole for name in run.whole.figures}
    shown = [(title, name) for title, name in OF_WHOLE if name in known] or [*OF_WHOLE[:2]]
    names += [*(title for title, _ in shown), "verdict"]
    rows = [
        {
            "recipe": group.recipes,
            "anchor": quote(run.case.recipe) if run.failing else "",
            "texts": [*[run.model] * models, *[run.case.device] * devices],
            "passed": sum(outcome.status == "passed" for one in group.runs for outcome in one.outcomes),
            "failed": len(run.failing),
            "figures": _worst(
                run, "injected.relative_mse" if relative else "injected.mse", [name for _, name in shown]
            ),
            "verdict": ", ".join(totals(run.failing)) or run.outcomes[0].status,
        }
        for group in run_groups(sorted(found, key=lambda run: not run.failing))
        for run in [group.first]
    ]
    return {"columns": names, "rows": rows}


#: The figures of the whole model in the table of recipes: those that a run has.
OF_WHOLE = (
    ("KL of logits", "logits.kl"),
    ("change in bits per byte", "logits.change_in_bits_per_byte"),
    ("mse of output", "output.mse"),
    ("cosine of output", "output.cosine"),
)


def _worst(run: Run, injected_name: str, of_whole: Sequence[str]) -> list[dict[str, str]]:
    """The worst figures over the layers, with their labels, and those of the whole model."""
    from probe.metrics import label_correlation, label_mse  # loads torch; where a model ran, it is loaded already

    injected = max(run.values(injected_name), default=None)
    mse = max(run.values("propagated.mse", "injected.mse"), default=None)
    correlation = min(run.values("propagated.correlation", "injected.correlation"), default=None)
    whole = run.whole.figures if run.whole else {}
    return [
        {"text": "" if x is None else form(x), "label": "" if x is None or label is None else label(x)}
        for x, form, label in (
            *((injected, short, None), (mse, short, label_mse), (correlation, number, label_correlation)),
            *((value(whole, name), number, None) for name in of_whole),
        )
    ]


def _environment(now: Mapping[str, str], baseline: Mapping[str, str] | None) -> list[dict[str, Any]]:
    then = now if baseline is None else baseline
    rows = [(name, now.get(name, ""), then.get(name, "")) for name in dict.fromkeys([*now, *then])]
    return [{"name": name, "now": x, "then": "" if baseline is None else y, "moved": x != y} for name, x, y in rows]
