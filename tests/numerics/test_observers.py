import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from probe.numerics import observers
from probe.numerics.integers import fake_quantize_integer, integer_parameters
from probe.numerics.observers import (
    OBSERVERS,
    MinMaxObserver,
    MSEObserver,
    Observer,
    PercentileObserver,
    from_state,
    make_observer,
)

MAKERS = {
    "minmax": MinMaxObserver,
    "minmax-axis": lambda: MinMaxObserver(axis=-1),
    "percentile": lambda: PercentileObserver(0.9),
    "mse": lambda: MSEObserver(bits=4),
}
ALL = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def data(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A heavy tail, as activations have."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * x.abs().exp()).to(dtype)


def seen(observer: Observer, *batches: Tensor) -> Observer:
    for batch in batches:
        observer.update(batch)
    return observer


def assert_same(a: Observer, b: Observer) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]) if isinstance(value, Tensor) else value == right[key]
    assert torch.equal(a.amax, b.amax)


@pytest.fixture
def small_top(monkeypatch: pytest.MonkeyPatch) -> int:
    """So few exact values that the buckets have to answer."""
    monkeypatch.setattr(observers, "KEPT", 50)
    return 50


# ---- the same whatever the order, the batching and the merging


@ALL
@pytest.mark.parametrize("kept", [50, 2**18])
@settings(deadline=None, max_examples=25)
@given(cuts=st.lists(st.integers(0, 60), max_size=5), order=st.randoms(use_true_random=False))
def test_answers_do_not_depend_on_batching_order_or_merging(make: Any, kept: int, cuts: Any, order: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observers, "KEPT", kept)
        x = data(60, 8)
        whole = seen(make(), x)
        edges = [0, *sorted(cuts), 60]
        batches = [x[a:b] for a, b in pairwise(edges)]
        order.shuffle(batches)
        assert_same(seen(make(), *batches), whole)
        parts = [seen(make(), batch) for batch in batches]
        order.shuffle(parts)
        merged = make()
        for part in parts:
            assert merged.merge(part) is merged
        assert_same(merged, whole)


@ALL
def test_merging_leaves_the_other_as_it_was(make: Any) -> None:
    first, second = seen(make(), data(30, 8)), seen(make(), data(40, 8, seed=1))
    first.merge(second)
    first.update(100 * data(30, 8))
    assert_same(second, seen(make(), data(40, 8, seed=1)))


@ALL
@pytest.mark.parametrize("kept", [50, 2**18])
def test_state_survives_plain_values_and_goes_on_observing(make: Any, kept: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(observers, "KEPT", kept)
    observer = seen(make(), data(30, 8))
    state = observer.state_dict()
    plain = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
    tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
    back = from_state({**json.loads(json.dumps(plain)), **tensors})
    assert_same(back, observer)
    assert type(back) is type(observer)
    back.update(data(30, 8, seed=1))
    assert_same(back, seen(make(), data(30, 8), data(30, 8, seed=1)))
    assert_same(observer, seen(make(), data(30, 8)))  # the copy shares nothing with the original


@ALL
def test_state_of_an_unused_observer_survives(make: Any) -> None:
    assert from_state(make().state_dict()).count == 0


@ALL
def test_empty_batches_change_nothing(make: Any) -> None:
    observer = seen(make(), torch.empty(0, 8), data(30, 8), torch.empty(0, 8))
    assert_same(observer, seen(make(), data(30, 8)))
    assert observer.count == 240


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_are_observed_exactly(make: Any, dtype: torch.dtype) -> None:
    x = data(30, 8, dtype=dtype)
    assert_same(seen(make(), x), seen(make(), x.double()))


# ---- minmax


def test_minmax_is_the_largest_magnitude_of_everything() -> None:
    x = data(1000)
    observer = seen(MinMaxObserver(), *torch.split(x, 7))
    assert observer.amax.dtype == torch.float64
    assert observer.amax.item() == x.abs().max().item()
    parameters = observer.parameters()
    assert parameters.scale.item() == torch.tensor(x.abs().max().item() / 127).item()
    asymmetric = observer.parameters(bits=4, symmetric=False)
    by_hand = integer_parameters(x.min(), x.max(), bits=4, symmetric=False)
    assert (asymmetric.scale, asymmetric.zero_point) == (by_hand.scale, by_hand.zero_point)


@pytest.mark.parametrize(("axis", "shape"), [(0, (3, 1, 1)), (1, (4, 1)), (-1, (5,)), (-3, (3, 1, 1))])
def test_minmax_per_channel_broadcasts_against_the_data(axis: int, shape: tuple[int, ...]) -> None:
    x = data(3, 4, 5)
    observer = seen(MinMaxObserver(axis=axis), x, x / 2)
    expected = [part.abs().max().item() for part in x.unbind(axis)]
    assert observer.amax.shape == shape
    assert observer.amax.flatten().tolist() == expected
    static = fake_quantize_integer(x, parameters=observer.parameters())
    assert torch.equal(static, fake_quantize_integer(x, granularity="channel", axis=axis))


def test_minmax_per_channel_takes_any_leading_shape_when_counted_from_the_end() -> None:
    x = data(3, 4, 5)
    assert_same(seen(MinMaxObserver(axis=-1), x), seen(MinMaxObserver(axis=-1), x[0], x[1:]))


def test_minmax_refuses_another_number_of_channels_and_stays_as_it_was() -> None:
    observer = seen(MinMaxObserver(axis=0), data(3, 4))
    with pytest.raises(ValueError, match=r"has seen ranges of shape \[3, 1\] and now gets \[4, 1\]\. Use one obs"):
        observer.update(data(4, 4))
    with pytest.raises(ValueError, match=r"has seen ranges of shape \[3, 1\] and now gets \[3\]"):
        observer.merge(seen(MinMaxObserver(axis=0), data(3)))
    assert_same(observer, seen(MinMaxObserver(axis=0), data(3, 4)))


# ---- percentile


@pytest.mark.parametrize("alpha", [0.001, 0.3, 0.5, 0.9, 0.99, 0.9995, 0.9999, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000, 20_000])
def test_percentile_equals_numpy_on_all_the_data(alpha: float, size: int) -> None:
    x = data(size)
    observer = seen(PercentileObserver(alpha), *torch.split(x, 999))
    assert observer.amax.item() == np.quantile(x.abs().double().numpy(), alpha)


def test_percentile_stays_exact_in_the_tail_beyond_what_is_kept() -> None:
    x = data(1_000_000)
    assert x.numel() > observers.KEPT
    for alpha in (0.75, 0.9995, 0.9999):
        observer = seen(PercentileObserver(alpha), *torch.split(x, 300_000))
        assert observer.amax.item() == np.quantile(x.abs().double().numpy(), alpha)


@pytest.mark.parametrize("alpha", [0.01, 0.5, 0.9, 0.97])
def test_percentile_beyond_the_exact_tail_is_within_its_bound(small_top: int, alpha: float) -> None:
    for seed in range(5):
        for x in (
            data(10_000, seed=seed),
            data(10_000, seed=seed).clamp(-40, 40).exp(),
            data(3_000, seed=seed) * 1e-30,
        ):
            exact = np.quantile(x.abs().double().numpy(), alpha)
            observer = seen(PercentileObserver(alpha), *torch.split(x, 1111))
            assert len(observer.state_dict()["top"]) == small_top
            got = observer.amax.item()
            assert got != exact
            assert abs(got - exact) <= 2**-11 * exact


@settings(deadline=None, max_examples=100)
@given(
    values=st.lists(st.floats(-(2.0**127), 2.0**127), min_size=51, max_size=80),
    alpha=st.floats(0, 1, exclude_min=True),
)
def test_percentile_bound_holds_for_any_data(values: list[float], alpha: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observers, "KEPT", 5)
        x = torch.tensor(values, dtype=torch.float64)
        exact = np.quantile(x.abs().numpy(), alpha)
        got = seen(PercentileObserver(alpha), x).amax.item()
        assert abs(got - exact) <= 2**-11 * exact * (1 + 1e-12) + 2.0**-126


def test_percentile_of_zeros_and_a_few_values_is_zero(small_top: int) -> None:
    x = torch.zeros(1000)
    x[:20] = 5.0
    assert seen(PercentileObserver(0.5), x).amax.item() == 0.0
    assert seen(PercentileObserver(0.99), x).amax.item() == 5.0


def test_percentile_is_never_above_the_largest_value_seen(small_top: int) -> None:
    assert seen(PercentileObserver(0.5), torch.ones(1000)).amax.item() == 1.0  # the lower edge of its bucket


def test_percentile_is_taken_over_all_data_not_averaged_over_batches() -> None:
    small, large = torch.full((900,), 1.0), torch.full((100,), 10.0)
    assert seen(PercentileObserver(0.95), small, large).amax.item() == 10.0
    assert seen(PercentileObserver(0.85), large, small).amax.item() == 1.0


def test_percentile_gives_the_scale_of_its_quantile() -> None:
    x = data(5000)
    quantile = float(np.quantile(x.abs().double().numpy(), 0.99))
    observer = seen(PercentileObserver(0.99), x)
    assert observer.parameters().scale == torch.tensor(quantile / 127)
    asymmetric = observer.parameters(symmetric=False)
    assert asymmetric.scale == torch.tensor(2 * quantile / 255)
    positive = seen(PercentileObserver(0.99), x.abs()).parameters(symmetric=False)
    assert positive.scale.item() == pytest.approx(quantile / 255, rel=1e-6)
    assert positive.zero_point.item() == 0


# ---- mse


def rms_error(x: Tensor, amax: float, bits: int) -> float:
    """Brute force: quantize the data itself."""
    limit = torch.tensor(amax, dtype=torch.float64)
    parameters = integer_parameters(-limit, limit, bits=bits)
    wide = x.double()
    return (wide - fake_quantize_integer(wide, parameters=parameters)).square().mean().sqrt().item()


DISTRIBUTIONS = {
    "heavy": data(4000),
    "normal": torch.randn(4000, generator=torch.Generator().manual_seed(1)),
    "positive": data(4000, seed=2).abs(),
    "negative": -data(4000, seed=3).abs(),
    "outlier": torch.cat([torch.randn(4000, generator=torch.Generator().manual_seed(2)), torch.tensor([300.0])]),
    "one value": torch.full((100,), 0.7),
    "tiny": data(1000) * 1e-7,
}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("x", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_mse_choice_is_within_its_bound_of_the_best_candidate(x: Tensor, bits: int) -> None:
    largest = x.double().abs().max().item()
    candidates = [largest * 2 ** (-j / 32) for j in range(321)]
    chosen = seen(MSEObserver(bits=bits), *torch.split(x, 777)).amax.item()
    assert min(abs(chosen - c) / c for c in candidates) < 1e-12
    best = min(rms_error(x, c, bits) for c in candidates)
    bound = 2**-10 * x.double().square().mean().sqrt().item()
    assert rms_error(x, chosen, bits) <= best + bound
    assert rms_error(x, chosen, bits) <= best * 1.02 + 1e-3 * bound  # what it does in practice


@pytest.mark.parametrize("value", [1.0, -2.0])
def test_mse_of_one_value_is_that_value(value: float) -> None:
    assert seen(MSEObserver(bits=5), torch.full((10,), value)).amax.item() == abs(value)


def test_mse_of_zeros_is_zero() -> None:
    observer = seen(MSEObserver(), torch.zeros(5))
    assert observer.amax.item() == 0.0
    assert observer.parameters().scale == torch.tensor(1e-6)


def test_mse_counts_the_one_more_negative_code() -> None:
    # Two bits have the codes -2 .. 1: all of the data on -2 and 0 is exact at scale 1, half the magnitude.
    x = torch.tensor([-2.0, 0.0]).repeat(50)
    observer = seen(MSEObserver(bits=2), x)
    assert rms_error(x, observer.amax.item(), 2) == 0.0
    assert rms_error(-x, seen(MSEObserver(bits=2), -x).amax.item(), 2) == 0.0
    lopsided = torch.tensor([-2.0] * 50 + [-1.0] * 50 + [1.0] * 50)
    assert seen(MSEObserver(bits=2), lopsided).amax.item() == 1.0
    assert seen(MSEObserver(bits=2), -lopsided).amax.item() != 1.0


def test_mse_answers_only_for_the_grid_it_was_made_for() -> None:
    observer = seen(MSEObserver(bits=4), data(100))
    limit = observer.amax
    assert observer.parameters().scale == integer_parameters(-limit, limit, bits=4).scale
    assert observer.parameters(bits=4).bits == 4
    message = r"MSEObserver\(bits=4, count=100\) has chosen for a symmetric grid of 4 bits, not for "
    with pytest.raises(ValueError, match=message + "bits=8, symmetric=True. Make an MSEObserver with those bits"):
        observer.parameters(bits=8)
    with pytest.raises(ValueError, match=message + "bits=4, symmetric=False"):
        observer.parameters(symmetric=False)


# ---- errors


@ALL
def test_nan_and_infinity_are_counted_and_change_nothing(make: Any) -> None:
    observer = seen(make(), data(30, 8))
    bad = data(2, 8)
    bad[0, 0], bad[1, 1] = math.nan, -math.inf
    with pytest.raises(ValueError, match=r"x has 2 NaN or Inf among 16 values, which belong to no range\. Find"):
        observer.update(bad)
    assert_same(observer, seen(make(), data(30, 8)))


@ALL
def test_integers_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"x is torch\.int64\. Observers take torch\.float64, "):
        make().update(torch.ones(3, dtype=torch.int64))


@ALL
def test_an_observer_that_saw_nothing_says_so(make: Any) -> None:
    unseen = r"has seen no values, so it has no range\. Call update\(x\) with data"
    with pytest.raises(ValueError, match=unseen):
        _ = make().amax
    with pytest.raises(ValueError, match=unseen):
        make().parameters()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (MinMaxObserver(), MSEObserver()),
        (MinMaxObserver(), MinMaxObserver(axis=0)),
        (PercentileObserver(0.9), PercentileObserver(0.99)),
        (MSEObserver(bits=4), MSEObserver(bits=8)),
    ],
)
def test_observers_of_different_settings_do_not_merge(a: Observer, b: Observer) -> None:
    with pytest.raises(ValueError, match=r"cannot merge .* into .*: what they have kept is not comparable\. Merge"):
        a.merge(b)


@pytest.mark.parametrize("alpha", [0, 0.0, -0.5, 1.0001, math.nan, True, "0.9", None])
def test_alpha_must_be_a_quantile(alpha: Any) -> None:
    with pytest.raises(ValueError, match=r"alpha is .*\. A quantile is above 0 and at most 1: give e\.g\. 0\.9995"):
        PercentileObserver(alpha)


def test_bits_of_the_mse_observer_are_checked() -> None:
    with pytest.raises(ValueError, match=r"bits is 9\. An integer grid has from 2 to 8 bits"):
        MSEObserver(bits=9)


@pytest.mark.parametrize("observer", [PercentileObserver(), MSEObserver()], ids=repr)
def test_magnitudes_beyond_float32_are_refused_where_they_are_counted(observer: Observer) -> None:
    x = torch.tensor([2.0**128, -(2.0**127)], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"x has 1 values of magnitude 2\^128 or more, which float32 cannot hold"):
        observer.update(x)
    assert observer.count == 0
    observer.update(x[1:])
    assert observer.amax.item() == 2.0**127


def test_observers_are_made_by_name() -> None:
    assert list(OBSERVERS) == ["minmax", "percentile", "mse"]
    assert isinstance(make_observer("minmax", axis=1), MinMaxObserver)
    assert make_observer("percentile", alpha=0.9999).settings == {"alpha": 0.9999}
    assert make_observer("percentile").settings == {"alpha": 0.9995}
    assert make_observer("mse", bits=3).settings == {"bits": 3}
    with pytest.raises(ValueError, match=r"unknown observer 'percentil'\. Did you mean 'percentile'\? Known: minmax,"):
        make_observer("percentil")
    with pytest.raises(ValueError, match=r"unknown option of observer 'percentile': 'alfa'\. Did you mean 'alpha'\?"):
        make_observer("percentile", alfa=0.9)


def test_a_damaged_state_is_refused() -> None:
    state = seen(PercentileObserver(), data(10)).state_dict()
    del state["top"]
    with pytest.raises(ValueError, match=r"state of observer 'percentile' has missing or unknown entries: top\. Exp"):
        from_state(state)
    with pytest.raises(ValueError, match=r"unknown observer None"):
        from_state({})
