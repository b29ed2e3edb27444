"""What a baseline stores of a case: figures with their spread, and a small sample of golden values."""

from dataclasses import dataclass, field


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
