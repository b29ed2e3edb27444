"""The definition of a level: a few lines of float64 arithmetic over the whole tensor that read as the formulas.

`fast.py` and `blockwise.py` are its fast twins. Tests compare them with it: counts are equal, sums differ at most in
their last digits. In float64, no quotient of two float32 numbers becomes a tie by rounding, and products q * s are
exact: the rounding to the grid is the only rounding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import add
from typing import Any

import torch
from torch import Tensor

from probe.formats import Format
from probe.numerics.blocks import Blocks
from probe.numerics.codes import encode
from probe.numerics.reference import mx_blocks, power, round_elements
from probe.scaling.levels import Extent
from probe.scaling.results import COUNTS, Level

#: Bits of the formats whose codes are counted.
COUNTED_BITS = 6
#: The cosine of a level that loses something is never above this, so that a lossless one is the best by cosine too.
BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclass(frozen=True)
class Sums:
    """Sums over elements x that became q * s, with y = x / s and d = q * s - x; the sums of two parts add up."""

    squares: float = 0.0  # of d
    magnitudes: float = 0.0  # of d
    largest: float = 0.0  # |d|
    product: float = 0.0  # of x and q * s
    power: float = 0.0  # of q * s
    overflow: int = 0
    underflow: int = 0
    flushed: int = 0
    subnormal: int = 0
    lowest: float = math.inf  # q * s
    highest: float = -math.inf
    codes: tuple[int, ...] | None = None

    def __add__(self, other: "Sums") -> "Sums":
        codes = tuple(map(add, self.codes, other.codes)) if self.codes and other.codes else self.codes or other.codes
        joins: dict[str, Callable[[Any, Any], Any]] = {"largest": max, "lowest": min, "highest": max}
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.name != "codes"}
        return Sums(**{name: joins.get(name, add)(*pair) for name, pair in pairs.items()}, codes=codes)


def level_of(index: int, exponent: float, scale: float, rule: str | None, sums: Sums, extent: Extent) -> Level:
    """The figures that follow from the sums over a whole tensor."""
    n = extent.elements
    mse = sums.squares / n
    rmse = math.sqrt(mse)
    lossless = sums.largest == 0
    norm = math.sqrt(sums.power) * math.sqrt(extent.sum_squares)
    cosine = 1.0 if lossless else max(-1.0, min(BELOW_ONE, sums.product / norm)) if norm else 0.0
    return Level(
        level=index,
        scale_exponent=exponent,
        scale=scale,
        rule=rule,
        mse=mse,
        rmse=rmse,
        cosine=cosine,
        psnr=math.inf if lossless else 20 * (math.log10(extent.amax) - math.log10(rmse)),
        mae=sums.magnitudes / n,
        max_abs_error=sums.largest,
        relative_error=100 * sums.magnitudes / n / extent.mean_abs,
        elements=n,
        **{name: getattr(sums, name) for name in COUNTS},
        min_output=sums.lowest + 0.0,
        max_output=sums.highest + 0.0,
        codes=sums.codes,
    )


def scale_of(exponent: float) -> float:
    """The float32 nearest to 2^exponent: a scale as hardware holds it. Exact for whole exponents."""
    return float(torch.tensor(2.0**exponent, dtype=torch.float64).to(torch.float32))


def code_limits(fmt: Format) -> tuple[float, float]:
    """The smallest and the largest number of the element grid; only plain int8 has one more below zero."""
    return (-fmt.max - 1 if fmt.scale == "float32" else -fmt.max), fmt.max


def on_elements(y: Tensor, fmt: Format) -> Tensor:
    """`y` on the element grid: nearest, ties to even, saturating."""
    if fmt.scale == "float32":
        return torch.round(y).clamp(*code_limits(fmt)) + 0.0
    return round_elements(y, fmt, "half_even", None)


def kinds(y: Tensor, x: Tensor, fmt: Format) -> dict[str, Tensor]:
    """Masks of y = x / scale for each of COUNTS; the definitions are in `Level`."""
    low, high = code_limits(fmt)
    magnitude, some = y.abs(), x != 0
    return {
        "overflow": (y > high) | (y < low),
        "underflow": some & (magnitude < fmt.min_subnormal),
        "flushed": some & (magnitude <= fmt.min_subnormal / 2),
        "subnormal": some & (magnitude < (fmt.min_normal or 0.0)),
    }


def level_sums(x: Tensor, scale: float | Tensor, fmt: Format) -> Sums:
    """The sums of `x` at a scale, or at one for each of its rows."""
    x = x.to(torch.float64)
    y = x / scale
    q = on_elements(y, fmt)
    output = q * scale
    d = output - x
    return Sums(
        squares=float((d * d).sum()),
        magnitudes=float(d.abs().sum()),
        largest=float(d.abs().max()),
        product=float((x * output).sum()),
        power=float((output * output).sum()),
        **{name: int(mask.sum()) for name, mask in kinds(y, x, fmt).items()},
        lowest=float(output.min()),
        highest=float(output.max()),
        codes=code_counts(q, fmt),
    )


def code_counts(q: Tensor, fmt: Format) -> tuple[int, ...] | None:
    """How often each code occurs, for formats of few bits."""
    if fmt.bits > COUNTED_BITS:
        return None
    return tuple(torch.bincount(encode(q, fmt).reshape(-1).long(), minlength=2**fmt.bits).tolist())


def tensor_levels(x: Tensor, exponents: Sequence[float], fmt: Format) -> list[Sums]:
    """One scale for the tensor, for each of the exponents."""
    return [level_sums(x, scale_of(exponent), fmt) for exponent in exponents]


def block_parts(x: Tensor, axis: int, size: int) -> list[Tensor]:
    """`x` as one tensor whose blocks are all whole, and one of the shorter last blocks of its lines, if it has any."""
    x = x.reshape(1) if x.ndim == 0 else x
    line = x.shape[axis]
    whole = line // min(size, line) * min(size, line)
    parts = [x.narrow(axis, 0, whole), x.narrow(axis, whole, line - whole)]
    return [part for part in parts if part.numel()]


def block_levels(
    x: Tensor, shifts: Sequence[int], rules: Sequence[str], fmt: Format, *, axis: int, size: int, limit: int
) -> dict[tuple[str, int], Sums]:
    """A scale for each block: the exponent that the rule gives, plus the shift, within -limit .. limit."""
    found = {(rule, shift): Sums() for rule in rules for shift in shifts}
    for part in block_parts(x, axis, size):
        rows = Blocks.of(part, axis, size).split(part).to(torch.float64)
        for rule in rules:
            _, bytes_ = mx_blocks(rows, fmt, rule, "half_even", None)
            exponent = (bytes_ - 127).clamp(-limit, limit)
            for shift in shifts:
                scale = power((exponent + shift).clamp(-limit, limit))
                found[rule, shift] += level_sums(rows, scale, fmt)
    return found
