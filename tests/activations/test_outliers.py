"""Promises of outliers, bands and heat grids, held against plain computations."""

import numpy as np
import pytest
import torch

from probe.activations.collecting import CHANNELS, TOKENS, WORST, LayerOutliers, find_outliers, heat_of, pooled
from probe.activations.statistics import BAND_ERROR, BANDS, measure_bands


def found(values: list[float], *, threshold: float = 4.0, sample: int = 0) -> LayerOutliers:
    tokens = np.arange(100, 100 + len(values))
    return find_outliers("m", np.array(values, np.float32), tokens, threshold=threshold, sample=sample)


def test_an_outlier_exceeds_the_threshold_times_the_median_of_its_sample() -> None:
    layer = found([1, 1, 4, 4.001, 1, 90, 1])  # the median is 1
    assert (layer.tokens, layer.count, layer.samples) == (7, 2, 1)
    assert dict(layer.positions) == {3: 1, 5: 1}
    assert dict(layer.token_ids) == {103: 1, 105: 1}
    assert (layer.worst[0].position, layer.worst[0].token, layer.worst[0].value) == (5, 105, 90.0)
    assert layer.largest_ratio == 90.0
    assert found([1, 1, 3], threshold=64).largest_ratio == 3.0, "outlier or not"


def test_the_median_is_that_of_the_sample_and_not_of_the_layer() -> None:
    quiet, loud = found([1, 1, 1, 5], sample=0), found([100, 100, 100, 100], sample=1)
    both = quiet.merge(loud)
    assert (both.count, both.tokens, both.samples) == (1, 8, 1)
    assert both.worst[0].sample == 0


def test_where_the_median_is_zero_any_value_is_an_outlier() -> None:
    layer = found([0, 0, 0, 1e-9])
    assert (layer.count, layer.largest_ratio) == (1, np.inf)
    assert found([0, 0]).count == 0
    assert find_outliers("m", np.array([], np.float32), np.array([], np.int64), threshold=1, sample=0).tokens == 0


def test_the_worst_are_kept_and_no_more() -> None:
    layers = [found([1.0] * 9 + [10.0 + i], sample=i) for i in range(30)]
    whole = layers[0]
    for one in layers[1:]:
        whole = whole.merge(one)
    assert whole.count == 30
    assert [one.ratio for one in whole.worst] == [39.0 - i for i in range(WORST)]
    assert whole.positions[9] == 30


@pytest.mark.parametrize("fast", [False, True], ids=["reference", "fast"])
def test_bands_keep_their_bound_and_merge(fast: bool) -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(4, 500, 6, generator=g) * torch.tensor([0.001, 1, 30, 1, 1, 0]) + torch.tensor([0, 5, 0, -3, 0, 0])
    x[0, 3, 4], x[1, 3, 4] = 1000.0, float("nan")
    bands = measure_bands(x[:2], fast=fast).merge(measure_bands(x[2:], fast=fast))
    assert np.array_equal(bands.counts, measure_bands(x, fast=fast).counts)
    assert bands.counts.sum() == x.numel() - 1
    for channel in range(6):
        column = x[..., channel].reshape(-1)
        values = column[column.isfinite()].double().numpy()
        got = bands.percentiles()[:, channel]
        for value, percent in zip(got, BANDS, strict=True):
            ends = [np.percentile(values, percent, method=side) for side in ("lower", "higher")]
            low, high = (
                end + sign * (BAND_ERROR * abs(end) + 2.0**-24) for end, sign in zip(ends, (-1, 1), strict=True)
            )
            assert low <= value <= high, (channel, percent)
        assert values.min() <= got[0] <= got[-1] <= values.max()


def test_the_twins_of_bands_count_alike() -> None:
    x = torch.randn(300, 5, generator=torch.Generator().manual_seed(4)) * 2.0 ** torch.arange(-60, 60, 24)
    x[:6, 0] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 3e38])
    a, b = measure_bands(x, fast=False), measure_bands(x, fast=True)
    for name in ("counts", "minimum", "maximum"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


def test_bands_leave_out_padding() -> None:
    x = torch.ones(2, 3, 4)
    x[1, 1:] = 1e6
    keep = torch.tensor([[True] * 3, [True, False, False]])
    bands = measure_bands(x, keep)
    assert bands.counts.sum() == 16
    assert bands.maximum.max() == 1


def test_a_heat_grid_keeps_the_largest_of_every_field() -> None:
    x = torch.zeros(300, 1000)
    x[299, 999], x[0, 0], x[150, 3] = -7, 2, float("inf")
    heat = heat_of(x, module="m", kind="output", sample=0)
    assert heat.values.shape == (TOKENS, CHANNELS)
    assert (heat.tokens, heat.channels) == (300, 1000)
    assert (heat.values[-1, -1], heat.values[0, 0], heat.values.sum()) == (7, 2, 9)
    small = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(pooled(small, 5, 5), small)
    assert pooled(small, 1, 2).tolist() == [[3, 5]]
