"""What became of a case: frozen values that the verdict hands to the report, in one process or across several."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from probe.gate.cases import Case

Verdict = Literal[
    "missing", "obsolete", "uncovered", "not applied", "not finite", "over the limit", "drift", "changed values"
]
Status = Literal["passed", "failed", "skipped", "updated"]


@dataclass(frozen=True)
class Figure:
    """A figure beside its baseline. `direction`: worse, better, or empty where neither can be said."""

    new: float | None
    old: float | None = None
    tolerance: float | None = None
    moved: bool = False
    direction: str = ""
    reason: str = ""  # why a worse figure was accepted


@dataclass(frozen=True)
class Outcome:
    """One case, judged. The figures are called injected.mse, propagated.correlation, logits.kl and so on."""

    model: str
    case: Case
    status: Status
    verdict: Verdict | None = None
    message: str = ""  # one sentence: what is wrong
    details: tuple[str, ...] = ()  # more of it, a line each
    cause: str = ""  # the likely cause, if the signature of the error says one
    figures: dict[str, Figure] = field(default_factory=dict)
    points: dict[str, list[float]] = field(default_factory=dict)  # reference, output: the same elements of both
    nodeid: str = ""
    baseline_file: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON and for the way from a worker to the controller."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Self:
        """The inverse of as_dict."""
        parts = {
            "case": Case(**given["case"]),
            "details": tuple(given["details"]),
            "figures": {name: Figure(**figure) for name, figure in given["figures"].items()},
        }
        return cls(**{**given, **parts})
