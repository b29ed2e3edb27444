"""What pytest's report of a case carries: its outcome, the story of its recipe, its table and its pictures.

The report may be on its way from a worker to the controller, so all of it is plain data.
"""

import base64
from dataclasses import replace
from typing import Any

import pytest

from probe.gate.cases import Outcome
from probe.plugin.taken import GateFailure, ProbeCase
from probe.report.gate.page import figure_table
from probe.report.gate.plots import recipe_picture
from probe.report.gate.story import case_text, one_line, story
from probe.running.environment import comparable, differences, environment

#: How many failing layers of one recipe carry a picture of their own.
PICTURED = 8


def describe(report: pytest.TestReport, taken: ProbeCase, problem: BaseException | None, config: pytest.Config) -> None:
    """Add to the report of a phase what is known of its case."""
    if report.when == "setup" and report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        outcome = Outcome(taken.settings.model, taken.case, "skipped", message=reason, nodeid=taken.nodeid)
        _attach(report, taken, outcome)
    if report.when != "call":
        return
    if taken.outcome is not None:
        _describe_judged(report, taken, taken.outcome, problem, config)
    else:
        _describe_unjudged(report, taken, problem)


def _describe_judged(
    report: pytest.TestReport,
    taken: ProbeCase,
    outcome: Outcome,
    problem: BaseException | None,
    config: pytest.Config,
) -> None:
    _attach(report, taken, outcome)
    teller = _teller(taken)
    if isinstance(problem, GateFailure):
        if taken.refusal:
            report.longrepr = taken.refusal
        elif teller == str(taken.case):
            report.longrepr = "\n".join(story(taken.recipe, report=_report_file(config), environment=_changed(taken)))
        else:
            report.longrepr = "\n".join([one_line(outcome, told_by=teller), *case_text(outcome)])
        report.probe_follows = teller != str(taken.case)  # type: ignore[attr-defined]
    if config.getoption("htmlpath", None):
        report.extras = [*getattr(report, "extras", []), *_extras(taken, outcome)]  # type: ignore[attr-defined]


def _describe_unjudged(report: pytest.TestReport, taken: ProbeCase, problem: BaseException | None) -> None:
    """A case that nothing could be said of: its baselines are damaged, the test crashed, or it never asked."""
    message = f"{type(problem).__name__}: {problem}"
    if isinstance(problem, GateFailure):
        report.longrepr = message = str(problem)
        report.probe_follows = _teller(taken) != str(taken.case)  # type: ignore[attr-defined]
    elif report.passed and not taken.checked:
        report.outcome = "failed"
        report.longrepr = message = (
            f"{taken.case}: the test took probe_case and never called probe_case.check(), so nothing was compared. "
            "Call it."
        )
    if report.failed:
        _attach(report, taken, Outcome(taken.settings.model, taken.case, "failed", None, message, nodeid=taken.nodeid))


def _attach(report: pytest.TestReport, taken: ProbeCase, outcome: Outcome) -> None:
    entry = getattr(taken, "entry", None)
    report.probe = {  # type: ignore[attr-defined]
        "outcome": replace(outcome, points={}).as_dict(),
        "refusal": taken.refusal,
        "entry": None if entry is None else entry.as_dict(),
    }


def _teller(taken: ProbeCase) -> str:
    """The case of this recipe that tells its story: the first of this process to fail."""
    key = (taken.settings.key, taken.case.device, taken.case.recipe, bool(taken.refusal))
    failed = taken.refusal or taken.outcome is None or taken.outcome.status == "failed"
    return taken.session.tellers.setdefault(key, str(taken.case)) if failed else str(taken.case)


def _changed(taken: ProbeCase) -> list[str]:
    return differences(comparable(taken.session.gate.bar(taken.settings).stored or {}), comparable(environment()))


def _report_file(config: pytest.Config) -> str | None:
    given = config.getoption("htmlpath", None)
    return str(given) if given else None


def _extras(taken: ProbeCase, outcome: Outcome) -> list[dict[str, Any]]:
    """The table of figures; and a picture, of every failing case and once of a recipe that passes."""
    from pytest_html import extras

    found = [extras.html(figure_table(outcome))]
    drawn = taken.session.drawn
    key = (taken.settings.key, taken.case.device, taken.case.recipe)
    failed = outcome.status == "failed"
    healthy = all(one.status != "failed" for one in taken.recipe)
    if (failed and drawn.get(key, 0) < PICTURED) or (healthy and key not in drawn and outcome.points):
        drawn[key] = drawn.get(key, 0) + 1
        picture = base64.b64encode(recipe_picture(taken.recipe, outcome)).decode()
        found.append(extras.png(picture))
    return found
