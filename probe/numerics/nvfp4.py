"""nvfp4: fp4_e2m1 elements, an e4m3 scale per block of 16, a float32 scale per tensor."""

from collections.abc import Callable

import torch
from torch import Tensor

from probe.formats import FORMATS, Format

RoundElements = Callable[[Tensor, Format, str, Tensor | None], Tensor]

#: Block scales are e4m3 numbers and never zero, so that nothing is divided by zero.
SMALLEST_SCALE = FORMATS["fp8_e4m3"].min_subnormal


def tensor_scale_of(x: Tensor) -> Tensor:
    """The second-level scale taken from a tensor: amax / (448 * 6) in float32, over its finite values.

    The largest block then gets the largest e4m3 scale. Kept where 448 times it is finite and it is a
    normal float32; 1 for a tensor without a finite non-zero value.
    """
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x)).to(torch.float64)
    amax = finite.abs().amax() if x.numel() else torch.zeros((), dtype=torch.float64, device=x.device)
    limits = torch.finfo(torch.float32)
    largest_scale = FORMATS["fp8_e4m3"].max
    scale = amax / (largest_scale * FORMATS["nvfp4"].max)
    scale = scale.clamp(limits.tiny, limits.max / (2 * largest_scale))
    return torch.where(amax > 0, scale, torch.ones_like(scale)).to(torch.float32)


def nvfp4_blocks(
    x: Tensor,
    tensor_scale: Tensor,
    fmt: Format,
    rounding: str,
    noise: Tensor | None,
    round_elements: RoundElements,
) -> tuple[Tensor, Tensor]:
    """(elements, block scales) of rows, both float64.

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
    block_scale = round_elements(wanted, FORMATS["fp8_e4m3"], "half_even", None).clamp(min=SMALLEST_SCALE)
    elements = round_elements(x / combined_scale(block_scale, tensor_scale), fmt, rounding, noise)
    return elements, torch.where(finite, block_scale, torch.nan)


def combined_scale(block_scale: Tensor, tensor_scale: Tensor) -> Tensor:
    """float32(block scale * tensor scale), the one factor that elements are divided and multiplied by."""
    return (block_scale.to(torch.float32) * tensor_scale).to(torch.float64)
