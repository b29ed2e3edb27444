"""The patterns of a device fault: what the first tensor beyond noise looks like on B beside A, in words.

Each pattern returns a description, or an empty text where it does not fit; the first that fits is reported. Patterns
that the gate knows too are those of probe/diagnosis.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from probe.comparisons.devices.differences import CHUNK, Array, Places, Structure, as_rows, chunks, evenly
from probe.comparisons.devices.pairs import ROUNDINGS, UNITS
from probe.diagnosis.explanations import matches, unrelated
from probe.diagnosis.signatures import Step

#: Elements of each side that are sampled (16 MB each).
SAMPLED = 2**21
#: A pattern is the cause if it explains this part of the squared difference, and worth reporting if it explains that.
EXPLAINED, PARTLY = 0.9, 0.5
#: Layers that compute in a narrower dtype than they are recorded in differ by this much, in units of that dtype.
NARROWER = (0.25, ROUNDINGS)
#: The dtypes that devices compute in without reporting it, with the words for them; fine first.
HIDDEN = {"float16": "float16 or tf32", "bfloat16": "bfloat16"}
#: Adjacent tokens that are sampled together.
WINDOW = 16
#: Values that a pattern needs at least.
_FEWEST = 8
#: Channels that are matched with all others at most.
_MATCHED = 256
_NORMAL = {
    float(torch.finfo(getattr(torch, name)).tiny): name for name in ("bfloat16", "float16", "float32", "float64")
}
_LARGEST = {float(torch.finfo(getattr(torch, name)).max): name for name in UNITS if name != "float64"}


@dataclass(frozen=True)
class Pattern:
    """What a difference looks like, in words."""

    words: str
    is_cause: bool
    """Whether it is the cause, and not only a description."""


@dataclass(frozen=True, eq=False)
class OneSided:
    """The elements that are not finite on one side and not the same on the other."""

    a: Array
    b: Array
    """Their values on both sides, at most 2^16 and the rest of a chunk."""
    a_only: int
    """How many there are that are not finite on A, and finite on B."""
    b_only: int
    on_both: int
    """NaN on one side and Inf on the other, or infinities of other signs."""


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Rows of one tensor on both devices: windows of adjacent tokens, at the same places in every sample.

    Elements that are not finite on any side are 0 on all. `given` are the rows of the layer's input on both devices;
    with `residual` the layer adds to them.
    """

    unit: float
    structure: Structure
    a: Array
    b: Array
    given: tuple[Array, Array] | None
    residual: bool
    grid: tuple[int, int, int]
    """Samples, windows of each, tokens of each window: the rows are in this order."""
    tensors: tuple[Tensor, ...]
    """Where the rows come from: a, b and the input on both devices, [samples, tokens, channels]."""
    one_sided: OneSided

    @cached_property
    def added(self) -> tuple[Array, Array]:
        """What the layer adds on A and on B."""
        return self._added(self.a, self.b, *(self.given or ()))

    @cached_property
    def difference(self) -> Array:
        """The difference in what the layer adds."""
        return self.added[1] - self.added[0]

    def _added(self, a: Array, b: Array, *given: Array) -> tuple[Array, Array]:
        return (a - given[0], b - given[1]) if self.residual and given else (a, b)

    def by_sample(self) -> Iterator[tuple[Array, Array]]:
        """Values of every sample, [samples, values]: those of A and B, and then what the layer adds on A and on B.

        All values if they fit into SAMPLED elements, else those at some tokens, and some channels if there are many
        samples; the same ones of every sample.
        """
        samples, _, channels = self.tensors[0].shape
        most = max(1, SAMPLED // samples)
        picked = choose(_token_energy(self.structure, samples).sum(0), max(1, most // channels))
        tensors = self.tensors if self.residual else self.tensors[:2]
        parts = []
        for tensor in tensors:
            some = evenly(tensor.shape[2], most)
            values = tensor[:, torch.from_numpy(picked)[:, None], torch.from_numpy(some)[None]]
            parts.append(values.double().numpy().reshape(samples, -1))
        x, y, *base = _finite_on_all(parts)
        yield x, y
        if base:
            yield self._added(x, y, *base)


def sample_tensor(
    a: Tensor, b: Tensor, given: tuple[Tensor, Tensor] | None, *, residual: bool, unit: float, structure: Structure
) -> SampledRows:
    """All rows if they fit into SAMPLED elements, else windows of tokens: where most of the difference is, and others.

    The windows are at the same places in every sample. Only if there are too many samples are some of them left out.
    """
    samples, per_sample = len(a), structure.per_sample
    tensors = tuple(as_rows(x).reshape(samples, per_sample, -1) for x in (a, b, *(given or ())))
    most = max(1, SAMPLED // max(tensor.shape[2] for tensor in tensors))
    energy = _token_energy(structure, samples)
    if samples * per_sample <= most:
        chosen, starts, length = np.arange(samples), np.zeros(1, np.int64), per_sample
    else:
        length = min(per_sample, WINDOW, most)
        chosen = choose(energy.sum(1), max(1, most // length))
        starts = np.unique(np.append(np.arange(0, per_sample - length, length), per_sample - length))
        windows = np.add.reduceat(energy[chosen].sum(0), starts)
        starts = starts[choose(windows, max(1, most // (length * len(chosen))))]
    places = chosen[:, None, None] * per_sample + starts[None, :, None] + np.arange(length)
    index = torch.from_numpy(places.reshape(-1))
    parts = [tensor.reshape(samples * per_sample, -1)[index].double().numpy() for tensor in tensors]
    x, y, *base = _finite_on_all(parts)
    return SampledRows(
        unit=unit,
        structure=structure,
        a=x,
        b=y,
        given=(base[0], base[1]) if base else None,
        residual=residual,
        grid=(len(chosen), len(starts), length),
        tensors=tensors,
        one_sided=_one_sided(tensors[0], tensors[1]),
    )


def choose(energy: Array, count: int) -> Places:
    """`count` places in order: half of them evenly spaced, the others where the energy is largest."""
    if count >= len(energy):
        return np.arange(len(energy))
    even = evenly(len(energy), count - count // 2)
    largest = np.argsort(-energy, kind="stable")
    return np.sort(np.concatenate([even, largest[~np.isin(largest, even)][: count - len(even)]]))


def _token_energy(structure: Structure, samples: int) -> Array:
    """[samples, tokens]: the squared difference in what the layer adds."""
    energy: Array = np.nan_to_num(structure.tokens[0]).reshape(samples, -1)
    return energy


def _finite_on_all(parts: Sequence[Array]) -> list[Array]:
    """The parts with 0 where any is not finite; parts of another width than the first have 0 in those rows."""
    width = parts[0].shape[1]
    good = np.logical_and.reduce([np.isfinite(part) for part in parts if part.shape[1] == width])
    for part in parts:
        if part.shape[1] != width:
            good = good & np.isfinite(part).all(1, keepdims=True)
    if good.all():
        return list(parts)
    rows = good.any(1, keepdims=True)
    return [np.where(good if part.shape[1] == width else rows, part, 0.0) for part in parts]


def _one_sided(a: Tensor, b: Tensor) -> OneSided:
    values, counts = [np.zeros((2, 0))], np.zeros(3, np.int64)
    for x, y in chunks(a.reshape(-1), b.reshape(-1), size=CHUNK):
        on_a, on_b = np.isfinite(x), np.isfinite(y)
        if on_a.all() and on_b.all():
            continue
        unlike = ~on_a & ~on_b & (x != y) & ~(np.isnan(x) & np.isnan(y))
        odd = (on_a != on_b) | unlike
        counts += [int((~on_a & on_b).sum()), int((on_a & ~on_b).sum()), int(unlike.sum())]
        if sum(part.shape[1] for part in values) < 2**16:
            values.append(np.stack([x[odd], y[odd]]))
    on_a, on_b = np.concatenate(values, axis=1)
    return OneSided(on_a, on_b, *map(int, counts))


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


def recognise(rows: SampledRows) -> Pattern:
    """The first pattern that fits; one without words if none does."""
    few = rows.structure.rows * rows.a.shape[1] < _FEWEST  # anything explains a few values
    names = [name for name in PATTERNS if not few or name == "NaN or Inf"]
    found = ((name, PATTERNS[name](rows)) for name in names)
    return next((Pattern(words, name not in DESCRIPTIONS) for name, words in found if words), Pattern("", False))


def _lost(rows: SampledRows) -> str:
    """NaN or Inf on one side only."""
    found = rows.one_sided
    on_a, on_b = np.isfinite(found.a), np.isfinite(found.b)
    lines = []
    if found.b_only:
        largest = float(np.abs(found.a[~on_b & on_a]).max(initial=0.0))
        past = next((name for top, name in sorted(_LARGEST.items(), reverse=True) if largest > top), None)
        why = _saturation(found.a[on_a & ~on_b], None, "A", ": A saturates there")
        why = why or (f": A reaches {largest:.4g}, beyond {past}" if past else "")
        lines.append(f"{_kind(found.b[on_a & ~on_b])} on B where A is finite, {_counted(found.b_only)}{why}")
    if found.a_only:
        values = found.b[on_b & ~on_a]
        where = f"{_kind(found.a[on_b & ~on_a])} on A where B is finite, {_counted(found.a_only)}"
        zeros = "" if values.any() else "NaN or Inf of A is replaced by 0 on B"
        instead = _saturation(values, rows.b, "B", "saturates instead of NaN or Inf")
        lines.append(instead or zeros or where)
    if found.on_both:
        kinds = [_kind(side[~on_a & ~on_b]) for side in (found.a, found.b)]
        unlike = f"{kinds[0]} on A and {kinds[1]} on B" if kinds[0] != kinds[1] else "infinities of other signs"
        lines.append(f"{unlike} at the same places, {_counted(found.on_both)}")
    first = 0 if found.b_only >= found.a_only or len(lines) < 2 else 1
    return "; ".join([lines[first], *lines[:first], *lines[first + 1 :]]) if lines else ""


def _kind(values: Array) -> str:
    nan = np.isnan(values)
    return "NaN" if nan.all() else "NaN or Inf" if nan.any() else "Inf"


def _saturation(values: Array, others: Array | None, side: str, words: str) -> str:
    """The largest magnitude that stands in for NaN or Inf, in words; empty if there is no evidence of one.

    Nearly all of the values must be the same number: the end of a format or, if `others` are given, one that is there
    twice or more and that none of them exceeds.
    """
    magnitudes, counts = np.unique(np.abs(values), return_counts=True)
    top, count = float(magnitudes[counts.argmax()]), int(counts.max())
    name = _LARGEST.get(top)
    is_end = name is not None or (others is not None and count > 1 and top >= float(np.abs(others).max(initial=0.0)))
    if top == 0 or count < EXPLAINED * len(values) or not is_end:
        return ""
    return f"{words}: +-{top:.6g} on {side}" + (f", the largest {name}" if name else "")


def _counted(count: int) -> str:
    return "in one value" if count == 1 else f"in {count} values"


def _flushed(rows: SampledRows) -> str:
    """B is 0 where A is below the smallest normal number of a dtype, and nowhere has such a value."""
    a, b = np.abs(rows.a), np.abs(rows.b)
    gone = (b == 0) & (a > 0)
    if not gone.any():
        return ""
    largest, least = float(a[gone].max()), float(b[b > 0].min(initial=np.inf))
    scale = 1 / float(np.abs(rows.b - rows.a).max())
    if _squares((rows.b - rows.a)[gone] * scale) < EXPLAINED * _squares((rows.b - rows.a) * scale):
        return ""
    for normal, name in sorted(_NORMAL.items()):
        if largest < normal <= least and (least < np.inf or name != "float16"):  # zeros alone may be any small values
            return f"subnormals are flushed to zero: values below {normal:.2g} are 0 on B ({name})"
    return ""


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
        exact = matches("a factor", _step(*rows.added))
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


#: Patterns that describe a difference, but are not its cause.
DESCRIPTIONS = ("unrelated", "a little less", "partly", "rough noise")
#: In the order in which they are tried.
PATTERNS: dict[str, Callable[[SampledRows], str]] = {
    "NaN or Inf": _lost,
    "flushed subnormals": _flushed,
    "zeros": lambda rows: matches("zeros", _step(rows.a, rows.b)),
    "skipped": _skipped,
    "saturated": _clipped,
    "permuted channels": _permuted,
    "a narrower grid": _rounded,
    "a constant": _constant,
    "wrong epsilon": _epsilon,
    "a factor": _factor,
    "one place": _local,
    "unrelated": lambda rows: unrelated(_step(*rows.added)),
    "a little less": _shrunk,
    "partly": _partly,
    "rough noise": _rough,
}
