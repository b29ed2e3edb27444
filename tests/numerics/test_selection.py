"""Values of given ranks: what a sort gives, to the bit."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from probe.numerics.selection import FEW, values_at

rng = np.random.default_rng(0)
MANY = 3 * FEW + 7
STREAMS = {
    "normal": np.abs(rng.standard_normal(MANY)),
    "many octaves": np.exp2(rng.uniform(-1074, 1023, MANY)),
    "equal": np.full(MANY, 0.1),
    "zeros": np.zeros(MANY),
    "mostly zeros": np.where(rng.random(MANY) < 0.9, 0.0, rng.random(MANY)),
    "one outlier": np.append(rng.random(MANY), 1e300),
    "subnormal": rng.integers(0, 50, MANY) * 5e-324,
    "infinite": np.append(rng.random(MANY), [np.inf, np.inf]),
    "few": rng.random(FEW),
    "one more than few": rng.random(FEW + 1),
    "single": np.array([3.0]),
}


@pytest.mark.parametrize("values", STREAMS.values(), ids=STREAMS.keys())
def test_every_rank_is_that_of_a_sort(values: npt.NDArray[np.float64]) -> None:
    kept, last = values.copy(), values.size - 1
    ranks = sorted({0, last, last // 2, last // 3, max(0, last - 1), *(int(q * last) for q in (0.5, 0.9, 0.95, 0.99))})
    ordered = np.sort(values)
    assert values_at(values, ranks) == [ordered[rank] for rank in ranks]
    assert values_at(values, [ranks[-1]]) == [ordered[ranks[-1]]]
    assert np.array_equal(values, kept)


@given(st.integers(FEW + 1, 3 * FEW), st.integers(0, 2**32 - 1), st.sampled_from([1, 5, 300]), st.data())
def test_any_ranks_of_any_values(size: int, seed: int, octaves: int, data: st.DataObject) -> None:
    stream = np.random.default_rng(seed)
    digits = 10.0 ** data.draw(st.integers(1, 12))  # few of them make many values equal
    values = np.rint(np.exp2(stream.uniform(-octaves, 0, size)) * digits) / digits
    ranks = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=9)))
    assert values_at(values, ranks) == np.sort(values)[ranks].tolist()
