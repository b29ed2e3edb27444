"""The fast twin of `reference.block_levels`: one pass over the tensor for all rules and shifts.

Blocks to which every rule gives the same exponents are gathered: their elements are one tensor that has one scale at
each level, as in `fast.py`. Its runs are bins: elements are told apart by their sign, their exponent and one bit of the
mantissa more than the format has, and the value at which a bin begins has a bin of its own. All numbers of the grid,
and all middles between two of them, are such values at every power-of-two scale, so all of a bin becomes the same q.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probe.formats import Format
from probe.numerics.blocks import Blocks
from probe.numerics.fast import plan_for, scales_for
from probe.numerics.machine_code import kernel
from probe.numerics.quantize import quantize
from probe.scaling.fast import Runs, tensor_levels
from probe.scaling.reference import Sums, block_parts

#: Elements that are worked on at a time.
PIECE = 2**17
#: Bytes of bins that are filled before they are added up, if there are more.
ROOM = 2**26

_Bins = npt.NDArray[np.float64]
_Whole = npt.NDArray[np.int64]

#: What a bin has: how many, the sum of their distances from where it begins and that of the squares, and both ends.
COUNT, OFFSETS, SQUARES, FIRST, LAST, FIGURES = range(6)
#: The exponents of a float64 that a float32 can have, as they are stored, and one place more for zero.
_LOWEST, _EXPONENTS = 1023 - 149, 278


def pieces(x: Tensor, axis: int, size: int) -> Iterator[Tensor]:
    """Rows of one block each, float32; no block is padded."""
    for part in block_parts(x, axis, size):
        rows = Blocks.of(part, axis, size).split(part)
        step = max(1, PIECE // rows.shape[-1])
        for start in range(0, rows.shape[0], step):
            yield rows[start : start + step].to(torch.float32)


def rule_exponents(rows: Tensor, rules: Sequence[str], fmt: Format, limit: int) -> dict[str, Tensor]:
    """The exponent of every row by every rule, int64 [rows, 1]."""
    amax = rows.abs().amax(-1, keepdim=True)
    found = {}
    for rule in rules:
        plan = plan_for(fmt, torch.float32, rule)
        if rule == "mse":
            bytes_ = quantize(rows, fmt.name, block_size=rows.shape[-1], scale_rule=rule).scales
            assert bytes_ is not None
        else:
            bytes_ = scales_for(amax, plan).view(torch.int32) >> plan.machine.mantissa_bits
        found[rule] = (bytes_.to(torch.int64) - 127).clamp(-limit, limit)
    return found


def block_levels(
    x: Tensor, shifts: Sequence[int], rules: Sequence[str], fmt: Format, *, axis: int, size: int, limit: int
) -> dict[tuple[str, int], Sums]:
    """The sums of every rule at every shift."""
    found = {(rule, shift): Sums() for rule in rules for shift in shifts}
    bins = 4 * _EXPONENTS << (fmt.mantissa_bits + 1)
    room = max(1, ROOM // (8 * FIGURES * bins))
    tables: dict[tuple[int, ...], _Bins] = {}

    def add_up() -> None:
        for exponents, table in tables.items():
            runs = _runs(table, fmt)
            distinct = sorted({_shifted(e, shift, limit) for e in exponents for shift in shifts})
            levels = dict(zip(distinct, tensor_levels(runs, distinct, fmt), strict=True))
            for (rule, shift), before in found.items():
                found[rule, shift] = before + levels[_shifted(exponents[rules.index(rule)], shift, limit)]
        tables.clear()

    for rows in pieces(x, axis, size):
        by_rule = rule_exponents(rows, rules, fmt, limit)
        together = torch.stack([(by_rule[rule] + 128) << 8 * place for place, rule in enumerate(rules)]).sum(0)
        kinds, member = torch.unique(together.reshape(-1), return_inverse=True)  # far faster than of rows of exponents
        for index, kind in enumerate(kinds.tolist()):
            exponents = tuple((kind >> 8 * place & 255) - 128 for place in range(len(rules)))
            if exponents not in tables:
                if len(tables) == room:
                    add_up()
                tables[exponents] = np.zeros((bins, FIGURES))
            fill_bins(rows.numpy(), member.numpy(), index, fmt.mantissa_bits + 1, tables[exponents])
    add_up()
    return found


def _shifted(exponent: int, shift: int, limit: int) -> int:
    return max(-limit, min(limit, exponent + shift))


def _runs(table: _Bins, fmt: Format) -> Runs:
    """The runs of the bins that are not empty: their sums are those of distances from their first values."""
    (places,) = table[:, COUNT].nonzero()
    filled = torch.from_numpy(table[places])
    count, offsets, squares, first, last = filled.unbind(1)
    step = torch.from_numpy(_begins(places, fmt.mantissa_bits + 1)) - first
    s1 = offsets + step * count
    s2 = squares + step * (2 * offsets + step * count)
    return Runs(first, last, count, s1, s2, torch.zeros_like(count, dtype=torch.int64))


def _begins(places: _Whole, bits: int) -> _Bins:
    """The number of least magnitude of each bin; its bits, but for the sign, are its place with the lowest exponent."""
    half = _EXPONENTS << (bits + 1)
    place = places % half // 2
    size = ((place + ((_LOWEST - 1) << bits)) << (52 - bits)).view(np.float64)
    return np.copysign(np.where(place > 0, size, 0.0), np.where(places < half, 1.0, -1.0))


# ------------------------------------------------------------------------------------------------- numba kernels


@kernel
def fill_bins(rows: npt.NDArray[np.float32], member: _Whole, index: int, bits: int, table: _Bins) -> None:
    """Add the rows with this member index to the bins of a table; `bits` of the mantissa tell bins apart."""
    below = np.int64(52 - bits)
    rest, signs = (np.int64(1) << below) - np.int64(1), np.int64(_EXPONENTS) << np.int64(bits + 1)
    for row in range(rows.shape[0]):
        if member[row] != index:
            continue
        for i in range(rows.shape[1]):
            value = np.float64(rows[row, i])
            raw = np.float64(value).view(np.int64)
            size = raw & np.int64(0x7FFFFFFFFFFFFFFF)
            place = max(np.int64(0), (size >> below) - (np.int64(_LOWEST - 1) << np.int64(bits)))
            place = 2 * place + ((size & rest) != 0) + (signs if raw < 0 else np.int64(0))
            one = table[place]
            offset = value - np.int64(raw & ~rest).view(np.float64)
            if one[COUNT] == 0:
                one[FIRST] = one[LAST] = value
            one[COUNT] += 1
            one[OFFSETS] += offset
            one[SQUARES] += offset * offset
            one[FIRST] = min(one[FIRST], value)
            one[LAST] = max(one[LAST], value)
