"""What a test is given: one case, and the one thing to do with it."""

from dataclasses import replace

from probe.gate.cases import Outcome
from probe.gate.session import Asked, Session


class GateFailure(AssertionError):  # noqa: N818
    """A case that does not match; its text is all there is to say, without a traceback."""


class ProbeCase:
    """The case of this test. `str()` of it is the pytest id."""

    def __init__(self, asked: Asked, session: Session, nodeid: str) -> None:
        self.case = asked.case
        self.settings = asked.settings
        self.session = session
        self.nodeid = nodeid
        self.checked = False
        self.outcome: Outcome | None = None
        self.recipe: list[Outcome] = []  # all layers of the recipe, judged
        self.refusal = ""

    def __str__(self) -> str:
        return str(self.case)

    def check(self) -> None:
        """Compare with the baseline; in an update, find what to store. A case that fails raises, and says why."""
        self.checked = True
        try:
            judged = self.session.gate.judged(self.settings, self.case)
        except ValueError as problem:
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
