"""Integer grids: codes as exact quotients, values with one rounding, scales and zero points from ranges."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from probe.numerics.integers import (
    IntegerParameters,
    dequantize_integer,
    fake_quantize_integer,
    integer_parameters,
    quantize_integer,
)
from tests.numerics.tensors import KINDS, given_parameters

BITS = range(2, 9)
ROUNDINGS: dict[str, Callable[[Fraction], int]] = {
    "half_even": round,
    "half_away": lambda q: math.floor(abs(q) + Fraction(1, 2)) * (1 if q > 0 else -1),
    "toward_zero": math.trunc,
    "floor": math.floor,
}


def code_range(bits: int, symmetric: bool) -> tuple[int, int]:
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)


def exact_code(x: float, parameters: IntegerParameters, rounding: str = "half_even") -> int:
    """The definition in rational arithmetic, for one scale."""
    low, high = code_range(parameters.bits, parameters.symmetric)
    if math.isinf(x):
        return high if x > 0 else low
    quotient = Fraction(x) / Fraction(parameters.scale.item())
    return max(low, min(high, ROUNDINGS[rounding](quotient) + int(parameters.zero_point)))


def every_bfloat16() -> Tensor:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[~x.isnan()]


# ---- codes


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.1, 1e-6, 3.0e4])
def test_every_bfloat16_gets_the_code_of_its_exact_quotient(bits: int, scale: float) -> None:
    x = every_bfloat16()
    values = x.double().tolist()
    for symmetric, zero_point in ((True, 0), (False, 2 ** (bits - 1) - 1)):
        parameters = given_parameters(scale, zero_point, bits, symmetric)
        exact_scale = Fraction(parameters.scale.item())
        low, high = code_range(bits, symmetric)
        # Away from the grid the answer is an end code; only what is near it needs rationals.
        far = 2 * 2**bits * float(exact_scale)
        expected = [
            (low if v < 0 else high)
            if abs(v) > far
            else 0 + zero_point
            if abs(v) < far / 2**13
            else max(low, min(high, round(Fraction(v) / exact_scale) + zero_point))
            for v in values
        ]
        codes = quantize_integer(x, parameters)
        assert codes.dtype == (torch.int8 if symmetric else torch.uint8)
        assert codes.tolist() == expected


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(deadline=None, max_examples=200)
@given(
    scale=st.floats(2**-20, 2**20, width=32),
    halves=st.integers(-600, 600),
    nudges=st.integers(-3, 3),
    bits=st.integers(2, 8),
)
def test_values_beside_a_tie_or_an_integer_are_rounded_as_the_exact_quotient(
    dtype: torch.dtype, rounding: str, scale: float, halves: int, nudges: int, bits: int
) -> None:
    x = (torch.tensor(scale, dtype=torch.float64) * halves / 2).to(dtype)
    for _ in range(abs(nudges)):
        x = torch.nextafter(x, torch.tensor(math.inf * nudges, dtype=dtype))
    parameters = given_parameters(scale, bits=bits)
    assert int(quantize_integer(x, parameters, rounding=rounding)) == exact_code(x.item(), parameters, rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@settings(deadline=None, max_examples=300)
@given(
    x=st.floats(width=32, allow_nan=False),
    scale=st.floats(2.0**-60, 2.0**60, width=32),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    data=st.data(),
)
def test_any_value_gets_the_code_of_its_exact_quotient(
    rounding: str, x: float, scale: float, bits: int, symmetric: bool, data: Any
) -> None:
    zero_point = 0 if symmetric else data.draw(st.integers(0, 2**bits - 1))
    parameters = given_parameters(scale, zero_point, bits, symmetric)
    assert int(quantize_integer(torch.tensor(x), parameters, rounding=rounding)) == exact_code(x, parameters, rounding)


def test_float64_values_closer_to_a_tie_than_their_quotient_can_show_are_rounded_right() -> None:
    scale = torch.tensor(0.1).item()
    tie = 2.5 * scale
    x = torch.tensor([math.nextafter(tie, 0), tie, math.nextafter(tie, 1)], dtype=torch.float64)
    assert quantize_integer(x, given_parameters(scale)).tolist() == [2, 2, 3]
    tiny = torch.tensor([-5e-324, 5e-324], dtype=torch.float64)
    assert quantize_integer(tiny, given_parameters(3e38), rounding="floor").tolist() == [-1, 0]


def test_infinity_goes_to_the_end_codes() -> None:
    x = torch.tensor([math.inf, -math.inf])
    assert quantize_integer(x, given_parameters(0.5)).tolist() == [127, -128]
    assert quantize_integer(x, given_parameters(0.5, 3, 4, False)).tolist() == [15, 0]
    wide = torch.tensor([1e308, -1e308, math.inf], dtype=torch.float64)
    assert quantize_integer(wide, given_parameters(1e-6)).tolist() == [127, -128, 127]


def test_stochastic_rounding_is_unbiased_repeatable_and_needs_a_generator() -> None:
    x, parameters = torch.full((40_000,), 0.3), given_parameters(1.0)
    draws = [
        quantize_integer(x, parameters, rounding="stochastic", generator=torch.Generator().manual_seed(5))
        for _ in range(2)
    ]
    assert torch.equal(*draws)
    assert set(draws[0].tolist()) == {0, 1}
    assert abs(draws[0].double().mean().item() - 0.3) < 0.01
    with pytest.raises(ValueError, match="no generator was given"):
        quantize_integer(x, parameters, rounding="stochastic")
    with pytest.raises(ValueError, match="is not random"):
        fake_quantize_integer(x, generator=torch.Generator())


# ---- values


@KINDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_code_is_dequantized_with_one_rounding(symmetric: bool, dtype: torch.dtype) -> None:
    precision = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[dtype]
    for bits in BITS:
        low, high = code_range(bits, symmetric)
        zero_point = 0 if symmetric else 2**bits // 3
        codes = torch.arange(low, high + 1).to(torch.int8 if symmetric else torch.uint8)
        for scale in (0.1, 1 / 127, 0.75, math.pi):
            parameters = given_parameters(scale, zero_point, bits, symmetric)
            got = dequantize_integer(codes, parameters, dtype)
            assert got.dtype == dtype
            for code, value in zip(codes.tolist(), got.double().tolist(), strict=True):
                exact = Fraction(parameters.scale.item()) * (code - zero_point)
                step = Fraction(2) ** (math.frexp(float(exact))[1] - precision)
                assert Fraction(value) == round(exact / step) * step


@KINDS
@pytest.mark.parametrize("bits", BITS)
def test_every_code_survives_dequantize_then_quantize(bits: int, symmetric: bool) -> None:
    low, high = code_range(bits, symmetric)
    codes = torch.arange(low, high + 1).to(torch.int8 if symmetric else torch.uint8)
    parameters = given_parameters(0.37, 0 if symmetric else 1, bits, symmetric)
    assert torch.equal(quantize_integer(dequantize_integer(codes, parameters), parameters), codes)


def test_values_beyond_the_dtype_saturate_and_never_become_infinite() -> None:
    parameters = given_parameters(3e38)
    codes = torch.tensor([-128, 127], dtype=torch.int8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        largest = torch.finfo(dtype).max
        assert dequantize_integer(codes, parameters, dtype).tolist() == [-largest, largest]


# ---- parameters


@settings(deadline=None, max_examples=300)
@given(
    ends=st.tuples(st.floats(-(2.0**100), 2.0**100, width=32), st.floats(-(2.0**100), 2.0**100, width=32)).map(sorted),
    bits=st.integers(2, 8),
)
def test_symmetric_scale_is_the_exact_ratio_rounded_once(ends: list[float], bits: int) -> None:
    parameters = integer_parameters(torch.tensor(ends[0]), torch.tensor(ends[1]), bits=bits)
    ratio = Fraction(max(abs(ends[0]), abs(ends[1]))) / (2 ** (bits - 1) - 1)
    scale = Fraction(parameters.scale.item())
    if ratio <= Fraction(1e-6):
        assert parameters.scale == torch.tensor(1e-6)
    else:
        neighbours = (torch.nextafter(parameters.scale, torch.tensor(end)).item() for end in (0.0, math.inf))
        assert all(abs(scale - ratio) <= abs(Fraction(n) - ratio) for n in neighbours)
    assert parameters.zero_point.item() == 0
    assert parameters.zero_point.dtype == torch.int32
    assert parameters.scale.dtype == torch.float32


@settings(deadline=None, max_examples=300)
@given(
    ends=st.tuples(st.floats(-1e9, 1e9, width=32), st.floats(-1e9, 1e9, width=32)).map(sorted),
    bits=st.integers(2, 8),
)
def test_asymmetric_grid_holds_zero_and_covers_the_range(ends: list[float], bits: int) -> None:
    low, high = torch.tensor(ends[0]), torch.tensor(ends[1])
    parameters = integer_parameters(low, high, bits=bits, symmetric=False)
    lo, hi = Fraction(min(ends[0], 0)), Fraction(max(ends[1], 0))
    scale = Fraction(parameters.scale.item())
    assert abs(scale - max((hi - lo) / (2**bits - 1), Fraction(1e-6))) <= scale * Fraction(1, 2**24)
    assert int(parameters.zero_point) == max(0, min(2**bits - 1, round(-lo / scale)))
    assert fake_quantize_integer(torch.tensor(0.0), parameters=parameters).item() == 0.0
    for end in (low, high):
        error = Fraction(fake_quantize_integer(end.double(), parameters=parameters).item()) - Fraction(end.item())
        assert abs(error) <= scale * (1 + Fraction(1, 1000))


def test_the_int8_recipe_is_absmax_over_127_and_never_below_one_millionth() -> None:
    assert integer_parameters(torch.tensor(-254.0), torch.tensor(3.0)).scale.item() == 2.0
    assert integer_parameters(torch.tensor(-0.0), torch.tensor(1e-7)).scale == torch.tensor(1e-6)
    assert fake_quantize_integer(torch.zeros(4)).tolist() == [0.0] * 4


def test_asymmetric_range_is_widened_to_zero() -> None:
    above = integer_parameters(torch.tensor(10.0), torch.tensor(255.0), symmetric=False)
    below = integer_parameters(torch.tensor(-255.0), torch.tensor(-10.0), symmetric=False)
    assert (above.scale.item(), above.zero_point.item()) == (1.0, 0)
    assert (below.scale.item(), below.zero_point.item()) == (1.0, 255)
