"""What the gate made of a fault, and what is wrong with that."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from probe.diagnosis.causes import WIDTH
from probe.gate.cases import Outcome
from probe.gate.verdicts import strength
from probe.words import LOGITS, PATHS
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
        return next((one for one in self.failing if one.is_own), self.failing[0] if self.failing else None)

    @property
    def is_caught(self) -> bool:
        """Whether the gate failed at all."""
        return bool(self.error or self.failing)

    @property
    def verdict(self) -> str:
        """The verdict of the case that must fail, in a word."""
        if self.error:
            return "error"
        outcome = self.outcomes.get(self.fault.label, self.first)
        return "NOT CAUGHT" if outcome is None else outcome.verdict or "NOT CAUGHT"

    @property
    def cause(self) -> str:
        """The cause as it is told; of verdicts that say it all, the message."""
        outcome = self.outcomes.get(self.fault.label, self.first)
        if outcome is None:
            return self.error
        return outcome.cause or outcome.message

    @property
    def told(self) -> str:
        """Everything that the failure says about where and why."""
        outcome = self.outcomes.get(self.fault.label, self.first)
        return self.error if outcome is None else " ".join([outcome.message, *outcome.details, outcome.cause])

    def problems(self) -> list[str]:
        """What is not as the row says; empty if all is."""
        fault, found = self.fault, []
        if not self.is_caught:
            return ["not caught"]
        found += [f"{label} fails without any fault" for label, one in self.healthy.items() if one.status != "passed"]
        if fault.kind == "error":
            return [*found, *([] if fault.cause in self.error else [f"says {self.error!r}, not {fault.cause!r}"])]
        if self.error:
            return [f"raised {self.error}"]
        if fault.kind == "reference":
            found += [
                f"{one.case.layer} is {one.verdict}"
                for one in self.outcomes.values()
                if one.verdict not in fault.verdicts
            ]
            return [*found, *self._cause_problems()]
        if fault.label not in self.outcomes:
            return [*found, f"there is no case {fault.label}"]
        if self.outcomes[fault.label].status != "failed":
            return [*found, f"{fault.label} passes; failing: {', '.join(one.case.layer for one in self.failing)}"]
        assert self.first is not None
        if self.first.case.layer != fault.label and not (fault.kind == "path" and self.first.case.layer in PATHS):
            found.append(f"{self.first.case.layer} is named first")
        if self.outcomes[fault.label].verdict not in fault.verdicts:
            found.append(f"verdict {self.outcomes[fault.label].verdict}")
        return [*found, *self._cause_problems(), *self._spread_problems()]

    def _cause_problems(self) -> list[str]:
        fault, said = self.fault, self.told if self.fault.kind != "layer" else self.cause
        found = [] if fault.cause in said else [f"cause {said!r} has no {fault.cause!r}"]
        if fault.kind == "path" and fault.where not in said:
            found.append(f"does not name {fault.where}: {said!r}")
        outcome = self.outcomes.get(fault.label, self.first)
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
    def is_unnamed(self) -> bool:
        """Whether the diagnosis admits that it does not know."""
        return UNKNOWN in self.cause

    @property
    def strongest(self) -> str:
        """The figure that moved by most, and by how many of its tolerances."""
        outcome = self.outcomes.get(self.fault.label, self.first)
        if outcome is None:
            return "-"
        moved = {name: figure for name, figure in outcome.figures.items() if figure.moved}
        own = {name: figure for name, figure in moved.items() if not name.startswith("propagated.")} or moved
        if not own:
            return "-"
        name, figure = max(own.items(), key=lambda pair: strength(pair[1]))
        return f"{name} x {strength(figure):.3g}"


def _own(outcome: Outcome) -> dict[str, float | None]:
    """The figures that nothing but the layer itself can move."""
    others = ("propagated.", "logits.")
    return {name: figure.new for name, figure in outcome.figures.items() if not name.startswith(others)}
