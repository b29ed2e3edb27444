"""Which units to keep in higher precision: a stated rule, and the runs that check it."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from probe.sensitivity.results import LOSSES, Advice, Effect, Sensitivity
from probe.words import first_few

#: The share of the loss that is to be left.
AIM = 0.5


def advise(found: Sensitivity, loss_keeping: Callable[[Sequence[str]], float | None]) -> Advice:
    """The advice by the rule of `Advice`; of two lists of the same length, the one with the lower loss.

    `loss_keeping(names)` measures the quantized model with these units float. The first guess adds up the gains of
    the units one by one; from there lengths are tried until one is enough and one less is not, both measured.
    """
    whole, name = found.loss(found.everything), LOSSES[found.measure]
    if not whole:
        why = (
            f"the {name} of the quantized model is not finite" if whole is None else "the quantized model loses nothing"
        )
        return Advice(keep=(), loss_all=whole, loss_kept=whole, reached=False, text=f"No advice: {why}.")
    goal = AIM * whole
    known = {frozenset[str](): whole} | {
        frozenset([effect.name]): found.loss(effect.without) for effect in found.effects
    }

    def loss_of(names: Sequence[str]) -> float | None:
        if frozenset(names) not in known:
            known[frozenset(names)] = loss_keeping(names)
        return known[frozenset(names)]

    choices: list[tuple[int, float, tuple[str, ...]]] = []
    for effects in (found.by_gain(), found.by_loss()):
        order = [effect.name for effect in effects]

        def enough(count: int, order: Sequence[str] = order) -> bool:
            loss = loss_of(order[:count])
            return loss is not None and loss <= goal

        length = _shortest(len(order), _guess(found, effects), enough)
        if length is not None:
            keep = tuple(order[:length])
            choices.append((length, loss_of(keep) or 0.0, keep))
    keep = min(choices)[2] if choices else tuple(effect.name for effect in found.by_loss())
    kept = loss_of(keep)
    text = _text(found, keep, kept)
    return Advice(keep=keep if choices else (), loss_all=whole, loss_kept=kept, reached=bool(choices), text=text)


def _guess(found: Sensitivity, effects: Sequence[Effect]) -> int:
    """How many units it takes if their gains add up; between 1 and all."""
    totals = accumulate(found.gain(effect) or 0.0 for effect in effects)
    return next((count for count, total in enumerate(totals, 1) if total >= 1 - AIM), len(effects))


def _shortest(count: int, guess: int, enough: Callable[[int], bool]) -> int | None:
    """A length that is enough while one less is not, searched outwards from `guess`; None if `count` is not."""
    low, high, step = 0, count + 1, 1  # low is not enough; high is, or is beyond the end
    at = min(max(guess, 1), count)
    while high - low > 1:
        if enough(at):
            high = at
            at = max(low + 1, high - step)
        else:
            low = at
            at = min(high - 1, low + step)
        step *= 2
        if low > 0 and high <= count:
            at = (low + high) // 2
    return high if high <= count else None


def _text(found: Sensitivity, keep: Sequence[str], kept: float | None) -> str:
    """The advice in words, with the measured figures."""
    whole, name = found.loss(found.everything), LOSSES[found.measure]
    left = "is not finite" if kept is None else f"falls from {whole:.3g} to {kept:.3g}"
    share = "" if kept is None or not whole else f" ({kept / whole:.0%})"
    what = f"Keep {first_few(keep)} in higher precision"
    if kept is not None and whole is not None and kept <= AIM * whole:
        return f"{what}: the {name} {left}{share}, measured."
    return (
        f"No choice among these {len(found.effects)} halves the {name}: with all of them in higher precision it "
        f"{left}{share}, measured. The error comes from elsewhere in the model."
    )
