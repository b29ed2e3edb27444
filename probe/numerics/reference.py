"""The definition of block quantization, MX and nvfp4, in a few lines of float64 arithmetic that read as the formulas.

Tests check that the fast twin, `fast.py`, gives the same bits. Scaling by powers of two is exact in float64 and a
float32 input has 24 bits, so the rounding to an integer is the only rounding here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from probe.formats import FORMATS, Format
from probe.numerics.blocks import tree_sum
from probe.numerics.rounding import round_integer

NAN_BYTE = 255
BYTE_BIAS = 127
#: Block scales of nvfp4 are e4m3 numbers and never zero, so that nothing is divided by zero.
SMALLEST_BLOCK_SCALE = FORMATS["fp8_e4m3"].min_subnormal

RoundElements = Callable[[Tensor, Format, str, Tensor | None], Tensor]


def exponent_of(x: Tensor) -> Tensor:
    """floor(log2 |x|) from the representation, never from a logarithm; of zero: 0."""
    return torch.frexp(x).exponent.to(torch.int64) - (x != 0).to(torch.int64)


def power(exponent: Tensor) -> Tensor:
    """2^exponent in float64."""
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64, device=exponent.device), exponent)


def round_elements(y: Tensor, fmt: Format, rounding: str, noise: Tensor | None) -> Tensor:
    """The value of the element grid for `y`, saturating at +-max. NaN stays NaN.

        e    = max(floor(log2 |y|), min_exponent)
        step = 2^(e - mantissa_bits)
        q    = clip(step * round(y / step), -max, max)

    A format with Inf and no scale (bf16, fp16) overflows as IEEE says: to Inf where the rounding goes
    away from zero, to max where it goes toward zero.
    """
    y = y.to(torch.float64)
    ceiling = 4 * fmt.max
    bounded = y.clamp(-ceiling, ceiling)
    step = power(exponent_of(bounded).clamp(min=fmt.min_exponent) - fmt.mantissa_bits)
    q = step * round_integer(bounded / step, rounding, noise)
    limit = torch.full_like(y, fmt.max)
    if overflows_to_infinity(fmt):
        inward = torch.tensor(rounding == "toward_zero") | ((y > 0) & (rounding == "floor"))
        limit = torch.where(inward & y.isfinite(), limit, torch.inf)
    q = torch.where(q.abs() > fmt.max, torch.copysign(limit, y), q)
    return signed_zero(q, y, fmt)


def overflows_to_infinity(fmt: Format) -> bool:
    """Formats without a scale are casts and follow IEEE; every scaled format saturates."""
    return fmt.scale is None and fmt.specials == "ieee"


def signed_zero(q: Tensor, y: Tensor, fmt: Format) -> Tensor:
    """Zeros take the sign of `y`, except on integer grids, which have no code for -0."""
    zero = torch.zeros_like(y) if fmt.is_integer else torch.copysign(torch.zeros_like(y), y)
    return torch.where(q == 0, zero, q)


def scale_exponent(amax: Tensor, fmt: Format, rule: str) -> Tensor:
    """The exponent of the shared scale for blocks whose largest magnitude is amax = F * 2^E, 1 <= F < 2.

        floor   E - max_exponent                                     OCP MX v1.0; may saturate
        ceil    ceil(log2 amax) - max_exponent                       never saturates
        even    floor(log2(amax rounded to mantissa_bits)) - max_exponent
        rceil   the smallest e with amax <= max * 2^e                ceil of the exact ratio
        mse     see `mx_blocks`; starts from floor

    clamped to -127 .. 127; amax = 0 gives -127.
    """
    e = exponent_of(amax)
    fraction = amax / power(e)
    carry = {
        "floor": fraction >= 2,
        "mse": fraction >= 2,
        "ceil": fraction > 1,
        "even": torch.floor(fraction * 2**fmt.mantissa_bits + 0.5) >= 2 ** (fmt.mantissa_bits + 1),
        "rceil": fraction > fmt.max / 2.0**fmt.max_exponent,
    }[rule]
    exponent = (e + carry.to(e.dtype) - fmt.max_exponent).clamp(-BYTE_BIAS, BYTE_BIAS)
    return torch.where(amax == 0, -BYTE_BIAS, exponent)


def mx_blocks(x: Tensor, fmt: Format, rule: str, rounding: str, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize rows of one block each: (elements, scale bytes).

        value = 2^(byte - 127) * element,   element = round_elements(x / 2^(byte - 127))

    A NaN or Inf makes its whole block NaN: elements 0 and scale byte 255. Rule `mse` chooses among the floor exponent,
    the one above and the one below: the first with the smallest sum of squared errors.
    """
    x = x.to(torch.float64)
    amax = x.abs().amax(-1, keepdim=True)
    finite = amax.isfinite()
    x = torch.where(finite, x, torch.zeros_like(x))
    first = scale_exponent(torch.where(finite, amax, torch.zeros_like(amax)), fmt, rule)
    shifts = torch.tensor([0, 1, -1] if rule == "mse" else [0], device=x.device)[:, None, None]
    exponents = (first + shifts).clamp(-BYTE_BIAS, BYTE_BIAS)
    elements = round_elements(x / power(exponents), fmt, rounding, noise)
    errors = tree_sum((x / power(first) - elements * power(exponents - first)) ** 2)
    best = errors.argmin(0, keepdim=True)  # the first of equals
    exponent, elements = (torch.take_along_dim(tried, best, 0)[0] for tried in (exponents, elements))
    return elements, torch.where(finite, exponent + BYTE_BIAS, NAN_BYTE)


def tensor_scale_of(x: Tensor) -> Tensor:
    """The second scale of nvfp4 for a tensor: amax / (448 * 6) in float32, over its finite values.

    The largest block then gets the largest e4m3 scale. Clamped to normal float32 numbers of which 448 times is still
    finite; 1 for a tensor without a finite non-zero value.
    """
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x)).to(torch.float64)
    amax = finite.abs().amax() if x.numel() else torch.zeros((), dtype=torch.float64, device=x.device)
    limits = torch.finfo(torch.float32)
    largest_scale = FORMATS["fp8_e4m3"].max
    scale = amax / (largest_scale * FORMATS["nvfp4"].max)
    scale = scale.clamp(limits.tiny, limits.max / (2 * largest_scale))
    return torch.where(amax > 0, scale, torch.ones_like(scale)).to(torch.float32)


def nvfp4_blocks(
    x: Tensor, tensor_scale: Tensor, fmt: Format, rounding: str, noise: Tensor | None, rounder: RoundElements
) -> tuple[Tensor, Tensor]:
    """(elements, block scales) of rows for nvfp4, both float64, with `round_elements` of either twin as `rounder`.

        block scale = e4m3(amax / 6 / tensor_scale), nearest even, from 2^-9 to 448
        element     = e2m1(x / float32(block scale * tensor_scale))

    Quotients are taken in float64: with operands of 24 bits no quotient that is not a tie becomes one.
    A NaN or Inf makes its whole block NaN (scale code 0x7f).
    """
    x = x.to(torch.float64)
    amax = x.abs().amax(-1, keepdim=True)
    finite = amax.isfinite()
    x = torch.where(finite, x, 0.0)
    wanted = torch.where(finite, amax, 0.0) / (fmt.max * tensor_scale.to(torch.float64))
    block_scale = rounder(wanted, FORMATS["fp8_e4m3"], "half_even", None).clamp(min=SMALLEST_BLOCK_SCALE)
    elements = rounder(x / combined_scale(block_scale, tensor_scale), fmt, rounding, noise)
    return elements, torch.where(finite, block_scale, torch.nan)


def combined_scale(block_scale: Tensor, tensor_scale: Tensor) -> Tensor:
    """float32(block scale * tensor scale), the factor that elements are divided and multiplied by."""
    return (block_scale.to(torch.float32) * tensor_scale).to(torch.float64)
