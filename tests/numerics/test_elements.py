"""Rounding to the element grids, without a scale: exhaustive over the 16-bit dtypes."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from probe import FORMATS, round_to
from tests.numerics.tensors import ROUNDERS, Rounder, adversarial_blocks, assert_same_bits, every
from tests.test_formats import ML_DTYPES

FLOATS = tuple(ML_DTYPES)
ELEMENTS = (*FLOATS, "mxint8")
INPUTS = pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=["every_bf16", "every_fp16"])
ROUNDINGS = ("half_even", "half_away", "toward_zero", "floor")


def exact(x: npt.NDArray[np.float64], name: str, rounding: str) -> npt.NDArray[np.float64]:
    """Rounding by comparing rationals: twice the input with the sum of its neighbours on the grid.

    Grid values have at most 11 bits within 2^5 binades of each other where they are neighbours, so their sum
    and 2x are exact in float64, and so is every comparison. Shares nothing with the quantizers but the grid.
    """
    fmt = FORMATS[name]
    codes = range(2 ** (fmt.bits - 1))
    grid = np.array([fmt.decode(code) for code in codes])
    grid = grid[np.isfinite(grid)]
    above_max = 2.0 ** (fmt.max_exponent + 1) if fmt.scale is None else np.inf
    a = np.abs(x)
    low = np.searchsorted(grid, a, side="right") - 1
    high = np.minimum(low + (grid[low] != a), len(grid))
    below, above = grid[low], np.append(grid, above_max)[high]
    twice, middle = 2 * a, below + above
    up = {
        "half_even": (twice > middle) | ((twice == middle) & (low % 2 == 1)),
        "half_away": twice >= middle,
        "toward_zero": np.zeros_like(a, dtype=bool),
        "floor": x < 0,
    }[rounding]
    magnitude = np.where(up & (below != a), above, below)
    if fmt.scale is None:  # an IEEE cast: beyond the largest number is Inf, unless rounded toward zero
        magnitude = np.where(magnitude > fmt.max, np.inf, magnitude)
        magnitude = np.where(np.isinf(a), np.inf, magnitude)
    else:
        magnitude = np.minimum(magnitude, fmt.max)
    magnitude = np.where(np.isnan(x), np.nan, magnitude)
    signed: npt.NDArray[np.float64] = np.copysign(magnitude, x)
    return np.where(magnitude == 0, 0.0, signed) if fmt.is_integer else signed


@ROUNDERS
@INPUTS
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_16_bit_input_rounds_as_exact_rationals_do(
    name: str, rounding: str, source: torch.dtype, implementation: Rounder
) -> None:
    x = every(source).double()
    ours = round_to(x, name, rounding=rounding, implementation=implementation)
    assert_same_bits(ours, torch.from_numpy(exact(x.numpy(), name, rounding)))


@ROUNDERS
@INPUTS
@pytest.mark.parametrize("name", FLOATS)
def test_every_16_bit_input_in_range_rounds_as_ml_dtypes_does(
    name: str, source: torch.dtype, implementation: Rounder
) -> None:
    x = every(source).float()
    x = x[x.abs() <= FORMATS[name].max]  # beyond, ml_dtypes sends e4m3 to NaN where the quantizers saturate
    ours = round_to(x, name, implementation=implementation)
    theirs = x.numpy().astype(ML_DTYPES[name]).astype(np.float32)
    assert_same_bits(ours, torch.from_numpy(theirs))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_fast_rounding_equals_the_reference_on_hostile_float32(name: str, rounding: str) -> None:
    x = adversarial_blocks()
    for wide in (x, x.double(), x.double() * 2.0**300, x.double() * 2.0**-300):
        fast = round_to(wide, name, rounding=rounding, implementation="torch")
        assert_same_bits(fast, round_to(wide, name, rounding=rounding, implementation="reference"))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_casts_equal_those_of_torch(name: str) -> None:
    x = adversarial_blocks()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    assert_same_bits(round_to(x, name), x.to(dtype).float())


def test_float64_is_cast_without_double_rounding() -> None:
    just_above_a_tie = 1 + 2.0**-8 + 2.0**-40  # a float32 in between would be the tie, and go down to 1
    x = torch.tensor([just_above_a_tie], dtype=torch.float64)
    assert round_to(x, "bf16").item() == 1 + 2.0**-7
    assert x.float().bfloat16().item() == 1.0
    assert float(np.float64(just_above_a_tie).astype(ml_dtypes.bfloat16)) in (1.0, 1 + 2.0**-7)


@ROUNDERS
def test_stochastic_rounding_is_unbiased_and_repeatable(implementation: Rounder) -> None:
    x = torch.full((200_000,), 1.0 + 0.3 / 8)  # fp8_e4m3: 0.3 of the way from 1 to 1.125
    generator = torch.Generator().manual_seed(5)
    up = round_to(x, "fp8_e4m3", rounding="stochastic", generator=generator, implementation=implementation)
    assert set(up.tolist()) == {1.0, 1.125}
    assert abs((up > 1).double().mean().item() - 0.3) < 5 * (0.3 * 0.7 / x.numel()) ** 0.5
    again = round_to(x, "fp8_e4m3", rounding="stochastic", generator=torch.Generator().manual_seed(5))
    assert_same_bits(up, again)
