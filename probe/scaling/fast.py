"""The fast twin of `reference.tensor_levels`, which works on runs of neighbouring values instead of single values.

A tensor is turned into runs once. A tensor of 16-bit floats (or of float32 widened from bfloat16) has at most 65536
distinct values, and a run is one of them with its count. Any other tensor is sorted, and a run is RUN neighbours
x_1 <= ... <= x_n with their count, both ends and two sums around the first:

    S1 = sum (x - x_1),   S2 = sum (x - x_1)^2

Where both ends of a run become the same q, so do all values between them, and with c = q s the errors d = c - x have

    sum d^2 = S2 - 2 (c - x_1) S1 + n (c - x_1)^2,   sum |d| = |n (c - x_1) - S1|

Only the few runs that contain a boundary of the grid (or c itself) are computed value by value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from probe.formats import Format
from probe.numerics.fast import round_elements
from probe.scaling.levels import Extent
from probe.scaling.reference import COUNTED_BITS, Sums, code_limits, scale_of

#: Values in a run of sorted ones.
RUN = 256
#: Elements that are counted, or summed, at a time.
PIECE = 2**20


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of values of one sign, as float64. `values` are sorted; None where all of a run becomes one q."""

    first: Tensor
    last: Tensor
    count: Tensor
    s1: Tensor
    s2: Tensor
    start: Tensor  # of the run, in `values`
    values: Tensor | None = None

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """All but the values: one number per run."""
        return self.first, self.last, self.count, self.s1, self.s2, self.start

    def extent(self) -> Extent:
        """The range and size of the tensor."""
        elements = int(self.count.sum())
        zero = self.first == 0
        ends = torch.minimum(self.first.abs(), self.last.abs())[~zero]
        total = (self.count * self.first + self.s1).abs()
        squares = self.s2 + 2 * self.first * self.s1 + self.count * self.first * self.first
        return Extent(
            elements=elements,
            zeros=int(self.count[zero].sum()),
            minimum=float(self.first.amin()),
            maximum=float(self.last.amax()),
            smallest=float(ends.amin()),
            mean_abs=float(total.sum()) / elements,
            sum_squares=float(squares.sum()),
        )

    def within(self, chosen: Tensor) -> Tensor:
        """The values of the runs that a mask chooses, float64."""
        assert self.values is not None
        starts, counts = self.start[chosen], self.count[chosen].long()
        ends = counts.cumsum(0)
        shift = torch.repeat_interleave(starts - (ends - counts), counts)
        return self.values[torch.arange(int(ends[-1]) if len(ends) else 0) + shift].double()


def runs_of(x: Tensor) -> Runs:
    """The runs of a tensor that `check_tensor` returned."""
    words = _sixteen_bit(x.reshape(-1))
    return _sorted(x.reshape(-1)) if words is None else _distinct(words)


def _sixteen_bit(flat: Tensor) -> Tensor | None:
    """The same values in a dtype of 16 bits, if they fit; None if they do not."""
    if flat.dtype in (torch.bfloat16, torch.float16):
        return flat
    bits = flat.view(torch.int32)
    for start in range(0, flat.numel(), PIECE):
        if bool((bits[start : start + PIECE] & 0xFFFF).any()):
            return None
    return flat.to(torch.bfloat16)


def _distinct(words: Tensor) -> Runs:
    patterns = words.view(torch.int16)
    counts = torch.zeros(2**16, dtype=torch.int64)
    for start in range(0, patterns.numel(), PIECE):
        piece = patterns[start : start + PIECE].to(torch.int32).add_(2**15)
        counts += torch.bincount(piece, minlength=2**16)
    present = counts.nonzero().reshape(-1)
    values = (present - 2**15).to(torch.int16).view(words.dtype).to(torch.float64)
    return _equal(torch.stack([values, counts[present].double()], 1))


def _equal(pairs: Tensor) -> Runs:
    """Runs of equal values, from [value, count] in float64."""
    values, counts = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    none = torch.zeros_like(values)
    return Runs(values, values, counts, none, none, torch.zeros(len(values), dtype=torch.int64))


def _sorted(flat: Tensor) -> Runs:
    """Zeros are runs of their own, one for each sign, and no run holds values of both signs.

    Negative zeros are counted before the sort: numpy's AVX-512 sort takes -0 and +0 for equal and may turn one into
    the other.
    """
    negative = int((flat.view(torch.int32) == -(2**31)).sum())
    ordered = np.sort(flat.numpy())
    kept = torch.from_numpy(ordered)
    below, above = (int(np.searchsorted(ordered, np.float32(0), side)) for side in ("left", "right"))
    present = [(value, count) for value, count in ((-0.0, negative), (0.0, above - below - negative)) if count]
    parts = [_cut(kept, 0, below), _cut(kept, above, len(kept))]
    parts.append(_equal(torch.tensor(present, dtype=torch.float64).reshape(-1, 2)))
    columns = map(torch.cat, zip(*(part.columns for part in parts), strict=True))
    return replace(Runs(*columns), values=kept)


def _cut(ordered: Tensor, begin: int, end: int) -> Runs:
    """The runs of sorted values of one sign; the last may be shorter."""
    start = torch.arange(begin, end, RUN)
    after = (start + RUN).clamp_max(end)
    first, last = ordered[start].double(), ordered[after - 1].double()
    s1, s2 = torch.zeros_like(first), torch.zeros_like(first)
    whole = (end - begin) // RUN
    rows = ordered[begin : begin + whole * RUN].view(whole, RUN)
    step = PIECE // RUN
    for at in range(0, whole, step):
        offset = rows[at : at + step].double() - first[at : min(at + step, whole), None]
        s1[at : at + step][: len(offset)] = offset.sum(-1)
        s2[at : at + step][: len(offset)] = (offset * offset).sum(-1)
    if whole < len(start):
        offset = ordered[begin + whole * RUN : end].double() - first[-1]
        s1[-1], s2[-1] = offset.sum(), torch.dot(offset, offset)
    return Runs(first, last, (after - start).double(), s1, s2, start)


def tensor_levels(runs: Runs, exponents: Sequence[float], fmt: Format) -> list[Sums]:
    """One scale for the tensor, for each of the exponents."""
    return [_level(runs, scale_of(exponent), fmt) for exponent in exponents]


def _level(runs: Runs, scale: float, fmt: Format) -> Sums:
    y = runs.first / scale
    q, kinds = on_elements(y, fmt), kinds_of(y, fmt)
    if runs.values is None:
        return _run_sums(runs, q, kinds, scale, fmt)
    y_last = runs.last / scale
    q_last = on_elements(y_last, fmt)
    same = (q == q_last) & ((q * scale - runs.first) * (q_last * scale - runs.last) >= 0)
    same &= kinds == kinds_of(y_last, fmt)  # where both ends of a run are of a kind, all of it is
    whole = Runs(*(column[same] for column in runs.columns))
    found = _run_sums(whole, q[same], kinds[same], scale, fmt) if bool(same.any()) else Sums()
    rest = runs.within(~same)
    if not len(rest):
        return found
    y = rest / scale
    one_each = _equal(torch.stack([rest, torch.ones_like(rest)], 1))
    return found + _run_sums(one_each, on_elements(y, fmt), kinds_of(y, fmt), scale, fmt)


def _run_sums(runs: Runs, q: Tensor, kinds: Tensor, scale: float, fmt: Format) -> Sums:
    """The sums over runs that became q as a whole; the formulas are at the top of the file."""
    c = q * scale
    gap = c - runs.first
    weighted = c * runs.count
    counts = torch.bincount(kinds, weights=runs.count, minlength=6).long()
    return Sums(
        squares=float((runs.s2 + gap * (gap * runs.count - 2 * runs.s1)).sum()),
        magnitudes=float((gap * runs.count - runs.s1).abs().sum()),
        largest=max(float(gap.abs().amax()), float((c - runs.last).abs().amax())),
        product=float(torch.dot(c, runs.first * runs.count + runs.s1)),
        power=float(torch.dot(c, weighted)),
        overflow=int(counts[5]),
        underflow=int(counts[1:3].sum()),
        flushed=int(counts[1]),
        subnormal=0 if fmt.min_normal is None else int(counts[1:4].sum()),
        lowest=float(c.amin()),
        highest=float(c.amax()),
        codes=code_counts(q, runs.count, fmt),
    )


def on_elements(y: Tensor, fmt: Format) -> Tensor:
    """The twin of `reference.on_elements`; `y` is left as it is."""
    if fmt.scale == "float32":
        return torch.round(y).clamp_(*code_limits(fmt)).add_(0.0)
    return round_elements(y, fmt, "half_even", None)


def kinds_of(y: Tensor, fmt: Format) -> Tensor:
    """The kind of each value: 0 zero, 1 becomes zero, 2 other underflow, 3 other subnormal, 4 normal, 5 overflow."""
    below = [math.nextafter(end, 0.0) for end in (fmt.min_subnormal, fmt.min_normal or fmt.min_subnormal)]
    ends = torch.tensor([0.0, fmt.min_subnormal / 2, *below], dtype=torch.float64)  # each belongs to the kind below it
    return torch.where(y == y.clamp(*code_limits(fmt)), torch.bucketize(y.abs(), ends), 5)


def code_steps(fmt: Format) -> list[int]:
    """The magnitude of every non-negative code, in steps of the smallest."""
    return [round(fmt.decode(code) / fmt.min_subnormal) for code in range(2 ** (fmt.bits - 1))]


def code_counts(q: Tensor, counts: Tensor, fmt: Format) -> tuple[int, ...] | None:
    """How often each code occurs: magnitudes are whole numbers of steps, and a table leads from those to codes."""
    if fmt.bits > COUNTED_BITS:
        return None
    steps = (q.abs() / fmt.min_subnormal).to(torch.int64)
    width = round(fmt.max / fmt.min_subnormal) + 1
    found = torch.bincount(steps + width * torch.signbit(q), weights=counts, minlength=2 * width).tolist()
    return tuple(int(found[sign * width + magnitude]) for sign in (0, 1) for magnitude in code_steps(fmt))
