"""Advice: on tensors whose best scale is known, the score, the words, the range."""

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from probe import FORMATS, recommend, scaling_sweep
from probe.scaling.advice import CRITERIA, alternatives, normalised
from probe.scaling.levels import BEYOND
from probe.scaling.rules import compare_rules
from tests.scaling.tensors import FORMATS_OF_THE_SPEC, grid_of_the_format, log_uniform, normal


@pytest.mark.parametrize("format", [*FORMATS_OF_THE_SPEC, "mxint8"])
@pytest.mark.parametrize("exponent", [-30, -1, 0, 5])
def test_the_grid_of_the_format_is_lossless_at_the_right_exponent(format: str, exponent: int) -> None:
    x = grid_of_the_format(format) * 2.0**exponent
    result = scaling_sweep(x, format, max_scale_exp=exponent + 2, min_scale_exp=exponent - 2, num_levels=9)
    found = recommend(result)
    assert found.scale_exponent == exponent
    assert found.score == 1.0
    assert found.level.lossless
    assert (found.level.mse, found.level.psnr, found.level.cosine) == (0.0, math.inf, 1.0)
    assert found.position == "At this scale every value lies on the grid: nothing is lost"
    assert [level.level for level in found.best.values()] == [found.level.level] * 5
    assert all(math.isfinite(score) and score < 1 for i, score in enumerate(found.scores) if i != found.level.level)


@pytest.mark.parametrize("format", FORMATS_OF_THE_SPEC)
def test_powers_of_two_tie_and_the_max_aligned_level_wins(format: str) -> None:
    """One power of two is on the grid at every whole exponent between the alignments: the first of them is taken."""
    x = torch.full((64,), 2.0**-3)
    fmt = FORMATS[format]
    first, last = -3 - fmt.max_exponent, -3 - (fmt.min_exponent - fmt.mantissa_bits)
    result = scaling_sweep(x, format, num_levels=last - first + 1 + BEYOND)
    assert (result.max_aligned, result.min_aligned) == (first, last)
    lossless = [level for level in result.levels if level.lossless]
    assert [level.scale_exponent for level in lossless] == list(range(first, last + 1))
    found = recommend(result)
    assert found.scale_exponent == first
    assert {found.scores[level.level] for level in lossless} == {1.0}
    assert found.range == (first, last)
    assert {level.level for level in found.best.values()} == {found.level.level}
    assert found.edge is None


def test_one_outlier_decides_between_saturating_it_and_losing_the_rest() -> None:
    """1023 ones and one 12 in fp4_e2m1: at scale 2 all are exact but the outlier only at 12 = 6 * 2."""
    x = torch.ones(1024)
    x[100] = 12.0
    result = scaling_sweep(x, "fp4_e2m1", max_scale_exp=1, min_scale_exp=-1, num_levels=3)
    exact, clipped, worse = result.levels
    assert (exact.mse, exact.overflow) == (0.0, 0)
    assert (clipped.mse, clipped.overflow, clipped.max_abs_error) == ((12 - 6) ** 2 / 1024, 1, 6.0)
    assert (worse.mse, worse.overflow, worse.max_abs_error) == ((12 - 3) ** 2 / 1024, 1, 9.0)
    assert recommend(result).scale_exponent == 1
    x[100] = 1000.0  # now maximum alignment flushes all the ones, and its error is least all the same
    result = scaling_sweep(x, "fp4_e2m1", max_scale_exp=8, min_scale_exp=0, num_levels=9)
    top, bottom = result.levels[0], result.levels[-1]
    assert top.flushed == 1023
    assert top.mse == pytest.approx((1023 + (1000 - 4 * 256) ** 2) / 1024, rel=1e-14)
    assert bottom.mse == pytest.approx((1000 - 6) ** 2 / 1024, rel=1e-14)
    assert recommend(result).best["mse"] is top


def test_uniform_values_have_the_error_of_the_step() -> None:
    """Uniform over the range of int8 at scale 1: mse = step^2 / 12, twice the step is four times that."""
    x = torch.linspace(-127, 127, 2**16 + 1)
    result = scaling_sweep(x, "int8", max_scale_exp=2, min_scale_exp=-1, num_levels=4)
    for level, step in zip(result.levels, (4, 2, 1), strict=False):
        assert level.mse == pytest.approx(step**2 / 12, rel=1e-2)
        assert level.overflow == 0
    assert result.levels[3].percent(result.levels[3].overflow) == pytest.approx(50, abs=0.5)
    assert recommend(result).scale_exponent == 0


def test_log_uniform_values_lose_their_share_of_octaves() -> None:
    """4096 values over 20 octaves in fp8_e4m3: at maximum alignment what is more than 17.8 octaves down underflows."""
    x = log_uniform(-20, 0)
    result = scaling_sweep(x, "fp8_e4m3", num_levels=7)
    assert [level.scale_exponent for level in result.levels] == [-5, -6, -7, -8, -9, -10, -11]
    top = result.levels[BEYOND]
    octaves_lost = 20 + (-9 - 8)  # below 2^(-9-8)
    assert top.underflow == pytest.approx(octaves_lost / 20 * 4096, abs=1)
    assert top.flushed == pytest.approx((octaves_lost - 1) / 20 * 4096, abs=1)
    assert top.overflow == 0
    bottom = result.levels[-1]
    assert bottom.underflow == 0
    assert bottom.overflow == pytest.approx((11 - math.log2(448)) / 20 * 4096, abs=1)
    found = recommend(result)
    assert "span 20.0 powers of two, those of fp8_e4m3 17.8" in found.losses
    assert found.level is top


def test_the_score_is_the_weighted_sum_of_normalised_figures() -> None:
    result = scaling_sweep(normal(40, 40), "fp4_e2m1", num_levels=6)
    found = recommend(result)
    assert {name: one.weight for name, one in CRITERIA.items()} == {
        "mse": 0.3, "cosine": 0.3, "psnr": 0.2, "mae": 0.1, "relative_error": 0.1,
    }  # fmt: skip
    assert sum(one.weight for one in CRITERIA.values()) == pytest.approx(1)
    for index, level in enumerate(result.levels):
        expected = 0.0
        for name, weight in (("mse", 0.3), ("mae", 0.1), ("relative_error", 0.1)):
            values = [getattr(one, name) for one in result.levels]
            expected += weight * (max(values) - getattr(level, name)) / (max(values) - min(values))
        for name, weight in (("cosine", 0.3), ("psnr", 0.2)):
            values = [getattr(one, name) for one in result.levels]
            expected += weight * (getattr(level, name) - min(values)) / (max(values) - min(values))
        assert found.scores[index] == pytest.approx(expected, rel=1e-12)
    assert found.level.level == max(range(6), key=lambda index: found.scores[index])


def test_normalising_never_gives_nan() -> None:
    assert normalised([3.0, 3.0], False) == [1.0, 1.0]
    assert normalised([math.inf, math.inf], True) == [1.0, 1.0]
    assert normalised([10.0, math.inf, 20.0], True) == [0.0, 1.0, 0.0]
    assert normalised([1.0, 3.0, 2.0], False) == [1.0, 0.0, 0.5]


def with_figures(**figures: list[float]) -> Any:
    """A result of three levels with these figures, the others as measured."""
    result = scaling_sweep(normal(64), "int8", num_levels=3)
    levels = [
        replace(level, **cast(Any, {name: values[index] for name, values in figures.items()}))
        for index, level in enumerate(result.levels)
    ]
    return recommend(replace(result, levels=tuple(levels)))


@pytest.mark.parametrize(
    ("figures", "place", "kind", "text"),
    [
        ({"mse": [1.0, 1.05, 1.09]}, 0, "good", "MSE is stable"),
        ({"mse": [10.0, 10.5, 11.0]}, 0, "fair", "MSE varies significantly with scaling - choose the recommended"),
        ({"mse": [0.0, 0.0, 1e-9]}, 0, "fair", "MSE varies significantly"),
        ({"mse": [0.0, 0.0, 0.0]}, 0, "good", "MSE is stable"),
        ({"cosine": [0.99, 0.995, 0.9999]}, 1, "good", "Cosine similarity is very stable"),
        ({"cosine": [0.98, 0.985, 0.99]}, 1, "fair", "Cosine similarity varies with scaling"),
        ({"psnr": [30.0, 35.0, 40.0]}, 2, "good", "Small PSNR range - scaling factor has limited impact"),
        ({"psnr": [30.0, 35.0, 40.1]}, 2, "fair", "Moderate PSNR range"),
        ({"psnr": [30.0, 35.0, 50.0]}, 2, "fair", "Moderate PSNR range"),
        ({"psnr": [30.0, 35.0, 50.1]}, 2, "poor", "Large PSNR range - scaling factor selection is critical"),
        ({"psnr": [30.0, 35.0, math.inf]}, 2, "poor", "Large PSNR range"),
        ({"psnr": [math.inf] * 3}, 2, "good", "Small PSNR range"),
    ],
)
def test_words_follow_the_thresholds(figures: dict[str, list[float]], place: int, kind: str, text: str) -> None:
    found = with_figures(**figures).advice[place]
    assert found[0] == kind
    assert found[1].startswith(text)


def test_spreads_are_range_and_population_std() -> None:
    spread = with_figures(mse=[1.0, 2.0, 6.0]).spreads["mse"]
    assert (spread.low, spread.high, spread.range) == (1.0, 6.0, 5.0)
    assert spread.std == pytest.approx(math.sqrt((4 + 1 + 9) / 3))
    psnr = with_figures(psnr=[1.0, 2.0, math.inf]).spreads["psnr"]
    assert (psnr.range, psnr.std) == (math.inf, None)


def test_the_range_has_at_most_1_db_less_psnr_and_the_losses_are_counted() -> None:
    result = scaling_sweep(log_uniform(-4, 4), "fp8_e4m3", max_scale_exp=-10, min_scale_exp=14, num_levels=25)
    found = recommend(result)
    low, high = found.range
    assert low <= found.scale_exponent <= high
    for level in result.levels:
        good = level.psnr >= found.level.psnr - 1 and not level.significant
        assert (low <= level.scale_exponent <= high) == good, level.scale_exponent
    assert found.range == (-4.0, 5.0)
    assert found.losses == "10 of 25 levels have no significant overflow or underflow"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("format", [*FORMATS_OF_THE_SPEC, "mxint8"])
def test_a_power_of_two_is_recommended_where_the_scale_is_one(format: str, seed: int) -> None:
    x = normal(40, 33, seed=seed) * torch.exp(2 * normal(40, 33, seed=seed + 100))
    result = scaling_sweep(x, format)
    found = recommend(result)
    whole = [level for level in result.levels if level.is_power]
    low, high = sorted(map(int, (result.max_scale_exp, result.min_scale_exp)))
    assert {level.scale_exponent for level in whole} == set(range(low, high + 1))
    candidates = whole if FORMATS[format].scale == "e8m0" else list(result.levels)
    assert found.score == max(found.scores[level.level] for level in candidates)
    assert found.level in candidates
    assert len(candidates) < len(result.levels) or format == "int8"


def test_the_least_error_lies_inside_a_default_sweep() -> None:
    for format in FORMATS_OF_THE_SPEC:
        for granularity in ("tensor", "block"):
            result = scaling_sweep(normal(64, 64), format, granularity=granularity)
            found = recommend(result)
            assert found.edge is None, (format, granularity)
            assert abs(found.scale_exponent - result.max_scale_exp) >= 1


def test_a_best_level_at_an_edge_is_said_with_the_option_that_goes_on() -> None:
    x = normal(64, 64)  # in fp4_e2m1 the best exponent is -1
    for first, last, place, option in ((5, 1, "last", "--min-scale-exp -2"), (-3, -9, "first", "--max-scale-exp 0")):
        edge = recommend(scaling_sweep(x, "fp4_e2m1", max_scale_exp=first, min_scale_exp=last)).edge
        beyond = "the least error may lie beyond it"
        assert edge == f"The recommended level is the {place} of the sweep: {beyond}. Sweep on with {option}"
    assert recommend(scaling_sweep(x, "fp4_e2m1", max_scale_exp=2, min_scale_exp=-4)).edge is None
    assert recommend(scaling_sweep(x, "fp4_e2m1", num_levels=1)).edge is None
    limited = scaling_sweep(x, "fp4_e2m1", scale_bits=2)
    assert (limited.max_scale_exp, recommend(limited).edge) == (1, None)  # there is no smaller scale than 2^-1


def test_alternatives_are_the_next_levels_the_best_fraction_and_every_rule() -> None:
    x = normal(64, 64)
    result = scaling_sweep(x, "fp4_e2m1")
    chosen = recommend(result).level
    rules = compare_rules(x, "fp4_e2m1")
    found = {one.what: one for one in alternatives(result, chosen, rules)}
    by_exponent = {level.scale_exponent: level for level in result.levels}
    below, above = (by_exponent[chosen.scale_exponent + step] for step in (-1, 1))
    assert found["next power of two below"].mse == below.mse
    assert found["next power of two above"].mse == above.mse
    assert found["next power of two above"].times == pytest.approx(above.mse / chosen.mse)
    fraction = found["best fractional exponent, not a scale of the format"]
    assert fraction.mse == min(level.mse for level in result.levels if not level.is_power)
    for rule in rules:
        assert found[f"blocks of 32, rule {rule.rule}"].mse == rule.level.mse
    assert len(found) == 8
    blocks = scaling_sweep(x, "fp4_e2m1", granularity="block")
    chosen = recommend(blocks).level
    found = {one.what: one for one in alternatives(blocks, chosen, rules)}
    others = [f"rule {rule}" for rule in blocks.rules if rule != chosen.rule]
    assert list(found) == ["next power of two below", "next power of two above", *others]
    lossless = scaling_sweep(torch.ones(4), "int8")
    assert {one.times for one in alternatives(lossless, recommend(lossless).level)} == {None}


@pytest.mark.parametrize(
    ("overflow", "severity"), [(0, "none"), (1, "none"), (2, "moderate"), (10, "moderate"), (11, "high")]
)
def test_severity_is_high_above_1_percent_and_moderate_above_a_tenth(overflow: int, severity: str) -> None:
    level = replace(scaling_sweep(normal(1000), "int8").levels[0], overflow=overflow, underflow=0)
    assert level.overflow_severity == severity
    assert level.significant == (severity != "none")
    level = replace(level, overflow=0, underflow=overflow)
    assert level.underflow_severity == severity
