"""Errors of the integer grids: what is wrong, what was expected, what to do next."""

import math
import re
from typing import Any

import pytest
import torch

from probe.numerics.integers import (
    IntegerParameters,
    dequantize_integer,
    fake_quantize_integer,
    integer_parameters,
    quantize_integer,
)
from tests.numerics.tensors import given_parameters

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
