"""Underflow counts: what a format would lose, held against plain counts, and the warning."""

import math
import warnings
from typing import Any
from unittest import mock

import pytest
import torch

from probe import (
    FORMATS,
    UnderflowWarning,
    analyze_underflow,
    fake_quantize,
    quantize,
)
from probe.numerics import fast, underflow
from probe.numerics.underflow import Underflow
from tests.numerics.tensors import MX, adversarial_blocks, scales_of


def test_underflow_of_padded_blocks_with_nan() -> None:
    x = torch.ones(2, 40)
    x[0, 39] = math.nan
    x[1, 3] = 0.0
    found = analyze_underflow(x, "fp8_e4m3")
    assert (found.elements, found.nonfinite, found.zeros) == (80, 8, 1)


def test_underflow_thresholds_axis_and_rule() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnderflowWarning)
        e4m3 = FORMATS["fp8_e4m3"]
        x = torch.tensor([256.0, e4m3.max, e4m3.min_normal, e4m3.min_subnormal, e4m3.min_subnormal / 2])
        found = analyze_underflow(x, "fp8_e4m3")
        assert (found.overflow, found.subnormal, found.underflow, found.flushed) == (0, 2, 1, 1)
        saturating = torch.full((32,), 500.0)
        assert analyze_underflow(saturating, "fp8_e4m3").overflow == 32
        assert analyze_underflow(saturating, "fp8_e4m3").severity == "high"
        assert analyze_underflow(saturating, "fp8_e4m3", scale_rule="ceil").overflow == 0
        assert analyze_underflow(saturating, "fp8_e4m3", scale_rule="mse").overflow == 0
        column = torch.ones(32, 32)
        column[:, 0] = 2.0**30
        assert analyze_underflow(column, "fp4_e2m1").underflow == 31 * 32
        assert analyze_underflow(column, "fp4_e2m1", axis=0).underflow == 0


def test_underflow_of_an_empty_tensor_is_nothing() -> None:
    found = analyze_underflow(torch.empty(0, 32), "fp8_e4m3")
    assert (found.elements, found.zeros, found.severity) == (0, 0, "none")


def test_severity() -> None:
    def severity(**counts: int) -> str:
        full = dict.fromkeys(("zeros", "overflow", "subnormal", "underflow", "flushed", "nonfinite"), 0)
        return Underflow("fp8_e4m3", 10_000, **(full | counts)).severity

    assert severity(underflow=10) == severity(overflow=10) == "none"
    assert severity(underflow=11) == severity(overflow=11) == "moderate"
    assert severity(underflow=100) == "moderate"
    assert severity(underflow=101) == severity(overflow=101) == "high"
    assert severity(underflow=6, nonfinite=5_000) == "moderate"
    assert severity(flushed=5000) == "none"


def test_underflow_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(100, 32)
    monkeypatch.setattr(fast, "CHUNK", 96)
    assert analyze_underflow(x, "fp8_e4m3").zeros == 3200


def test_underflow_counts_equal_a_plain_count() -> None:
    for name in MX:
        fmt = FORMATS[name]
        x = adversarial_blocks(64, seed=11)
        x = x[:, :29]  # short blocks: padding must not count
        with pytest.warns(UnderflowWarning):
            found = analyze_underflow(x, name)
        q = quantize(x, name)
        scales = scales_of(q)
        scale = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.int() - 127)
        scale[scales == 255] = math.nan
        y = x.double().abs() / scale
        assert found.elements == x.numel()
        assert found.nonfinite == int((~y.isfinite()).sum())
        assert found.overflow == int((y > fmt.max).sum())
        assert found.underflow == int(((y > 0) & (y < fmt.min_subnormal)).sum())
        assert found.zeros == int((y == 0).sum())
        finite = y.isfinite()
        assert found.flushed == int(((q.dequantize() == 0) & (x != 0) & finite).sum())
        if fmt.min_normal is not None:
            assert found.subnormal == int(((y > 0) & (y < fmt.min_normal)).sum())


@pytest.mark.parametrize("name", ["nvfp4", "int8", "int4", "fp16", "bf16"])
def test_underflow_of_the_other_formats_matches_what_becomes_zero(name: str) -> None:
    x = torch.cat([torch.logspace(-9, 0, 500), torch.tensor([1.0, 0.0])])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnderflowWarning)
        found = analyze_underflow(x, name)
    assert found.flushed == int(((fake_quantize(x, name) == 0) & (x != 0)).sum())


def test_underflow_is_silent_where_nothing_is_lost_and_warns_where_much_is() -> None:
    assert analyze_underflow(torch.ones(64), "fp8_e4m3").severity == "none"
    wide = torch.cat([torch.full((99,), 1e-6), torch.ones(1)])
    with pytest.warns(UnderflowWarning, match="lie below the smallest number"):
        assert analyze_underflow(wide, "fp4_e2m1", block_size=100).severity == "high"


def by_torch(x: torch.Tensor, name: str, **options: Any) -> Underflow:
    """The readable twin."""
    with mock.patch.object(underflow, "is_native", return_value=False):
        return analyze_underflow(x, name, **options)


@pytest.mark.filterwarnings("ignore::probe.UnderflowWarning")
@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_loop_counts_what_torch_counts(name: str, dtype: torch.dtype) -> None:
    x = adversarial_blocks(64, seed=3).to(dtype)
    for given in (x, x[:, :29], x.T, x[:, ::3], x[:0], torch.zeros(3, 32, dtype=dtype)):
        assert analyze_underflow(given, name) == by_torch(given, name)


@pytest.mark.filterwarnings("ignore::probe.UnderflowWarning")
@pytest.mark.usefixtures("torch_threads")
def test_threads_share_the_rows_of_the_loop() -> None:
    x = torch.randn(2**14 + 1, 40) * torch.logspace(-30, 30, 40)
    x[7, 3], x[-1, -1] = math.nan, math.inf
    for name in ("fp8_e4m3", "nvfp4", "int8"):
        assert analyze_underflow(x, name) == by_torch(x, name)
    assert analyze_underflow(x, "fp4_e2m1", axis=0, block_size=16) == by_torch(x, "fp4_e2m1", axis=0, block_size=16)
