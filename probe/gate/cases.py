"""A case: one layer of one recipe on one device. `str(case)` is the pytest id and what the command line takes."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Case:
    """One test. The format of a float mode is empty."""

    mode: str  # as in test ids: mode_2_1
    layer: str  # layer_0, a module's name, or logits
    device: str
    format: str = ""

    def __str__(self) -> str:
        return "-".join(part for part in (self.mode, self.layer, self.device, self.format) if part)

    @property
    def recipe(self) -> str:
        """What is run once for all layers: mode_2_1-fp8_e4m3."""
        return "-".join(part for part in (self.mode, self.format) if part)
