"""Tensors whose best scale is known, and comparison of levels."""

import math

import torch
from torch import Tensor

from probe import FORMATS, ScalingResult

FORMATS_OF_THE_SPEC = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def grid_of_the_format(name: str) -> Tensor:
    """Every number of the format but Inf and NaN."""
    fmt = FORMATS[name]
    values = [fmt.decode(code) for code in range(2**fmt.bits)]
    return torch.tensor([value for value in values if math.isfinite(value) and abs(value) <= fmt.max])


def log_uniform(low: float, high: float, count: int = 4096) -> Tensor:
    """2^u with u uniform, so that every octave has as many."""
    return torch.exp2(torch.linspace(low, high, count, dtype=torch.float64)).float()


def assert_same_levels(one: ScalingResult, other: ScalingResult, *, relative: float = 1e-11) -> None:
    """Counts and extremes to the bit, sums to their last digits."""
    assert len(one.levels) == len(other.levels)
    for a, b in zip(one.levels, other.levels, strict=True):
        for name, found in a.as_dict().items():
            expected = b.as_dict()[name]
            if isinstance(found, float) and isinstance(expected, float):
                assert abs(found - expected) <= relative * abs(expected), (a.scale_exponent, a.rule, name)
            else:
                assert found == expected, (a.scale_exponent, a.rule, name)
