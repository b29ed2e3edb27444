"""Rounding to integers, by name. Every grid of the project is integers times a step."""

from collections.abc import Callable

import torch
from torch import Tensor

from probe.words import look_up

Rounding = Callable[[Tensor, Tensor | None], Tensor]


def _half_even(x: Tensor, noise: Tensor | None) -> Tensor:
    return torch.round(x)


def _half_away(x: Tensor, noise: Tensor | None) -> Tensor:
    whole = torch.trunc(x)
    away = (x - whole).abs() >= 0.5
    return whole + torch.where(away, torch.copysign(torch.ones_like(x), x), torch.zeros_like(x))


def _toward_zero(x: Tensor, noise: Tensor | None) -> Tensor:
    return torch.trunc(x)


def _floor(x: Tensor, noise: Tensor | None) -> Tensor:
    return torch.floor(x)


def _stochastic(x: Tensor, noise: Tensor | None) -> Tensor:
    assert noise is not None
    whole = torch.trunc(x)
    away = noise < (x - whole).abs()
    return whole + torch.where(away, torch.copysign(torch.ones_like(x), x), torch.zeros_like(x))


#: name -> function(x, noise); a new rounding is a new row here and in `fast.py`.
ROUNDINGS: dict[str, Rounding] = {
    "half_even": _half_even,  # nearest, ties to the even integer (IEEE, the default everywhere)
    "half_away": _half_away,  # nearest, ties away from zero (Quamba's CUDA kernels, microxcaling's default)
    "toward_zero": _toward_zero,
    "floor": _floor,  # toward minus infinity
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


def draw_noise(x: Tensor, rounding: str, generator: torch.Generator | None) -> Tensor | None:
    """The random numbers that one stochastic rounding of `x` uses, None for the other roundings.

    One float32 per element, drawn at once in the order of `x`, so that reference and fast twin given
    generators of the same seed round the same way. Never 0: a value that float32 arithmetic flushes to
    zero (below 2^-126 of a step) is then not rounded up either.
    """
    check_rounding(rounding, generator)
    if generator is None:
        return None
    noise = torch.rand(x.shape, generator=generator, dtype=torch.float32, device=generator.device)
    return noise.clamp_(min=2.0**-25).to(x.device)
