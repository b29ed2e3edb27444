"""Merged moments are those of all values together, held against numpy."""

import math
from functools import reduce

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from probe.numerics.moments import NO_MOMENTS, Moments


def moments_of(values: npt.NDArray[np.float64]) -> Moments:
    mean = float(values.mean())
    second, third, fourth = (float(((values - mean) ** power).sum()) for power in (2, 3, 4))
    return Moments(values.size, mean, second, third, fourth)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("cuts", [(100,), (1, 2, 3), (500, 501)])
def test_parts_merge_into_the_whole(offset: float, cuts: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).gamma(2.0, size=1000) + offset
    merged = reduce(Moments.merge, [moments_of(part) for part in np.split(values, cuts)])
    whole = moments_of(values)
    for name in ("count", "mean", "second", "third", "fourth"):
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-9), name


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_mean_and_variance_are_numpys(a: list[float], b: list[float]) -> None:
    merged, values = moments_of(np.array(a)).merge(moments_of(np.array(b))), np.array(a + b)
    size = float(np.abs(values).max()) + 1e-300
    assert merged.mean == pytest.approx(values.mean(), abs=1e-12 * size)
    assert merged.variance == pytest.approx(values.var(), abs=1e-12 * size**2)
    assert merged.mean_square == pytest.approx((values**2).mean(), abs=1e-12 * size**2)


def test_merging_with_nothing_changes_nothing() -> None:
    some = Moments(5, 1, 2, 3, 4)
    assert NO_MOMENTS.merge(some) == some
    assert some.merge(NO_MOMENTS) == some


def test_kurtosis_is_numpys_and_none_for_equal_values() -> None:
    values = np.random.default_rng(1).normal(size=500)
    expected = ((values - values.mean()) ** 4).mean() / values.var() ** 2
    assert moments_of(values).kurtosis == pytest.approx(expected)
    assert moments_of(np.ones(3)).kurtosis is None
    assert (NO_MOMENTS.variance, NO_MOMENTS.std, NO_MOMENTS.kurtosis) == (0.0, 0.0, None)


def test_powers_that_were_not_gathered_stay_unknown() -> None:
    merged = Moments(2, 1.0, 3.0).merge(Moments(3, 2.0, 4.0))
    assert math.isfinite(merged.second)
    assert math.isnan(merged.third)
    assert math.isnan(merged.fourth)


def test_huge_values_give_infinity_and_no_exception() -> None:
    assert Moments(1, 1e200).merge(Moments(1, -1e200)).second == math.inf
