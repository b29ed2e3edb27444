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


def few_moved(x: Tensor, unit: Tensor, generator: torch.Generator) -> Tensor:
    hit = torch.rand(x.shape, generator=generator) < 0.01
    return torch.where(hit, x + unit, x)


def jittered(x: Tensor, unit: Tensor, generator: torch.Generator) -> Tensor:
    return x * (1 + 1e-3 * torch.randn(x.shape, generator=generator))


def steps_off(x: Tensor, unit: Tensor, generator: torch.Generator) -> Tensor:
    return x + unit * torch.randint(-3, 4, x.shape, generator=generator)


def one_channel_off(x: Tensor, unit: Tensor, generator: torch.Generator) -> Tensor:
    out = x.clone()
    out[..., 5] += unit[..., 5] * torch.randint(-4, 5, x.shape[:-1], generator=generator)
    return out


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "fp4_e2m1", "nvfp4"])
@pytest.mark.parametrize("change", [few_moved, jittered, steps_off, one_channel_off])
@pytest.mark.parametrize("seed", range(3))
def test_a_change_of_no_known_kind_has_no_known_cause(
    activation: Tensor, format: str, change: Callable[..., Tensor], seed: int
) -> None:
    """Where it is may be said, why may not."""
    grid = expected_grid(format)
    made = change(grid(activation), grid.unit(activation), torch.Generator().manual_seed(seed))
    assert "no known cause: " in explain(grid_step("site", grid, activation, made))


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "fp4_e2m1"])
def test_two_values_do_not_make_a_bias(activation: Tensor, format: str) -> None:
    grid = expected_grid(format)
    made = grid(activation)
    made[:, 3, 5] -= grid.unit(activation)[:, 3, 5]
    assert explain(grid_step("site", grid, activation, made)).startswith("only channel 5 of token 3: no known cause: ")


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_a_random_change_of_sums_has_no_known_cause(size: float, seed: int) -> None:
    noise = torch.randn(EXPECTED.shape, generator=torch.Generator().manual_seed(100 + seed))
    assert explain(Step("a step", EXPECTED + size * noise, EXPECTED)).startswith("no known cause: ")


@pytest.mark.parametrize(
    ("look_alike", "sentence"),
    [
        (EXPECTED * torch.linspace(1.0, 1.1, 64), "the scale is off"),  # a factor for each channel
        (EXPECTED + torch.linspace(-0.1, 0.1, 40)[:, None], "is added to every value"),
        (EXPECTED.tanh(), "clamped"),
        (0.5 * (EXPECTED + EXPECTED.roll(1, 1)), "late"),
        (EXPECTED[:, torch.randperm(40, generator=torch.Generator().manual_seed(1))], "late"),
        (EXPECTED + 0.01 * EXPECTED.bfloat16().float(), "rounded to"),
        (torch.where(EXPECTED > 0, EXPECTED, 0.9 * EXPECTED), "the sign"),
    ],
)
def test_a_look_alike_is_not_named_for_what_it_resembles(look_alike: Tensor, sentence: str) -> None:
    assert sentence not in explain(Step("a step", look_alike, EXPECTED))
