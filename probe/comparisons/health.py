"""The health of one recipe in a recording: the first layer that looks wrong.

    not finite     NaN or Inf
    large mean     |mean| above 10 (max_mean)
    jump           max |x_i+1 - x_i| above 10 (max_change), x_i and x_i+1 the outputs of adjacent layers of one shape
    odd change     mean |x_i+1 - x_i| above `factor` times its median over all adjacent layers

Sound models with outliers in a few channels jump by more than 10 in every layer: raise max_change for them. An odd
change needs at least three pairs of layers. The embedding, the final norm and the logits have no adjacent layer; the
logits are only checked for NaN and Inf.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from probe.comparisons.selection import Side, all_sides, bands, find_side, layer_number, opened, place_of
from probe.metrics import Comparison, Metrics
from probe.recordings import Recording
from probe.words import LOGITS, look_up

#: The fewest changes of which a median is taken.
_FEWEST = 3


@dataclass(frozen=True)
class LayerHealth:
    """The figures of one tensor, and its problems in words."""

    name: str
    shape: tuple[int, ...]
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    nan: int
    inf: int
    first_nonfinite: tuple[int, ...] | None
    """(sample, token, feature)."""
    max_change: float | None
    """max |x - x of the layer before| where both are finite; None without a layer before of the same shape."""
    mean_change: float | None
    problems: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """❌ for NaN and Inf, ⚠ for any other problem, ✓ for none."""
        return "❌" if self.nan or self.inf else "⚠" if self.problems else "✓"


@dataclass(frozen=True)
class Health:
    """The result of `probe check`: every tensor of one recipe."""

    recording: str
    mode: str
    factor: float
    median_change: float | None
    """Of mean |x_i+1 - x_i|, over all adjacent layers."""
    layers: tuple[LayerHealth, ...]
    notes: tuple[str, ...] = ()

    @property
    def suspicious(self) -> tuple[LayerHealth, ...]:
        """The layers with a problem, in the order of the data flow."""
        return tuple(layer for layer in self.layers if layer.problems)

    @property
    def first(self) -> LayerHealth | None:
        """The first layer with a problem."""
        return next(iter(self.suspicious), None)

    def layer(self, name: str) -> LayerHealth:
        """A layer by its name or number: layer_30 or 30."""
        label = f"layer_{name}" if name.isdecimal() else name
        return look_up("layer", label, {layer.name: layer for layer in self.layers})

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        layers = {layer.name: {"mark": layer.mark, **asdict(layer)} for layer in self.layers}
        for layer in layers.values():
            del layer["name"]
        return {"first_suspicious": self.first and self.first.name, **asdict(self), "layers": layers}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """The inverse of as_dict, also after JSON."""

        def fields(facts: Mapping[str, Any]) -> dict[str, Any]:
            return {key: tuple(x) if isinstance(x, list) else x for key, x in facts.items() if key not in derived}

        derived = ("mark", "first_suspicious", "layers")
        layers = (LayerHealth(name, **fields(facts)) for name, facts in found["layers"].items())
        return cls(**fields(found), layers=tuple(layers))


def check(
    recording: Recording | Path | str,
    recipe: str | None = None,
    *,
    factor: float = 10.0,
    max_mean: float = 10.0,
    max_change: float = 10.0,
    format: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Health:
    """Look at every tensor of a recipe; without `recipe` there must be only one. Tensors are read band by band."""
    for name, value in (("max_mean", max_mean), ("max_change", max_change)):
        if not value > 0:
            raise ValueError(f"{name} is {value}. Expected a number above 0, e.g. 10.")
    if not factor > 1:
        raise ValueError(f"factor is {factor}. Expected a multiple of the median change above 1, e.g. 10.")
    whole = opened(recording)
    sides = all_sides(whole)
    if recipe is None and len(sides) > 1:
        names = ", ".join(side.name for side in sides)
        raise ValueError(f"{whole.folder} has {len(sides)} recipes: {names}. Say which one to check.")
    side = sides[0] if recipe is None else find_side(whole, recipe, format)
    measured: list[LayerHealth] = []
    before: str | None = None
    for place, label in enumerate(side.labels):
        if progress:
            progress(f"{side.name} {label} ({place + 1} of {len(side.labels)})")
        adjacent = before if label in side.layers and _are_adjacent(side, before, label) else None
        measured.append(_measured(side, label, adjacent))
        before = label if label in side.layers else before
    changes = [layer.mean_change for layer in measured if layer.mean_change is not None]
    usual = median(changes) if changes else None
    odd = None if usual is None or len(changes) < _FEWEST else factor * usual
    judged = tuple(_judged(layer, max_mean, max_change, odd) for layer in measured)
    return Health(str(whole.folder), side.name, factor, usual, judged, whole.notes)


def _are_adjacent(side: Side, before: str | None, label: str) -> bool:
    """One after the other in the model, and of one shape."""
    if before is None or side.shape(before) != side.shape(label):
        return False
    numbers = layer_number(before), layer_number(label)
    return None in numbers or numbers[1] == (numbers[0] or 0) + 1


def _measured(side: Side, label: str, before: str | None) -> LayerHealth:
    """The figures of a layer, without its problems; `before` is the adjacent layer, if there is one."""
    change = _compared(side, label, before) if before else None
    figures = change if change and change.finite else _compared(side, label, label)
    shape = side.shape(label)
    first = _first_nonfinite(side, label) if figures.nan_output or figures.inf_output else None
    own = {name: getattr(figures, f"{name}_output") for name in ("mean", "std", "min", "max", "nan", "inf")}
    largest, mean = (change.max_abs, change.mae) if change else (None, None)
    place = place_of(first, shape)
    return LayerHealth(label, shape, **own, first_nonfinite=place, max_change=largest, mean_change=mean)


def _compared(side: Side, label: str, other: str) -> Metrics:
    """A tensor against another of its shape, or against itself."""
    comparison = Comparison(percentiles=False)
    for (output,), (reference,) in zip(bands(label, side), bands(other, side), strict=True):
        comparison.update(output, reference)
        del output, reference
    return comparison.metrics()


def _first_nonfinite(side: Side, label: str) -> int:
    start = 0
    for (values,) in bands(label, side):
        nonfinite = (~values.double().isfinite()).nonzero()
        if len(nonfinite):
            return start + int(nonfinite[0])
        start += values.numel()
    raise AssertionError(f"{label} was not finite when it was measured")


def _judged(layer: LayerHealth, max_mean: float, max_change: float, odd: float | None) -> LayerHealth:
    problems = []
    if layer.nan or layer.inf:
        problems.append(f"{layer.nan} NaN and {layer.inf} Inf, the first at {layer.first_nonfinite}")
    if layer.name != LOGITS and layer.mean is not None and abs(layer.mean) > max_mean:
        problems.append(f"its mean is {layer.mean:.6g}, beyond {max_mean:g}")
    if layer.max_change is not None and layer.max_change > max_change:
        problems.append(f"differs from the layer before by up to {layer.max_change:.6g}, more than {max_change:g}")
    if odd is not None and layer.mean_change is not None and layer.mean_change > odd:
        mean = f"{layer.mean_change:.6g} on average"
        problems.append(f"differs from the layer before by {mean}, usual is below {odd:.6g}")
    return replace(layer, problems=tuple(problems))
