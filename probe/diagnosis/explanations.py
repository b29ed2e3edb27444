"""The explanation of a difference: the output of a step beside the expected one, matched with known faults.

Replays of known faults (`Step.suspects`) and the signatures are claims: what is left between the values that they claim
and the real output says how much of the squared difference they explain. A claim that explains less than EXPLAINED is
never reported; of several the one that explains most is, and of equals the first. Where the difference lies in one
channel, token or block, claims are tried within it too. Where nothing fits, the explanation says so, and what was
measured.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probe.diagnosis.signatures import AXES, FEWEST, SIGNATURES, Replay, Step, bias, rms, squares

#: The part of the squared difference that a claim must explain.
EXPLAINED = 0.9
#: Of a difference that a claim explains to this part, no claim within a channel, a token or a block is tried.
ALL = 1 - 1e-6
#: Of replays that explain a difference equally well, so many at most are told; more explain nothing.
ALIKE = 2
#: What is said where no claim fits.
UNKNOWN = "no known cause"
LAST_BLOCK = "the last, shorter block"


def explain(step: Step) -> str:
    """Why the output of the step is not the expected one, in a few words; empty if it is."""
    if step.actual.shape != step.expected.shape:
        return f"has shape {list(step.actual.shape)}, expected {list(step.expected.shape)}"
    if step.actual.dtype != step.expected.dtype:
        return f"is {_dtype(step.actual)}, expected {_dtype(step.expected)}"
    differs = step.differs()
    if not bool(differs.any()):
        return ""
    lost = not_finite(step)
    whole = best_claim(step, only_replays=bool(lost))
    if lost:
        return whole.sentence or lost
    sentence, left = whole.sentence, whole.left
    if left > 1 - ALL or whole.name == "zeros here and there":
        for where, mask in places(step, differs):
            part = step.inside(mask)
            within = best_claim(part) if part.actual.numel() >= FEWEST else Best()  # fewer fit many a claim
            energy = squares(part.actual, part.expected) / max(squares(step.actual, step.expected), 1e-300)
            remains = 1 - energy * (1 - within.left)
            better = remains < left - (1 - ALL) or (remains <= left + 1 - ALL and sentence == whole.sentence)
            if within.sentence and remains <= 1 - EXPLAINED and better:
                sentence, left = _located(where, within.sentence), remains
            elif not sentence and energy >= EXPLAINED:
                sentence = f"only {where}: {facts(part)}"  # another claim may still explain it
    return sentence or facts(step)


@dataclass(frozen=True)
class Best:
    """The claim that explains most: its sentence, and the part of the difference that it leaves; 1 if there is none."""

    sentence: str = ""
    left: float = 1.0
    name: str = "replay"  # of its signature


def explain_together(steps: Sequence[Step]) -> str:
    """Why the outputs of one step for several inputs are not the expected ones; empty if they are.

    A replayed fault must explain every output that differs, and must leave those alone that do not. Without one, the
    first that differs is explained alone.
    """
    different = [step for step in steps if bool(step.differs().any())]
    if not different or len(steps) == 1:
        return explain(steps[0]) if different else ""
    replays = _together(steps, [dict(step.suspects()) for step in steps])
    fits = _together(steps, [dict(step.fits()) for step in steps])
    return _only_one(replays).sentence or _only_one(fits).sentence or explain(different[0])


def _together(steps: Sequence[Step], tables: Sequence[dict[str, Replay]]) -> list[Best]:
    """The replays that all steps have and that explain enough of each."""
    found = []
    for sentence in tables[0]:
        if all(sentence in table for table in tables):
            left = max(_left(step, table[sentence]()) for step, table in zip(steps, tables, strict=True))
            found.append(Best(sentence, left))
    return [one for one in found if one.left <= 1 - EXPLAINED]


def explains_most(step: Step, sentence: str) -> bool:
    """Whether no replay explains more of the difference than that of this sentence."""
    left = {name: step.left_by(made) for name, made in _made(step.suspects(), step)}
    return sentence in left and left[sentence] <= min(1 - EXPLAINED, *left.values())


def _left(step: Step, made: Tensor) -> float:
    """What is left by a claim; infinite for one that changes an output which is as expected."""
    if made.shape != step.actual.shape:
        return math.inf
    if bool(step.differs().any()):
        return step.left_by(made)
    return math.inf if bool(replace(step, actual=made).differs().any()) else 0.0


def best_claim(step: Step, *, only_replays: bool = False) -> Best:
    """The claim that explains most of the difference, if it explains enough."""
    replays = [Best(sentence, step.left_by(made)) for sentence, made in _made(step.suspects(), step)]
    best = _only_one([one for one in replays if one.left <= 1 - EXPLAINED])
    named: dict[str, Callable[[Step], Iterable[tuple[str, Replay | Tensor]]]] = {"replay": lambda step: step.fits()}
    for name, signature in (named if only_replays else {**named, **SIGNATURES}).items():
        for sentence, made in _made(signature(step), step):
            left = step.left_by(made)
            if left <= 1 - EXPLAINED and left < best.left:
                best = Best(sentence, left, name)
    with_bias = best.sentence.startswith("rounding looks like")
    return replace(best, sentence=best.sentence + bias(step)) if with_bias else best


def _made(claims: Iterable[tuple[str, Replay | Tensor]], step: Step) -> Iterator[tuple[str, Tensor]]:
    """The values of the claims that have the shape of the output."""
    for sentence, claim in claims:
        made = claim if isinstance(claim, Tensor) else claim()
        if made.shape == step.actual.shape:
            yield sentence, made


def _only_one(replays: Sequence[Best]) -> Best:
    """The replay that explains most; two that explain the same are told both, and of more none."""
    least = min((one.left for one in replays), default=1.0)
    same = list(dict.fromkeys(one.sentence for one in replays if one.left == least))
    return Best(", or ".join(same), least) if 0 < len(same) <= ALIKE else Best()


def matches(name: str, step: Step) -> str:
    """The sentence of one signature if it explains enough of the difference; else empty."""
    claims = ((step.left_by(made), sentence) for sentence, made in SIGNATURES[name](step))
    left, sentence = min(claims, default=(1.0, ""))
    return sentence if left <= 1 - EXPLAINED else ""


def _located(where: str, within: str) -> str:
    """`1 of 1000 blocks has its scale off by 2^1`, or `only channel 17: gives only zeros`."""
    factor = within.removeprefix("the scale is off by a factor of ").removeprefix("the scale is off by ")
    if "block" in where:
        if within.startswith(where):
            return within
        one = where.startswith(("1 ", "the "))
        if factor != within:
            return f"{where} {'has its' if one else 'have their'} scale off by {factor}"
        if within == "not quantized":
            return f"{where} {'is' if one else 'are'} not quantized"
        return f"{where}: {within}"
    return f"only {where}: {within}"


def places(step: Step, differs: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parts of the step that could hold all of the difference: channels, tokens, rows, or blocks of a grid.

    A few of an axis, or an unbroken stretch, and at most half of it; first what is one of several axes at once.
    """
    axes = step.axes or AXES.get(differs.dim(), ())
    found: list[tuple[str, Tensor]] = []
    blocks = list(_blocks(step, differs)) if step.block else []
    yield from (one for one in blocks if one[0] == LAST_BLOCK)
    if int(differs.sum()) > 1 and len(axes) > 1:
        for axis in reversed(range(len(axes))):
            hit = differs.any(dim=[other for other in range(len(axes)) if other != axis])
            index = hit.nonzero().reshape(-1)
            size, first, last = hit.numel(), int(index[0]), int(index[-1])
            if size < 2 or 2 * index.numel() > size:
                continue
            if index.numel() == 1:
                words = f"{axes[axis]} {first}"
            elif index.numel() == last - first + 1:
                words = f"{axes[axis]}s {first} to {last}"
            elif index.numel() <= 3:
                words = f"{axes[axis]}s {' and '.join(str(int(i)) for i in index)}"
            else:
                continue
            shape = [size if other == axis else 1 for other in range(len(axes))]
            found.append((words, hit.reshape(shape).expand(differs.shape)))
    if len(found) > 1:
        yield " of ".join(words for words, _ in found), torch.stack([mask for _, mask in found]).all(0)
    yield from found
    yield from (one for one in blocks if one[0] != LAST_BLOCK)


def _blocks(step: Step, differs: Tensor) -> Iterator[tuple[str, Tensor]]:
    assert step.block is not None
    width = differs.shape[-1]
    number = torch.arange(width, device=differs.device) // step.block
    count = int(number[-1]) + 1
    lines = differs.reshape(-1, width)
    hit = torch.zeros(lines.shape[0], count, dtype=torch.bool, device=differs.device)
    hit.index_put_((lines.nonzero()[:, 0], number[lines.nonzero()[:, 1]]), torch.tensor(True, device=differs.device))
    total, some = hit.numel(), int(hit.sum())
    if total < 2 or 2 * some > total:
        return
    mask = hit[:, number].reshape(differs.shape)
    if width % step.block and not bool(hit[:, :-1].any()):
        last = torch.zeros_like(hit)
        last[:, -1] = True
        yield LAST_BLOCK, last[:, number].reshape(differs.shape)
    yield f"{some} of {total} blocks", mask


def not_finite(step: Step) -> str:
    """How many values are NaN or Inf and should not be."""
    bad = ~step.actual.isfinite() & step.expected.isfinite()
    if not bool(bad.any()):
        return ""
    nan = int((bad & step.actual.isnan()).sum())
    kind, count = ("NaN", nan) if nan else ("Inf", int(bad.sum()))
    return f"{kind} in {count} of {bad.numel()} values, the first at {bad.nonzero()[0].tolist()}"


def unrelated(step: Step) -> str:
    """Says that the output is not even like the expected one."""
    a, e = (x.double().reshape(-1) - x.double().mean() for x in (step.actual, step.expected))
    size = a.norm() * e.norm()
    correlation = float((a @ e) / size) if float(size) > 0 else 1.0
    return f"unrelated to the expected values (correlation {correlation:+.2f})" if abs(correlation) < 0.3 else ""


def facts(step: Step) -> str:
    """What is known of a difference that no claim explains."""
    differs = step.differs()
    difference = (step.actual.double() - step.expected.double())[differs]
    size = float(difference.square().mean().sqrt()) / (rms(step.expected) or 1.0)
    share = float(differs.double().mean())
    if step.actual.numel() >= 16 and share > 0.5 and (words := unrelated(step)):
        return f"{UNKNOWN}: {words}"
    return f"{UNKNOWN}: {share:.2%} of the values differ, by {size:.2g} of the rms{_most(step)}"


def _most(step: Step) -> str:
    """The channel, token or sequence that holds most of the difference, if one does."""
    squares = (step.actual.double() - step.expected.double()).square().nan_to_num(0.0)
    axes = step.axes or AXES.get(squares.dim(), ())
    for axis in reversed(range(len(axes))) if len(axes) == squares.dim() > 1 else ():
        energy = squares.sum(dim=[other for other in range(len(axes)) if other != axis])
        share = float(energy.max() / energy.sum().clamp(min=1e-300))
        if energy.numel() > 2 and share > 0.5:
            return f", {share:.0%} of it in {axes[axis]} {int(energy.argmax())}"
    return ""


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
