"""The value of the fixtures, one case to check, and what is added to pytest's report of the test.

`probe_case`, `probe_scaling` and `probe_activations` have the same type; they differ in how the figures of a case are
measured. A worker sends the report to the controller, so everything that is added to it is plain data.
"""

import base64
from dataclasses import replace
from typing import Any

import pytest

from probe.gate.baselines.format import Entry
from probe.gate.cases import Outcome
from probe.gate.session import CaseRequest, Session
from probe.report.gate.page import figure_table
from probe.report.gate.plots import recipe_picture
from probe.report.gate.text import case_text, golden_text, one_line, story
from probe.running.environment import comparable, differences, environment

#: How many failing layers of one recipe carry a picture of their own.
PICTURED = 8


class GateFailure(AssertionError):  # noqa: N818
    """A case that does not match its baseline; its text is printed without a traceback."""


class ProbeCase:
    """The case of this test. `str()` of it is the pytest id."""

    def __init__(self, fixture: str, request: CaseRequest, session: Session, nodeid: str) -> None:
        self.fixture = fixture
        self.request = request
        self.case = request.case
        self.settings = request.settings
        self.session = session
        self.nodeid = nodeid
        self.checked = False
        self.outcome: Outcome | None = None
        self.recipe: list[Outcome] = []  # all layers of the recipe, judged
        self.entry: Entry | None = None
        self.refusal = ""

    def __str__(self) -> str:
        return str(self.case)

    def check(self) -> None:
        """Compare with the baseline; in an update, find what to store. A case that fails raises, and says why."""
        self.checked = True
        try:
            judged = self.request.judge(self.session)
        except (ValueError, OSError) as problem:
            raise GateFailure(f"{self.case}: {problem}") from None
        head = self.nodeid.partition("[")[0]
        self.recipe = [replace(one, nodeid=f"{head}[{one.case}]") for one in judged.outcomes.values()]
        self.outcome = next(one for one in self.recipe if one.case == self.case)
        self.entry = judged.entries.get(self.case.layer)
        self.refusal = judged.refusals.get(self.case.layer, "")
        if self.refusal:
            raise GateFailure(self.refusal)
        if self.outcome.status == "failed":
            raise GateFailure(self.outcome.message)

    @property
    def teller(self) -> str:
        """The case whose report explains this failure: of a recipe, the first that fails in this process."""
        failed = self.refusal or self.outcome is None or self.outcome.status == "failed"
        if not failed or not self.request.has_recipe:
            return str(self)
        key = (self.settings.key, self.case.device, self.case.recipe, bool(self.refusal))
        return self.session.tellers.setdefault(key, str(self))


def describe(report: pytest.TestReport, given: ProbeCase, problem: BaseException | None, config: pytest.Config) -> None:
    """Add the outcome of a case to the report of a phase of its test."""
    if report.when == "setup" and report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _attach(report, given, Outcome(given.settings.model, given.case, "skipped", message=reason))
    if report.when != "call":
        return
    if given.outcome is not None:
        _describe_judged(report, given, given.outcome, problem, config.getoption("htmlpath", None))
    else:
        _describe_unjudged(report, given, problem)


def _describe_judged(
    report: pytest.TestReport, given: ProbeCase, outcome: Outcome, problem: BaseException | None, html: str | None
) -> None:
    _attach(report, given, outcome)
    teller = given.teller
    if isinstance(problem, GateFailure):
        if given.refusal:
            lines = [given.refusal]
        elif not given.request.has_recipe:
            lines = golden_text(outcome)
        elif teller == str(given):
            lines = story(given.recipe, report=html, environment=_changed_environment(given))
        else:
            lines = [one_line(outcome, explained_at=teller), *case_text(outcome)]
        report.longrepr = "\n".join(lines)
        report.probe_follows = teller != str(given)  # type: ignore[attr-defined]
    if html and given.request.has_recipe:
        report.extras = [*getattr(report, "extras", []), *_extras(given, outcome)]  # type: ignore[attr-defined]


def _describe_unjudged(report: pytest.TestReport, given: ProbeCase, problem: BaseException | None) -> None:
    """A case without a verdict: its baselines are damaged, the test crashed, or it never called check()."""
    message = f"{type(problem).__name__}: {problem}"
    if isinstance(problem, GateFailure):
        report.longrepr = message = str(problem)
        report.probe_follows = given.teller != str(given)  # type: ignore[attr-defined]
    elif report.passed and not given.checked:
        report.outcome = "failed"
        report.longrepr = message = (
            f"{given.case}: the test took {given.fixture} and never called {given.fixture}.check(), so nothing was "
            "compared. Call it."
        )
    if report.failed:
        _attach(report, given, Outcome(given.settings.model, given.case, "failed", None, message))


def _attach(report: pytest.TestReport, given: ProbeCase, outcome: Outcome) -> None:
    report.probe = {  # type: ignore[attr-defined]
        "outcome": replace(outcome, points={}, nodeid=given.nodeid).as_dict(),
        "refusal": given.refusal,
        "entry": None if given.entry is None else given.entry.as_dict(),
    }


def _changed_environment(given: ProbeCase) -> list[str]:
    stored = given.session.gate.bench(given.settings).environment(given.case)
    return differences(comparable(stored), comparable(environment()))


def _extras(given: ProbeCase, outcome: Outcome) -> list[dict[str, Any]]:
    """The table of figures; and a picture of the first failing cases, or of one case of a recipe that passes."""
    from pytest_html import extras

    added = [extras.html(figure_table(outcome))]
    drawn, key = given.session.drawn, (given.settings.key, given.case.device, given.case.recipe)
    failed = outcome.status == "failed"
    healthy = all(layer.status != "failed" for layer in given.recipe)
    if (failed and drawn[key] < PICTURED) or (healthy and not drawn[key] and outcome.points):
        drawn[key] += 1
        added.append(extras.png(base64.b64encode(recipe_picture(given.recipe, outcome)).decode()))
    return added
