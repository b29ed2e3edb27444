"""The explanation of a difference: the output of a step beside the expected one, matched with known faults.

Faults that can be replayed are tried first: the one that reproduces the output of the step is the cause. A difference
that none reproduces is described by its statistics: a factor, one channel, one token, zeros, a bias of the rounding.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

Replay = Callable[[], Tensor]

#: Two ways to add the same float32 numbers differ by less than this part of the result and of its rms.
SUMS = 2e-5
#: Grid values computed in float64 and rounded once differ by less.
GRIDS = 1e-6
#: A replayed fault is the cause if it leaves less than this part of the difference.
EXPLAINED = 0.1
#: The names of the dimensions, by their number.
AXES = {1: ("channel",), 2: ("row", "column"), 3: ("sequence", "token", "channel")}
AXES_OF_WEIGHTS = {**AXES, 3: ("channel", "group", "tap")}


@dataclass(frozen=True, eq=False)
class Step:
    """The output of a step, and the output expected from the very same inputs."""

    name: str
    actual: Tensor
    expected: Tensor
    given: Tensor | None = None  # for a grid: its input
    unit: Tensor | None = None  # for a grid: the distance between its values
    suspects: Callable[[], Iterator[tuple[str, Replay]]] = lambda: iter(())
    noise: float = SUMS
    axes: tuple[str, ...] = ()  # names of the dimensions; empty: those in AXES

    def differs(self) -> Tensor:
        """Where the output differs from the expected one by more than noise."""
        a, e = self.actual.double(), self.expected.double()
        finite = e[e.isfinite()]
        floor = float(finite.square().mean().sqrt()) if finite.numel() and self.noise == SUMS else 0.0
        same = (a == e) | (a.isnan() & e.isnan()) | ((a - e).abs() <= self.noise * (e.abs() + floor))
        return ~same

    def at(self, axis: int, index: int) -> "Step":
        """One channel, one token or one row of the step."""

        def narrowed(replay: Replay) -> Tensor:
            return replay().narrow(axis, index, 1)

        tensors = {name: getattr(self, name) for name in ("actual", "expected", "given", "unit")}
        parts = {name: x.narrow(axis, index, 1) for name, x in tensors.items() if x is not None}
        suspects = self.suspects
        return replace(self, suspects=lambda: ((why, partial(narrowed, replay)) for why, replay in suspects()), **parts)


def explain(step: Step) -> str:
    """Why the output of the step is not the expected one, in a few words; empty if it is."""
    if step.actual.shape != step.expected.shape:
        return f"has shape {list(step.actual.shape)}, expected {list(step.expected.shape)}"
    if step.actual.dtype != step.expected.dtype:
        return f"is {_dtype(step.actual)}, expected {_dtype(step.expected)}"
    differs = step.differs()
    if not bool(differs.any()):
        return ""
    return _replayed(step) or _not_finite(step) or _local(step, differs) or _matched(step)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _matched(step: Step) -> str:
    return next(found for signature in SIGNATURES.values() if (found := signature(step)))


def _replayed(step: Step) -> str:
    """The sentence of the replayed fault that leaves the least of the difference, if that is little enough."""
    whole = _distance(step.actual, step.expected)
    if not math.isfinite(whole):
        whole = _distance(step.actual, torch.where(step.actual.isfinite(), 0.0, torch.nan))
    best, cause = EXPLAINED, ""
    for sentence, replay in step.suspects():
        made = replay()
        if made.shape != step.actual.shape:
            continue
        left = _distance(step.actual, made)
        share = left / whole if left > 0 and whole > 0 else left
        if share < best:
            best, cause = share, sentence
    return cause + _bias(step) if cause.startswith("rounding") else cause


def _distance(a: Tensor, b: Tensor) -> float:
    """rms of the difference as float32; infinite if values overflowed on one side only."""
    a, b = a.float().double(), b.float().double()
    lost = ~a.isfinite()
    if float((lost != ~b.isfinite()).sum()) > 0.01 * float(lost.sum()):
        return math.inf
    both = (a - b)[a.isfinite() & b.isfinite()]
    return float(both.square().mean().sqrt()) if both.numel() else 0.0


def _local(step: Step, differs: Tensor) -> str:
    """The cause within the one channel, token or element that differs, where it is just one."""
    axes = step.axes or AXES.get(differs.dim(), ())
    if not axes or int(differs.sum()) == 1:
        return ""
    for axis in reversed(range(len(axes))):
        others = [other for other in range(len(axes)) if other != axis]
        hit = (differs.any(dim=others) if others else differs).nonzero().reshape(-1)
        if hit.numel() == 1 and differs.shape[axis] > 1:
            index = int(hit[0])
            part = step.at(axis, index)
            return f"only {axes[axis]} {index}: {_replayed(part) or _matched(part)}"
    return ""


def _errors_in_steps(step: Step) -> Tensor | None:
    """(output - input) / unit of the finite elements; None for steps that are no grid."""
    if step.given is None or step.unit is None or step.given.shape != step.actual.shape:
        return None
    error = (step.actual.double() - step.given.double()) / step.unit.double()
    some = error[error.isfinite() & (step.unit > 0)]
    return some if some.numel() else None


def _mean_error(step: Step) -> float:
    """The mean rounding error in steps of the grid; 0 for steps that are no grid."""
    errors = _errors_in_steps(step)
    return 0.0 if errors is None else float(errors.clamp(-2, 2).mean())


def _bias(step: Step) -> str:
    mean = _mean_error(step)
    return f" (mean error {mean:+.2f} steps)" if abs(mean) > 0.05 else ""


def _not_finite(step: Step) -> str:
    bad = ~step.actual.isfinite() & step.expected.isfinite()
    if not bool(bad.any()):
        return ""
    nan = int((bad & step.actual.isnan()).sum())
    kind, count = ("NaN", nan) if nan else ("Inf", int(bad.sum()))
    return f"{kind} in {count} of {bad.numel()} values, the first at {bad.nonzero()[0].tolist()}"


def _single(step: Step) -> str:
    differs = step.differs()
    if int(differs.sum()) != 1:
        return ""
    place = tuple(differs.nonzero()[0].tolist())
    return f"one value, at {list(place)}: {float(step.actual[place]):.4g} instead of {float(step.expected[place]):.4g}"


def _zeros(step: Step) -> str:
    return "gives only zeros" if not bool(step.actual.any()) and bool(step.expected.any()) else ""


def _untouched(step: Step) -> str:
    if step.given is None or step.given.shape != step.actual.shape:
        return ""
    same = torch.allclose(step.actual.double(), step.given.double(), rtol=1e-6, atol=0.0, equal_nan=True)
    return "not quantized" if same else ""


def _factor(step: Step) -> str:
    """actual / expected is one number nearly everywhere, so the scale is off by it."""
    a, e = step.actual.double(), step.expected.double()
    usable = (e != 0) & e.isfinite() & a.isfinite()
    if int(usable.sum()) < 2:
        return ""
    ratio = (a[usable] / e[usable]).float()
    middle = float(ratio.median())
    near = float(((ratio - middle).abs() <= 1e-3 * abs(middle)).float().mean())
    return _scaled(middle) if near > 0.8 and abs(middle - 1) > 1e-4 and middle != 0 else ""


def _unrelated(step: Step) -> str:
    a, e = (x.double().reshape(-1) - x.double().mean() for x in (step.actual, step.expected))
    correlation = float((a @ e) / (a.norm() * e.norm()).clamp(min=1e-300))
    return f"unrelated to the expected values (correlation {correlation:+.2f})" if abs(correlation) < 0.3 else ""


def _quantum(step: Step) -> str:
    """The values are multiples of another step size than expected."""
    if step.unit is None or step.unit.numel() == 0 or bool((step.unit != step.unit.reshape(-1)[0]).any()):
        return ""
    levels = torch.unique(step.actual[step.actual.isfinite()].double())
    gaps = levels.diff()
    if gaps.numel() < 4:
        return ""
    quantum = float(gaps[gaps <= 1.5 * gaps.min()].mean())
    counts = levels / quantum
    ratio = quantum / float(step.unit.reshape(-1)[0])
    on_it = float(((counts - counts.round()).abs() < 0.01).float().mean())
    return _scaled(ratio) if on_it > 0.95 and 1e-4 < abs(ratio - 1) < 10 else ""


def _scaled(ratio: float) -> str:
    exponent = round(math.log2(ratio)) if ratio > 0 else 0
    if exponent and abs(ratio / 2.0**exponent - 1) < 1e-3:
        return f"the scale is off by a factor of 2^{exponent}"
    if abs(ratio + 1) < 1e-3:
        return "the sign is flipped"
    return f"the scale is off by {ratio - 1:+.2%}" if 0 < ratio < 10 else f"the scale is off by a factor of {ratio:.4g}"


def _lost(step: Step) -> str:
    differs = step.differs()
    zero = (step.actual == 0) & differs
    share = float(zero.sum()) / float(differs.sum())
    return f"{int(zero.sum())} of {zero.numel()} values are zero and should not be" if share > 0.99 else ""


def _extremes(step: Step) -> str:
    """Only the largest magnitudes differ."""
    differs = step.differs()
    if step.given is None or step.given.shape != differs.shape or not bool((~differs).any()):
        return ""
    if float(step.given[differs].abs().min()) < 0.98 * float(step.given[~differs].abs().max()):
        return ""
    top = float(step.actual[differs].abs().max())
    return f"only the {int(differs.sum())} largest values differ: clamped at {top:.4g}"


def _biased(step: Step) -> str:
    mean = _mean_error(step)
    return f"rounding is biased {'down' if mean < 0 else 'up'}{_bias(step)}" if abs(mean) > 0.1 else ""


def _random(step: Step) -> str:
    """Every value went to one of its two neighbours on the grid, and not always to the nearer one."""
    errors = _errors_in_steps(step)
    if errors is None or float((errors.abs() < 1.001).double().mean()) < 0.99:
        return ""
    return f"rounding looks random, not nearest ({float(step.differs().double().mean()):.0%} to the farther side)"


def _unlike(step: Step) -> str:
    differs = step.differs()
    difference = (step.actual.double() - step.expected.double())[differs]
    scale = float(step.expected.double().square().mean().sqrt()) or 1.0
    rms = float(difference.square().mean().sqrt()) / scale
    return f"{float(differs.double().mean()):.1%} of the values differ, by {rms:.2g} of its rms; no known signature"


#: Each describes the step, or returns an empty text where it does not fit. The first that fits is reported; the last
#: always fits.
SIGNATURES: dict[str, Callable[[Step], str]] = {
    "NaN or Inf": _not_finite,
    "one value": _single,
    "zeros": _zeros,
    "not quantized": _untouched,
    "a factor": _factor,
    "unrelated": _unrelated,
    "another step": _quantum,
    "zeros here and there": _lost,
    "extremes": _extremes,
    "a bias": _biased,
    "random": _random,
    "unknown": _unlike,
}
