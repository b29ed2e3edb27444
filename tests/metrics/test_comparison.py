import json
import math
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from probe.metrics import PERCENTILE_ERROR, Comparison, Metrics, comparison as chosen, reference as readable, tally
from tests.metrics.oracles import (
    INF,
    NAN,
    PERCENTILES,
    assert_agrees,
    expected,
    figures,
    floats,
    odd,
    pair,
    seen,
    split,
    stream,
)


@pytest.fixture(scope="module", autouse=True, params=("reference", "fast"))
def twin(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every promise below is one of both twins."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setattr(chosen, "numba_twin", lambda *_: None)
            patch.setattr(tally, "numba_twin", lambda *_: None)
        yield request.param


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readable, "CHUNK", 7)


@pytest.mark.parametrize("shape", [(5,), (64, 48), (3, 5, 7), ()])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_every_figure_is_numpys(shape: tuple[int, ...], offset: float) -> None:
    output, reference = pair(*shape, offset=offset)
    assert_agrees(seen((output, reference)).metrics(), output, reference)


def test_more_than_one_chunk_is_numpys() -> None:
    output, reference = pair(2 * readable.CHUNK + 1)
    assert_agrees(seen((output, reference)).metrics(), output, reference)


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-10])
def test_huge_and_tiny_values_are_numpys(scale: float) -> None:
    output, reference = pair(50, 40, scale=scale)
    found = seen((output, reference)).metrics()
    assert_agrees(found, output, reference)
    assert found.mse is not None
    assert found.mse > 0


@given(stream(floats))
def test_any_floats_give_numpys_figures(values: list[tuple[float, float]]) -> None:
    output, reference = split(values)
    assert_agrees(seen((output, reference)).metrics(), output, reference)


@given(stream(odd))
def test_nan_and_inf_are_counted_and_left_out(values: list[tuple[float, float]]) -> None:
    output, reference = split(values)
    assert_agrees(seen((output, reference)).metrics(), output, reference)


@given(stream(odd), st.integers(0, 2**32))
def test_splits_and_merges_change_nothing(values: list[tuple[float, float]], seed: int) -> None:
    output, reference = split(values)
    pick = random.Random(seed)
    whole = Comparison()
    start = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readable, "CHUNK", pick.randint(1, 20))
        while start < len(output):
            part = Comparison()
            for _ in range(pick.randint(0, 3)):
                stop = start + pick.randint(0, 12)
                part.update(output[start:stop], reference[start:stop])
                start = min(stop, len(output))
            before = part.metrics() if part._tally.seen else None
            assert whole.merge(part) is whole
            assert (part.metrics() if part._tally.seen else None) == before
    assert_agrees(whole.metrics(), output, reference)


@pytest.mark.parametrize("batch", [1, 3, 64, 640])
def test_figures_do_not_depend_on_the_batch_size(batch: int) -> None:
    output, reference = pair(640, 16, offset=3.0)
    batches = zip(torch.split(output, batch), torch.split(reference, batch), strict=True)
    assert_agrees(seen(*batches).metrics(), output, reference)


def test_correlation_survives_a_large_mean() -> None:
    g = torch.Generator().manual_seed(0)
    reference = 1e8 + torch.randn(4000, generator=g, dtype=torch.float64)
    output = reference + 0.1 * torch.randn(4000, generator=g, dtype=torch.float64)
    found = seen(*zip(torch.split(output, 100), torch.split(reference, 100), strict=True)).metrics()
    shifted = expected(output - 1e8, reference - 1e8)
    assert found.correlation == pytest.approx(shifted["correlation"], abs=1e-8)
    assert found.std_output == pytest.approx(shifted["std_output"], rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_float_dtype_is_read_as_it_is(dtype: torch.dtype) -> None:
    output, reference = (x.to(dtype) for x in pair(30, 20))
    assert_agrees(seen((output, reference)).metrics(), output, reference)
    wide = pair(30, 20)[1]
    assert_agrees(seen((output, wide)).metrics(), output, wide)


def test_views_and_gradients_are_accepted_and_inputs_left_alone() -> None:
    output, reference = (x.double() for x in pair(30, 20))
    kept = output.clone(), reference.clone()
    found = seen((output.T.requires_grad_(), reference.T)).metrics()
    assert torch.equal(output, kept[0])
    assert torch.equal(reference, kept[1])
    assert_agrees(found, output.detach().T, reference.T)


def test_no_loss_is_perfect() -> None:
    _, reference = pair(100)
    found = seen((reference, reference)).metrics()
    assert (found.mse, found.max_abs, found.p99, found.moved, found.identical) == (0, 0, 0, 0, True)
    assert (found.psnr, found.sqnr, found.correlation, found.cosine) == (INF, INF, 1.0, 1.0)


def test_a_changed_sign_of_zero_is_moved_but_not_lost() -> None:
    found = figures([-0.0, 1.0], [0.0, 1.0])
    assert (found.identical, found.moved, found.mse, found.psnr) == (False, 0.5, 0, INF)
    assert math.copysign(1, found.max_abs or 0.0) == 1


@pytest.mark.parametrize(
    ("output", "reference", "undefined"),
    [
        ([0.1] * 9, [0.1] * 9, {"correlation"}),
        ([0.1] * 9, list(range(9)), {"correlation"}),
        (list(range(9)), [0.1] * 9, {"correlation"}),
        ([0.0] * 9, [0.0] * 9, {"correlation", "cosine"}),
        (list(range(9)), [0.0] * 9, {"correlation", "cosine", "psnr", "sqnr"}),
        ([0.0] * 9, list(range(9)), {"correlation", "cosine"}),
        ([2.0], [3.0], {"correlation"}),
    ],
)
@pytest.mark.usefixtures("small_chunks")
def test_what_constants_leave_undefined_is_none(
    output: list[float], reference: list[float], undefined: set[str]
) -> None:
    found = figures(output, reference).as_dict()
    assert {name for name, figure in found.items() if figure is None} - {"first_nonfinite"} == undefined
    for name, values in (("std_output", output), ("std_reference", reference)):
        assert (found[name] == 0) == (len(set(values)) == 1)


def test_nothing_finite_leaves_only_counts() -> None:
    found = figures([NAN, INF, 1.0], [1.0, 1.0, -INF])
    assert (found.count, found.compared, found.finite, found.first_nonfinite) == (3, 0, False, 0)
    known = {name for name, figure in found.as_dict().items() if figure is not None}
    assert known == {
        *("count", "compared", "finite", "identical", "moved", "first_nonfinite"),
        *("nan_output", "inf_output", "nan_reference", "inf_reference"),
    }


def test_nan_on_either_side_is_never_finite() -> None:
    for bad in (NAN, INF, -INF):
        assert not figures([bad, 1.0], [1.0, 1.0]).finite
        assert not figures([1.0, 1.0], [bad, 1.0]).finite
        assert not figures([bad, 1.0], [bad, 1.0]).finite


def test_the_first_nonfinite_counts_the_whole_stream_and_skips_a_bad_reference() -> None:
    good, bad, both = (torch.tensor(x) for x in ([1.0, 2.0], [1.0, NAN], [INF, 2.0]))
    a = seen((good, good), (both, both))
    assert a.metrics().first_nonfinite is None
    b = seen((good, good), (bad, good), (bad, good))
    assert b.metrics().first_nonfinite == 3
    assert a.merge(b).metrics().first_nonfinite == 7
    assert seen((bad, good)).merge(a).metrics().first_nonfinite == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("keep", [0, 100])
def test_beyond_float64_is_none_not_nan(keep: int) -> None:
    big = torch.tensor([1.7e308, -1.7e308, 1.7e308, 1.0], dtype=torch.float64)
    found = seen((big, -big), (big, -big), keep=keep).metrics()
    for name in ("mse", "psnr", "max_abs", "p99", "correlation", "cosine", "std_output", "relative_mse"):
        assert getattr(found, name) is None, name
    assert not any(isinstance(x, float) and not math.isfinite(x) for x in found.as_dict().values())
    assert found.max_output == 1.7e308
    assert seen((big[:1].expand(3), big[:1].expand(3))).metrics().mean_output is None


def test_squares_below_float64_are_not_taken_for_lossless() -> None:
    tiny = torch.tensor([1e-200, 2e-200], dtype=torch.float64)
    found = seen((tiny, 2 * tiny)).metrics()
    assert (found.mse, found.psnr, found.sqnr, found.correlation, found.max_abs) == (0, None, None, None, 2e-200)


def test_zeroed_is_where_the_output_alone_is_zero() -> None:
    assert figures([0.0, -0.0, 0.0, 1.0], [1.0, 2.0, 0.0, 0.0]).zeroed == 0.5


def test_saturated_needs_the_largest_magnitude_twice() -> None:
    assert figures([4.0, -4.0, 4.0, 1.0], [9.0, -9.0, 5.0, 1.0]).saturated == 0.75
    assert figures([4.0, -3.0, 3.0, 1.0], [9.0, -9.0, 5.0, 1.0]).saturated == 0
    assert figures([0.0, 0.0], [1.0, 2.0]).saturated == 0
    low, high = (torch.tensor(x) for x in ([3.0, -3.0], [3.0, 4.0]))
    assert seen((low, low)).merge(seen((high, high))).metrics().saturated == 0
    assert seen((high, high), (low, low)).merge(seen((-high, high))).metrics().saturated == 2 / 6


def test_percentiles_can_be_left_out() -> None:
    output, reference = pair(50)
    comparison = seen((output, reference), percentiles=False)
    found = comparison.metrics()
    assert [getattr(found, name) for name in (*PERCENTILES, "percentiles_exact")] == [None] * 5
    assert_agrees(found, output, reference, skip=(*PERCENTILES, "percentiles_exact"))
    assert not comparison._magnitudes._kept


def test_percentiles_are_exact_up_to_the_cap_however_they_came() -> None:
    output, reference = pair(100)
    for cut in (1, 50, 99):
        a = seen((output[:cut], reference[:cut]), keep=100).merge(seen((output[cut:], reference[cut:]), keep=100))
        assert_agrees(a.metrics(), output, reference)
        b = seen((output[:cut], reference[:cut]), keep=99).merge(seen((output[cut:], reference[cut:]), keep=99))
        assert b.metrics().percentiles_exact is False
    assert seen((output, reference), keep=99).metrics().percentiles_exact is False


def assert_within_bound(found: Metrics, output: Tensor, reference: Tensor) -> None:
    wanted = expected(output, reference)
    assert found.percentiles_exact is False
    for name in PERCENTILES:
        assert abs(getattr(found, name) - wanted[name]) <= PERCENTILE_ERROR * (1 + 1e-12) * wanted[name], name
        assert getattr(found, name) <= wanted["max_abs"]
    assert_agrees(found, output, reference, skip=(*PERCENTILES, "percentiles_exact"))


@given(stream(floats))
def test_histogram_percentiles_keep_their_bound(values: list[tuple[float, float]]) -> None:
    output, reference = split(values)
    assert_within_bound(seen((output, reference), keep=0).metrics(), output, reference)


@pytest.mark.parametrize("cuts", [(1000,), (10, 990), (300, 300, 400)])
@pytest.mark.parametrize("keep", [0, 299, 700])
def test_histogram_percentiles_do_not_depend_on_the_cuts(cuts: tuple[int, ...], keep: int) -> None:
    output, reference = pair(1000)
    output[::3] = reference[::3]  # zeros among |d|
    whole = seen((output, reference), keep=keep)
    parts = [
        seen((o, r), keep=keep)
        for o, r in zip(torch.split(output, list(cuts)), torch.split(reference, list(cuts)), strict=True)
    ]
    merged = Comparison(keep=keep)
    for part in parts:
        merged.merge(part)
    assert_within_bound(merged.metrics(), output, reference)
    assert [getattr(merged.metrics(), p) for p in PERCENTILES] == [getattr(whole.metrics(), p) for p in PERCENTILES]
    parts[0].update(output, reference)  # whoever was merged shares nothing with the merger
    assert_within_bound(merged.metrics(), output, reference)


def test_the_histogram_bound_is_stated_as_it_is_reached() -> None:
    assert PERCENTILE_ERROR == 2.0**-9
    edge = torch.full((5,), 1.0)
    found = seen((edge, 0 * edge), (10 * edge[:1], 0 * edge[:1]), keep=0).metrics()
    assert found.p50 == 1 + PERCENTILE_ERROR


@pytest.mark.parametrize("keep", [0, 1000])
def test_merging_with_itself_is_seeing_it_twice(keep: int) -> None:
    output, reference = pair(100)
    comparison = seen((output, reference), keep=keep)
    twice = seen((output, reference), (output, reference), keep=keep)
    assert comparison.merge(comparison).metrics() == twice.metrics()


def test_figures_are_plain_and_survive_json() -> None:
    found = seen(pair(100)).metrics().as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_an_empty_batch_changes_nothing() -> None:
    comparison = seen(pair(10))
    before = comparison.metrics()
    comparison.update(torch.empty(0, 3), torch.empty(0, 3))
    assert comparison.metrics() == before


@pytest.mark.parametrize("value", [0.1, 1e200])
def test_a_constant_of_float64_does_not_vary(value: float) -> None:
    constant = torch.full((1000,), value, dtype=torch.float64)
    found = seen((constant, constant)).metrics()
    assert (found.std_output, found.mean_output, found.correlation) == (0, value, None)


def test_a_histogram_percentile_is_never_above_the_largest() -> None:
    assert figures([1.0] * 5, [0.0] * 5, keep=0).p99 == 1.0


def test_the_largest_difference_has_no_sign() -> None:
    assert str(figures([-0.0], [0.0]).max_abs) == "0.0"
    assert str(figures([0.0], [0.0]).max_abs) == "0.0"
