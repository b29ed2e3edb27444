"""A case, one layer of one recipe on one device, and what became of it: frozen values that reports are made from."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

Verdict = Literal[
    "missing",
    "obsolete",
    "reference moved",
    "uncovered",
    "not applied",
    "not float",
    "not finite",
    "over the limit",
    "differs from prefill",
    "drift",
    "changed values",
]
#: What a failure says after the id of its case.
HEADINGS: dict[Verdict, str] = {
    "missing": "has no baseline",
    "obsolete": "has a baseline, but the matrix no longer produces it",
    "reference moved": "cannot be judged: the float reference moved",
    "uncovered": "was not covered",
    "not applied": "was not applied",
    "not float": "is declared float, but changed",
    "not finite": "is not finite",
    "over the limit": "is over its limit",
    "differs from prefill": "differs from the prefill of the same tokens",
    "drift": "drifted from its baseline",
    "changed values": "gives other values than its baseline, though its figures agree",
}
#: What to do about the verdicts that no baseline can accept.
NEXT: dict[Verdict, str] = {
    "uncovered": "cannot be stored as a baseline: select layers that run on both sides. List them with: probe layers",
    "not applied": "cannot be stored as a baseline: make the recipe change the output, or declare the layer float "
    "(keep_float). See: probe modes",
    "not float": "cannot be stored as a baseline: keep the layer float, or change keep_float of its mode",
    "not finite": "cannot be stored as a baseline: fix the first layer that is not finite, then rerun",
    "differs from prefill": "cannot be stored as a baseline: make this path give what the prefill gives",
    "over the limit": "no baseline overrides a limit: lower the error, or change the limit in [tool.probe]",
}
Status = Literal["passed", "failed", "skipped", "updated"]
#: Figures of what a layer is and does by itself; all others include what reached it from the layers before.
OWN = ("injected.", "corners.", "weights.", "functions.", "outside.", "relation.", "distance.")


@dataclass(frozen=True, order=True)
class Case:
    """One test. `str(case)` is the pytest id and what the command line takes; the format of a float mode is empty."""

    mode: str  # as in test ids: mode_2_1
    layer: str  # layer_0, a module's name, or one of words.BESIDE
    device: str
    format: str = ""

    def __str__(self) -> str:
        return "-".join(part for part in (self.mode, self.layer, self.device, self.format) if part)

    @property
    def recipe(self) -> str:
        """What is run once for all layers: mode_2_1-fp8_e4m3."""
        return "-".join(part for part in (self.mode, self.format) if part)


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
class Points:
    """Some elements of an output: in the float model, now, and in the baseline, for plots and tables.

    `golden` is as long as the others or empty; it is NaN where the baseline has no value of an element. The index of an
    element follows from its place in the stream and from the shape of one sequence's output, (token, channel) mostly.
    """

    reference: Sequence[float] = ()
    output: Sequence[float] = ()
    golden: Sequence[float] = ()
    places: Sequence[int] = ()
    shape: tuple[int, ...] = ()

    def index(self, number: int) -> tuple[int, ...]:
        """The index of an element in the outputs of all sequences: sequence, token, channel."""
        rest, index = self.places[number], []
        for size in reversed(self.shape):
            rest, last = divmod(rest, size)
            index.append(last)
        return (rest, *reversed(index))


@dataclass(frozen=True)
class TokenProfile:
    """How far each token of a path is from the prefill, by layer, in units of the layer's own error.

    Tokens are counted from 1, as in the messages about paths.
    """

    tokens: Sequence[int] = ()
    relations: Mapping[str, Sequence[float]] = field(default_factory=dict)


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
    points: Points = field(default_factory=Points)
    profile: TokenProfile = field(default_factory=TokenProfile)  # of a path that fails
    nodeid: str = ""
    baseline_file: str = ""
    is_expected: bool = False  # a failure that a person announced with xfail
    weights: str = ""  # how much of the model is on a grid under the recipe, in a line
    not_run: str = ""  # the paths that have no case, with the reasons, in a line
    equals: str = ""  # the mode that gives the same bits by definition, if another one does

    def as_dict(self) -> dict[str, Any]:
        """For JSON and for the way from a worker to the controller; without the points and the profile."""
        found = asdict(replace(self, points=Points(), profile=TokenProfile()))
        return {name: value for name, value in found.items() if name not in ("points", "profile")}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Self:
        """The inverse of as_dict."""
        parts = {
            "case": Case(**given["case"]),
            "details": tuple(given["details"]),
            "figures": {name: Figure(**figure) for name, figure in given["figures"].items()},
        }
        return cls(**{**given, **parts})

    @property
    def is_compared(self) -> bool:
        """Whether the case has a verdict of the gate; a test that crashed or was skipped gave none."""
        return self.status in ("passed", "updated") or (self.status == "failed" and self.verdict is not None)

    @property
    def is_own(self) -> bool:
        """Whether the layer itself has changed, not only what it was fed."""
        moved = [name for name, figure in self.figures.items() if figure.moved]
        return self.verdict in ("not applied", "not float", "uncovered") or any(name.startswith(OWN) for name in moved)
