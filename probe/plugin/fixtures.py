"""The value of the fixtures, one case to check, and what is added to pytest's report of the test.

`probe_case`, `probe_scaling` and `probe_activations` have the same type; they differ in how the figures of a case are
measured. A worker sends the report to the controller, so everything that is added to it is plain data.
"""

import base64
import os
from dataclasses import replace
from typing import Any

import pytest

from probe.gate.baselines.format import Entry
from probe.gate.cases import Outcome, Status
from probe.gate.session import CaseRequest, Session
from probe.plugin.selection import skip_reason
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
        self.failure = ""  # what check() raised
        self.is_reported = False
        self.outcome: Outcome | None = None
        self.recipe: list[Outcome] = []  # all layers of the recipe, judged
        self.entry: Entry | None = None
        self.refusal = ""

    def __str__(self) -> str:
        return str(self.case)

    def check(self) -> None:
        """Compare with the baseline; in an update, find what to store. A case that fails raises, and says why."""
        self.checked = True
        if self.session.options.update and os.getpid() != self.session.process:
            self.refusal = (
                f"{self.case}: an update cannot measure in a process that was forked for one test, because the anchors "
                "would be lost with it. Run the update without --forked."
            )
            raise self._failure(self.refusal)
        try:
            judged = self.request.judge(self.session)
        except (ValueError, OSError) as problem:
            raise self._failure(f"{self.case}: {problem}") from None
        head = self.nodeid.partition("[")[0]
        self.recipe = [replace(one, nodeid=f"{head}[{one.case}]") for one in judged.outcomes.values()]
        self.outcome = next(one for one in self.recipe if one.case == self.case)
        self.entry = judged.entries.get(self.case.layer)
        self.refusal = judged.refusals.get(self.case.layer, "")
        if self.refusal:
            raise self._failure(self.refusal)
        if self.outcome.status == "failed":
            raise self._failure(self.outcome.message)

    def _failure(self, text: str) -> GateFailure:
        self.failure = text
        return GateFailure(text)

    @property
    def teller(self) -> str:
        """The case whose report explains this failure: of a recipe, the first that fails in this process."""
        failed = self.refusal or self.outcome is None or self.outcome.status == "failed"
        if not failed or not self.request.has_recipe:
            return str(self)
        key = (self.settings.key, self.case.device, self.case.recipe, bool(self.refusal))
        return self.session.tellers.setdefault(key, str(self))


def describe(
    report: pytest.TestReport,
    request: CaseRequest,
    given: ProbeCase | None,
    problem: BaseException | None,
    config: pytest.Config,
) -> None:
    """Add the outcome of a case to the report of a phase of its test; `given` is None if the fixture did not run."""
    if given is not None and given.is_reported:
        return
    if report.skipped and (given is None or not given.checked):
        _describe_skipped(report, request, problem)
    elif given is not None and (given.checked or report.when == "call"):
        given.is_reported = True
        if given.outcome is not None:
            _describe_judged(report, given, given.outcome, problem, config.getoption("htmlpath", None))
        else:
            _describe_unjudged(report, given, problem)
        if given.failure and not report.failed and not hasattr(report, "wasxfail"):
            told = report.longrepr if isinstance(report.longrepr, str) else given.failure
            _fail(report, f"{given.case}: check() failed, and the test went on as if it had not.\n{told}")


def _describe_skipped(report: pytest.TestReport, request: CaseRequest, problem: BaseException | None) -> None:
    """A test that never asked the gate: skipped, or failed as its xfail mark announced."""
    outcome = Outcome(request.settings.model, request.case, "skipped", message=skip_reason(report))
    if hasattr(report, "wasxfail"):
        never_run = "[NOTRUN]" in report.wasxfail  # xfail(run=False): a person's decision, named at the end of the run
        status: Status = "skipped" if isinstance(problem, pytest.xfail.Exception) else "failed"
        reason = report.wasxfail.removeprefix("reason: ") if status == "skipped" else f"{problem}"
        outcome = replace(outcome, status=status, message=reason, is_expected=never_run)
    report.probe = {"outcome": outcome.as_dict(), "refusal": "", "entry": None}  # type: ignore[attr-defined]


def _describe_judged(
    report: pytest.TestReport, given: ProbeCase, outcome: Outcome, problem: BaseException | None, html: str | None
) -> None:
    expected = bool(given.failure) and hasattr(report, "wasxfail")
    _attach(report, given, replace(outcome, is_expected=expected))
    teller = given.teller
    if given.failure and (isinstance(problem, GateFailure) or not report.failed):
        if given.refusal:
            lines = [given.refusal]
        elif not given.request.has_recipe:
            lines = golden_text(outcome)
        elif teller == str(given):
            lines = story(given.recipe, report=html, environment=_changed_environment(given))
        else:
            lines = [one_line(outcome, explained_at=teller), *case_text(outcome)]
        report.longrepr = "\n".join(lines)
        report.probe_follows = teller != str(given) and not expected  # type: ignore[attr-defined]
    if html and given.request.has_recipe:
        report.extras = [*getattr(report, "extras", []), *_extras(given, outcome)]  # type: ignore[attr-defined]


def _describe_unjudged(report: pytest.TestReport, given: ProbeCase, problem: BaseException | None) -> None:
    """A case without a verdict: its baselines are damaged, the test crashed, or it never called check()."""
    message = given.failure or f"{type(problem).__name__}: {problem}"
    if isinstance(problem, GateFailure):
        report.longrepr = message
        report.probe_follows = given.teller != str(given)  # type: ignore[attr-defined]
    elif report.passed and not given.checked:
        message = (
            f"{given.case}: the test took {given.fixture} and never called {given.fixture}.check(), so nothing was "
            "compared. Call it."
        )
        _fail(report, message)
    _attach(report, given, Outcome(given.settings.model, given.case, "failed", None, message))


def _fail(report: pytest.TestReport, message: str) -> None:
    """Make it the report of a failed test, whatever a mark of the test says."""
    report.outcome = "failed"
    report.longrepr = message
    if hasattr(report, "wasxfail"):
        del report.wasxfail


def _attach(report: pytest.TestReport, given: ProbeCase, outcome: Outcome) -> None:
    report.probe = {  # type: ignore[attr-defined]
        "outcome": replace(outcome, nodeid=given.nodeid).as_dict(),
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
    if (failed and drawn[key] < PICTURED) or (healthy and not drawn[key] and outcome.points.output):
        picture = recipe_picture(given.recipe, outcome)
        if picture is not None:
            drawn[key] += 1
            added.append(extras.png(base64.b64encode(picture).decode()))
    return added
