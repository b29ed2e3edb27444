"""What a baseline stores of a case: figures with their spread, and a small sample of golden values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Stored:
    """A figure, how far harmless changes moved it, and, if it was accepted though worse, the reason."""

    value: float
    spread: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Entry:
    """One case. Figures are called injected.mse, propagated.correlation; values are float32, one flat row."""

    figures: dict[str, Stored] = field(default_factory=dict)
    values: tuple[float, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    """What the figures depend on beside model and code, where each case has its own: outlier.threshold and its like."""

    def as_dict(self) -> dict[str, Any]:
        """For the way from a worker to the controller."""
        figures = {name: [one.value, one.spread, one.reason] for name, one in self.figures.items()}
        return {"figures": figures, "values": list(self.values), "settings": dict(self.settings)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """The inverse of as_dict."""
        figures = {name: Stored(*figure) for name, figure in given["figures"].items()}
        return cls(figures, tuple(given["values"]), dict(given["settings"]))
