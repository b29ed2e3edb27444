"""From float64 to a narrower float with one rounding, which torch's own cast does not promise."""

import torch
from torch import Tensor

#: The dtypes `narrow` writes, and the ones every quantizer of plain integers reads.
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def require_tensor(x: object) -> None:
    """A TypeError for anything that is no tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x is a {type(x).__module__}.{type(x).__name__}, expected a torch.Tensor. Convert it: torch.as_tensor(x)."
        )


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The value of `dtype` nearest to each float64 of `x`, ties to even, saturating.

        float64, float32    y = cast(x)
        bfloat16, float16   y = cast(odd(x)),  odd = round-to-odd in float32
        then                y = clip(y, -max(dtype), max(dtype)) where x is finite

    torch casts float64 to bfloat16 and float16 through float32, so a value just beside a tie is first
    rounded onto the tie and then to the wrong side. Rounding to odd keeps the fact that something was
    cut off in the last bit of the float32; float32 has more than two bits to spare over either dtype
    (in its subnormal range too, whose step 2^-149 is 2^-16 of bfloat16's), so the second rounding is
    the only one.

    Finite values never become Inf. Inf stays Inf, NaN stays NaN, the sign of zero is kept. The result
    carries no gradient.
    """
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"cannot narrow to {dtype}. Give one of: {', '.join(map(str, FLOAT_DTYPES))}.")
    if x.dtype != torch.float64:
        raise ValueError(f"narrow takes float64, got {x.dtype}. Compute in float64, or cast with x.double().")
    wide = x.detach()
    single = wide if dtype in (torch.float64, torch.float32) else _to_odd_float32(wide)
    y = single.to(dtype)
    limit = torch.finfo(dtype).max
    return torch.where(wide.isinf(), y, y.clamp(-limit, limit))


def _to_odd_float32(x: Tensor) -> Tensor:
    """float64 to float32, toward zero, with the last bit set where anything was cut off.

    The bits of a float count up with its magnitude, so subtracting 1 from them is the next value toward
    zero: from Inf to the largest finite value, from the smallest subnormal to zero of the same sign.
    """
    nearest = x.to(torch.float32)
    past = nearest.double().abs() > x.abs()
    bits = nearest.view(torch.int32) - past.to(torch.int32)
    cut = bits.view(torch.float32).double() != x
    return torch.where(x.isfinite(), (bits | cut.to(torch.int32)).view(torch.float32), nearest)
