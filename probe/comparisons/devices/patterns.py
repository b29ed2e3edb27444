"""What is wrong with a layer of device B, told from its values beside those of device A: a table of patterns.

Each is given a `Look` at the first tensor that differs by more than noise, and says in words what it recognises, or
nothing. The first that fits is told. Patterns that the gate knows too are its own (probe/diagnosis/signatures.py).
"""

from collections.abc import Callable

import numpy as np
import torch

from probe.comparisons.devices.noise import HIDDEN, LESSER, UNITS
from probe.comparisons.devices.rows import Look
from probe.comparisons.devices.structure import Array
from probe.diagnosis.signatures import SIGNATURES, Step

#: A pattern is the cause if it explains this part of the squared difference.
EXPLAINED = 0.9
#: ... and worth a word if it explains this.
PARTLY = 0.5
#: Channels that are matched with all others at most.
_MATCHED = 256
_LARGEST = {float(torch.finfo(getattr(torch, name)).max): name for name in UNITS if name != "float64"}


def recognise(seen: Look) -> str:
    """The cause in words; empty if no pattern fits."""
    return next((found for pattern in PATTERNS.values() if (found := pattern(seen))), "")


def _lost(seen: Look) -> str:
    """NaN or Inf on one side only."""
    a, b = seen.lost
    if not len(a):
        return ""
    gone, kept = ~np.isfinite(b), ~np.isfinite(a)
    if gone.sum() >= kept.sum():
        kind = "NaN" if np.isnan(b[gone]).any() else "Inf"
        largest = float(np.abs(a[gone]).max())
        past = next((name for top, name in sorted(_LARGEST.items(), reverse=True) if largest > top), None)
        why = f": A reaches {largest:.4g}, beyond {past}" if past else ""
        return f"{kind} on B where A is finite, {_counted(int(gone.sum()))}{why}"
    values = np.unique(np.abs(b[kept]))
    if len(values) <= 4 and values[-1] > 0:
        name = _LARGEST.get(float(values[-1]))
        return f"saturates instead of NaN or Inf: +-{values[-1]:.6g} on B" + (f", the largest {name}" if name else "")
    if not values.any():
        return "NaN or Inf of A is replaced by 0 on B"
    return f"B is finite where A is NaN or Inf, {_counted(int(kept.sum()))}"


def _counted(count: int) -> str:
    return "in one value" if count == 1 else f"in {count} values"


def _zeros(seen: Look) -> str:
    return SIGNATURES["zeros"](_step(seen.b, seen.a))


def _skipped(seen: Look) -> str:
    adds, expected = seen.adds[1], seen.adds[0]
    if not seen.residual or _squares(adds) > 1e-6 * _squares(expected):
        return ""
    return "gives its input back on B: the layer is skipped"


def _clipped(seen: Look) -> str:
    """Values beyond +-c are c on B, and only they differ."""
    for a, b, what in ((seen.a, seen.b, "values"), (*seen.adds, "what it adds")):
        top = float(np.abs(b).max(initial=0.0))
        beyond = np.abs(a) > top * (1 + 1e-6)
        if int(beyond.sum()) < 2 or beyond.mean() > 0.5:
            continue
        left = _squares(b - np.clip(a, -top, top))
        if left < (1 - EXPLAINED) * _squares(b - a):
            return f"saturates: {what} beyond +-{top:.4g} {'are' if what == 'values' else 'is'} cut there on B"
    return ""


def _permuted(seen: Look) -> str:
    """The same columns at other places."""
    for a, b in (seen.adds, (seen.a, seen.b)):
        wrong = np.square(b - a).sum(0)
        if a.shape[1] < 3 or len(a) < 4 or not wrong.any():
            continue
        worst = np.argsort(wrong)[::-1][:_MATCHED]
        worst = worst[wrong[worst] > 1e-3 * wrong[worst[0]]]
        found = _matches(a, b[:, worst])
        left = np.square(b[:, worst] - a[:, found]).sum(0)
        moved = (found != worst) & (left < 0.05 * wrong[worst])
        if moved.sum() >= 2 and float(wrong[worst[moved]].sum()) > 0.8 * float(wrong[worst].sum()):
            where = f"{int(moved.sum())}{' or more' if len(worst) == _MATCHED else ''} of {a.shape[1]}"
            first = int(np.flatnonzero(moved)[0])
            return f"channels are permuted ({where}): channel {worst[first]} of B is channel {found[first]} of A"
    return ""


def _matches(a: Array, columns: Array) -> "np.ndarray[tuple[int, ...], np.dtype[np.intp]]":
    """For each column the nearest of `a`'s."""
    cross = columns.T @ a
    found: np.ndarray[tuple[int, ...], np.dtype[np.intp]] = np.argmin(np.square(a).sum(0)[None] - 2 * cross, axis=1)
    return found


def _rounded(seen: Look) -> str:
    """B's values, or what B adds, lie on the grid of a narrower float, and A's do not."""
    if seen.unit >= UNITS["bfloat16"]:
        return ""
    for a, b, what in ((seen.a, seen.b, "its values lie"), (*seen.adds, "what it adds lies")):
        for name in sorted(HIDDEN, key=UNITS.__getitem__, reverse=True):  # coarse first: it lies on the finer grid too
            if UNITS[name] > 2 * seen.unit and off_grid(b, name) < 0.05 and off_grid(a, name) > 0.3:
                return f"one layer in half precision: {what} on the grid of {name} on B"
    return ""


def off_grid(x: Array, dtype: str) -> float:
    """Median distance from the grid in half steps: 0.5 by chance; a row of small values is as good as any."""
    some = x[np.abs(x) > 1e-30]
    if not len(some):
        return 0.5
    near = torch.from_numpy(some).to(getattr(torch, dtype)).double().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.abs(some - near) / (np.exp2(np.floor(np.log2(np.abs(some)))) * UNITS[dtype])
    return float(np.median(off))


def _constant(seen: Look) -> str:
    share = seen.structure.constant_share
    if share < EXPLAINED or seen.structure.rows < 8:
        return ""
    return f"a constant for each channel is added or missing, such as a bias ({share:.0%} of the squared difference)"


def _epsilon(seen: Look) -> str:
    """The relative difference of a token goes with 1 / (mean square of what the layer was given)."""
    if seen.given is None or len(seen.a) < 16:
        return ""
    given, (a, _) = seen.given[0], seen.adds
    one_sided = not 0.05 < float(((seen.e * a).sum(1) < 0).mean()) < 0.95
    for centred in (False, True):
        power = np.square(given - centred * given.mean(1, keepdims=True)).mean(1)
        e, u = np.sqrt(np.square(seen.e).mean(1)), np.sqrt(np.square(a).mean(1))
        good = (power > 0) & (e > 0) & (u > 0)
        if good.sum() < 16:
            continue
        x, y = -np.log(power[good]), np.log(e[good] / u[good])
        if x.std() < 0.05 or y.std() == 0:
            continue
        fit, slope = float(np.corrcoef(x, y)[0, 1]), float(np.polyfit(x, y, 1)[0])
        if fit > (0.6 if one_sided else 0.85) and 0.5 < slope < 1.7:
            return (
                "wrong epsilon in a norm: the smaller a token's variance, the larger its difference "
                f"(as variance^{-slope:.2f}, correlation {fit:.2f})"
            )
    return ""


def _factor(seen: Look) -> str:
    """One factor for all, for each token, for each channel."""
    shares = seen.structure
    left = (1 - shares.factor_share) * shares.e_squares
    kept = (1 + shares.slope) ** 2 * float(shares.channels[1].sum())
    if shares.factor_share > EXPLAINED and left < (1 - EXPLAINED) * kept:
        exact = SIGNATURES["a factor"](_step(seen.adds[1], seen.adds[0]))
        what = "what it adds" if seen.residual else "its output"
        return f"{what} is {1 + shares.slope:.5g} times A's" + (f": {exact}" if exact else "")
    return ""


def _local(seen: Look) -> str:
    """Most of the difference is in one channel, one token or one sample."""
    for energy, name in (
        (seen.structure.channels[0], "channel"),
        (np.nan_to_num(seen.structure.tokens[0]), "token"),
        (seen.structure.samples(), "sample"),
    ):
        total = float(energy.sum())
        if len(energy) > 2 and total > 0 and float(energy.max()) > 0.8 * total:
            return f"{float(energy.max()) / total:.0%} of the squared difference is in one {name} ({energy.argmax()})"
    return ""


def _shrunk(seen: Look) -> str:
    """A little less, or a little more, in nearly every token."""
    _, u, products, _ = seen.structure.tokens
    slopes = products[u > 0] / u[u > 0]
    if len(slopes) < 16 or abs(float(np.median(slopes))) > 0.05:
        return ""
    less = float((slopes < 0).mean())
    if 0.05 < less < 0.95:
        return ""
    side, share = ("smaller", less) if less > 0.5 else ("larger", 1 - less)
    by = abs(float(np.median(slopes)))
    return f"what it adds is {side} in {share:.0%} of the tokens, by {by:.2g}: the epsilon of a norm, or a scale"


def _partly(seen: Look) -> str:
    shares = seen.structure
    kinds = {"one factor": shares.factor_share}
    kinds |= {"a factor for each token": shares.token_factor_share}
    kinds |= {"a factor for each channel": shares.channel_factor_share}
    kinds |= {"a constant for each channel": shares.constant_share}
    found = next((kind for kind, share in kinds.items() if share > PARTLY), None)
    return f"{found} explains {kinds[found]:.0%} of the squared difference in what it adds" if found else ""


def _rough(seen: Look) -> str:
    """Noise without structure, of the size that a narrower float makes."""
    if not is_unstructured(seen):
        return ""
    for name, words in HIDDEN.items():
        if UNITS[name] > 2 * seen.unit and LESSER[0] * UNITS[name] < seen.structure.added < LESSER[1] * UNITS[name]:
            return f"noise of the size that {words} makes begins here: half precision in this layer, or a rough formula"
    return ""


def is_unstructured(seen: Look) -> bool:
    """Whether the difference looks like rounding: no bias, no factor, no place where most of it is."""
    shares = seen.structure
    few = 2.0 / max(1.0, shares.rows) ** 0.5
    return (
        shares.factor_share < 0.1 + few
        and shares.constant_share < 0.25 + few
        and shares.channel_factor_share < 0.25 + few
        and shares.token_factor_share < 0.25 + 2.0 / len(shares.channels[0]) ** 0.5
        and shares.channel_peak()[1] < 8
        and shares.sample_peak()[1] < 8
    )


def _unlike(seen: Look) -> str:
    return SIGNATURES["unrelated"](_step(seen.adds[1], seen.adds[0]))


#: name -> what it says, empty where it does not fit; the first that fits is told.
PATTERNS: dict[str, Callable[[Look], str]] = {
    "NaN or Inf": _lost,
    "zeros": _zeros,
    "skipped": _skipped,
    "saturated": _clipped,
    "permuted channels": _permuted,
    "a narrower grid": _rounded,
    "a constant": _constant,
    "wrong epsilon": _epsilon,
    "a factor": _factor,
    "one place": _local,
    "unrelated": _unlike,
    "a little less": _shrunk,
    "partly": _partly,
    "rough noise": _rough,
}


def _step(actual: Array, expected: Array) -> Step:
    return Step("", torch.from_numpy(actual), torch.from_numpy(expected))


def _squares(x: Array) -> float:
    return float(np.square(x).sum())
