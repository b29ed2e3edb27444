"""The health of one recipe in a recording: the layers that look wrong, and the one to look at first.

A layer is judged by what is normal for a stream of values that every layer adds to: by its growth against the layer
before, and by the spread of all layers of the model. In order of severity:

    not finite      NaN or Inf
    zeros           every value is 0
    constant        every value is the same
    explosion       a typical token is EXPLOSION times as large, or as small, as before, or larger than LARGEST; or a
                    value is PEAK times as large as the typical one
    dead channels   channels that have one value in all tokens, and had not in the layer before
    step            growth beyond the usual one; a change beyond the usual one in a single layer; or no change at all
    limit           beyond a limit that the user gave

The usual growth is the median over all layers, times and divided by STEP or, where the layers of the model differ more
than that, by SPREAD robust standard deviations of its logarithm. The usual change is the same above its median; a
layer that changes less than it was given, or than STEP times one of its neighbours, is not odd. Both need three steps.
Only outputs of layers take steps: other tensors are judged by the first three, and the logits may have any mean.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np

from probe.comparisons.selection import Side, all_sides, find_side, layer_number, opened
from probe.comparisons.steps import Step, StepFigures, measure_step
from probe.recordings import Recording
from probe.words import LOGITS, look_up

#: In order of severity.
KINDS = ("not finite", "zeros", "constant", "explosion", "dead channels", "step", "limit")
#: Steps, and values, that no sound model has. Massive activations are up to 1e5 times as large as a typical value.
EXPLOSION, LARGEST, PEAK = 1e3, 1e6, 1e6
#: A step is odd beyond this many times the usual one, and beyond this many standard deviations over the layers.
STEP, SPREAD = 10.0, 5.0
#: The fewest steps of which a median is taken.
_FEWEST = 3
_EMBEDDING = "embedding"


@dataclass(frozen=True)
class LayerHealth(StepFigures):
    """The figures of one tensor, and its problems in words, the most severe first."""

    name: str
    shape: tuple[int, ...]
    dead: int
    """Channels that have one value in all tokens, and had not in the layer before."""
    kind: str | None = None
    """The most severe of its problems, one of KINDS."""
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
    limits: dict[str, float]
    """growth_low, growth_high and relative_change, where there are enough layers to say what is usual; and those that
    the user gave: max_mean, max_change, and mean_change, which is `factor` times the median."""
    layers: tuple[LayerHealth, ...]
    notes: tuple[str, ...] = ()

    @property
    def suspicious(self) -> tuple[LayerHealth, ...]:
        """The layers with a problem, in the order of the data flow."""
        return tuple(layer for layer in self.layers if layer.problems)

    @property
    def first(self) -> LayerHealth | None:
        """The layer to look at: the first one with the most severe problem."""
        return min(self.suspicious, key=lambda layer: KINDS.index(str(layer.kind)), default=None)

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
        layers = (LayerHealth(name=name, **fields(facts)) for name, facts in found["layers"].items())
        return cls(**fields(found), layers=tuple(layers))


def check(
    recording: Recording | Path | str,
    recipe: str | None = None,
    *,
    factor: float | None = None,
    max_mean: float | None = None,
    max_change: float | None = None,
    format: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Health:
    """Look at every tensor of a recipe; without `recipe` there must be only one. Tensors are read band by band.

    Beside what is normal for the model, a layer must keep the limits that are given:

    max_mean     of |mean|; not of the logits
    max_change   of max |x - x of the layer before|
    factor       of mean |x - x of the layer before|, in units of its median over all layers; needs three of them
    """
    for name, value in (("max_mean", max_mean), ("max_change", max_change)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}. Expected a number above 0, e.g. 10.")
    if factor is not None and not factor > 1:
        raise ValueError(f"factor is {factor}. Expected a multiple of the median change above 1, e.g. 10.")
    whole = opened(recording)
    sides = all_sides(whole)
    if recipe is None and len(sides) > 1:
        names = ", ".join(side.name for side in sides)
        raise ValueError(f"{whole.folder} has {len(sides)} recipes: {names}. Say which one to check.")
    side = sides[0] if recipe is None else find_side(whole, recipe, format)
    measured = _measured(side, progress)
    limits = _usual([one for one in measured if one.takes_step])
    changes = [one.step.mean_change for one in measured if one.step.mean_change is not None]
    if factor is not None and len(changes) >= _FEWEST:
        limits["mean_change"] = factor * median(changes)
    given = {"max_mean": max_mean, "max_change": max_change}
    limits |= {name: value for name, value in given.items() if value is not None}
    layers = tuple(_judged(measured, place, side, limits) for place in range(len(measured)))
    return Health(str(whole.folder), side.name, limits, layers, whole.notes)


@dataclass(frozen=True, eq=False)
class _Measured:
    """A tensor with its place in the stream: those of the embedding and the layers before and after, if any."""

    label: str
    step: Step
    is_layer: bool
    before: int | None = None
    after: list[int] = field(default_factory=list)

    @property
    def takes_step(self) -> bool:
        """Whether it is a layer that has a finite step from a layer before it."""
        step = self.step
        return step.relative_change is not None and not (step.nan or step.inf) and bool(step.growth)


def _measured(side: Side, progress: Callable[[str], None] | None) -> list[_Measured]:
    layers, measured = set(side.layers), list[_Measured]()
    last: int | None = None
    for place, label in enumerate(side.labels):
        if progress:
            progress(f"{side.name} {label} ({place + 1} of {len(side.labels)})")
        is_layer = label in layers
        previous = measured[last] if last is not None and is_layer else None
        before = previous if previous and _are_adjacent(side, previous.label, label) else None
        adjacent = before.label if before and before.is_layer else None
        step = measure_step(side, label, before=adjacent, sizes_before=before.step.sizes if before else None)
        measured.append(_Measured(label, step, is_layer, last if before else None))
        if before is not None:
            before.after.append(place)
        if is_layer or label == _EMBEDDING:
            last = place
    return measured


def _are_adjacent(side: Side, before: str, label: str) -> bool:
    """One after the other in the model, and of one shape."""
    if side.shape(before) != side.shape(label):
        return False
    numbers = -1 if before == _EMBEDDING else layer_number(before), layer_number(label)
    return None in numbers or numbers[1] == (numbers[0] or 0) + 1


def _usual(steps: Sequence[_Measured]) -> dict[str, float]:
    """The limits of growth and change that the steps of a model set themselves; none where they are too few."""
    if len(steps) < _FEWEST:
        return {}
    low, high = _reach([one.step.growth or 1.0 for one in steps])
    changes = [one.step.relative_change for one in steps if one.step.relative_change]
    found = {"growth_low": low, "growth_high": high}
    return found | ({"relative_change": max(1.0, _reach(changes)[1])} if changes else {})


def _reach(values: Sequence[float]) -> tuple[float, float]:
    """The median of positive values divided by, and times, what is odd in this model."""
    logarithms = np.log(values)
    middle = float(np.median(logarithms))
    # a quarter of normal values are within 0.3186 standard deviations; a bad layer spoils two steps, of few
    deviation = float(np.quantile(np.abs(logarithms - middle), 0.25, method="lower")) / 0.3186
    reach = min(max(math.log(STEP), SPREAD * deviation), math.log(EXPLOSION))
    return math.exp(middle - reach), math.exp(middle + reach)


def _judged(measured: Sequence[_Measured], place: int, side: Side, limits: Mapping[str, float]) -> LayerHealth:
    one = measured[place]
    figures = {name: value for name, value in vars(one.step).items() if name not in ("sizes", "constant")}
    dead = _dead(measured, one)
    stream = _stream_problems(measured, one, dead, limits) if one.is_layer else ()
    found = [*_own_problems(one.step), *stream, *_beyond_given(one, limits)]
    found.sort(key=lambda problem: KINDS.index(problem[0]))
    kind, problems = (found[0][0] if found else None), tuple(text for _, text in found)
    return LayerHealth(**figures, name=one.label, shape=side.shape(one.label), dead=dead, kind=kind, problems=problems)


def _dead(measured: Sequence[_Measured], one: _Measured) -> int:
    """How many channels died in this layer; without a tensor before it, those that live in the next one."""
    beside = [measured[place] for place in ([one.before] if one.before is not None else one.after)]
    rectified = one.step.min is not None and one.step.min >= 0  # where zeros are normal
    if not one.is_layer or not beside or rectified:
        return 0
    return int((one.step.constant & ~beside[0].step.constant).sum())


def _own_problems(step: Step) -> Iterator[tuple[str, str]]:
    """The problems of a tensor by itself."""
    if step.nan or step.inf:
        yield "not finite", f"{step.nan} NaN and {step.inf} Inf, the first at {step.first_nonfinite}"
    elif step.min == step.max == 0:
        yield "zeros", "every value is 0"
    elif step.min == step.max and step.sizes.size * step.constant.size > 1:
        yield "constant", f"every value is {step.min:.6g}"


def _stream_problems(
    measured: Sequence[_Measured], one: _Measured, dead: int, limits: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    """The problems of a layer in the stream."""
    step, growth = one.step, one.step.growth
    before = "the layer before" if one.before is None else measured[one.before].label
    largest = max(abs(step.min or 0.0), abs(step.max or 0.0))
    if growth is not None and not 1 / EXPLOSION <= growth <= EXPLOSION and largest:
        limit = f"more than {EXPLOSION:g}" if growth > 1 else f"less than {1 / EXPLOSION:g}"
        yield "explosion", f"its values are {growth:.3g} times as large as those of {before}, {limit}"
    elif one.takes_step and not limits.get("growth_low", 0) <= (growth or 1.0) <= limits.get("growth_high", math.inf):
        usual = f"{limits['growth_low']:.3g} to {limits['growth_high']:.3g} is usual in this model"
        yield "step", f"its values are {growth:.3g} times as large as those of {before}; {usual}"
    if step.size is not None and step.size > LARGEST:
        yield "explosion", f"its values are {step.size:.3g} on average, more than {LARGEST:g}"
    if step.size and largest > PEAK * step.size:
        times = f"{largest / step.size:.3g} times the typical one, more than {PEAK:g}"
        yield "explosion", f"its largest value, {largest:.3g}, is {times}"
    if dead:
        had = f"and had not in {before}" if one.before is not None else "and have not in the next layer"
        yield "dead channels", f"{dead} of {step.constant.size} channels have one value in all tokens, {had}"
    if step.max_change == 0 and largest:
        yield "step", f"is the same as {before}, to the bit: the layer did nothing"
    if _is_odd_change(measured, one, limits):
        usual = f"more than {limits['relative_change']:.3g}, which is odd in this model"
        yield "step", f"differs from {before} by {step.relative_change:.3g} of its size, {usual}"


def _is_odd_change(measured: Sequence[_Measured], one: _Measured, limits: Mapping[str, float]) -> bool:
    """Whether a single layer changes far more than usual, and than the layers beside it do."""
    if not one.takes_step or one.before is None or "relative_change" not in limits:
        return False
    neighbours = [measured[place].step.relative_change for place in (one.before, *one.after)]
    known = [change for change in neighbours if change is not None]
    change = one.step.relative_change or 0.0
    return len(known) == 2 and change > max(limits["relative_change"], STEP * min(known))


def _beyond_given(one: _Measured, limits: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """The limits of the user that a tensor does not keep."""
    step = one.step
    if one.label != LOGITS and abs(step.mean or 0.0) > limits.get("max_mean", math.inf):
        yield "limit", f"its mean is {step.mean:.6g}, beyond {limits['max_mean']:g}"
    if (step.max_change or 0.0) > (limit := limits.get("max_change", math.inf)):
        yield "limit", f"differs from the layer before by up to {step.max_change:.6g}, more than {limit:g}"
    if (step.mean_change or 0.0) > (limit := limits.get("mean_change", math.inf)):
        yield "limit", f"differs from the layer before by {step.mean_change:.6g} on average, usual is below {limit:.6g}"
