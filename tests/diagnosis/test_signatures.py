"""Differences are explained by their signature."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from probe.diagnosis.explanations import explain
from probe.diagnosis.linear_steps import grid_step
from probe.diagnosis.signatures import Step
from tests.diagnosis.grids import AMAX, expected_grid

EXPECTED = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(5))


def changed(place: Any, value: float | Tensor) -> Tensor:
    out = EXPECTED.clone()
    out[place] = value
    return out


@pytest.mark.parametrize(
    ("actual", "explanation"),
    [
        (EXPECTED, ""),
        (EXPECTED * (1 + 1e-6), ""),
        (EXPECTED * 1.03, "the scale is off by +3.00%"),
        (EXPECTED * 4, "the scale is off by a factor of 2^2"),
        (EXPECTED / 2, "the scale is off by a factor of 2^-1"),
        (EXPECTED * 37.5, "the scale is off by a factor of 37.5"),
        (-EXPECTED, "the sign is flipped"),
        (torch.zeros_like(EXPECTED), "gives only zeros"),
        (EXPECTED[:, :20], "has shape [2, 20, 64], expected [2, 40, 64]"),
        (EXPECTED.half(), "is float16, expected float32"),
        (changed((1, 3, 17), torch.nan), "NaN in 1 of 5120 values, the first at [1, 3, 17]"),
        (changed((0, 2), torch.inf), "Inf in 64 of 5120 values, the first at [0, 2, 0]"),
        (changed((..., 17), EXPECTED[..., 17] * 2), "only channel 17: the scale is off by a factor of 2^1"),
        (changed((0, 9), 0.0), "only token 9 of sequence 0: gives only zeros"),
        (changed((slice(None), 9), 0.0), "only token 9: gives only zeros"),
        (changed((1,), EXPECTED[1] * 0.5), "only sequence 1: the scale is off by a factor of 2^-1"),
        (changed((1, 3, 17), 8.0), "one value, at [1, 3, 17]: 8 instead of"),
        (torch.where(EXPECTED.abs() < 0.3, 0.0, EXPECTED), "values are zero and should not be"),
        (EXPECTED.flip(1), "tokens are in reverse order"),
        (
            torch.randn(EXPECTED.shape, generator=torch.Generator().manual_seed(6)),
            "no known cause: unrelated to the ex",
        ),
        (EXPECTED + 0.05 * EXPECTED.flip(1), "of the values differ, by 0.05 of the rms"),
    ],
)
def test_a_difference_is_explained_by_its_signature(actual: Tensor, explanation: str) -> None:
    found = explain(Step("a step", actual, EXPECTED))
    assert found == explanation if not explanation else explanation in found


@pytest.mark.parametrize(
    ("rounding", "explanation"),
    [
        (lambda q: q, "not quantized"),
        (lambda q: torch.floor(q + 0.3), "rounding is biased down (mean error -0.20 steps)"),
        (lambda q: torch.floor(q + torch.rand(q.shape, dtype=q.dtype)), "rounding looks random, not nearest"),
        (lambda q: torch.round(q).clamp(-100, 100), "largest values differ: clamped at 2.913"),
        (lambda q: torch.round(q / 1.02) * 1.02, "the scale is off by +2.00%"),
    ],
)
def test_a_rounding_that_no_row_replays_is_explained_by_its_errors(
    activation: Tensor, rounding: Callable[[Tensor], Tensor], explanation: str
) -> None:
    torch.manual_seed(1)
    given = activation.clamp(-AMAX, AMAX)
    scale = AMAX / 127
    made = (rounding(given.double() / scale) * scale).float()
    assert explanation in explain(grid_step("site", expected_grid("int8"), given, made))
