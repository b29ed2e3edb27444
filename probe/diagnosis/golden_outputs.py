"""The likely cause of a change against the stored output of a layer, from its outputs alone.

Nothing must be known of the layer, so this works for modes of users. Of the stored output there are a sketch and a
sample (numerics/sketches.py). A hypothesis undoes a fault: from the output, the layer's input and the float layer's
output it makes what the layer would have given without it. The sketch is linear, so the part of the change that a
hypothesis explains is 1 - |sketch(undone) - stored|^2 / |sketch(output) - stored|^2, whatever the quantizer does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probe.diagnosis.changed_outputs import ChangedOutput, flat, squares
from probe.diagnosis.explanations import EXPLAINED, UNKNOWN
from probe.diagnosis.signatures import permutation
from probe.numerics.sketches import SKETCH, sketched

#: Values of the sample that must have moved before a function of the value can be read from them.
FEWEST = 8
#: The stored output is given again if the change is below this part of the output.
SAME = 1e-6
SAME_OUTPUT = "alone it gives its stored output: another input, or a stale or random run, was measured"
#: The output of a module was left out if it must be added so nearly once, and what the layer adds does not contain it.
LEFT_OUT = 0.02
#: The names of the dimensions of an output.
NAMES = ("sequence", "token", "channel")
#: Lines that are matched with one another at most.
MATCHED = 4096
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Found:
    """A sentence, and the part of the change that is left if it is true."""

    left: float
    sentence: str


def explain_change(found: ChangedOutput) -> str:
    """What has become of the stored output, in a few words; it says so where no hypothesis explains it."""
    if found.change <= (SAME**2) * float(found.output.square().sum()):
        return SAME_OUTPUT
    if not bool(found.output.any()):
        return "gives only zeros"
    best = min(_hypotheses(found), key=lambda one: round(one.left, 3), default=Found(1.0, ""))  # of equals the first
    if best.left <= 1 - EXPLAINED:
        return best.sentence
    return f"{UNKNOWN}: its output moved by {found.relative:.2g} of what it adds{_most(found)}"


def _hypotheses(found: ChangedOutput) -> Iterator[Found]:
    yield from _as_a_whole(found)
    yield from _by_value(found)
    if found.output.dim() == 3:
        yield from _repeated(found)
        yield from _moved(found)
        yield from _in_one_place(found)
        yield from _in_two_places(found)
        yield from _in_a_stretch(found)
    yield from _clipped(found)


def _as_a_whole(found: ChangedOutput) -> Iterator[Found]:
    nothing, added = np.zeros(SKETCH), found.output - found.given
    c, left = found.fitted(nothing, found.sketch)
    if c:
        yield Found(left, _times("its output", 1 / c))
    if bool(found.given.any()):
        of_given = sketched(flat(found.given))
        c, left = found.fitted(of_given, sketched(flat(added)))
        if c:
            yield Found(left, _times("what it adds", 1 / c))
        c, left = found.fitted(found.sketch, of_given)
        yield Found(left, f"{-c:+.4g} times its input is added to its output")
    c, left = found.fitted(found.sketch, sketched(np.ones(found.output.numel())))
    yield Found(left, f"a constant, {-c:+.4g}, is added to every value")

    for name, part in found.parts.items():
        c, left = found.fitted(found.sketch, sketched(flat(part)))
        there = float(((found.output - found.given) * part).sum() / part.square().sum().clamp(min=1e-300))
        if abs(c - 1) < LEFT_OUT and there < 0.5:
            yield Found(left, f"the output of {name} is left out")
        elif c > -1:
            yield Found(left, _times(f"the output of {name}", 1 / (1 + c)))


def _by_value(found: ChangedOutput) -> Iterator[Found]:
    """A function of the value, read from the sample: present = f(stored)."""
    then, now, given = found.sample
    moved = int(np.count_nonzero(then != now))
    if moved < FEWEST:
        return
    before = squares(now - then)
    for name, dtype in NARROW.items():
        for words, base in (("its output is", np.zeros_like(then)), ("what it adds is", given)):
            made = base + torch.from_numpy(then - base).to(dtype).double().numpy()
            yield Found(squares(now - made) / before, f"{words} rounded to {name}")


def _repeated(found: ChangedOutput) -> Iterator[Found]:
    """A sequence that is the copy of another, though its input is not."""
    output, given = found.output, found.given
    for later in range(1, len(output)):
        for earlier in range(later):
            if torch.equal(output[later], output[earlier]) and not torch.equal(given[later], given[earlier]):
                left = found.left(found.sketch + sketched(flat(_only(found.expected - output, 0, later))))
                yield Found(left, f"sequence {later} is a copy of sequence {earlier}")


def _moved(found: ChangedOutput) -> Iterator[Found]:
    """Channels, tokens or sequences at other places, of the output or of what the layer adds."""
    nothing = torch.zeros_like(found.output)
    for what, base in (("", nothing), ("what it adds: ", found.given)):
        actual, expected = found.output - base, found.expected - base
        for axis in reversed(range(3)):
            size = actual.shape[axis]
            if not 2 <= size <= MATCHED:
                continue
            mapping = _nearest(actual, expected, axis)
            away = (mapping != torch.arange(size)).nonzero().reshape(-1)
            if not away.numel():
                continue
            restored = actual.clone()
            lines, sources = restored.movedim(axis, 0), actual.movedim(axis, 0)
            lines[away] = expected.movedim(axis, 0)[away]  # where nothing else is known
            lines[mapping[away]] = sources[away]
            left = found.left(sketched(flat(base + restored)))
            yield Found(left, what + permutation(NAMES[axis], mapping, away))
        if not bool(found.given.any()):
            break


def _in_one_place(found: ChangedOutput) -> Iterator[Found]:
    """One channel, token or sequence: a factor of it, an offset, or anything at all."""
    output, given, expected = found.output, found.given, found.expected
    for axis in reversed(range(3)):
        if output.shape[axis] < 2:
            continue
        own, base, plain, ones = (found.by_index(x, axis) for x in (output, given, expected, torch.ones_like(output)))
        for index in range(output.shape[axis]):
            name, rest = f"{NAMES[axis]} {index}", found.sketch - own[index]
            c, left = found.fitted(rest, own[index])
            if c:
                yield Found(left, _times(name, 1 / c))
            c, left = found.fitted(rest + base[index], own[index] - base[index])
            if c:
                yield Found(left, _times(f"what it adds to {name}", 1 / c))
            c, left = found.fitted(found.sketch, ones[index])
            yield Found(left, f"a constant, {-c:+.4g}, is added to {name}")
            words = _state(output.select(axis, index), given.select(axis, index))
            yield Found(found.left(rest + plain[index]), f"only {name} {words}")


def _in_two_places(found: ChangedOutput) -> Iterator[Found]:
    """Two channels, tokens or sequences: swapped, in the output or in that of a module inside, or anything at all."""
    for axis in reversed(range(3)):
        if found.output.shape[axis] < 4:
            continue
        change = found.by_index(found.expected - found.output, axis)
        alone = np.array([found.left(found.sketch + one) for one in change])
        most = np.argsort(alone, kind="stable")[:4].tolist()
        wholes = {"": found.output, "what it adds: ": found.output - found.given}
        wholes |= {f"the output of {name}: ": part for name, part in found.parts.items()}
        for i, j in ((i, j) for n, i in enumerate(sorted(most)) for j in sorted(most)[n + 1 :]):
            for what, values in wholes.items():
                across = values.select(axis, j) - values.select(axis, i)
                swap = torch.zeros_like(values)
                swap.select(axis, i).copy_(across)
                swap.select(axis, j).copy_(-across)
                left = found.left(found.sketch + sketched(flat(swap)))
                yield Found(left, f"{what}{NAMES[axis]}s {i} and {j} are swapped")
            left = found.left(found.sketch + change[i] + change[j])
            if left < 0.2 * min(alone[i], alone[j]):  # neither would do alone
                yield Found(left, f"only {NAMES[axis]}s {i} and {j} have changed")


def _in_a_stretch(found: ChangedOutput) -> Iterator[Found]:
    """The last tokens or the first ones, of every sequence; at most half of them, the shortest stretch first."""
    own, plain = found.by_index(found.output, 1), found.by_index(found.expected, 1)
    change, tokens = np.cumsum((plain - own)[::-1], axis=0)[::-1], len(own)
    for first in reversed(range(max(1, (tokens + 1) // 2), tokens - 1)):
        words = _state(found.output[:, first:], found.given[:, first:], many=True)
        yield Found(found.left(found.sketch + change[first]), f"only the tokens from {first} on {words}")
    for last in range(2, tokens // 2 + 1):
        words = _state(found.output[:, :last], found.given[:, :last], many=True)
        yield Found(found.left(found.sketch + change[0] - change[last]), f"only the first {last} tokens {words}")


def _state(output: Tensor, given: Tensor, *, many: bool = False) -> str:
    """What has become of a part of the output."""
    if not bool(output.any()):
        return "are zero" if many else "is zero"
    if bool((output == given).all()):
        return "are returned as they came in" if many else "is returned as it came in"
    return "have changed" if many else "has changed"


def _clipped(found: ChangedOutput) -> Iterator[Found]:
    """Values beyond a limit are that limit."""
    for what, base in (("values", torch.zeros_like(found.output)), ("what it adds", found.given)):
        actual, expected = found.output - base, found.expected - base
        top = float(actual.abs().max())
        at_top = actual.abs() >= top * (1 - 1e-4)
        beyond = (expected[at_top].abs() > 0.9 * top).double().mean() if bool(at_top.any()) else torch.zeros(())
        if int(at_top.sum()) >= 2 and top > 0 and float(beyond) > EXPLAINED:
            restored = torch.where(at_top, base + expected, found.output)
            left = found.left(sketched(flat(restored)))
            yield Found(left, f"{what} beyond +-{top:.4g} {'are' if what == 'values' else 'is'} cut there")


def _times(what: str, factor: float) -> str:
    if abs(factor + 1) < 1e-3:
        return f"{what} has the other sign"
    return f"{what} is {factor:.4g} times the stored one"


def _nearest(actual: Tensor, expected: Tensor, axis: int) -> Tensor:
    """Which line of `expected` each line of `actual` is nearest to; its own unless another is much nearer."""
    size = actual.shape[axis]
    a, e = (x.movedim(axis, 0).reshape(size, -1) for x in (actual, expected))
    if a.shape[1] > MATCHED:
        some = torch.linspace(0, a.shape[1] - 1, MATCHED).round().long()
        a, e = a[:, some], e[:, some]
    distance = e.square().sum(1)[None] - 2 * (a @ e.T) + a.square().sum(1)[:, None]
    nearest, index = distance.min(1)
    return torch.where(nearest < 0.25 * distance.diagonal(), index, torch.arange(size))


def _most(found: ChangedOutput) -> str:
    """The channel, token or sequence without which least of the change is left, if it holds most of it."""
    if found.output.dim() != 3:
        return ""
    places = [one for one in _in_one_place(found) if one.sentence.startswith("only ")]
    best = min(places, key=lambda one: one.left, default=None)
    if best is None or best.left > 0.5:
        return ""
    return f", most of it in {' '.join(best.sentence.split()[1:3])}"


def _only(values: Tensor, axis: int, index: int) -> Tensor:
    kept = torch.zeros_like(values)
    kept.select(axis, index).copy_(values.select(axis, index))
    return kept
