"""The sweep: which scales, what each costs, on tensors whose answer is known; both implementations."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import probe
from probe import FORMATS, ScalingResult, scaling_sweep
from probe.scaling.advice import grid_of
from probe.scaling.levels import element_format, max_aligned, min_aligned
from probe.scaling.sweep import Prepared
from tests.numerics.tensors import adversarial_blocks, assert_same_bits
from tests.scaling.tensors import (
    FORMATS_OF_THE_SPEC,
    assert_same_levels,
    grid_of_the_format,
    log_uniform,
    normal,
)

TWINS = pytest.mark.parametrize("implementation", ["reference", "fast"], ids=("reference", "fast"))
EVERY_FORMAT = (*FORMATS_OF_THE_SPEC, "mxint8")


def awkward() -> dict[str, Tensor]:
    raw = adversarial_blocks(48)
    return {
        "normal": normal(24, 100),
        "wide": normal(24, 70) * torch.exp2(torch.arange(70.0) - 35),
        "zeros of both signs": torch.where(normal(20, 33, seed=1) < 0, -0.0, normal(20, 33).relu()),
        "raw bits": raw[raw.isfinite().all(-1)],
        "more than one run": normal(3000, seed=2),
        "one value": torch.tensor(-3.0),
    }


@pytest.mark.parametrize("format", EVERY_FORMAT)
@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_implementations_agree(format: str, granularity: str, dtype: torch.dtype) -> None:
    for name, x in awkward().items():
        x = x.to(dtype)
        if not bool(x.isfinite().all()):
            continue
        fast, slow = (
            scaling_sweep(x, format, granularity=granularity, num_levels=5, implementation=one)  # type: ignore[arg-type]
            for one in ("fast", "reference")
        )
        assert fast.max_scale_exp == slow.max_scale_exp, name
        assert_same_levels(fast, slow)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_zeros_keep_their_signs_whatever_the_sort_does_to_them(monkeypatch: pytest.MonkeyPatch, sign: float) -> None:
    """numpy sorts by the instructions that a machine has; with AVX-512, -0 and +0 are equal and either may come out."""
    x = awkward()["zeros of both signs"]
    expected = scaling_sweep(x, "fp4_e2m1", num_levels=2, implementation="reference")
    sort = np.sort

    def sort_to_one_zero(values: Any) -> Any:
        ordered = sort(values)
        ordered[ordered == 0] = np.copysign(np.float32(0), np.float32(sign))
        return ordered

    monkeypatch.setattr(np, "sort", sort_to_one_zero)
    assert_same_levels(scaling_sweep(x, "fp4_e2m1", num_levels=2), expected)


@TWINS
@pytest.mark.parametrize("format", FORMATS_OF_THE_SPEC[:-1])
def test_level_0_is_fake_quantize_with_one_block(format: str, implementation: Any) -> None:
    for x in (normal(40, 64), normal(40, 64).bfloat16(), normal(7, 9) * 1e-30):
        level = scaling_sweep(x, format, implementation=implementation).levels[0]
        y = probe.fake_quantize(x.reshape(-1), format, block_size=x.numel(), scale_rule="rceil")
        d = y.double() - x.reshape(-1).double()
        assert level.max_abs_error == float(d.abs().max())
        assert level.mse == pytest.approx(float((d * d).mean()), rel=1e-12)
        assert (level.min_output, level.max_output) == (float(y.min()), float(y.max()))
        assert level.overflow == 0
        grid = grid_of(scaling_sweep(x, format), level)
        assert_same_bits(grid(x).reshape(-1), y)


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil", "mse"])
@pytest.mark.parametrize("format", [*FORMATS_OF_THE_SPEC[:-1], "mxint8"])
def test_unshifted_blocks_are_fake_quantize(format: str, rule: str) -> None:
    for x in (normal(20, 70), normal(20, 64).bfloat16()):
        result = scaling_sweep(x, format, granularity="block", scale_rules=[rule])
        level = next(level for level in result.levels if level.scale_exponent == 0)
        d = probe.fake_quantize(x, format, scale_rule=rule).double() - x.double()
        assert level.mse == pytest.approx(float((d * d).mean()), rel=1e-12)
        assert level.max_abs_error == float(d.abs().max())


def test_figures_are_their_formulas_in_numpy() -> None:
    x = normal(50, 41, seed=3)
    result = scaling_sweep(x, "fp4_e2m1", num_levels=7)
    grid = np.array(sorted({float(v) for v in grid_of_the_format("fp4_e2m1")}))
    for level in result.levels:
        v = x.double().numpy().ravel()
        y = v / level.scale
        d = grid[np.abs(y[:, None] - grid).argmin(1)] * level.scale - v  # no ties in these data
        o = v + d
        assert level.mse == pytest.approx((d**2).mean(), rel=1e-12)
        assert level.rmse == pytest.approx(math.sqrt((d**2).mean()), rel=1e-12)
        assert level.mae == pytest.approx(np.abs(d).mean(), rel=1e-12)
        assert level.max_abs_error == pytest.approx(np.abs(d).max(), rel=1e-12)
        assert level.cosine == pytest.approx((v * o).sum() / np.sqrt((v * v).sum() * (o * o).sum()), rel=1e-12)
        assert level.psnr == pytest.approx(20 * np.log10(np.abs(v).max() / np.sqrt((d**2).mean())), rel=1e-12)
        assert level.relative_error == pytest.approx(100 * np.abs(d).mean() / np.abs(v).mean(), rel=1e-12)
        assert level.overflow == (np.abs(y) > 6).sum()
        assert level.underflow == (np.abs(y) < 0.5).sum()
        assert level.flushed == (np.abs(y) <= 0.25).sum()
        assert level.subnormal == (np.abs(y) < 1).sum()
        assert level.codes is not None
        assert sum(level.codes) == x.numel()
        assert level.codes[0b0001] == ((y > 0.25) & (y <= 0.75)).sum()  # the code of +0.5
        assert level.codes[0b1000] == ((y >= -0.25) & (y < 0)).sum()  # -0


def test_ends_are_max_and_min_alignment() -> None:
    x = torch.tensor([1.0, -448.0, 2.0**-9])
    result = scaling_sweep(x, "fp8_e4m3")
    assert (result.max_scale_exp, result.min_scale_exp) == (0, 0 - 1)  # both alignments are 0: one octave below
    result = scaling_sweep(torch.tensor([449.0, 2.0**-9]), "fp8_e4m3", num_levels=3)
    assert [level.scale_exponent for level in result.levels] == [1, 0.5, 0]
    assert result.levels[1].scale == float(torch.tensor(2.0).sqrt())
    result = scaling_sweep(torch.tensor([448.0, 0.99 * 2.0**-9]), "fp8_e4m3", num_levels=2)
    assert [level.scale_exponent for level in result.levels] == [0, -1]
    assert len(scaling_sweep(x, "fp8_e4m3", num_levels=31).levels) == 31


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


@pytest.mark.parametrize("format", FORMATS_OF_THE_SPEC)
def test_overflow_falls_and_underflow_rises_with_the_scale(format: str) -> None:
    for granularity in ("tensor", "block"):
        result = scaling_sweep(
            log_uniform(-30, 10), format, granularity=granularity, max_scale_exp=40, min_scale_exp=-40, num_levels=41
        )
        for rule in result.rules or (None,):
            levels = sorted((one for one in result.levels if one.rule == rule), key=lambda level: level.scale_exponent)
            for lower, higher in pairwise(levels):
                assert lower.overflow >= higher.overflow
                for name in ("underflow", "flushed", "subnormal"):
                    assert getattr(lower, name) <= getattr(higher, name)
            assert levels[0].overflow > 0
            assert levels[-1].underflow > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_arithmetic_does_not_depend_on_the_dtype_that_holds_the_values(dtype: torch.dtype) -> None:
    x = normal(64, 8).to(torch.bfloat16).to(torch.float16).to(torch.bfloat16)
    assert_same_levels(scaling_sweep(x.to(dtype), "fp6_e2m3"), scaling_sweep(x, "fp6_e2m3"), relative=0)


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


def test_int8_is_the_static_grid_of_the_quantizers() -> None:
    x = normal(30, 30) * 100
    x[0, 0] = -128 * 2.0
    result = scaling_sweep(x, "int8", max_scale_exp=1, min_scale_exp=-1, num_levels=5)
    for level in result.levels:
        parameters = probe.IntegerParameters(torch.tensor(level.scale), torch.tensor(0, dtype=torch.int32), 8, True)
        y = probe.fake_quantize_integer(x.double(), parameters=parameters)
        assert level.mse == pytest.approx(float(((y - x.double()) ** 2).mean()), rel=1e-12)
        assert level.min_output == float(y.min())
    assert result.levels[0].min_output == -256.0
    assert result.levels[0].overflow == int(((x / 2 > 127) | (x / 2 < -128)).sum())


def test_int8_in_blocks_is_mxint8() -> None:
    x = normal(8, 64)
    one, other = (scaling_sweep(x, name, granularity="block") for name in ("int8", "mxint8"))
    assert one.element is FORMATS["mxint8"]
    assert_same_levels(one, other, relative=0)


def test_a_prepared_tensor_gives_the_same() -> None:
    x = normal(10, 10)
    prepared = Prepared(x)
    assert scaling_sweep(prepared, "int8") == scaling_sweep(x, "int8")


@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_json_round_trip(granularity: str) -> None:
    for x in (normal(6, 40).bfloat16(), grid_of_the_format("fp4_e2m1")):  # the second has a lossless level
        result = scaling_sweep(x, "fp4_e2m1", granularity=granularity, name="a/b $x$")
        assert ScalingResult.from_json(result.to_json()) == result
        assert ScalingResult.from_json(result.to_json(recommendation={}, source="x")) == result
        assert "Infinity" not in result.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "[]", "not a JSON object"),
        (lambda text: text[:-30], "is not JSON"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has version 2, and this probe reads 1"),
        (lambda text: text.replace('"zeros"', '"nulls"'), "'nulls'|misses 'zeros'"),
        (lambda text: text.replace('"rmse"', '"rms"'), "is damaged"),
    ],
)
def test_a_damaged_result_is_refused(change: Any, message: str) -> None:
    text = scaling_sweep(normal(40), "int8").to_json()
    with pytest.raises(ValueError, match=message):
        ScalingResult.from_json(change(text))


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


def test_blocks_lie_along_the_axis_and_the_last_may_be_short() -> None:
    x = normal(50, 6)
    down = scaling_sweep(x, "fp4_e2m1", granularity="block", axis=0)
    along = scaling_sweep(x.T, "fp4_e2m1", granularity="block")
    assert_same_levels(down, along)
    d = probe.fake_quantize(x, "fp4_e2m1", axis=0).double() - x.double()
    assert down.levels[0].mse == pytest.approx(float((d * d).mean()), rel=1e-12)


def test_nothing_is_changed() -> None:
    x = normal(300)
    kept = x.clone()
    for granularity in ("tensor", "block"):
        scaling_sweep(x, "int8", granularity=granularity)
    assert torch.equal(x, kept)
