"""Buckets over the bits of floats: where values fall, their stated error, and quantiles as numpy defines them."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from probe.numerics.histogram import Buckets, linear, spread_evenly
from probe.numerics.observers import BUCKETS

ALL_FLOAT32 = Buckets(float_bits=32, mantissa_bits=6, lowest=-127, octaves=256)
ALL_FLOAT64 = Buckets(float_bits=64, mantissa_bits=8, lowest=-1023, octaves=2048)
SOME = Buckets(float_bits=32, mantissa_bits=3, lowest=-24, octaves=40)
EVERY = pytest.mark.parametrize("buckets", [ALL_FLOAT32, ALL_FLOAT64, SOME], ids=("float32", "float64", "some"))


@EVERY
def test_every_edge_is_in_the_bucket_that_it_begins(buckets: Buckets) -> None:
    last = buckets.size - (1 << buckets.mantissa_bits) * (buckets is not SOME)  # the octave of Inf and NaN
    assert np.array_equal(buckets.find(buckets.edges[:last]), np.arange(last))
    floats = np.float32 if buckets.float_bits == 32 else np.float64
    before = np.nextafter(buckets.edges[1:last].astype(floats), floats(0))
    assert np.array_equal(buckets.find(before), np.arange(last - 1))


@EVERY
def test_a_middle_is_within_half_a_width_of_its_bucket(buckets: Buckets) -> None:
    normal = 1 << buckets.mantissa_bits  # the first octave may be subnormal
    places = np.arange(normal, buckets.size - 2 * normal)
    low, high, middle = buckets.edges[places], buckets.edges[places + 1], buckets.middles(places)
    assert (low < middle).all()
    assert (middle < high).all()
    assert (np.maximum(middle - low, high - middle) <= buckets.width / 2 * low).all()


def test_edges_of_an_octave_are_evenly_spaced() -> None:
    start = int(ALL_FLOAT32.find(np.array([1.0]))[0])
    assert np.array_equal(ALL_FLOAT32.edges[start : start + 65], 1 + np.arange(65) / 64)
    assert SOME.edges[0] == 2.0**-24
    assert SOME.edges[-1] == 2.0**16


@given(st.lists(st.floats(0, 2.0**100, width=32), max_size=40))
def test_counting_a_tensor_and_an_array_is_the_same(values: list[float]) -> None:
    counts = np.zeros(ALL_FLOAT32.size, np.int64)
    ALL_FLOAT32.add(counts, np.array(values, np.float32))
    zeros = values.count(0.0)
    expected = ALL_FLOAT32.count_tensor(torch.tensor(values, dtype=torch.float32)).numpy()
    expected[0] -= zeros
    assert np.array_equal(counts, expected)
    assert counts.sum() + zeros == len(values)


def test_a_tensor_beyond_the_buckets_is_refused_with_how_many() -> None:
    with pytest.raises(IndexError, match=r"^2$"):
        SOME.count_tensor(torch.tensor([1.0, 2.0**16, 2.0**20]))
    assert SOME.count_tensor(torch.tensor([0.0, 2.0**-30, 2.0**-24])).nonzero().tolist() == [[0]], "below: in the first"


@given(st.lists(st.floats(0, 1e9, width=32), min_size=1, max_size=60), st.floats(0, 1))
def test_quantiles_are_numpys_within_the_stated_error(values: list[float], share: float) -> None:
    array = np.array(values, np.float64)
    array[array < 1e-30] = 0.0
    exact = float(np.quantile(array, share))
    assert linear(share * (array.size - 1), lambda rank: float(np.sort(array)[rank])) == exact
    counts = np.zeros(ALL_FLOAT64.size, np.int64)
    ALL_FLOAT64.add(counts, array)
    zeros = int((array == 0).sum())
    found = linear(share * (array.size - 1), ALL_FLOAT64.ranked(counts, zeros=zeros))
    assert found == pytest.approx(exact, rel=ALL_FLOAT64.width / 2, abs=0)


def test_values_of_many_tables_are_spread_over_their_buckets() -> None:
    lows, highs = np.array([-2.0, 0.0, 1.0]), np.array([-1.0, 0.0, 3.0])
    counts = np.array([[2, 0, 2], [0, 1, 4]])
    assert np.array_equal(spread_evenly(counts, np.array([0, 0]), lows, highs), [-1.75, 0.0])
    assert np.array_equal(spread_evenly(counts, np.array([1, 1]), lows, highs), [-1.25, 1.25])
    assert np.array_equal(spread_evenly(counts, np.array([3, 4]), lows, highs), [2.5, 2.75])


def test_quantiles_with_zeros_and_at_the_ends() -> None:
    def quantile(values: list[float], share: float, *, high: float = 1.0) -> float:
        counts = np.zeros(ALL_FLOAT32.size, np.int64)
        ALL_FLOAT32.add(counts, np.array(values, np.float32))
        return ALL_FLOAT32.quantile(counts, share, zeros=values.count(0.0), low=0.0, high=high)

    assert quantile([], 0.5) == 0
    some = [1.0, 1.0, 0.0, 0.0, 0.0]
    assert quantile(some, 0.5) == 0
    assert quantile(some, 1.0) == 1
    assert quantile(some, 2.5 / 4) == 0.5, "between the last zero and the first one"
    largest = float(np.finfo(np.float32).max)
    assert quantile([largest], 0.5, high=largest) == pytest.approx(largest, rel=0.01)


def every_kind() -> dict[str, torch.Tensor]:
    """All finite float16 and bfloat16, corner values and random ones of the wide dtypes, empty, and a view."""
    words = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    found = {str(dtype): words.view(dtype) for dtype in (torch.float16, torch.bfloat16)}
    found = {name: x[x.isfinite()] for name, x in found.items()}
    subnormal = torch.arange(2**12, dtype=torch.int32) * 2053
    found["subnormal float32"] = torch.cat([subnormal, subnormal - 2**31]).view(torch.float32)
    found["float32"] = torch.randint(-(2**31), 2**31, (5000,), dtype=torch.int32).view(torch.float32)
    found["float32"] = found["float32"][found["float32"].isfinite()]
    found["float64"] = torch.exp2(torch.linspace(-1074, 127.9, 5000, dtype=torch.float64)).repeat(2)
    found["float64"][::2] *= -1
    found["zeros"], found["empty"] = torch.tensor([0.0, -0.0]), torch.empty(0, 3)
    found["a view"] = torch.randn(64, 33).T[::2, 1:]
    return found


KINDS = every_kind()


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("values", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("buckets", [BUCKETS, ALL_FLOAT64], ids=("of observers", "float64"))
def test_the_loop_counts_what_torch_counts(buckets: Buckets, values: torch.Tensor, tables: int) -> None:
    expected = buckets._count_by_torch(values, tables)
    assert torch.equal(buckets.count_tensor(values, tables=tables), expected)
    assert int(expected.sum()) == values.numel()


def test_the_loop_counts_what_lies_beyond_the_buckets() -> None:
    buckets = Buckets(float_bits=64, mantissa_bits=3, lowest=-24, octaves=40)
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([1.0, 2.0**16, -(2.0**20), 2.0**-60], dtype=dtype)
        for count in (buckets.count_tensor, buckets._count_by_torch):
            with pytest.raises(IndexError, match=r"^2$"):
                count(x, tables=1)
