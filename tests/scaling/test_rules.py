"""The scale rules of blocks side by side: what fake_quantize does, rates by block, outliers."""

from typing import Any

import pytest
import torch
from torch import Tensor

import probe
from probe.scaling.rules import compare_rules
from tests.scaling.tensors import normal


def results_of(x: Tensor) -> Any:
    return {result.rule: result for result in compare_rules(x, "fp4_e2m1")}


def test_compare_rules_is_what_fake_quantize_does_by_every_rule() -> None:
    x = normal(16, 64, seed=5)
    for rule, result in results_of(x).items():
        quantized = probe.quantize(x, "fp4_e2m1", scale_rule=rule)
        d = quantized.dequantize().double() - x.double()
        assert result.level.mse == pytest.approx(float((d * d).mean()), rel=1e-12)
        assert quantized.scales is not None
        exponents = quantized.scales.double() - 127
        assert result.mean_exponent == pytest.approx(float(exponents.mean()))
        assert result.std_exponent == pytest.approx(float(exponents.std(correction=0)))
        assert (result.min_exponent, result.max_exponent) == (int(exponents.min()), int(exponents.max()))
        y = (x.reshape(-1, 32).double() / torch.exp2(exponents.reshape(-1, 1))).abs()
        assert result.overflowing_blocks == int((y > 6).any(-1).sum())
        assert result.underflowing_blocks == int((y < 0.5).any(-1).sum())
        assert result.flushing_blocks == int((y <= 0.25).any(-1).sum())
        assert result.worst_overflow == float((y > 6).double().mean(-1).max())
        assert result.worst_underflow == float((y < 0.5).double().mean(-1).max())
        assert result.worst_flush == float((y <= 0.25).double().mean(-1).max())
        assert result.level.codes == tuple(torch.bincount(quantized.codes.reshape(-1).long(), minlength=16).tolist())
    assert results_of(x)["ceil"].overflowing_blocks == 0


def test_one_outlier_spoils_its_own_block_and_no_other() -> None:
    x = normal(4, 64, seed=6).clamp(-2, 2)
    before = {rule: result.spoiled_blocks for rule, result in results_of(x).items()}
    x[1, 40] = 500.0
    after = results_of(x)
    assert {rule: result.spoiled_blocks - before[rule] for rule, result in after.items()} == dict.fromkeys(after, 1)
    assert all(result.blocks == 8 for result in after.values())


def test_blocks_of_zeros_have_no_scale_and_lose_nothing() -> None:
    x = torch.zeros(4, 32)
    x[2] = 1.0
    for result in results_of(x).values():
        assert (result.blocks, result.zero_blocks, result.spoiled_blocks) == (4, 3, 0)
        assert result.std_exponent == 0
        assert result.level.lossless
