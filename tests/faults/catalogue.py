"""What a fault is: a row with a name, the recipe that shows it, how it breaks the code, and how it must be told."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from probe.gate.cases import Verdict
from tests.faults.breaking import Damage, damaged

#: How the gate may tell a fault. What moves no figure but the golden values is "changed values".
VALUES: tuple[Verdict, ...] = ("drift", "changed values")
NOT_APPLIED: tuple[Verdict, ...] = ("not applied",)
NOT_FINITE: tuple[Verdict, ...] = ("not finite",)
UNCOVERED: tuple[Verdict, ...] = ("uncovered",)

INT8, FP8, FP6, FP4 = (f"mode_2_1-{format}" for format in ("int8", "fp8_e4m3", "fp6_e2m3", "fp4_e2m1"))
MXINT8, NVFP4 = "mode_2_1-mxint8", "mode_2_1-nvfp4"


@dataclass(frozen=True)
class Fault:
    """A fault of one layer. `cause` is a part of what the diagnosis must say; empty where it can say nothing."""

    name: str
    recipe: str
    damage: Damage
    cause: str
    verdicts: tuple[Verdict, ...] = VALUES
    layer: int = 1
    model: str = "tiny-mamba"

    @property
    def label(self) -> str:
        """The layer that must fail, and the only one whose injected figures may move."""
        return f"layer_{self.layer}"

    @property
    def everywhere(self) -> bool:
        """Whether other layers have it too."""
        return False

    def applied(self) -> AbstractContextManager[None]:
        """The fault, while it lasts."""
        return damaged(self.damage, self.layer)


@dataclass(frozen=True)
class WideFault:
    """A fault that has no layer: of the calibration, of a whole mode, of what lies outside the layers."""

    name: str
    recipe: str
    applied: Callable[[], AbstractContextManager[None]]
    cause: str
    label: str = "layer_0"
    verdicts: tuple[Verdict, ...] = VALUES
    model: str = "tiny-mamba"
    everywhere: bool = True
