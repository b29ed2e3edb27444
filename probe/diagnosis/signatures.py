"""Signatures: the claims about a difference that need no knowledge of the step.

A claim is a sentence, and the very values that the step would give if the sentence were true: a factor, a constant, a
permutation and so on of the expected values. Parameters are taken from the output; there are always far fewer of them
than values. `explanations.py` measures how much of the difference each claim explains.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

Replay = Callable[[], Tensor]
Claims = Iterator[tuple[str, Tensor]]

#: Two ways to add the same float32 numbers differ by less than this part of the result and of its rms.
SUMS = 2e-5
#: Grid values of weights that are folded first, computed in float64 and rounded once, differ by less.
GRIDS = 1e-6
#: The names of the dimensions, by their number.
AXES = {1: ("channel",), 2: ("row", "column"), 3: ("sequence", "token", "channel")}
PART = ("value",)  # of elements that a mask has chosen
AXES_OF_WEIGHTS = {**AXES, 3: ("channel", "group", "tap")}
#: Rows are matched by at most this many of their values; the claim is then tested on all.
MATCHED = 256
#: Fewer values than this are never explained by a fitted number.
FEWEST = 8
#: Values that stochastic rounding must have sent to the farther side.
FARTHER = 16


@dataclass(frozen=True, eq=False)
class Step:
    """The output of a step, and the output expected from the very same inputs."""

    name: str
    actual: Tensor
    expected: Tensor
    given: Tensor | None = None  # for a grid: its input
    unit: Tensor | None = None  # for a grid: the distance between its values
    suspects: Callable[[], Iterator[tuple[str, Replay]]] = lambda: iter(())
    fits: Callable[[], Iterator[tuple[str, Replay]]] = lambda: iter(())  # replays with a number taken from the output
    noise: float = SUMS
    axes: tuple[str, ...] = ()  # names of the dimensions; empty: those in AXES
    block: int | None = None  # for a grid: the size of its blocks along the last axis

    def differs(self) -> Tensor:
        """Where the output differs from the expected one by more than noise."""
        a, e = self.actual.double(), self.expected.double()
        same = (a == e) | (a.isnan() & e.isnan()) | ((a - e).abs() <= self.noise * (e.abs() + self._floor()))
        return ~same

    def _floor(self) -> float:
        return rms(self.expected) if self.noise == SUMS else 0.0

    def left_by(self, made: Tensor) -> float:
        """The part of the squared difference that is left if the step had given `made`; less than noise is none.

        Or the part of the output itself, where that is less: what zeros would explain as well is not explained.
        """
        before, after = squares(self.actual, self.expected), squares(self.actual, made)
        if not math.isfinite(before):  # only what is finite can be compared
            before = squares(self.actual, torch.where(self.actual.isfinite(), 0.0, torch.nan))
        if after == 0 or before == 0:
            return after
        noise = (self.noise * rms(self.expected)) ** 2 * self.actual.numel()
        itself = squares(self.actual, torch.where(self.actual.isfinite(), 0.0, self.actual))
        return 0.0 if after <= min(noise, 1e-3 * before) else after / max(min(before, itself), 1e-300)

    def inside(self, mask: Tensor) -> "Step":
        """The elements of a mask, in a row."""

        def narrowed(replay: Replay) -> Tensor:
            made = replay()
            return made[mask] if made.shape == mask.shape else made

        tensors = {name: getattr(self, name) for name in ("actual", "expected", "given", "unit")}
        parts = {name: x[mask] for name, x in tensors.items() if x is not None and x.shape == mask.shape}
        suspects, fits = self.suspects, self.fits
        own = {"given": None, "unit": None, **parts}
        return replace(
            self,
            suspects=lambda: ((why, partial(narrowed, replay)) for why, replay in suspects()),
            fits=lambda: ((why, partial(narrowed, replay)) for why, replay in fits()),
            axes=PART,
            block=None,
            **own,
        )


def rms(x: Tensor) -> float:
    """Root mean square of the finite values."""
    some = x[x.isfinite()].double()
    return float(some.square().mean().sqrt()) if some.numel() else 0.0


def squares(a: Tensor, b: Tensor) -> float:
    """Sum of the squared difference as float32; infinite if values overflowed on one side only."""
    a, b = a.float().double(), b.float().double()
    good = a.isfinite()
    if good.all() and bool(b.isfinite().all()):
        return float((a - b).square().sum())
    lost = ~good
    if float((lost != ~b.isfinite()).sum()) > 0.01 * float(lost.sum()):
        return math.inf
    return float((a - b)[good & b.isfinite()].square().sum())


def zeros(step: Step) -> Claims:
    """Nothing but zeros."""
    if not bool(step.actual.any()):
        yield "gives only zeros", torch.zeros_like(step.expected)


def untouched(step: Step) -> Claims:
    """The input of a grid, as it is."""
    if step.given is not None and step.given.shape == step.actual.shape:
        yield "not quantized", step.given


def single(step: Step) -> Claims:
    """One value."""
    differs = step.differs()
    if int(differs.sum()) == 1:
        place = tuple(differs.nonzero()[0].tolist())
        words = f"{float(step.actual[place]):.4g} instead of {float(step.expected[place]):.4g}"
        yield f"one value, at {list(place)}: {words}", torch.where(differs, step.actual, step.expected)


def factor(step: Step) -> Claims:
    """One factor for all values."""
    a, e = step.actual.double(), step.expected.double()
    usable = (e != 0) & e.isfinite() & a.isfinite()
    if int(usable.sum()) < FEWEST:
        return
    ratio = float((a[usable] / e[usable]).median())
    slope = float((a[usable] * e[usable]).sum() / e[usable].square().sum().clamp(min=1e-300))
    for number in dict.fromkeys((ratio, slope)):
        if number not in (0.0, 1.0):
            yield scaled(number), e * number


def constant(step: Step) -> Claims:
    """One number added to all values, or one to each channel."""
    d = step.actual.double() - step.expected.double()
    if d.numel() < FEWEST:
        return
    middle = float(d.mean())
    yield f"a constant, {middle:+.4g}, is added to every value", step.expected.double() + middle
    if d.dim() == 3 and d.shape[0] * d.shape[1] >= FEWEST:
        yield "a constant is added to each channel, as a bias is", step.expected.double() + d.mean((0, 1), keepdim=True)


def narrower(step: Step) -> Claims:
    """The expected values in a narrower float."""
    if step.actual.numel() < FEWEST:
        return
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield f"rounded to {name}", step.expected.to(dtype).double()


def unsigned(step: Step) -> Claims:
    """Magnitudes without their sign."""
    if not bool((step.actual < 0).any()):
        yield "signs are lost", step.expected.abs()


def lost(step: Step) -> Claims:
    """Zeros here and there."""
    zero = (step.actual == 0) & step.differs()
    if bool(zero.any()):
        words = f"{int(zero.sum())} of {zero.numel()} values are zero and should not be"
        yield words, torch.where(zero, torch.zeros_like(step.expected), step.expected)


def clipped(step: Step) -> Claims:
    """Values beyond +-c are +-c."""
    top = float(step.actual.abs().max()) if step.actual.numel() else 0.0
    beyond = step.expected.abs() > top
    count, there = int(beyond.sum()), int((step.actual.abs()[beyond] >= top * (1 - 1e-6)).sum())
    if top > 0 and 2 <= count <= 0.5 * beyond.numel() and there >= 0.9 * count:
        yield f"only the {count} largest values differ: clamped at {top:.4g}", step.expected.clamp(-top, top)


def rescaled(step: Step) -> Claims:
    """Integers at another scale: the values are multiples of another number."""
    if step.given is None or step.unit is None or step.unit.numel() == 0:
        return
    right = float(step.unit.reshape(-1)[0])
    levels = torch.unique(step.actual[step.actual.isfinite()].double())
    gaps = levels.diff()
    if gaps.numel() < 4 or bool((step.unit != step.unit.reshape(-1)[0]).any()):
        return
    quantum = float(gaps[gaps <= 1.5 * gaps.min()].mean())
    codes = (levels / quantum).round()
    scale = float(levels @ codes / codes.square().sum()) if bool(codes.any()) else right
    if scale != right:
        made = (step.given.double() / scale).round().clamp(-128, 127) * scale  # only int8 has one unit for all
        yield scaled(scale / right), made


def biased(step: Step) -> Claims:
    """Values are rounded at another threshold than half way."""
    mean = mean_error(step)
    if step.given is not None and step.unit is not None and step.actual.numel() >= FEWEST and abs(mean) > 0.05:
        unit = step.unit.double()
        made = torch.floor(step.given.double() / unit + 0.5 + mean) * unit
        yield f"rounding is biased {'down' if mean < 0 else 'up'}{bias(step)}", made


def by_chance(step: Step) -> Claims:
    """Stochastic rounding: a value goes to its farther neighbour as often as it is near to it.

    It has no values that could be claimed, so its evidence is that of the counts: in each quarter of the way from a
    neighbour to the middle the share that went farther is that of the distance, and nothing is off the grid.
    """
    if step.given is None or step.unit is None or step.given.shape != step.actual.shape:
        return
    unit = step.unit.double()
    some = (unit > 0) & step.actual.isfinite()
    x, a, e = (t.double()[some] / unit[some] for t in (step.given, step.actual, step.expected))
    inside = (x - e).abs() <= 0.5 + 1e-6
    farther = ((a - e).abs() - 1).abs() < 1e-3
    off = ~farther & ((a - e).abs() > 1e-3)
    away = ((a - x).abs() - (1 - (x - e).abs())).abs() < 1e-3
    if int(farther.sum()) < FARTHER or bool(off.any()) or not bool((away | ~farther).all()):
        return
    distance = (x - e).abs()[inside]
    went = farther[inside].double()
    for quarter in range(4):
        here = (distance >= quarter / 8) & (distance < (quarter + 1) / 8)
        count = int(here.sum())
        wanted, seen = float(distance[here].sum()), float(went[here].sum())
        if count < FEWEST or abs(seen - wanted) > 4 * math.sqrt(max(wanted, 1.0)):
            return
    share = float(went.mean())
    yield f"rounding looks random, not nearest ({share:.0%} to the farther side)", step.actual


def permuted(step: Step) -> Claims:
    """The expected rows, columns, channels, tokens or sequences at other places."""
    axes = step.axes or AXES.get(step.actual.dim(), ())
    if len(axes) != step.actual.dim() or axes == PART:
        return
    differs = step.differs()
    for axis, name in enumerate(axes):
        others = [other for other in range(len(axes)) if other != axis]
        hit = (differs.any(dim=others) if others else differs).nonzero().reshape(-1)
        size = step.actual.shape[axis]
        if size < 2 or hit.numel() < 1:
            continue
        mapping = _mapping(step.actual, step.expected, axis, hit)
        moved = (mapping != torch.arange(size)).nonzero().reshape(-1)
        if not moved.numel():
            continue
        width = step.actual.numel() // size
        if width < FEWEST and sorted(mapping[moved].tolist()) != moved.tolist():
            continue  # a single number is near some other
        yield permutation(name, mapping, moved), step.expected.index_select(axis, mapping.to(step.expected.device))


def _mapping(actual: Tensor, expected: Tensor, axis: int, hit: Tensor) -> Tensor:
    """For each index along the axis, which of the expected ones is nearest; where nothing differs its own."""
    size = actual.shape[axis]
    lines = [x.double().nan_to_num(0.0).movedim(axis, 0).reshape(size, -1) for x in (actual, expected)]
    width = lines[0].shape[1]
    if width > MATCHED:  # those that differ most between lines, and others evenly
        some = torch.linspace(0, width - 1, MATCHED).round().long()
        lines = [x[:, some] for x in lines]
    a, e = lines[0][hit], lines[1]
    distance = e.square().sum(1)[None] - 2 * (a @ e.T) + a.square().sum(1)[:, None]
    own = distance[torch.arange(len(hit)), hit]
    nearest, index = distance.min(1)
    mapping = torch.arange(size)
    better = nearest < 0.5 * own
    mapping[hit[better].cpu()] = index[better].cpu()
    return mapping


def permutation(name: str, mapping: Tensor, moved: Tensor) -> str:
    """What has moved where, in words: `mapping` gives the source of each place, and `moved` has those that moved."""
    size, count = mapping.numel(), moved.numel()
    first = int(moved[0])
    source = int(mapping[first])
    offsets = (moved - mapping[moved] + size // 2) % size - size // 2
    offset = int(offsets.mode().values)
    if count == 1:
        return f"{name} {first} is {name} {source}"
    if count == 2 and int(mapping[source]) == first:
        return f"{name}s {first} and {source} are swapped"
    if bool((mapping[moved] == size - 1 - moved).all()):
        return f"{name}s are in reverse order"
    if count >= 0.5 * size and float((offsets == offset).double().mean()) > 0.8:
        if name != "token":
            return f"{name}s are permuted: shifted by {offset}"
        tokens = "one token" if abs(offset) == 1 else f"{abs(offset)} tokens"
        return f"it is {tokens} {'late' if offset > 0 else 'early'}"
    return f"{name}s are permuted, {count} of {size}: {name} {first} is {name} {source}"


def errors_in_steps(step: Step) -> Tensor | None:
    """(output - input) / unit of the finite elements; None for steps that are no grid."""
    if step.given is None or step.unit is None or step.given.shape != step.actual.shape:
        return None
    error = (step.actual.double() - step.given.double()) / step.unit.double()
    some = error[error.isfinite() & (step.unit > 0)]
    return some if some.numel() else None


def mean_error(step: Step) -> float:
    """The mean rounding error in steps of the grid; 0 for steps that are no grid."""
    errors = errors_in_steps(step)
    return 0.0 if errors is None else float(errors.clamp(-2, 2).mean())


def bias(step: Step) -> str:
    """The mean rounding error in words; empty where it is small."""
    mean = mean_error(step)
    return f" (mean error {mean:+.2f} steps)" if abs(mean) > 0.05 else ""


def scaled(ratio: float) -> str:
    """A factor in words."""
    exponent = round(math.log2(ratio)) if ratio > 0 else 0
    if exponent and abs(ratio / 2.0**exponent - 1) < 1e-3:
        return f"the scale is off by a factor of 2^{exponent}"
    if abs(ratio + 1) < 1e-3:
        return "the sign is flipped"
    if 0 < ratio < 10:
        off = ratio - 1
        return f"the scale is off by {off:+.2%}" if abs(off) >= 5e-5 else f"the scale is off by {off:+.1e}"
    return f"the scale is off by a factor of {ratio:.4g}"


#: In the order in which they are tried; of claims that explain the same the first is reported.
SIGNATURES: dict[str, Callable[[Step], Claims]] = {
    "zeros": zeros,
    "not quantized": untouched,
    "one value": single,
    "a factor": factor,
    "a constant": constant,
    "a narrower float": narrower,
    "lost signs": unsigned,
    "a permutation": permuted,
    "zeros here and there": lost,
    "extremes": clipped,
    "another scale": rescaled,
    "a bias": biased,
    "random": by_chance,
}
