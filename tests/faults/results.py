"""What the gate made of a fault, and what is wrong with that."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from probe.diagnosis.causes import WIDTH
from probe.gate.cases import Outcome
from probe.gate.verdicts import strength
from probe.words import LOGITS, PATHS, flow_key
from tests.faults.catalogue import UNKNOWN, AnyFault

Outcomes = Mapping[str, Outcome]


@dataclass(frozen=True)
class Result:
    """The outcomes of the recipe of a fault, by label, with the fault and without; `error`: what the gate raised."""

    fault: AnyFault
    healthy: Outcomes
    outcomes: Outcomes = field(default_factory=dict)
    error: str = ""

    @property
    def failing(self) -> list[Outcome]:
        """The cases that failed."""
        return [one for one in self.outcomes.values() if one.status == "failed"]

    @property
    def first(self) -> Outcome | None:
        """The case that the failure is explained at: the first one that changed by itself."""
        failing = sorted(self.failing, key=lambda one: flow_key(one.case.layer))
        return next((one for one in failing if one.is_own), failing[0] if failing else None)

    @property
    def outcome(self) -> Outcome | None:
        """The case that must fail; of faults that have none, the first that does."""
        return self.outcomes.get(self.fault.label, self.first)

    @property
    def is_caught(self) -> bool:
        """Whether the gate failed at all."""
        return bool(self.error or self.failing)

    @property
    def is_placed(self) -> bool:
        """Whether it failed where the fault is, and nowhere else."""
        return self.is_caught and not self.place_problems()

    @property
    def grade(self) -> Literal["right", "not known", "wrong"]:
        """Of the cause: a sentence of the row, or one that admits not to know, or anything else."""
        if UNKNOWN in self.cause:
            return "not known"
        return "right" if any(is_sentence(self.cause, one) for one in self.fault.causes) else "wrong"

    @property
    def verdict(self) -> str:
        """The verdict of the case that must fail, in a word."""
        if self.error:
            return "error"
        return "not caught" if self.outcome is None else self.outcome.verdict or "not caught"

    @property
    def cause(self) -> str:
        """The cause as it is told; of verdicts that say it all, the message."""
        return self.error if self.outcome is None else self.outcome.cause or self.outcome.message

    def problems(self) -> list[str]:
        """What is not as the row says; empty if all is."""
        wrong = [f"{label} fails without any fault" for label, one in self.healthy.items() if one.status != "passed"]
        return wrong + ([*self.place_problems(), *self.cause_problems()] if self.is_caught else ["not caught"])

    def place_problems(self) -> list[str]:
        """How the failing cases and their verdicts are not those of the row."""
        fault = self.fault
        if fault.kind == "error":
            return [] if self.error else [f"{self.verdict}, not an error"]
        if self.error:
            return [f"raised {self.error}"]
        if fault.kind == "reference":
            others = {label: one.verdict for label, one in self.outcomes.items() if one.verdict not in fault.verdicts}
            return [f"{label} is {verdict or 'passed'}" for label, verdict in others.items()]
        if self.outcomes[fault.label].status != "failed":
            return [f"{fault.label} passes; failing: {', '.join(one.case.layer for one in self.failing)}"]
        assert self.first is not None
        first, verdict = self.first.case.layer, self.outcomes[fault.label].verdict
        found = [] if first == fault.label or (fault.kind == "path" and first in PATHS) else [f"{first} is named first"]
        return [*found, *([] if verdict in fault.verdicts else [f"verdict {verdict}"]), *self._spread_problems()]

    def cause_problems(self) -> list[str]:
        """How the cause is not what the row says, and longer than a line."""
        outcome = self.outcome
        found = (
            [] if any(is_sentence(self.cause, one) for one in self.fault.causes) else [f"{self.grade}: {self.cause!r}"]
        )
        if outcome is not None and len(outcome.cause) > WIDTH:
            found.append(f"the cause has {len(outcome.cause)} characters")
        return found

    def _spread_problems(self) -> list[str]:
        """A fault of one place must leave the figures of all others alone."""
        kind, label = self.fault.kind, self.fault.label
        moved = [name for name in self.healthy if _own(self.outcomes[name]) != _own(self.healthy[name])]
        inner = [name for name in moved if name not in PATHS and name != LOGITS]
        if kind in ("layer", "outside") and inner != [label]:
            return [f"own figures moved in {', '.join(inner)}"]
        if kind == "path":
            others = [one.case.layer for one in self.failing if one.case.layer not in PATHS]
            if others or inner:
                return [f"prefill changed too: {', '.join(dict.fromkeys([*others, *inner]))}"]
        return []

    @property
    def strongest(self) -> str:
        """The figure that moved by most, and by how many of its tolerances."""
        moved = {name: figure for name, figure in self.outcome.figures.items() if figure.moved} if self.outcome else {}
        own = {name: figure for name, figure in moved.items() if not name.startswith("propagated.")} or moved
        if not own:
            return "-"
        name, figure = max(own.items(), key=lambda pair: strength(pair[1]))
        return f"{name} x {strength(figure):.3g}"


def is_sentence(text: str, sentence: str) -> bool:
    """Whether a text is the sentence of a row, all of it: there `#` stands for a figure, and `*` for any text."""
    pattern = re.escape(sentence).replace(r"\#", r"[-+]?\d[\d.,e+-]*").replace(r"\*", ".*")
    return re.fullmatch(pattern, text) is not None


def _own(outcome: Outcome) -> dict[str, float | None]:
    """The figures that nothing but the layer itself can move."""
    others = ("propagated.", "logits.")
    return {name: figure.new for name, figure in outcome.figures.items() if not name.startswith(others)}
