import math
import re
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
    dynamic_parameters,
    fake_quantize_integer,
    integer_parameters,
    quantize_integer,
)

BITS = range(2, 9)
KINDS = pytest.mark.parametrize("symmetric", [True, False], ids=("symmetric", "asymmetric"))
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


def given_parameters(scale: float, zero_point: int = 0, bits: int = 8, symmetric: bool = True) -> IntegerParameters:
    return IntegerParameters(torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), bits, symmetric)


def every_bfloat16() -> Tensor:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[~x.isnan()]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


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


# ---- granularity


def by_hand(x: Tensor, bits: int, symmetric: bool) -> Tensor:
    """One slice, one scale."""
    if x.numel() == 0:
        return x
    parameters = integer_parameters(x.min(), x.max(), bits=bits, symmetric=symmetric)
    return dequantize_integer(quantize_integer(x, parameters), parameters, x.dtype)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_each_granularity_equals_its_slices_taken_alone(bits: int, dtype: torch.dtype, symmetric: bool) -> None:
    x = randn(3, 4, 10, dtype=dtype) * torch.tensor([0.01, 1.0, 30.0, 1e3], dtype=dtype)[:, None]
    kind: dict[str, Any] = {"bits": bits, "symmetric": symmetric}

    def same(got: Tensor, expected: Tensor) -> None:
        assert got.dtype == dtype
        assert torch.equal(got, expected)

    same(fake_quantize_integer(x, **kind), by_hand(x, bits, symmetric))
    same(fake_quantize_integer(x, granularity="tensor", **kind), by_hand(x, bits, symmetric))
    for axis in range(-3, 3):
        slices = [by_hand(s, bits, symmetric) for s in x.unbind(axis)]
        same(fake_quantize_integer(x, granularity="channel", axis=axis, **kind), torch.stack(slices, axis))
    rows = [by_hand(row, bits, symmetric) for row in x.reshape(-1, 10)]
    same(fake_quantize_integer(x, granularity="token", **kind), torch.stack(rows).reshape(x.shape))
    for axis in (0, 1, -1):
        for size in (1, 3, 100):
            lines = x.movedim(axis, -1)
            groups = [
                torch.cat([by_hand(g, bits, symmetric) for g in line.split(size)])
                for line in lines.reshape(-1, lines.shape[-1])
            ]
            expected = torch.stack(groups).reshape(lines.shape).movedim(-1, axis)
            options = {"granularity": "group", "axis": axis, "group_size": size, **kind}
            same(fake_quantize_integer(x, **options), expected)
    assert torch.equal(
        fake_quantize_integer(x, granularity="group", group_size=4, **kind),
        fake_quantize_integer(x, granularity="group", group_size=4, axis=2, **kind),
    )
    assert torch.equal(
        fake_quantize_integer(x, granularity="channel", **kind),
        fake_quantize_integer(x, granularity="channel", axis=0, **kind),
    )


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (1, 1, 1)),
        ({"granularity": "channel"}, (3, 1, 1)),
        ({"granularity": "channel", "axis": 1}, (1, 4, 1)),
        ({"granularity": "token"}, (3, 4, 1)),
        ({"granularity": "group", "group_size": 32}, (3, 4, 10)),
    ],
)
def test_dynamic_parameters_broadcast_and_give_the_same_as_static(options: dict[str, Any], shape: Any) -> None:
    x = randn(3, 4, 10)
    parameters = dynamic_parameters(x, **options)
    assert parameters.scale.shape == parameters.zero_point.shape == shape
    static = fake_quantize_integer(x, parameters=parameters)
    assert torch.equal(static, fake_quantize_integer(x, **options))


def test_one_dimension_with_a_scale_per_element_is_not_read_as_one_scale_for_all() -> None:
    x = torch.tensor([1.0, 100.0])
    assert dynamic_parameters(x, granularity="channel").scale.shape == (2,)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"granularity": "channel"},
        {"granularity": "channel", "axis": -1},
        {"granularity": "token"},
        {"granularity": "group", "group_size": 3},
        {"granularity": "group", "group_size": 3, "axis": 0},
    ],
)
@KINDS
def test_empty_tensors_stay_empty(shape: tuple[int, ...], options: dict[str, Any], symmetric: bool) -> None:
    got = fake_quantize_integer(torch.empty(shape, dtype=torch.bfloat16), symmetric=symmetric, **options)
    assert got.shape == shape
    assert got.dtype == torch.bfloat16


def test_a_single_number_is_a_tensor() -> None:
    assert fake_quantize_integer(torch.tensor(2.5)).item() == 2.5
    assert fake_quantize_integer(torch.tensor(2.5)).shape == ()


def test_a_slice_of_zeros_stays_zero_and_minus_zero_becomes_zero() -> None:
    x = torch.tensor([[0.0, -0.0], [1.0, -1.0]])
    got = fake_quantize_integer(x, granularity="token")
    assert torch.equal(got, x)
    assert not got[0].signbit().any()


def test_strides_do_not_matter_the_input_is_kept_and_no_gradient_is_carried() -> None:
    x = randn(12, 10).T[::2].requires_grad_()
    kept = x.detach().clone()
    options: dict[str, Any] = {"granularity": "group", "group_size": 5}
    got = fake_quantize_integer(x, **options)
    assert torch.equal(got, fake_quantize_integer(kept, **options))
    assert torch.equal(x.detach(), kept)
    assert not got.requires_grad


def test_the_largest_float32_is_quantized_without_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    got = fake_quantize_integer(torch.tensor([largest, -largest, 0.0]))
    assert got.isfinite().all()
    assert got[0] > 0.99 * largest


# ---- errors: what is wrong, what was expected, what to do next

X = torch.ones(2, 3)
GRID = given_parameters(1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 9}, "bits is 9. An integer grid has from 2 to 8 bits: give a whole number from 2 to 8."),
        ({"bits": 1}, "bits is 1. An integer grid has from 2 to 8 bits"),
        ({"bits": True}, "bits is True. An integer grid has from 2 to 8 bits"),
        ({"bits": 4.0}, "bits is 4.0. An integer grid has from 2 to 8 bits"),
        (
            {"granularity": "tokens"},
            "unknown granularity 'tokens'. Did you mean 'token'? Known: tensor, channel",
        ),
        (
            {"granularity": "group"},
            "granularity 'group' needs a group_size: none was given. Pass e.g. group_size=32.",
        ),
        (
            {"granularity": "group", "group_size": 0},
            "group_size is 0. A group holds a whole number of values",
        ),
        ({"granularity": "group", "group_size": 2.0}, "group_size is 2.0. A group holds a whole number"),
        ({"granularity": "group", "group_size": True}, "group_size is True. A group holds a whole number"),
        (
            {"granularity": "token", "group_size": 4},
            "group_size=4 was given, but granularity 'token' has no groups. Leave group_size out",
        ),
        (
            {"granularity": "channel", "axis": 2},
            "axis 2 is out of range for a tensor of 2 dimensions. Give one from",
        ),
        ({"granularity": "group", "group_size": 2, "axis": -3}, "axis -3 is out of range"),
        ({"axis": 0}, "axis=0 was given, but granularity 'tensor' does not choose its axis. Leave axis out"),
        (
            {"granularity": "token", "axis": 0},
            "axis=0 was given, but granularity 'token' does not choose its axis.",
        ),
        (
            {"parameters": GRID, "bits": 8},
            "parameters were given together with bits, which the parameters already decide. Leave one",
        ),
        (
            {"parameters": GRID, "granularity": "token", "symmetric": True},
            "parameters were given together with granularity, symmetric, which",
        ),
        ({"parameters": GRID, "axis": 0}, "parameters were given together with axis,"),
        ({"parameters": GRID, "group_size": 4}, "parameters were given together with group_size,"),
        ({"rounding": "half_evn"}, "unknown rounding 'half_evn'. Did you mean 'half_even'?"),
    ],
)
def test_a_wrong_option_is_one_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fake_quantize_integer(X, **options)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_wrong_dtype_is_one_clear_error(dtype: torch.dtype) -> None:
    expected = rf"x is {dtype}. Integer grids take torch\.float64, .* Convert first, e.g. x\.float\(\)"
    for call in (fake_quantize_integer, lambda x: quantize_integer(x, GRID)):
        with pytest.raises(ValueError, match=expected):
            call(torch.ones(2).to(dtype))


def test_nan_and_infinity_are_named_and_counted() -> None:
    x = torch.tensor([math.nan, 1.0, math.inf, math.nan])
    with pytest.raises(ValueError, match=r"x has 2 NaN among 4 values and integer codes cannot hold NaN. Find where"):
        quantize_integer(x, GRID)
    with pytest.raises(ValueError, match=r"x has 3 NaN or Inf among 4 values and no scale can be taken from those."):
        fake_quantize_integer(x)
    with pytest.raises(ValueError, match=r"1 of 4 ranges have an end that is NaN or Inf"):
        integer_parameters(torch.zeros(4), torch.tensor([1.0, math.inf, 1.0, 1.0]))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"1 of 1 scales are not finite numbers above 0. Take them with"):
        given_parameters(scale)


def test_data_beyond_float32_saturates_at_the_largest_scale() -> None:
    x = torch.tensor([1e300, -1e300, 1.0], dtype=torch.float64)
    largest = float(torch.finfo(torch.float32).max)
    assert fake_quantize_integer(x).tolist() == [127 * largest, -128 * largest, 0.0]


def test_a_static_grid_lets_nan_through_and_keeps_it_where_it_was() -> None:
    x = torch.tensor([0.5, math.nan, -math.inf, math.inf])
    got = fake_quantize_integer(x, parameters=given_parameters(0.25))
    assert got.isnan().tolist() == [False, True, False, False]
    assert got[[0, 2, 3]].tolist() == [0.5, -32.0, 31.75]


def test_parameters_that_do_not_fit_together_are_refused() -> None:
    zero = torch.tensor(0, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"scale is torch\.float64 and zero_point is torch\.int32\. Give a float32"):
        IntegerParameters(torch.tensor(1.0, dtype=torch.float64), zero, 8, True)
    with pytest.raises(ValueError, match=r"scale has shape \[2\] and zero_point \[\]\. Give both the same shape"):
        IntegerParameters(torch.ones(2), zero, 8, True)
    with pytest.raises(ValueError, match=r"1 of 1 zero points are outside 0 \.\. 0, the range of symmetric grids"):
        given_parameters(1.0, 1)
    with pytest.raises(ValueError, match=r"1 of 1 zero points are outside 0 \.\. 15, the range of asymmetric"):
        given_parameters(1.0, 16, 4, False)
    with pytest.raises(ValueError, match="bits is 12"):
        given_parameters(1.0, 0, 12)


def test_ranges_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 of 1 ranges have a minimum above their maximum. Pass the minimum first"):
        integer_parameters(torch.tensor(1.0), torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"minimum has shape \[\] and maximum \[2\]"):
        integer_parameters(torch.tensor(1.0), torch.ones(2))


def test_parameters_of_another_shape_are_refused() -> None:
    grid = IntegerParameters(torch.ones(5), torch.zeros(5, dtype=torch.int32), 8, True)
    with pytest.raises(ValueError, match=r"have shape \[5\], which does not broadcast to the tensor's \[2, 3\]"):
        quantize_integer(X, grid)
    with pytest.raises(ValueError, match=r"does not broadcast to the tensor's \[1\]"):
        quantize_integer(torch.ones(1), grid)


def test_codes_of_another_grid_are_refused() -> None:
    with pytest.raises(ValueError, match=r"codes are torch\.uint8, but these parameters go with torch\.int8"):
        dequantize_integer(torch.zeros(1, dtype=torch.uint8), GRID)
    with pytest.raises(ValueError, match=r"1 of 2 codes are outside -8 \.\. 7, the range of 4 bits"):
        dequantize_integer(torch.tensor([7, 8], dtype=torch.int8), given_parameters(1.0, bits=4))
