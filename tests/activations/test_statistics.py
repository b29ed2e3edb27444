"""Promises of LayerStatistics: exact where it says so, in one pass, whatever the cut; held against numpy."""

import math
import sys
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch

from probe.activations.reference import SIZES, TABLES
from probe.activations.statistics import PERCENTILE_ERROR, PERCENTILES, LayerStatistics, measure
from probe.numerics.native import numba_twin

TWINS = pytest.mark.parametrize("fast", [False, True], ids=("reference", "fast"))
EXACT = (
    *("rows", "count", "nonfinite", "zeros", "negatives", "minimum", "maximum", "smallest", "largest"),
    *("row_largest", "row_smallest", "zero_blocks"),
)


def heavy(*shape: int, seed: int = 0) -> torch.Tensor:
    """Many sizes, some zeros, a few outliers."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g) * torch.exp2(torch.randint(-12, 4, shape, generator=g).float())
    x[torch.rand(*shape, generator=g) < 0.05] = 0.0
    x[torch.rand(*shape, generator=g) < 0.002] *= 300
    return x


def assert_same(a: LayerStatistics, b: LayerStatistics) -> None:
    assert {name: getattr(a, name) for name in EXACT} == {name: getattr(b, name) for name in EXACT}
    assert np.array_equal(a.channel_amax, b.channel_amax)
    for name in TABLES:
        assert np.array_equal(getattr(a, name).whole(), getattr(b, name).whole()), name
    for name in ("mean", "second", "third", "fourth"):
        size = max(a.moments.fourth, 1.0)
        assert getattr(a.moments, name) == pytest.approx(getattr(b.moments, name), rel=1e-9, abs=1e-9 * size), name


@TWINS
def test_counts_and_extremes_are_numpys(fast: bool) -> None:
    x = heavy(3, 50, 70)
    s, rows = measure(x, module="m", kind="input", fast=fast)
    v = x.numpy().reshape(-1, 70)
    sizes = np.abs(v)
    ordered = np.sort(sizes.reshape(-1))[::-1]
    assert (s.module, s.kind, s.rows, s.count, s.nonfinite) == ("m", "input", 150, v.size, 0)
    assert (s.zeros, s.negatives) == ((v == 0).sum(), (v < 0).sum())
    assert (s.minimum, s.maximum, s.smallest, s.amax) == (v.min(), v.max(), sizes.min(), sizes.max())
    assert s.largest == tuple(ordered[:3])
    assert np.array_equal(s.channel_amax, sizes.max(0))
    assert np.array_equal(rows, sizes.max(1).reshape(3, 50))
    assert s.row_largest == tuple(np.sort(sizes.max(1))[::-1][:3])
    assert s.row_smallest == sizes.max(1).min()
    assert int(s.buckets.whole().sum()) + s.zeros == s.count
    assert s.blocks == 150 * 3, "two blocks of 32 and one of 6"


@TWINS
def test_moments_are_numpys_also_far_from_zero(fast: bool) -> None:
    for offset in (0.0, 1000.0):
        v = (torch.randn(40, 130, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + offset).float()
        s, _ = measure(v, fast=fast)
        w = v.double().numpy()
        assert s.moments.mean == pytest.approx(w.mean(), rel=1e-12)
        assert s.moments.std == pytest.approx(w.std(), rel=1e-9)
        assert s.moments.mean_square == pytest.approx((w**2).mean(), rel=1e-12)
        assert s.moments.kurtosis == pytest.approx(((w - w.mean()) ** 4).mean() / w.var() ** 2, rel=1e-8)


@TWINS
def test_percentiles_keep_their_bound(fast: bool) -> None:
    x = heavy(64, 300)
    s, _ = measure(x, fast=fast)
    for percent in PERCENTILES:
        exact = float(np.percentile(np.abs(x.numpy().astype(np.float64)), percent))
        assert s.percentile(percent) == pytest.approx(exact, rel=PERCENTILE_ERROR / 2, abs=0), percent
    assert s.median == s.percentile(50)
    assert s.percentile(100) == s.amax
    assert s.max_to_median == s.amax / s.median
    assert s.max_to_p99 == s.amax / s.percentile(99)


@TWINS
def test_depths_say_how_far_elements_lie_below_their_block(fast: bool) -> None:
    row = torch.zeros(40)
    row[:32] = 1.5  # exponent 127
    row[0], row[1], row[2], row[3] = 16.0, 2.0**-60, 0.0, -9.0
    row[32:] = torch.tensor([4.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    s, _ = measure(row[None], fast=fast)
    first, second = s.depths.whole()[127 + 4], s.depths.whole()[127 + 2]
    assert {d: int(n) for d, n in enumerate(first) if n} == {0: 1, 1: 1, 4: 28, 31: 1, 32: 1}
    assert {d: int(n) for d, n in enumerate(second) if n} == {0: 1, 2: 3, 32: 4}
    assert s.depths.whole().sum() == 40
    assert {d: int(n) for d, n in enumerate(s.median_depths.whole()) if n} == {2: 1, 4: 1}, "the lower of two medians"
    counts = s.block_buckets.whole()
    blocks = {round(float(SIZES.edges[b]), 3): int(counts[b]) for b in counts.nonzero()[0]}
    assert blocks == {4.0: 1, 16.0: 1}
    assert s.zero_blocks == 0


@TWINS
def test_blocks_of_zeros_and_subnormals(fast: bool) -> None:
    row = torch.zeros(96)
    row[32], row[33] = 1e-40, 1e-44
    s, _ = measure(row[None], fast=fast)
    assert (s.zero_blocks, s.blocks, s.zeros) == (2, 3, 94)
    assert {d: int(n) for d, n in enumerate(s.depths.whole()[0]) if n} == {0: 2, 32: 30}
    assert s.largest[0] == pytest.approx(1e-40, rel=1e-3)
    assert s.largest[1] == pytest.approx(1e-44, rel=0.2)
    assert s.largest[2:] == (0.0,)


@TWINS
def test_nan_and_inf_are_counted_and_left_out(fast: bool) -> None:
    x = heavy(30, 64)
    spoiled = x.clone()
    spoiled[3, 5], spoiled[3, 6], spoiled[20, 63] = math.nan, math.inf, -math.inf
    spoiled[7] = math.nan
    s, rows = measure(spoiled, fast=fast)
    good = spoiled[spoiled.isfinite()].numpy()
    assert (s.count, s.nonfinite) == (good.size, 67)
    assert (s.zeros, s.smallest) == ((good == 0).sum(), np.abs(good).min())
    assert s.largest == tuple(np.sort(np.abs(good))[::-1][:3])
    assert s.moments.mean == pytest.approx(good.astype(np.float64).mean(), rel=1e-9)
    assert rows[0, 7] == 0
    assert (s.zero_blocks, s.depths.whole().sum()) == (2, 29 * 64), "as zeros in the tables of blocks"
    everything, _ = measure(torch.full((2, 3), math.nan), fast=fast)
    assert (everything.count, everything.nonfinite, everything.amax) == (0, 6, 0.0)
    assert everything.moments.kurtosis is None


@pytest.mark.parametrize("shape", [(1, 1), (5, 31), (4, 33), (2, 7, 100), (3, 2, 5, 64)])
def test_the_twins_agree(shape: tuple[int, ...]) -> None:
    x = heavy(*shape)
    (a, rows_a), (b, rows_b) = measure(x, fast=False), measure(x, fast=True)
    assert_same(a, b)
    assert np.array_equal(rows_a, rows_b)


@TWINS
@pytest.mark.parametrize("pieces", [2, 7])
def test_pieces_merge_into_the_whole(fast: bool, pieces: int) -> None:
    x = heavy(70, 96)
    parts = [measure(part, fast=fast)[0] for part in torch.tensor_split(x, pieces)]
    assert_same(reduce(LayerStatistics.merge, parts), measure(x, fast=fast)[0])


@TWINS
def test_large_tensors_are_cut_and_shared_among_threads(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = heavy(4, 60, 50)
    whole, rows = measure(x, fast=fast)
    monkeypatch.setattr("probe.activations.statistics.PIECE", 700)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    cut, cut_rows = measure(x, fast=fast)
    assert_same(cut, whole)
    assert np.array_equal(rows, cut_rows)


@TWINS
def test_rows_that_are_not_kept_count_for_nothing(fast: bool) -> None:
    x = heavy(3, 20, 40)
    keep = torch.ones(3, 20, dtype=torch.bool)
    keep[1, 12:], keep[2, :] = False, False
    padded = x.masked_fill(~keep[..., None], 1e6)
    s, rows = measure(padded, keep=keep, fast=fast)
    assert_same(s, measure(x[keep], fast=fast)[0])
    assert np.array_equal(rows, np.where(keep.numpy(), np.abs(x.numpy()).max(2), 0).astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_read_as_float32(dtype: torch.dtype) -> None:
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert_same(measure(x)[0], measure(x.float())[0])


def test_views_that_are_not_contiguous() -> None:
    x = heavy(2, 40, 25)
    assert_same(measure(x.transpose(1, 2))[0], measure(x.transpose(1, 2).contiguous())[0])


@pytest.mark.parametrize("dim", [None, -1, -2])
def test_magnitudes_are_those_of_the_reduced_tensor(dim: Any) -> None:
    x = heavy(101, 33)
    sizes = np.abs(x.numpy())
    values = np.sort((sizes if dim is None else sizes.max(dim)).reshape(-1))[::-1]
    found = measure(x)[0].magnitudes(dim)
    assert (found["top1"], found["top2"], found["top3"]) == tuple(values[:3])
    assert found["min"] == values[-1]
    assert found["median"] == pytest.approx(np.median(values), rel=PERCENTILE_ERROR / 2 if dim != -2 else 1e-7)


def test_reducing_over_channels_gives_tokens_and_over_tokens_gives_channels() -> None:
    x = torch.ones(4, 3)
    x[2, :] = 10  # one token is large
    s = measure(x)[0]
    assert (s.magnitudes(-1)["top1"], s.magnitudes(-1)["top2"]) == (10.0, 1.0)
    assert (s.magnitudes(-2)["top3"], s.magnitudes(-2)["min"]) == (10.0, 10.0)


def test_a_top_that_does_not_exist_is_none() -> None:
    assert measure(torch.ones(1, 2))[0].magnitudes(None)["top3"] is None
    assert measure(torch.ones(1, 2))[0].magnitudes(-1)["top2"] is None


def test_equal_values_have_no_kurtosis_and_no_spread() -> None:
    s = measure(torch.full((7, 33), 0.1))[0]
    assert (s.moments.std, s.moments.kurtosis) == (0.0, None)


def test_integers_have_no_magnitudes() -> None:
    with pytest.raises(ValueError, match=r"input of model\.x is torch\.int64\. Only floats have magnitudes"):
        measure(torch.ones(2, 2, dtype=torch.int64), module="model.x", kind="input")


def test_other_tensors_do_not_merge() -> None:
    a, b = (measure(torch.ones(1, width), module="m")[0] for width in (3, 4))
    with pytest.raises(ValueError, match=r"cannot merge output of m \(4 channels\) into output of m \(3 channels\)"):
        a.merge(b)


@TWINS
def test_percentiles_keep_their_bound_where_all_values_are_at_the_edge_of_their_bucket(fast: bool) -> None:
    x = torch.ones(1, 1001)
    x[0, 0] = 100.0
    s, _ = measure(x, fast=fast)
    for percent in (0.01, 50.0, 99.0, 99.9):
        assert s.percentile(percent) == pytest.approx(1.0, rel=PERCENTILE_ERROR, abs=0), percent
    assert s.percentile(99.0) > 1 + PERCENTILE_ERROR / 2, "and no smaller bound holds"


def test_without_numba_all_goes_on_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from probe.activations.statistics import measure_bands

    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(5))
    expected, expected_bands = measure(x)[0], measure_bands(x)
    numba_twin.cache_clear()
    for module in ("probe.activations.fast", "probe.numerics.machine_code"):
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.delattr(module, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    try:
        with pytest.warns(RuntimeWarning, match=r"numba cannot be loaded .*the same statistics, but slower\.$"):
            found = measure(x)[0]
        assert_same(found, expected)
        assert np.array_equal(measure_bands(x).counts, expected_bands.counts)  # without a second warning
    finally:
        numba_twin.cache_clear()
