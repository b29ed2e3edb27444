"""The sweep: what each scale costs, on tensors whose answer is known; both implementations."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import probe
from probe import FORMATS, scaling_sweep
from probe.scaling import blockwise, reference
from probe.scaling.advice import grid_of
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


@pytest.mark.parametrize("format", [*FORMATS_OF_THE_SPEC, "mxint8"])
@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_implementations_agree(format: str, granularity: str, dtype: torch.dtype) -> None:
    for name, x in awkward().items():
        x = x.to(dtype)
        if not bool(x.isfinite().all()):
            continue
        fast, slow = (
            scaling_sweep(x, format, granularity=granularity, num_levels=5, implementation=one)
            for one in ("fast", "reference")
        )
        assert fast.max_scale_exp == slow.max_scale_exp, name
        assert_same_levels(fast, slow)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "mxint8"])
@pytest.mark.parametrize("limit", [127, 7])
def test_blocks_of_all_exponents_agree_however_few_are_gathered_at_a_time(
    monkeypatch: pytest.MonkeyPatch, format: str, limit: int
) -> None:
    """Subnormals, zeros of both signs, ties and scales out of range; nothing but sums differs, in the last digits."""
    monkeypatch.setattr(blockwise, "ROOM", 1)
    g = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape or (48, 40), generator=g).double()

    exponents = draw(-149, 128, 48, 1) - draw(0, 9)
    mantissas = 1 + draw(0, 32) / 32 + 2.0**-20 * draw(0, 2)
    x = (mantissas * 2.0**exponents * (1 - 2 * draw(0, 2))).float()
    x[5, ::3] *= 0.0
    x[9] = 0.0
    given = (x, [-70, -2, 0, 1, 40], ("floor", "ceil", "even", "rceil", "mse"), FORMATS[format])
    twins = [twin.block_levels(*given, axis=-1, size=32, limit=limit) for twin in (reference, blockwise)]
    for slow, quick in zip(*(found.values() for found in twins), strict=True):
        for name, expected in vars(slow).items():
            is_sum = name in ("squares", "magnitudes", "product", "power")
            assert getattr(quick, name) == (pytest.approx(expected, rel=1e-12) if is_sum else expected), name


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
def test_max_alignment_is_fake_quantize_with_one_block(format: str, implementation: Any) -> None:
    for x in (normal(40, 64), normal(40, 64).bfloat16(), normal(7, 9) * 1e-30):
        result = scaling_sweep(x, format, implementation=implementation)
        level = next(level for level in result.levels if level.scale_exponent == result.max_aligned)
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


def test_blocks_lie_along_the_axis_and_the_last_may_be_short() -> None:
    x = normal(50, 6)
    down = scaling_sweep(x, "fp4_e2m1", granularity="block", axis=0)
    along = scaling_sweep(x.T, "fp4_e2m1", granularity="block")
    assert_same_levels(down, along)
    d = probe.fake_quantize(x, "fp4_e2m1", axis=0).double() - x.double()
    unmoved = next(level for level in down.levels if level.scale_exponent == 0)
    assert unmoved.mse == pytest.approx(float((d * d).mean()), rel=1e-12)


def test_nothing_is_changed() -> None:
    x = normal(300)
    kept = x.clone()
    for granularity in ("tensor", "block"):
        scaling_sweep(x, "int8", granularity=granularity)
    assert torch.equal(x, kept)
