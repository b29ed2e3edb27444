"""What a test that takes `probe_scaling` is given, and what its report carries."""

from dataclasses import replace
from typing import Any

import pytest

from probe.gate.cases import Outcome
from probe.gate.held import Judged
from probe.gate.session import Session
from probe.plugin.golden_scaling import judged
from probe.plugin.taken import GateFailure
from probe.report.gate.story import held_story


class ProbeScaling:
    """One tensor in one format. `str()` of it is the pytest id."""

    fixture = "probe_scaling"

    def __init__(self, asked: Any, session: Session, nodeid: str) -> None:
        self.asked = asked
        self.case = asked.case
        self.session = session
        self.nodeid = nodeid
        self.found: Judged | None = None

    def __str__(self) -> str:
        return str(self.case)

    def judge(self) -> Judged:
        """What became of it."""
        return judged(self.session, self.asked)

    def check(self) -> None:
        """Sweep the tensor and compare with the baseline; in an update, find what to store."""
        try:
            self.found = self.judge()
        except (ValueError, OSError) as problem:
            raise GateFailure(f"{self.case}: {problem}") from None
        if self.found.refusal:
            raise GateFailure(self.found.refusal)
        if self.found.outcome.status == "failed":
            raise GateFailure("\n".join(held_story(replace(self.found.outcome, nodeid=self.nodeid))))


def describe(report: pytest.TestReport, taken: ProbeScaling, problem: BaseException | None) -> None:
    """Add to the report of the call what became of the case; a test that never asked is told to."""
    if report.when != "call":
        return
    found = taken.found
    if isinstance(problem, GateFailure):
        report.longrepr = str(problem)
    elif report.passed and found is None:
        report.outcome = "failed"
        report.longrepr = (
            f"{taken.case}: the test took {taken.fixture} and never called {taken.fixture}.check(), so nothing was "
            "compared. Call it."
        )
    outcome = (
        found.outcome
        if found
        else Outcome(taken.asked.settings.model, taken.case, "failed", None, str(problem or report.longrepr))
    )
    entry = found.entry.as_dict() if found and found.entry else None
    given = replace(outcome, nodeid=taken.nodeid).as_dict()
    report.probe = {"outcome": given, "refusal": found.refusal if found else "", "entry": entry}  # type: ignore[attr-defined]
