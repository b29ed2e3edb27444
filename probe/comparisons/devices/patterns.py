"""The patterns of a device fault: what the first tensor beyond noise looks like on B beside A, in words.

Each pattern returns a description, or an empty text where it does not fit; the first that fits is reported. Patterns
that the gate knows too are those of probe/diagnosis/signatures.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from probe.comparisons.devices.differences import Array, Structure, as_rows, chunks, sample_rows
from probe.comparisons.devices.pairs import ROUNDINGS, UNITS
from probe.diagnosis.signatures import SIGNATURES, Step

#: Elements of each side that are sampled (16 MB each).
SAMPLED = 2**21
#: A pattern is the cause if it explains this part of the squared difference, and worth reporting if it explains that.
EXPLAINED, PARTLY = 0.9, 0.5
#: Layers that compute in a narrower dtype than they are recorded in differ by this much, in units of that dtype.
NARROWER = (0.25, ROUNDINGS)
#: The dtypes that devices compute in without reporting it, with the words for them; fine first.
HIDDEN = {"float16": "float16 or tf32", "bfloat16": "bfloat16"}
#: Channels that are matched with all others at most.
_MATCHED = 256
_LARGEST = {float(torch.finfo(getattr(torch, name)).max): name for name in UNITS if name != "float64"}


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Rows of one tensor on both devices, spread evenly over the recording; only rows that are finite on both.

    `given` are the rows of the layer's input on both devices; with `residual` the layer adds to them.
    """

    unit: float
    structure: Structure
    a: Array
    b: Array
    given: tuple[Array, Array] | None
    residual: bool
    samples: int
    one_sided: tuple[Array, Array]  # values of a and b where just one of them is finite; not all if there are many

    @cached_property
    def added(self) -> tuple[Array, Array]:
        """What the layer adds on A and on B."""
        if self.residual and self.given is not None:
            return self.a - self.given[0], self.b - self.given[1]
        return self.a, self.b

    @cached_property
    def difference(self) -> Array:
        """The difference in what the layer adds."""
        return self.added[1] - self.added[0]


def sample_tensor(
    a: Tensor, b: Tensor, given: tuple[Tensor, Tensor] | None, *, residual: bool, unit: float, structure: Structure
) -> SampledRows:
    """All rows if they fit into SAMPLED elements, else as many as do, evenly spaced."""
    tensors = [as_rows(x) for x in (a, b, *(given or ()))]
    parts = [sample_rows(one, max(1, SAMPLED // max(tensors[0].shape[1], 1))) for one in tensors]
    good = np.logical_and.reduce([np.isfinite(part).all(1) for part in parts])
    x, y, *base = (part[good] for part in parts)
    one_sided = _one_sided(tensors[0], tensors[1])
    return SampledRows(unit, structure, x, y, (base[0], base[1]) if base else None, residual, a.shape[0], one_sided)


def _one_sided(a: Tensor, b: Tensor) -> tuple[Array, Array]:
    """At most 2^16 values and the rest of a chunk."""
    values = [np.zeros((2, 0))]
    for x, y in chunks(a, b, size=SAMPLED):
        odd = np.isfinite(x) != np.isfinite(y)
        values.append(np.stack([x[odd], y[odd]]))
        if sum(part.shape[1] for part in values) > 2**16:
            break
    on_a, on_b = np.concatenate(values, axis=1)
    return on_a, on_b


def off_grid(x: Array, dtype: str) -> float:
    """The median distance of values from the grid of a dtype in half steps: 0.5 by chance."""
    some = x[np.abs(x) > 1e-30]
    if not len(some):
        return 0.5
    near = torch.from_numpy(some).to(getattr(torch, dtype)).double().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.abs(some - near) / (np.exp2(np.floor(np.log2(np.abs(some)))) * UNITS[dtype])
    return float(np.median(off))


def narrower(unit: float) -> Iterator[tuple[str, str]]:
    """The dtypes in HIDDEN that are coarser than `unit`, with the words for them."""
    return ((name, words) for name, words in HIDDEN.items() if UNITS[name] > 2 * unit)


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
    return "returns its input on B: the layer is skipped" if is_skipped else ""


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
    for a, b, what in ((rows.a, rows.b, "its values lie"), (*rows.added, "what it adds lies")):
        for name, _ in reversed(list(narrower(rows.unit))):  # coarse first: its grid is part of the finer one
            if off_grid(b, name) < 0.05 and off_grid(a, name) > 0.3:
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
    left = (1 - shares.factor_share) * shares.added**2  # relative to what A adds, squared, as (1 + slope)^2
    if shares.factor_share > EXPLAINED and left < (1 - EXPLAINED) * (1 + shares.slope) ** 2:
        exact = SIGNATURES["a factor"](_step(*rows.added))
        what = "what it adds" if rows.residual else "its output"
        return f"{what} is {1 + shares.slope:.5g} times A's" + (f": {exact}" if exact else "")
    return ""


def _local(rows: SampledRows) -> str:
    """Most of the difference is in one channel, one token or one sample."""
    shares = rows.structure
    tokens = np.nan_to_num(shares.tokens[0])
    for energy, name in ((shares.channels[0], "channel"), (tokens, "token"), (shares.samples(), "sample")):
        total = float(energy.sum())
        if len(energy) > 2 and total > 0 and float(energy.max()) > 0.8 * total:
            return f"{float(energy.max()) / total:.0%} of the squared difference is in one {name} ({energy.argmax()})"
    return ""


def _shrunk(rows: SampledRows) -> str:
    """A little less, or a little more, in nearly every token."""
    _, u, products, _, _ = rows.structure.tokens
    slopes = products[u > 0] / u[u > 0]
    if len(slopes) < 16:
        return ""
    by, less = abs(float(np.median(slopes))), float((slopes < 0).mean())
    if by > 0.05 or 0.05 < less < 0.95:
        return ""
    side, share = ("smaller", less) if less > 0.5 else ("larger", 1 - less)
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
    for name, words in narrower(rows.unit):
        if NARROWER[0] < rows.structure.added / UNITS[name] < NARROWER[1]:
            return f"noise of the size that {words} makes begins here: half precision in this layer, or a rough formula"
    return ""


#: In the order in which they are tried.
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
