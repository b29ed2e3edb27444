"""Rounding to integers, by name (every grid is integers times a step), and from float64 to narrower floats."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from probe.words import look_up

#: The dtypes `narrow` writes, and the ones every quantizer of plain integers reads.
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Rounding = Callable[[Tensor, Tensor | None], Tensor]


def _away_where(away: Tensor, x: Tensor) -> Tensor:
    """Away from zero where `away`, else toward zero."""
    return torch.trunc(x) + torch.where(away, torch.copysign(torch.ones_like(x), x), torch.zeros_like(x))


def _half_away(x: Tensor, noise: Tensor | None) -> Tensor:
    return _away_where((x - torch.trunc(x)).abs() >= 0.5, x)


def _stochastic(x: Tensor, noise: Tensor | None) -> Tensor:
    assert noise is not None
    return _away_where(noise < (x - torch.trunc(x)).abs(), x)


#: name -> function(x, noise); a new rounding is a new row here and in `fast.py`.
ROUNDINGS: dict[str, Rounding] = {
    "half_even": lambda x, noise: torch.round(x),  # nearest, ties to the even integer (IEEE, the default everywhere)
    "half_away": _half_away,  # nearest, ties away from zero (Quamba's CUDA kernels, microxcaling's default)
    "toward_zero": lambda x, noise: torch.trunc(x),
    "floor": lambda x, noise: torch.floor(x),  # toward minus infinity
    "stochastic": _stochastic,  # away from zero with probability |x| - trunc|x|; needs a generator
}


def round_integer(x: Tensor, rounding: str = "half_even", noise: Tensor | None = None) -> Tensor:
    """Round to integers in the dtype of `x`; `noise` is uniform in [0, 1), for `stochastic` only."""
    return look_up("rounding", rounding, ROUNDINGS)(x, noise)


def check_rounding(rounding: str, generator: torch.Generator | None) -> None:
    """Refuse an unknown rounding, randomness without a generator, and a generator without randomness."""
    look_up("rounding", rounding, ROUNDINGS)
    if rounding != "stochastic" and generator is not None:
        raise ValueError(
            f"a generator was given, but rounding {rounding!r} is not random. "
            "Leave generator out, or ask for rounding='stochastic'."
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator is a {type(generator).__name__}, expected a torch.Generator.")
    if rounding == "stochastic" and generator is None:
        raise ValueError(
            "rounding 'stochastic' draws random numbers and no generator was given. "
            "Pass generator=torch.Generator().manual_seed(SEED), so that the result can be repeated."
        )


def draw_noise(
    shape: Sequence[int], device: torch.device, rounding: str, generator: torch.Generator | None
) -> Tensor | None:
    """The random numbers that one stochastic rounding of a tensor uses, None for the other roundings.

    One float32 per element, drawn at once in their order, so that the reference and the fast twins round the
    same way with generators of the same seed. Never 0, so that a value that float32 arithmetic flushes to zero
    (below 2^-126 of a step) is not rounded up.
    """
    check_rounding(rounding, generator)
    if generator is None:
        return None
    noise = torch.rand(shape, generator=generator, dtype=torch.float32, device=generator.device)
    return noise.clamp_(min=2.0**-25).to(device)


def require_tensor(x: object) -> None:
    """A TypeError for anything that is not a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x is a {type(x).__module__}.{type(x).__name__}, expected a torch.Tensor. Convert it: torch.as_tensor(x)."
        )


def require_float(x: Tensor, taker: str) -> None:
    """An error for anything that is not a tensor of FLOAT_DTYPES; `taker`, in the message, accepts only these."""
    require_tensor(x)
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"x is {x.dtype}. {taker} take {', '.join(map(str, FLOAT_DTYPES))}. Convert first, e.g. x.float()."
        )


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The value of `dtype` nearest to each float64 of `x`, ties to even, saturating.

        float64, float32    y = cast(x)
        bfloat16, float16   y = cast(odd(x)),  odd = round-to-odd in float32
        then                y = clip(y, -max(dtype), max(dtype)) where x is finite

    torch casts float64 to bfloat16 and float16 through float32, so a value just beside a tie is first rounded onto
    the tie and then to the wrong side. Rounding to odd sets the last bit of the float32 where anything was cut off.
    float32 has more than two bits more than either dtype (in its subnormal range too, whose step 2^-149 is 2^-16 of
    bfloat16's), so the cast is the only rounding.

    Finite values never become Inf. Inf stays Inf, NaN stays NaN, the sign of zero is kept. The result has no gradient.
    """
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"cannot narrow to {dtype}. Give one of: {', '.join(map(str, FLOAT_DTYPES))}.")
    if x.dtype != torch.float64:
        raise ValueError(f"narrow takes float64, got {x.dtype}. Compute in float64, or cast with x.double().")
    wide = x.detach()
    y = (wide if dtype in (torch.float64, torch.float32) else _to_odd_float32(wide)).to(dtype)
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
