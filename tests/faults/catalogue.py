"""What a fault is: a row with a name, the recipe that shows it, how it breaks the code, and how it must be told."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from probe.gate.cases import Verdict
from probe.words import OUTSIDE, PATHS
from tests.faults.breaking import Damage, damaged

#: How the gate may tell a fault. What moves no figure but the golden values is "changed values".
VALUES: tuple[Verdict, ...] = ("drift", "changed values")
NOT_APPLIED: tuple[Verdict, ...] = ("not applied",)
NOT_FINITE: tuple[Verdict, ...] = ("not finite",)
NOT_FLOAT: tuple[Verdict, ...] = ("not float",)
UNCOVERED: tuple[Verdict, ...] = ("uncovered",)
MOVED: tuple[Verdict, ...] = ("reference moved",)
#: Of a path: it is not what the prefill gives, or not what is stored for it.
PATH: tuple[Verdict, ...] = ("differs from prefill", *VALUES)

INT8, FP8, FP6, FP4 = (f"mode_2_1-{format}" for format in ("int8", "fp8_e4m3", "fp6_e2m3", "fp4_e2m1"))
MXINT8, NVFP4, E5M2 = "mode_2_1-mxint8", "mode_2_1-nvfp4", "mode_2_1-fp8_e5m2"
#: The label of faults that the whole gate must refuse: the float reference, or an error before anything is judged.
REFERENCE, ERROR = "reference", "error"
#: What the diagnosis must say where a cause cannot be seen.
UNKNOWN = "no known cause"

Kind = Literal["layer", "outside", "path", "wide", "reference", "error"]


@dataclass(frozen=True)
class Fault:
    """A fault of the quantized copy: of one layer, of what lies outside the layers, or of one way through a layer.

    `cause` is what the diagnosis must say, word by word, or a tuple of several sentences that are right; see
    `results.is_sentence`. Where the verdict says it all it is the message. `case` is the label that must fail where it
    is not the layer: `head`, `decode`. A fault of a path must leave the prefill alone.
    """

    name: str
    recipe: str
    damage: Damage
    cause: str | tuple[str, ...]
    verdicts: tuple[Verdict, ...] = VALUES
    layer: int = 1
    model: str = "tiny-mamba"
    case: str = ""

    @property
    def causes(self) -> tuple[str, ...]:
        """The sentences that are right."""
        return _all_of(self.cause)

    @property
    def label(self) -> str:
        """The case that must fail first, and the only one of the layers whose own figures may move."""
        return self.case or f"layer_{self.layer}"

    @property
    def kind(self) -> Kind:
        """What else must hold."""
        return "path" if self.label in PATHS else "outside" if self.label in OUTSIDE else "layer"

    def applied(self) -> AbstractContextManager[None]:
        """The fault, while it lasts."""
        return damaged(self.damage, self.layer)


@dataclass(frozen=True)
class WideFault:
    """A fault that has no layer: of the calibration, of a format, of a whole mode, of the float reference."""

    name: str
    recipe: str
    applied: Callable[[], AbstractContextManager[None]]
    cause: str | tuple[str, ...]
    label: str = "layer_0"
    verdicts: tuple[Verdict, ...] = VALUES
    model: str = "tiny-mamba"

    @property
    def causes(self) -> tuple[str, ...]:
        """The sentences that are right."""
        return _all_of(self.cause)

    @property
    def kind(self) -> Kind:
        """What else must hold."""
        return "reference" if self.label == REFERENCE else "error" if self.label == ERROR else "wide"


def _all_of(cause: str | tuple[str, ...]) -> tuple[str, ...]:
    return (cause,) if isinstance(cause, str) else cause


AnyFault = Fault | WideFault
