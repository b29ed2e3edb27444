"""Which scales are tried: alignment, ends, the bits of a scale, and mistakes."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from probe import scaling_sweep
from probe.scaling.levels import element_format, max_aligned, min_aligned
from tests.scaling.tensors import (
    FORMATS_OF_THE_SPEC,
    assert_same_levels,
    log_uniform,
)

EVERY_FORMAT = (*FORMATS_OF_THE_SPEC, "mxint8")


def exponents(x: Tensor, **options: Any) -> list[float]:
    return [level.scale_exponent for level in scaling_sweep(x, "fp8_e4m3", **options).levels]


def test_ends_are_3_octaves_beyond_max_alignment_and_min_alignment() -> None:
    x = torch.tensor([1.0, -448.0, 2.0**-9])
    result = scaling_sweep(x, "fp8_e4m3")
    assert (result.max_aligned, result.min_aligned) == (0, 0)
    assert (result.max_scale_exp, result.min_scale_exp) == (3, -1)  # both alignments are 0: one octave below
    assert exponents(torch.tensor([449.0, 2.0**-9]), num_levels=9) == [4, 3.5, 3, 2.5, 2, 1.5, 1, 0.5, 0]
    assert exponents(torch.tensor([448.0, 2.0**-8]), num_levels=5) == [-3, -2, -1, 0, 1]  # less range than the format
    assert exponents(torch.tensor([449.0, 2.0**-9]), num_levels=2) == [1, 0]
    assert exponents(torch.tensor([449.0, 2.0**-9]), num_levels=1) == [1]
    assert scaling_sweep(x, "fp8_e4m3", min_scale_exp=-0.5).levels[1].scale == float(torch.tensor(2.0**2.825))
    assert exponents(x, min_scale_exp=-2, num_levels=3) == [3, 0, -2]
    assert exponents(x, max_scale_exp=1, num_levels=3) == [1, 0.5, 0]


def test_every_power_of_two_is_among_the_levels() -> None:
    wide = log_uniform(-40, 3)
    result = scaling_sweep(wide, "fp4_e2m1")
    assert (result.max_scale_exp, result.min_scale_exp, len(result.levels)) == (4, -39, 2 * 43 + 1)
    for count in (21, 44, 60, 87, 200):
        found = [level.scale_exponent for level in scaling_sweep(wide, "fp4_e2m1", num_levels=count).levels]
        assert len(found) == count
        assert found == sorted(found, reverse=True)
        assert 1 in found  # max alignment
        if count >= 44:
            assert set(range(-39, 5)) <= set(found)
    given = exponents(torch.ones(3), max_scale_exp=-2, min_scale_exp=2, num_levels=7)  # as in the users' example
    assert given == pytest.approx([-2, -4 / 3, -1, 0, 2 / 3, 1, 2])
    assert exponents(torch.ones(3), max_scale_exp=0.2, min_scale_exp=0.8, num_levels=3) == [0.2, 0.5, 0.8]
    assert exponents(torch.ones(3), max_scale_exp=15, min_scale_exp=-15, num_levels=31) == list(range(15, -16, -1))


@pytest.mark.parametrize("format", EVERY_FORMAT)
def test_alignment_is_exact_beside_powers_of_two(format: str) -> None:
    fmt = element_format(format, "tensor")
    for exponent in (-100, -3, 0, 7, 90):
        edge = fmt.max * 2.0**exponent
        above = float(np.nextafter(np.float32(edge), np.float32(np.inf)))
        assert (max_aligned(edge, fmt), max_aligned(above, fmt)) == (exponent, exponent + 1)
        step = fmt.min_subnormal * 2.0**exponent
        below = float(np.nextafter(np.float32(step), np.float32(0)))
        assert (min_aligned(step, fmt), min_aligned(below, fmt)) == (exponent, exponent - 1)


def test_scale_bits_bound_the_scales() -> None:
    x = log_uniform(-60, 60)
    result = scaling_sweep(x, "fp8_e4m3", scale_bits=5)
    assert (result.max_scale_exp, result.min_scale_exp) == (15, -15)
    blocks = scaling_sweep(x, "fp8_e4m3", granularity="block", scale_bits=5, max_scale_exp=2, min_scale_exp=-2)
    assert_same_levels(
        blocks,
        scaling_sweep(
            x, "fp8_e4m3", granularity="block", scale_bits=5, max_scale_exp=2, min_scale_exp=-2,
            implementation="reference",
        ),
    )  # fmt: skip
    assert blocks.levels[0].max_output == 448.0 * 2**15


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.arange(4), {}, "the tensor is torch.int64. A scale is swept over floats"),
        (torch.zeros(0, 3), {}, r"the tensor of shape \[0, 3\] is empty"),
        (torch.zeros(5), {}, "all 5 values of the tensor are zero"),
        (torch.tensor([1.0, torch.nan, torch.inf]), {}, "has 1 NaN and 1 Inf among 3 values"),
        (torch.tensor([1e300], dtype=torch.float64), {}, "has values beyond float32"),
        (torch.ones(3), {"format": "fp9"}, "unknown format 'fp9'"),
        (torch.ones(3), {"format": "nvfp4"}, "unknown format 'nvfp4'"),
        (torch.ones(3), {"granularity": "row"}, "unknown granularity 'row'"),
        (torch.ones(3), {"num_levels": 0}, "num_levels is 0"),
        (torch.ones(3), {"num_levels": 2.5}, "num_levels is 2.5"),
        (torch.ones(3), {"scale_bits": 9}, "scale_bits is 9"),
        (torch.ones(3), {"max_scale_exp": 200}, "max_scale_exp is 200. A scale of 8 bits is 2\\^-127 to 2\\^127"),
        (torch.ones(3), {"min_scale_exp": math.nan}, "min_scale_exp is nan"),
        (torch.ones(3), {"block_size": 16}, "belong to granularity 'block'"),
        (torch.ones(3), {"granularity": "block", "max_scale_exp": 0.5}, "give a whole number to add"),
        (torch.ones(3), {"granularity": "block", "min_scale_exp": math.inf}, "min_scale_exp is inf"),
        (torch.ones(3), {"granularity": "block", "scale_rules": []}, "scale_rules is"),
        (torch.ones(3), {"granularity": "block", "scale_rules": ["flor"]}, "unknown scale rule 'flor'"),
        (torch.ones(3), {"granularity": "block", "block_size": 0}, "block_size 0 is not"),
        (torch.ones(3), {"granularity": "block", "axis": 2}, "axis 2 is out of range"),
        (torch.ones(3), {"implementation": "slow"}, "unknown implementation 'slow'"),
    ],
)
def test_a_mistake_is_a_value_error_that_says_what_to_do(x: Tensor, options: dict[str, Any], message: str) -> None:
    options = {"format": "fp8_e4m3", **options}
    with pytest.raises(ValueError, match=message):
        scaling_sweep(x, **options)


def test_what_is_no_tensor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        scaling_sweep([1.0], "int8")  # type: ignore[arg-type]
