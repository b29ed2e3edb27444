"""What a test is given: one case to check, and what pytest's report of the test then carries.

`probe_case`, `probe_scaling` and `probe_activations` give the same thing; they differ in how the figures of a case are
measured. The report may be on its way from a worker to the controller, so all that it carries is plain data.
"""

import base64
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import pytest

from probe.gate.baselines import Entry
from probe.gate.cases import Case, Outcome
from probe.gate.configuration import Settings
from probe.gate.engine import Judged
from probe.gate.session import Session
from probe.report.gate.page import figure_table
from probe.report.gate.plots import recipe_picture
from probe.report.gate.text import case_text, golden_text, one_line, story
from probe.running.environment import comparable, differences, environment

#: How many failing layers of one recipe carry a picture of their own.
PICTURED = 8


class GateFailure(AssertionError):  # noqa: N818
    """A case that does not match; its text is all there is to say, without a traceback."""


class Request(Protocol):
    """The case of a test, and how its figures are measured and judged."""

    has_recipe: ClassVar[bool]  # whether all layers of a recipe are judged together and tell one story

    @property
    def settings(self) -> Settings: ...  # noqa: D102
    @property
    def case(self) -> Case: ...  # noqa: D102
    def judge(self, session: Session) -> Judged: ...  # noqa: D102


class ProbeCase:
    """The case of this test. `str()` of it is the pytest id."""

    def __init__(self, fixture: str, request: Request, session: Session, nodeid: str) -> None:
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
        """The case that tells the story of this failure: of a recipe, the first of this process to fail."""
        failed = self.refusal or self.outcome is None or self.outcome.status == "failed"
        if not failed or not self.request.has_recipe:
            return str(self)
        key = (self.settings.key, self.case.device, self.case.recipe, bool(self.refusal))
        return self.session.tellers.setdefault(key, str(self))


def describe(report: pytest.TestReport, given: ProbeCase, problem: BaseException | None, config: pytest.Config) -> None:
    """Add to the report of a phase what is known of its case."""
    if report.when == "setup" and report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _attach(report, given, Outcome(given.settings.model, given.case, "skipped", message=reason))
    if report.when != "call":
        return
    if given.outcome is not None:
        _describe_judged(report, given, given.outcome, problem, config)
    else:
        _describe_unjudged(report, given, problem)


def _describe_judged(
    report: pytest.TestReport,
    given: ProbeCase,
    outcome: Outcome,
    problem: BaseException | None,
    config: pytest.Config,
) -> None:
    _attach(report, given, outcome)
    teller, html = given.teller, config.getoption("htmlpath", None)
    if isinstance(problem, GateFailure):
        if given.refusal:
            lines = [given.refusal]
        elif not given.request.has_recipe:
            lines = golden_text(outcome)
        elif teller == str(given):
            lines = story(given.recipe, report=str(html) if html else None, environment=_changed_environment(given))
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
    """The table of figures; and a picture, of every failing case and once of a recipe that passes."""
    from pytest_html import extras

    found = [extras.html(figure_table(outcome))]
    drawn = given.session.drawn
    key = (given.settings.key, given.case.device, given.case.recipe)
    failed = outcome.status == "failed"
    healthy = all(one.status != "failed" for one in given.recipe)
    if (failed and drawn.get(key, 0) < PICTURED) or (healthy and key not in drawn and outcome.points):
        drawn[key] = drawn.get(key, 0) + 1
        picture = base64.b64encode(recipe_picture(given.recipe, outcome)).decode()
        found.append(extras.png(picture))
    return found
