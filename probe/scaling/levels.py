"""The scales of a sweep, from beyond maximum alignment to minimum alignment, and the tensors that can be swept.

    max-aligned   ceil(log2(amax / max))                           the largest magnitude just fits
    min-aligned   floor(log2(smallest / smallest subnormal))       the smallest non-zero one just does not underflow

If a tensor has less dynamic range than the format, min-aligned is above max-aligned, and no scale in between has
overflow or underflow. If it has more, min-aligned is below, and every scale in between has some of both. The least
error is nearly always close to maximum alignment, so a sweep begins BEYOND octaves on the other side of it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from probe.formats import FORMATS, Format
from probe.numerics.rounding import require_tensor
from probe.words import look_up

#: The formats that `all` stands for. Any other format with an e8m0 scale can be given by name.
ELEMENT_FORMATS = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8")
GRANULARITIES = ("tensor", "block")
MOST_LEVELS = 1001
#: The levels of a sweep, unless their number is given: so many, or two for each octave if that is more.
USUAL_LEVELS = 21
#: The octaves that a sweep has beyond maximum alignment, unless its first exponent is given.
BEYOND = 3


def element_format(name: str, granularity: str) -> Format:
    """The grid of the elements. In blocks `int8` is the int8 of MX, with steps of 1/64: the format mxint8."""
    swept = [*ELEMENT_FORMATS, *(fmt.name for fmt in FORMATS.values() if fmt.scale == "e8m0")]
    fmt = look_up("format", name, {known: FORMATS[known] for known in swept}, see="Or all.")
    return FORMATS["mxint8"] if name == "int8" and granularity == "block" else fmt


def expand_formats(names: list[str]) -> list[str]:
    """Formats by name, `all` among them, each once."""
    plain = [one for name in names for one in (ELEMENT_FORMATS if name == "all" else (name,))]
    for name in plain:
        element_format(name, "tensor")
    return list(dict.fromkeys(plain))


@dataclass(frozen=True)
class Extent:
    """The range and size of a tensor whose values are all finite and not all zero."""

    elements: int
    zeros: int
    minimum: float
    maximum: float
    smallest: float  # the smallest magnitude above zero
    mean_abs: float
    sum_squares: float

    @property
    def amax(self) -> float:
        """The largest magnitude."""
        return max(-self.minimum, self.maximum)


def check_tensor(x: Tensor) -> Tensor:
    """`x` as it is swept: detached, on the CPU, bfloat16, float16 or float32. ValueError if it cannot be swept."""
    require_tensor(x)
    if not x.is_floating_point():
        raise ValueError(f"the tensor is {x.dtype}. A scale is swept over floats. Convert it first, e.g. x.float().")
    if x.numel() == 0:
        raise ValueError(f"the tensor of shape {list(x.shape)} is empty. Give one with values.")
    x = x.detach().to("cpu")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        wide, x = x, x.to(torch.float32)
        if bool(x.isinf().any()) and bool(wide.isfinite().all()):
            raise ValueError("the tensor has values beyond float32, in which it is analysed. Scale it down first.")
    low, high = (float(end) for end in torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        nan, inf = int(x.isnan().sum()), int(x.isinf().sum())
        raise ValueError(f"the tensor has {nan} NaN and {inf} Inf among {x.numel()} values. Give finite ones.")
    if low == high == 0:
        raise ValueError(f"all {x.numel()} values of the tensor are zero, so that no scale matters. Give another.")
    return x


def max_aligned(amax: float, fmt: Format) -> int:
    """ceil(log2(amax / max)), exact: the smallest e with amax <= max * 2^e."""
    (fraction, exponent), (limit, highest) = math.frexp(amax), math.frexp(fmt.max)
    return int(exponent - highest + (fraction > limit))


def min_aligned(smallest: float, fmt: Format) -> int:
    """floor(log2(smallest / smallest subnormal)), exact: the largest e with smallest >= smallest subnormal * 2^e."""
    (fraction, exponent), (step, lowest) = math.frexp(smallest), math.frexp(fmt.min_subnormal)
    return int(exponent - lowest - (fraction < step))


def largest_exponent(scale_bits: int) -> int:
    """The largest exponent of a scale of `scale_bits` bits: 127 for E8M0, which has 8. The smallest is its negative."""
    if isinstance(scale_bits, bool) or not isinstance(scale_bits, int) or not 2 <= scale_bits <= 8:
        raise ValueError(f"scale_bits is {scale_bits!r}. Give a whole number from 2 to 8; E8M0 of OCP MX has 8.")
    return int(2 ** (scale_bits - 1)) - 1


@dataclass(frozen=True)
class Ends:
    """The first and the last exponent of a sweep, and maximum alignment, which is one of its levels if it can be."""

    first: float
    last: float
    aligned: int

    def exponents(self, count: int | None) -> list[float]:
        """`count` exponents, evenly spaced but for the whole numbers between the ends, which are all among them.

        Each takes the place of the nearest. With fewer levels than whole numbers, all but the ends are rounded, one of
        them to maximum alignment. None stands for USUAL_LEVELS, or for two in each octave if those are more.
        """
        octaves = abs(self.last - self.first)
        count = max(USUAL_LEVELS, math.ceil(2 * octaves) + 1) if count is None else count
        if count < 3 or not octaves:
            return [self.first] if count == 1 or not octaves else [self.first, self.last]
        step = (self.last - self.first) / (count - 1)
        found = [*(round(self.first + index * step, 12) for index in range(count - 1)), self.last]
        inside = range(math.floor(min(found)) + 1, math.ceil(max(found)))
        few = abs(step) > 1
        if few:
            found[1:-1] = map(float, map(round, found[1:-1]))
        for whole in inside:
            place = math.floor((whole - self.first) / step + 0.5)
            if few and whole == self.aligned:
                found[min(max(place, 1), count - 2)] = float(whole)
            elif not few and 0 < place < count - 1:
                found[place] = float(whole)
        return list(dict.fromkeys(found))

    def whole(self, count: int | None) -> list[int]:
        """At most `count` integers, evenly spaced but for their rounding, both ends among them; None: all."""
        return list(dict.fromkeys(map(round, self.exponents(count))))


def sweep_ends(
    max_scale_exp: float | None,
    min_scale_exp: float | None,
    aligned: tuple[int, int],
    *,
    scale_bits: int,
    beyond: int = BEYOND,
) -> Ends:
    """The ends that the caller gave, else min alignment and `beyond` octaves from max alignment, away from it.

    Where both alignments are the same exponent, the sweep ends one power of two below it. Ends that are not given are
    limited to what `scale_bits` can hold.
    """
    limit = largest_exponent(scale_bits)
    for name, end in (("max_scale_exp", max_scale_exp), ("min_scale_exp", min_scale_exp)):
        number = isinstance(end, int | float) and not isinstance(end, bool) and abs(end) <= limit
        if end is not None and not number:
            raise ValueError(
                f"{name} is {end!r}. A scale of {scale_bits} bits is 2^{-limit} to 2^{limit}: give a number from "
                f"{-limit} to {limit}."
            )
    first, last = float(aligned[0]), float(aligned[1] if min_scale_exp is None else min_scale_exp)
    if first == last and max_scale_exp is None and min_scale_exp is None:
        last = first - 1
    first = max_scale_exp if max_scale_exp is not None else first + (beyond if first >= last else -beyond)
    first, last = (float(max(-limit, min(limit, end))) for end in (first, last))
    return Ends(first, last, aligned[0])


def check_levels(num_levels: int | None) -> None:
    """Refuse a number of levels that is not a whole number from 1 to MOST_LEVELS, or None."""
    if num_levels is None:
        return
    if isinstance(num_levels, bool) or not isinstance(num_levels, int) or not 1 <= num_levels <= MOST_LEVELS:
        raise ValueError(f"num_levels is {num_levels!r}. Give a whole number from 1 to {MOST_LEVELS}; 21 is usual.")
