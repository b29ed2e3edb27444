"""The twin of `reference.py` in torch operations: the same bits from multiplications, additions and integer operations.

No log2, frexp or ldexp. Scales are built as exponent fields with integer operations, multiplying by them is exact, and
rounding is one addition and one subtraction: for y >= 0 with exponent e,

    magic = 2^(e - mantissa_bits + M)        M = 23 for float32, 52 for float64
    q     = (y + magic) - magic              nearest multiple of 2^(e - mantissa_bits), ties to even

because y + magic lies in [magic, 2 magic), where the spacing of floats is that step. The constant comes from the
exponent bits of y, clamped from below at the smallest normal exponent of the format.

The functions take and return rows of one block each. They run one by one, or through torch.compile (`compiled.py`). The
kernels of the CPU (`kernels/`) do the same arithmetic.
"""

import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from probe.formats import FORMATS, Format
from probe.numerics.blocks import tree_sum
from probe.numerics.reference import BYTE_BIAS, NAN_BYTE, overflows_to_infinity

#: Elements per piece of work, so that its temporaries stay in the cache.
CHUNK = 2**18


@cache
def _constant(value: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def _scalar(value: int, dtype: torch.dtype) -> Tensor | int:
    """A number for an operation that is not traced: torch takes a ready 0-d tensor 4 us faster than an int."""
    return value if torch.compiler.is_compiling() else _constant(value, dtype)


@dataclass(frozen=True)
class Machine:
    """The floats that the arithmetic is done in, as bits."""

    dtype: torch.dtype
    integer: torch.dtype
    mantissa_bits: int
    bias: int
    exponent_mask: int  # the bits of the exponent field; as a number it is +Inf
    sign_mask: int  # the sign bit, as the negative integer that it is
    packing: tuple[str, str]

    def exponents_of(self, x: Tensor) -> Tensor:
        """The exponent fields of `x`, in place in new integers."""
        return x.view(self.integer) & _scalar(self.exponent_mask, self.integer)

    def signs_of(self, x: Tensor) -> Tensor:
        """The sign bits of `x`, in place in new integers."""
        return x.view(self.integer) & _scalar(self.sign_mask, self.integer)

    def bits(self, value: float) -> int:
        """The bits of one number."""
        as_float, as_integer = self.packing
        return int(struct.unpack(as_integer, struct.pack(as_float, value))[0])


FLOAT32 = Machine(torch.float32, torch.int32, 23, 127, 0xFF << 23, -(1 << 31), ("<f", "<i"))
FLOAT64 = Machine(torch.float64, torch.int64, 52, 1023, 0x7FF << 52, -(1 << 63), ("<d", "<q"))


@dataclass(frozen=True, eq=False)
class Plan:
    """The constants of one format, machine and scale rule.

    Every rule but mse gives the exponent of amax = F * 2^E, plus one if F is above a threshold. Adding `carry` (all
    mantissa bits less the threshold) to the bits of amax carries into the exponent field exactly then. `still_zero` is
    the largest amax, in bits, that keeps scale byte 0: below it, the mantissa field of a subnormal amax is not its F.
    It matters only for a format with max_exponent 0.
    """

    format: Format
    machine: Machine
    rule: str
    carry: int
    still_zero: int | None
    max_exponent: int
    min_exponent: int
    magic: float  # times 2^e: the constant of the rounding; a power of two, so that the product is exact
    max: int
    scale_range: tuple[int, int]  # the bits of the smallest and the largest scale, 2^-127 and 2^127

    @classmethod
    def of(cls, fmt: Format, machine: Machine, rule: str) -> "Plan":
        """The plan; mse starts from floor."""
        ones = (1 << machine.mantissa_bits) - 1
        last = {
            "ceil": 1.0,
            "rceil": fmt.max / 2.0**fmt.max_exponent,
            "even": 2.0 - 2.0 ** -(fmt.mantissa_bits + 1) - 2.0**-machine.mantissa_bits,
        }.get(rule, 2.0 - 2.0**-machine.mantissa_bits)
        carry = ones - (machine.bits(last) & ones)
        return cls(
            fmt,
            machine,
            rule,
            carry,
            machine.bits(last * 2.0**-BYTE_BIAS) if carry and fmt.max_exponent == 0 and machine is FLOAT32 else None,
            fmt.max_exponent << machine.mantissa_bits,
            (fmt.min_exponent + machine.bias) << machine.mantissa_bits,
            2.0 ** (machine.mantissa_bits - fmt.mantissa_bits),
            machine.bits(fmt.max),
            (machine.bits(2.0**-BYTE_BIAS), machine.bits(2.0**BYTE_BIAS)),
        )


#: By format, float64 or not, and rule; made on import, so that a compiler that traces a caller sees constants.
PLANS: dict[tuple[str, bool, str], Plan] = {
    (fmt.name, machine is FLOAT64, rule): Plan.of(fmt, machine, rule)
    for fmt in FORMATS.values()
    for machine in (FLOAT32, FLOAT64)
    for rule in ("floor", "ceil", "even", "rceil", "mse")
    if machine is FLOAT64 or fmt.scale == "e8m0"
}


def plan_for(fmt: Format, dtype: torch.dtype, rule: str) -> Plan:
    """The plan of a format for tensors of `dtype`: float64 computes in float64, all narrower dtypes in float32."""
    return PLANS[fmt.name, dtype == torch.float64, rule]


def round_magnitudes_(y: Tensor, x: Tensor, plan: Plan, rounding: str, noise: Tensor | None) -> Tensor:
    """Grid magnitudes, not yet saturated, for y = |x| / scale; overwrites y.

    `x` gives the sign for `floor`, and stands in for a y that underflowed to zero.
    """
    machine = plan.machine
    power = machine.exponents_of(y).clamp_min_(plan.min_exponent).view(machine.dtype)  # 2^e
    if rounding == "half_even":
        return y.add_(power, alpha=plan.magic).sub_(power, alpha=plan.magic)
    nearest = torch.add(y, power, alpha=plan.magic).sub_(power, alpha=plan.magic)
    step = power * 2.0**-plan.format.mantissa_bits
    if rounding == "half_away":
        return torch.where(y - nearest == step * 0.5, nearest + step, nearest)
    inward = torch.where(nearest > y, nearest - step, nearest)
    if rounding == "toward_zero":
        return inward
    if rounding == "floor":
        outward = (x < 0) & ((inward < y) | (y == 0))
    else:
        assert noise is not None
        outward = noise < (y - inward) / step
    return torch.where(outward, inward + step, inward)


def with_sign_(magnitude: Tensor, x: Tensor, plan: Plan) -> Tensor:
    """Magnitudes with the sign of `x`, in place; integer grids have no -0."""
    sign = plan.machine.signs_of(x)
    if plan.format.is_integer:
        sign = torch.where(magnitude == 0, 0, sign)
    magnitude.view(plan.machine.integer).bitwise_or_(sign)
    return magnitude


def round_elements(y: Tensor, fmt: Format, rounding: str, noise: Tensor | None) -> Tensor:
    """The twin of `reference.round_elements`, in float64."""
    y = y.to(torch.float64)
    bounded = y.abs().clamp_max_(4 * fmt.max)
    plan = plan_for(fmt, torch.float64, "floor")
    magnitude = round_magnitudes_(bounded, y, plan, rounding, noise)
    over = magnitude > fmt.max
    magnitude = magnitude.clamp_max(fmt.max)
    if overflows_to_infinity(fmt):
        if rounding == "toward_zero":
            over = y.isinf()
        elif rounding == "floor":
            over = over & ((y < 0) | y.isinf())
        magnitude = torch.where(over, torch.inf, magnitude)
    return with_sign_(magnitude, y, plan)


def scales_for(amax: Tensor, plan: Plan) -> Tensor:
    """The shared scales, powers of two from 2^-127 (a float32 subnormal) to 2^127."""
    machine = plan.machine
    if plan.carry:
        bits = amax.view(machine.integer)
        if plan.still_zero is not None:
            bits = torch.where(bits > plan.still_zero, bits, 0)
        amax = (bits + plan.carry).view(machine.dtype)
    bits = machine.exponents_of(amax).sub_(plan.max_exponent)
    return bits.clamp_(*plan.scale_range).view(machine.dtype)


def _saturated_(y: Tensor, x: Tensor, plan: Plan, rounding: str, noise: Tensor | None) -> Tensor:
    """Rounded magnitudes, saturated by an integer minimum: positive floats are in the order of their bits."""
    if plan.machine is FLOAT64:
        y = y.clamp_max_(4 * plan.format.max)  # a float64 block may be far above the largest scale
    magnitude = round_magnitudes_(y, x, plan, rounding, noise)
    magnitude.view(plan.machine.integer).clamp_max_(plan.max)
    return magnitude


def mx_elements(
    x: Tensor, plan: Plan, rounding: str, noise: Tensor | None, buffer: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(signed elements, scales, amax) of rows in the machine dtype of the plan; `buffer` may be overwritten."""
    magnitude = torch.abs(x, out=buffer)
    amax = magnitude.amax(-1, keepdim=True)
    scale = scales_for(amax, plan)
    if plan.rule == "mse":
        element, scale = _least_squares(x, magnitude, scale, plan, rounding, noise)
        return with_sign_(element, x, plan), scale, amax
    inverse = scale.reciprocal()  # exact
    if plan.format.is_integer and rounding == "half_even":
        return _nearest_integers_(torch.mul(x, inverse, out=magnitude), plan), scale, amax
    element = _saturated_(magnitude.mul_(inverse), x, plan, rounding, noise)
    return with_sign_(element, x, plan), scale, amax


def _nearest_integers_(y: Tensor, plan: Plan) -> Tensor:
    """One step for all magnitudes, so one constant: 1.5 * 2^M steps, which also takes negative y, and gives no -0."""
    magic = 1.5 * 2.0 ** (plan.machine.mantissa_bits - plan.format.mantissa_bits)
    limit = plan.format.max
    return y.clamp_(-2 * limit, 2 * limit).add_(magic).sub_(magic).clamp_(-limit, limit)


def _least_squares(
    x: Tensor, magnitude: Tensor, first: Tensor, plan: Plan, rounding: str, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(magnitudes, scales): of the floor scale, twice that and half of it, the first with the least squared error.

    Errors are in float64 and in units of the floor scale, as in the reference: a float32 difference loses the small
    part of a value rounded up to a step, and a float32 quotient may underflow.
    """
    smallest, largest = 2.0**-BYTE_BIAS, 2.0**BYTE_BIAS
    best, best_scale, least = magnitude, first, None
    exact = magnitude.to(torch.float64) * first.to(torch.float64).reciprocal()
    for factor in (1.0, 2.0, 0.5):
        scale = (first * factor).clamp_(smallest, largest)
        element = _saturated_(magnitude * scale.reciprocal(), x, plan, rounding, noise)
        difference = exact - element.to(torch.float64) * (scale * first.reciprocal())
        error = tree_sum(difference * difference)
        if least is None:
            best, best_scale, least = element, scale, error
            continue
        better = error < least
        best, best_scale = torch.where(better, element, best), torch.where(better, scale, best_scale)
        least = torch.where(better, error, least)
    return best, best_scale


def mx_values(x: Tensor, plan: Plan, rounding: str, noise: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Quantize and dequantize rows of any float dtype; the values in that dtype, in `out` if it is given."""
    buffer = out if out is not None and out.dtype == plan.machine.dtype else None
    wide = x if x.dtype == plan.machine.dtype else x.to(plan.machine.dtype)
    elements, scale, amax = mx_elements(wide, plan, rounding, noise, buffer)
    # amax - amax is 0, or NaN where the block has a NaN or Inf: its scale, and so all of it, is NaN.
    values = elements.mul_(scale.add_(amax.sub_(amax)))
    if plan.rule != "floor":  # only a scale above floor's can carry 2^128 (2^16 in float16) to Inf
        limit = torch.finfo(x.dtype).max
        values = values.clamp_(-limit, limit)
    if out is None:
        return values.to(x.dtype)
    return out if values is out else out.copy_(values)


def mx_blocks(x: Tensor, plan: Plan, rounding: str, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """(elements, scale bytes) of rows, for codes."""
    machine = plan.machine
    elements, scale, amax = mx_elements(x.to(machine.dtype), plan, rounding, noise)
    bytes_ = (scale.view(machine.integer) >> machine.mantissa_bits) - (machine.bias - BYTE_BIAS)
    finite = amax.isfinite()
    return torch.where(finite, elements, 0.0), torch.where(finite, bytes_, NAN_BYTE)


def fake_quantize_rows(x: Tensor, out: Tensor, plan: Plan, rounding: str, noise: Tensor | None) -> None:
    """`mx_values` into `out`, in pieces that stay in the cache.

    Inference mode spares temporaries their autograd bookkeeping (15 % of a small call); `out` stays an ordinary tensor.
    """
    rows = max(1, CHUNK // x.shape[-1])
    with torch.inference_mode():
        if x.shape[0] <= rows:
            mx_values(x, plan, rounding, noise, out)
            return
        for start in range(0, x.shape[0], rows):
            piece = slice(start, start + rows)
            mx_values(x[piece], plan, rounding, None if noise is None else noise[piece], out[piece])
