"""The fast twin of `reference.block_levels`: numba kernels over rows of one block each, in pieces that fit the cache.

Every rule gives a block the exponent of `floor`, one more or one less. So blocks are sorted into groups by those steps,
and a group is computed once for every distance k from the floor exponent b that a rule and a shift need:

    total(rule, shift) = sum over groups of figures[group, k = shift + step of the rule]

With z = x / 2^b the elements at k are those of z / 2^k; both divisions are exact in float32. How many overflow or
underflow follows, for all k at once, from a count of the exponents of z. The reference computes the blocks whose scale
a shift would move out of range, and those with values more than 2^60 apart.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probe.formats import Format
from probe.numerics.blocks import Blocks
from probe.numerics.fast import mx_blocks, plan_for, scales_for
from probe.numerics.machine_code import kernel, summing_kernel
from probe.numerics.reference import power
from probe.scaling import reference
from probe.scaling.fast import code_steps
from probe.scaling.reference import COUNTED_BITS, Sums, block_parts

#: Elements that are worked on at a time.
PIECE = 2**17
#: Values of a block may be so many powers of two apart, and a shift so large, before float32 could lose something.
APART = 60

_Singles = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]
_Whole = npt.NDArray[np.int64]

#: Elements that are worked on at a time, if a block is not longer.
STRETCH = 1024
#: The fields of Sums that the kernels add up, in order, and their places.
SUMMED = ("squares", "magnitudes", "largest", "product", "power", "lowest", "highest")
(SQUARES, MAGNITUDES, LARGEST, PRODUCT, POWER, LOWEST, HIGHEST) = range(7)

_EXPONENT, _SIGN = np.int32(0x7F800000), np.int32(-(2**31))


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
            bytes_ = mx_blocks(rows, plan, "half_even", None)[1]
        else:
            bytes_ = scales_for(amax, plan).view(torch.int32) >> plan.machine.mantissa_bits
        found[rule] = (bytes_.to(torch.int64) - 127).clamp(-limit, limit)
    return found


def block_levels(
    x: Tensor, shifts: Sequence[int], rules: Sequence[str], fmt: Format, *, axis: int, size: int, limit: int
) -> dict[tuple[str, int], Sums]:
    """The sums of every rule at every shift."""
    groups: dict[tuple[int, ...], _Group] = {}
    found = {(rule, shift): Sums() for rule in rules for shift in shifts}
    for rows in pieces(x, axis, size):
        exponents = rule_exponents(rows, tuple(dict.fromkeys(("floor", *rules))), fmt, limit)
        zero = rows.abs().amax(-1, keepdim=True) == 0
        base = torch.where(zero, 0, exponents["floor"])
        steps = torch.cat([torch.where(zero, 0, exponents[rule] - base) for rule in rules], 1)
        ordinary = _ordinary(rows, base, shifts, limit)
        if not bool(ordinary.all()):
            for (rule, shift), before in found.items():
                exponent = (exponents[rule][~ordinary] + shift).clamp(-limit, limit)
                found[rule, shift] = before + reference.level_sums(rows[~ordinary], power(exponent), fmt)
            rows, base, steps = rows[ordinary], base[ordinary], steps[ordinary]
        member = (steps + 1) @ 3 ** torch.arange(len(rules))  # the steps of a row as one number
        for index in torch.unique(member).tolist():
            kind = tuple(index // 3**place % 3 - 1 for place in range(len(rules)))
            if kind not in groups:
                groups[kind] = _Group(fmt, {shift + step for shift in shifts for step in kind})
            here = member == index
            groups[kind].add(rows[here], base[here])
    for rule, shift in found:
        for kind, group in groups.items():
            found[rule, shift] += group.sums_at(shift + kind[rules.index(rule)])
    return found


def _ordinary(rows: Tensor, base: Tensor, shifts: Sequence[int], limit: int) -> Tensor:
    """The rows that stay inside the scale and inside float32 at every shift, bool [rows]."""
    lowest, highest = min(0, *shifts) - 1, max(0, *shifts) + 1
    if max(-lowest, highest) > APART:
        return torch.zeros(len(rows), dtype=torch.bool)
    smallest = rows.abs().masked_fill(rows == 0, torch.inf).amin(-1, keepdim=True).double()
    near = smallest >= power(base - APART)
    return ((base + lowest >= -limit) & (base + highest <= limit) & near).reshape(-1)


class _Group:
    """Blocks that all rules treat alike: their sums at every distance k from the floor exponent."""

    def __init__(self, fmt: Format, distances: set[int]) -> None:
        self._format = fmt
        self._plan = plan_for(fmt, torch.float32, "floor")
        self._distances = sorted(distances)
        self._sums = np.tile([getattr(Sums(), name) for name in SUMMED], (len(distances), 1))
        self._exponents: _Whole = np.zeros(3 * 256, dtype=np.int64)
        self._counted = fmt.bits <= COUNTED_BITS
        self._width = round(fmt.max / fmt.min_subnormal) if self._counted else 0
        room = 2 * self._width + 1 if self._counted else 0
        self._steps: _Whole = np.zeros((len(distances), room), dtype=np.int64)
        self._negative = 0

    def add(self, rows: Tensor, base: Tensor) -> None:
        """Add rows and their floor exponents, [rows, 1]."""
        scale, plan = power(base), self._plan
        z = (rows * scale.reciprocal().to(torch.float32)).reshape(-1).numpy()
        self._negative += count_exponents(z.view(np.int32), plan.max & 0x7FFFFF, self._exponents)
        grid = (plan.magic, plan.min_exponent, plan.max, not self._format.is_integer, 1 / self._format.min_subnormal)
        scales, size = scale.reshape(-1).numpy(), rows.shape[-1]
        add_levels(z, scales, size, np.array(self._distances), grid, self._sums, self._steps)

    def sums_at(self, k: int) -> Sums:
        """The sums at distance k, with the counts."""
        fmt, place = self._format, self._distances.index(k)
        table = self._exponents.reshape(256, 3)

        def below(exponent: int) -> int:
            """How many are not zero and below 2^exponent; zero is the first power of the table."""
            return int(table[: max(0, exponent + 127)].sum() - table[0, 0])

        lowest = fmt.min_exponent - fmt.mantissa_bits + k
        top = fmt.max_exponent + k + 127
        return Sums(
            **dict(zip(SUMMED, self._sums[place].tolist(), strict=True)),
            overflow=int(table[top + 1 :].sum() + table[top, 2]),
            underflow=below(lowest),
            flushed=below(lowest - 1) + int(table[lowest - 1 + 127, 0]),
            subnormal=0 if fmt.min_normal is None else below(fmt.min_exponent + k),
            codes=self._codes(self._steps[place]),
        )

    def _codes(self, steps: _Whole) -> tuple[int, ...] | None:
        """From counts of signed steps; a negative value that became zero has the code of -0."""
        if not self._counted:
            return None
        magnitudes = code_steps(self._format)
        codes = [int(steps[self._width + sign * magnitude]) for sign in (1, -1) for magnitude in magnitudes]
        negative_zeros = self._negative - int(steps[: self._width].sum())
        half = len(magnitudes)
        codes[0], codes[half] = codes[0] - negative_zeros, negative_zeros
        return tuple(codes)


# ------------------------------------------------------------------------------------------------- numba kernels


@kernel
def count_exponents(bits: npt.NDArray[np.int32], mantissa_of_max: int, counts: _Whole) -> int:
    """Count magnitudes by exponent field, and in each: powers of two, up to the mantissa of max, and above it.

    Returns how many have their sign set.
    """
    negative = 0
    for i in range(bits.size):
        raw = bits[i]
        mantissa = raw & 0x7FFFFF
        counts[((raw >> 23) & 0xFF) * 3 + (mantissa > 0) + (mantissa > mantissa_of_max)] += 1
        negative += raw < 0
    return negative


@kernel
def add_levels(
    z: _Singles,
    scale: _Doubles,
    size: int,
    distances: _Whole,
    grid: tuple[float, int, int, bool, float],
    sums: _Doubles,
    steps: _Whole,
) -> None:
    """Add the sums of blocks of `size` values z at 2^distance for every distance; each block has its own scale.

    `grid`: magic, min_exponent and max of a `Plan`, whether there is a negative zero, and the steps in one. `sums` and
    `steps` are [distance, ...]; with room in `steps`, outputs are counted there by their signed number of steps.
    """
    magic, min_exponent, largest, has_negative_zero, steps_in_one = grid
    constants = (np.float32(magic), np.int32(min_exponent), np.int32(largest))
    stretch = max(size, STRETCH // size * size)
    y, power = np.empty(stretch, np.float32), np.empty(stretch, np.float32)
    middle = steps.shape[1] // 2
    for start in range(0, z.size, stretch):
        here = z[start : start + stretch]
        q = y[: here.size]
        for level in range(distances.size):
            unit = 2.0 ** distances[level]
            _round(here, q, power, np.float32(1 / unit), *constants)
            if not has_negative_zero:
                for i in range(q.size):
                    q[i] += np.float32(0)
            if steps.shape[1]:
                for i in range(q.size):
                    steps[level, int(q[i] * steps_in_one) + middle] += 1
            for row in range(here.size // size):
                part = slice(row * size, (row + 1) * size)
                _add_row(here[part], q[part], unit, scale[start // size + row], sums[level])


@kernel
def _round(
    z: _Singles, y: _Singles, power: _Singles, inverse: np.float32, magic: np.float32, least: np.int32, most: np.int32
) -> None:
    """y = z * inverse on the element grid, nearest, ties to even, saturating; as `fast.round_magnitudes_` has it."""
    bits_z, bits_y, bits_power = z.view(np.int32), y.view(np.int32), power.view(np.int32)
    for i in range(z.size):
        y[i] = abs(z[i]) * inverse
    for i in range(z.size):
        bits_power[i] = max(bits_y[i] & _EXPONENT, least)
    for i in range(z.size):
        constant = power[i] * magic
        y[i] = (y[i] + constant) - constant
    for i in range(z.size):
        bits_y[i] = min(bits_y[i], most) | (bits_z[i] & _SIGN)


@summing_kernel
def _add_row(z: _Singles, q: _Singles, unit: float, scale: float, sums: _Doubles) -> None:
    """One block: with o = q * unit and d = o - z, all times the scale of the block."""
    squares, magnitudes, product, power = 0.0, 0.0, 0.0, 0.0
    largest, lowest, highest = 0.0, np.inf, -np.inf
    for i in range(z.size):
        value, output = np.float64(z[i]), np.float64(q[i]) * unit
        d = output - value
        squares += d * d
        magnitudes += abs(d)
        product += value * output
        power += output * output
        largest = max(largest, abs(d))
        lowest, highest = min(lowest, output), max(highest, output)
    square = scale * scale
    sums[SQUARES] += squares * square
    sums[MAGNITUDES] += magnitudes * scale
    sums[PRODUCT] += product * square
    sums[POWER] += power * square
    sums[LARGEST] = max(sums[LARGEST], largest * scale)
    sums[LOWEST] = min(sums[LOWEST], lowest * scale)
    sums[HIGHEST] = max(sums[HIGHEST], highest * scale)
