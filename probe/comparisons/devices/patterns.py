"""What is wrong with a layer of device B: a sample of its values beside those of device A, and a table of patterns.

Each pattern is given the first tensor that differs by more than noise, and describes what it recognises, or returns
nothing. The first that fits is reported. Patterns that the gate knows too are those of probe/diagnosis/signatures.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from probe.comparisons.devices.differences import Array, Structure, as_rows, sample_rows
from probe.comparisons.devices.noise import HIDDEN, NARROWER, UNITS, off_grid
from probe.diagnosis.signatures import SIGNATURES, Step

#: Elements of each side that are sampled (16 MB each).
SAMPLED = 2**21
#: A pattern is the cause if it explains this part of the squared difference, and worth reporting if it explains that.
EXPLAINED, PARTLY = 0.9, 0.5
#: Channels that are matched with all others at most.
_MATCHED = 256
_LARGEST = {float(torch.finfo(getattr(torch, name)).max): name for name in UNITS if name != "float64"}


@dataclass(frozen=True, eq=False)
class SampledRows:
    """One tensor: `a` and `b` are rows spread evenly over all that was recorded, those that are finite.

    `given` are the rows that the layer was given on either side; with `residual` it adds to them.
    """

    unit: float
    structure: Structure
    a: Array
    b: Array
    given: tuple[Array, Array] | None
    residual: bool
    samples: int
    one_sided: tuple[Array, Array]  # values of a and b where just one of them is finite, at most 2^16 and a few

    @cached_property
    def added(self) -> tuple[Array, Array]:
        """What the layer adds on either side."""
        if self.residual and self.given is not None:
            return self.a - self.given[0], self.b - self.given[1]
        return self.a, self.b

    @cached_property
    def difference(self) -> Array:
        """The difference in what the layer adds."""
        return self.added[1] - self.added[0]


def sample_tensor(
    a: Tensor,
    b: Tensor,
    given: tuple[Tensor, Tensor] | None,
    *,
    residual: bool,
    unit: float,
    structure: Structure,
) -> SampledRows:
    """All rows if they fit into SAMPLED elements, else as many as do, evenly spaced."""
    tensors = [as_rows(x) for x in (a, b, *(given or ()))]
    step = max(1, SAMPLED // max(tensors[0].shape[1], 1))
    parts = [sample_rows(one, step) for one in tensors]
    finite = np.logical_and.reduce([np.isfinite(part).all(1) for part in parts])
    x, y, *base = (part[finite] for part in parts)
    pair = (base[0], base[1]) if base else None
    one_sided = _one_sided(tensors[0], tensors[1], step)
    return SampledRows(unit, structure, x, y, pair, residual, a.shape[0], one_sided)


def _one_sided(a: Tensor, b: Tensor, step: int) -> tuple[Array, Array]:
    found: list[tuple[Array, Array]] = [(np.zeros(0), np.zeros(0))]
    for start in range(0, len(a), step):
        x, y = (one[start : start + step].double().numpy() for one in (a, b))
        odd = np.isfinite(x) != np.isfinite(y)
        found.append((x[odd], y[odd]))
        if sum(len(one) for one, _ in found) > 2**16:
            break
    return np.concatenate([x for x, _ in found]), np.concatenate([y for _, y in found])


def _step(a: Array, b: Array) -> Step:
    """B as a step of the gate's diagnosis, with A as its expectation."""
    return Step("", torch.from_numpy(b), torch.from_numpy(a))


def _squares(x: Array) -> float:
    return float(np.square(x).sum())


def recognise(rows: SampledRows) -> str:
    """The cause in words; empty if no pattern fits."""
    return next((found for pattern in PATTERNS.values() if (found := pattern(rows))), "")


def _lost(rows: SampledRows) -> str:
    """NaN or Inf on one side only."""
    a, b = rows.one_sided
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


def _skipped(rows: SampledRows) -> str:
    a, b = rows.added
    is_skipped = rows.residual and _squares(b) <= 1e-6 * _squares(a)
    return "gives its input back on B: the layer is skipped" if is_skipped else ""


def _clipped(rows: SampledRows) -> str:
    """Values beyond +-c are +-c on B, and only they differ."""
    for a, b, what in ((rows.a, rows.b, "values"), (*rows.added, "what it adds")):
        top = float(np.abs(b).max(initial=0.0))
        beyond = np.abs(a) > top * (1 + 1e-6)
        if int(beyond.sum()) < 2 or beyond.mean() > 0.5:
            continue
        left = _squares(b - np.clip(a, -top, top))
        if left < (1 - EXPLAINED) * _squares(b - a):
            return f"saturates: {what} beyond +-{top:.4g} {'are' if what == 'values' else 'is'} cut there on B"
    return ""


def _permuted(rows: SampledRows) -> str:
    """The same channels at other places."""
    for a, b in (rows.added, (rows.a, rows.b)):
        wrong = np.square(b - a).sum(0)
        if a.shape[1] < 3 or len(a) < 4 or not wrong.any():
            continue
        worst = np.argsort(wrong)[::-1][:_MATCHED]
        worst = worst[wrong[worst] > 1e-3 * wrong[worst[0]]]
        found = np.argmin(np.square(a).sum(0)[None] - 2 * (b[:, worst].T @ a), axis=1)  # the nearest column of A
        left = np.square(b[:, worst] - a[:, found]).sum(0)
        moved = (found != worst) & (left < 0.05 * wrong[worst])
        if moved.sum() >= 2 and float(wrong[worst[moved]].sum()) > 0.8 * float(wrong[worst].sum()):
            where = f"{int(moved.sum())}{' or more' if len(worst) == _MATCHED else ''} of {a.shape[1]}"
            first = int(np.flatnonzero(moved)[0])
            return f"channels are permuted ({where}): channel {worst[first]} of B is channel {found[first]} of A"
    return ""


def _rounded(rows: SampledRows) -> str:
    """B's values, or what B adds, lie on the grid of a narrower float, and A's do not."""
    if rows.unit >= UNITS["bfloat16"]:
        return ""
    for a, b, what in ((rows.a, rows.b, "its values lie"), (*rows.added, "what it adds lies")):
        for name in sorted(HIDDEN, key=UNITS.__getitem__, reverse=True):  # coarse first: it lies on the finer grid too
            if UNITS[name] > 2 * rows.unit and off_grid(b, name) < 0.05 and off_grid(a, name) > 0.3:
                return f"one layer in half precision: {what} on the grid of {name} on B"
    return ""


def _constant(rows: SampledRows) -> str:
    share = rows.structure.constant_share
    if share < EXPLAINED or rows.structure.rows < 8:
        return ""
    return f"a constant for each channel is added or missing, such as a bias ({share:.0%} of the squared difference)"


def _epsilon(rows: SampledRows) -> str:
    """The relative difference of a token is proportional to 1 / (mean square of the layer's input)."""
    if rows.given is None or len(rows.a) < 16:
        return ""
    given, (a, _) = rows.given[0], rows.added
    one_sided = not 0.05 < float(((rows.difference * a).sum(1) < 0).mean()) < 0.95
    for centred in (False, True):
        power = np.square(given - centred * given.mean(1, keepdims=True)).mean(1)
        e, u = np.sqrt(np.square(rows.difference).mean(1)), np.sqrt(np.square(a).mean(1))
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


def _factor(rows: SampledRows) -> str:
    """One factor for all values."""
    shares = rows.structure
    left = (1 - shares.factor_share) * shares.e_squares
    kept = (1 + shares.slope) ** 2 * float(shares.channels[1].sum())
    if shares.factor_share > EXPLAINED and left < (1 - EXPLAINED) * kept:
        exact = SIGNATURES["a factor"](_step(*rows.added))
        what = "what it adds" if rows.residual else "its output"
        return f"{what} is {1 + shares.slope:.5g} times A's" + (f": {exact}" if exact else "")
    return ""


def _local(rows: SampledRows) -> str:
    """Most of the difference is in one channel, one token or one sample."""
    for energy, name in (
        (rows.structure.channels[0], "channel"),
        (np.nan_to_num(rows.structure.tokens[0]), "token"),
        (rows.structure.samples(), "sample"),
    ):
        total = float(energy.sum())
        if len(energy) > 2 and total > 0 and float(energy.max()) > 0.8 * total:
            return f"{float(energy.max()) / total:.0%} of the squared difference is in one {name} ({energy.argmax()})"
    return ""


def _shrunk(rows: SampledRows) -> str:
    """A little less, or a little more, in nearly every token."""
    _, u, products, _ = rows.structure.tokens
    slopes = products[u > 0] / u[u > 0]
    if len(slopes) < 16 or abs(float(np.median(slopes))) > 0.05:
        return ""
    less = float((slopes < 0).mean())
    if 0.05 < less < 0.95:
        return ""
    side, share = ("smaller", less) if less > 0.5 else ("larger", 1 - less)
    by = abs(float(np.median(slopes)))
    return f"what it adds is {side} in {share:.0%} of the tokens, by {by:.2g}: the epsilon of a norm, or a scale"


def _partly(rows: SampledRows) -> str:
    shares = rows.structure
    for kind, share in (
        ("one factor", shares.factor_share),
        ("a factor for each token", shares.token_factor_share),
        ("a factor for each channel", shares.channel_factor_share),
        ("a constant for each channel", shares.constant_share),
    ):
        if share > PARTLY:
            return f"{kind} explains {share:.0%} of the squared difference in what it adds"
    return ""


def _rough(rows: SampledRows) -> str:
    """Noise without structure, of the size that a narrower float makes."""
    if not rows.structure.is_unstructured:
        return ""
    for name, words in HIDDEN.items():
        if UNITS[name] > 2 * rows.unit and NARROWER[0] * UNITS[name] < rows.structure.added < NARROWER[1] * UNITS[name]:
            return f"noise of the size that {words} makes begins here: half precision in this layer, or a rough formula"
    return ""


#: name -> a description, empty where the pattern does not fit; the first that fits is reported.
PATTERNS: dict[str, Callable[[SampledRows], str]] = {
    "NaN or Inf": _lost,
    "zeros": lambda rows: SIGNATURES["zeros"](_step(rows.a, rows.b)),
    "skipped": _skipped,
    "saturated": _clipped,
    "permuted channels": _permuted,
    "a narrower grid": _rounded,
    "a constant": _constant,
    "wrong epsilon": _epsilon,
    "a factor": _factor,
    "one place": _local,
    "unrelated": lambda rows: SIGNATURES["unrelated"](_step(*rows.added)),
    "a little less": _shrunk,
    "partly": _partly,
    "rough noise": _rough,
}
