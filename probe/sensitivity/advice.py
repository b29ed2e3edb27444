"""Which units to keep in higher precision: a stated rule, and the runs that check it."""

from collections.abc import Callable, Sequence

from probe.sensitivity.results import Advice, Sensitivity

#: The share of the KL that is to be left.
AIM = 0.5


def advise(found: Sensitivity, kl_keeping: Callable[[Sequence[str]], float | None]) -> Advice:
    """The shortest start of the order by gain that brings the KL to AIM of the whole or less.

    `kl_keeping(names)` measures the quantized model with these units float. The first guess adds up the gains of
    the units one by one; from there lengths are tried until one is enough and one less is not, both measured.
    """
    order = [effect.name for effect in found.by_gain()]
    whole = found.everything.kl
    if not whole:
        why = "the KL of the quantized model is not finite" if whole is None else "the quantized model loses nothing"
        return Advice(keep=(), kl_all=whole, kl_kept=whole, reached=False, text=f"No advice: {why}.")
    goal = AIM * whole
    known: dict[int, float | None] = {0: whole, 1: found.by_gain()[0].without.kl}

    def enough(count: int) -> bool:
        if count not in known:
            known[count] = kl_keeping(order[:count])
        kl = known[count]
        return kl is not None and kl <= goal

    length = _shortest(len(order), _guess(found), enough)
    keep = tuple(order[: length or len(order)])
    kept = known[len(keep)]
    return Advice(keep=keep, kl_all=whole, kl_kept=kept, reached=length is not None, text=_text(found, keep, kept))


def _guess(found: Sensitivity) -> int:
    """How many units it takes if their gains add up; between 1 and all."""
    total = 0.0
    for count, effect in enumerate(found.by_gain(), 1):
        total += found.gain(effect) or 0.0
        if total >= 1 - AIM:
            return count
    return len(found.effects)


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
    """In words; the figures are those of the runs."""
    whole = found.everything.kl
    shown = ", ".join(keep[:8]) + (f" and {len(keep) - 8} more" if len(keep) > 8 else "")
    left = "is not finite" if kept is None else f"falls from {whole:.3g} to {kept:.3g}"
    share = "" if kept is None or not whole else f" ({kept / whole:.0%})"
    what = f"Keep {shown} in higher precision"
    if kept is not None and whole is not None and kept <= AIM * whole:
        return f"{what}: the KL {left}{share}, measured."
    return (
        f"No choice among these {len(found.effects)} halves the KL: with all of them in higher precision it "
        f"{left}{share}, measured. The error comes from elsewhere in the model."
    )
