"""Inputs that have broken quantizers before, and comparison by bits."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from probe.numerics.codes import Quantized
from probe.numerics.integers import IntegerParameters

#: The implementations that every promise is tested with: the definition, torch's operations, the kernel (the default).
Twin = Literal["reference", "torch", "auto"]
TWINS = pytest.mark.parametrize("implementation", ["reference", "torch", "auto"], ids=["reference", "torch", "kernel"])
#: Those of `round_to`, which has no kernel.
Rounder = Literal["reference", "torch"]
ROUNDERS = pytest.mark.parametrize("implementation", ["reference", "torch"])

KINDS = pytest.mark.parametrize("symmetric", [True, False], ids=("symmetric", "asymmetric"))

MX = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "mxint8")
ROUNDINGS = ("half_even", "half_away", "toward_zero", "floor", "stochastic")
RULES = ("floor", "ceil", "even", "rceil", "mse")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}


def every(dtype: torch.dtype) -> Tensor:
    """All 65536 values of a 16-bit dtype, NaN and Inf among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def adversarial_blocks(count: int = 512, size: int = 32, seed: int = 0) -> Tensor:
    """float32 rows: raw bits, exponent sweeps, next to powers of two, subnormals, ties, zeros of both signs."""
    g = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, shape: tuple[int, ...] = (count, size)) -> Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=torch.int64)

    def floats(bits: Tensor) -> Tensor:
        return bits.to(torch.int32).view(torch.float32)

    sign = torch.where(integers(0, 2) == 0, -1.0, 1.0)
    raw = floats(integers(-(2**31), 2**31))
    exponent = (integers(1, 255, (count, 1)) - integers(0, 14)).clamp(min=0)
    swept = floats(exponent << 23 | integers(0, 2**23)) * sign
    beside = floats((exponent.clamp(min=1) << 23) + integers(-2, 3)) * sign
    subnormal = floats(integers(0, 2**23)) * sign
    mantissa = integers(0, 2**7) << 16  # few bits: full of ties on every grid
    ties = floats((integers(120, 134) << 23) | mantissa) * sign
    zeros = torch.where(integers(0, 4) == 0, floats(integers(0, 3)), torch.tensor(-0.0))
    one_inf = ties.clone()
    one_inf[::2, 3] = torch.inf
    one_inf[1::2, -1] = torch.nan
    rows = torch.cat([raw, swept, beside, subnormal, ties, zeros, one_inf])
    return rows.contiguous()


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Element by element: the same bits, or both NaN."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    word = WORDS.get(a.dtype, torch.int16)
    return (a.contiguous().view(word) == b.contiguous().view(word)) | (a.isnan() & b.isnan())


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    same = same_bits(a, b)
    if not bool(same.all()):
        where = tuple(int(i) for i in (~same).nonzero()[0])
        raise AssertionError(
            f"{int((~same).sum())} of {same.numel()} differ, first at {where}: {a[where]} and {b[where]}"
        )


def scales_of(quantized: Quantized) -> Tensor:
    """The scales of a format that has some."""
    assert quantized.scales is not None
    return quantized.scales


def given_parameters(scale: float, zero_point: int = 0, bits: int = 8, symmetric: bool = True) -> IntegerParameters:
    return IntegerParameters(torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), bits, symmetric)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)
