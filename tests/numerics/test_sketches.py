"""The sketch of a stream: the loop has the bits of the readable twin, whatever the stretches."""

from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from probe.numerics import sketches
from probe.numerics.sketches import CHUNK, SKETCH, sketched

rng = np.random.default_rng(0)
STREAMS = {
    "float64": rng.standard_normal(CHUNK + 77),
    "float32": rng.standard_normal(70_001).astype(np.float32),
    "not contiguous": rng.standard_normal((300, 7))[:, 2],
    "wide range": np.exp2(rng.uniform(-1000, 1000, 5000)) * rng.choice([-1.0, 1.0], 5000),
    "subnormal": rng.integers(-9, 9, 1000) * 5e-324,
    "not finite": np.array([np.nan, np.inf, -np.inf, 1.0, -0.0] * 50),
    "zeros": -np.zeros(300),
    "empty": np.zeros(0),
}


@pytest.mark.parametrize("start", [0, 1, 123_456_789])
@pytest.mark.parametrize("values", STREAMS.values(), ids=STREAMS.keys())
def test_the_loop_has_the_bits_of_the_readable_twin(values: npt.NDArray[np.floating], start: int) -> None:
    made = sketched(values, start)
    with mock.patch.object(sketches, "numba_twin", return_value=None), np.errstate(invalid="ignore"):
        expected = sketched(values, start)
    assert made.shape == (SKETCH,)
    assert np.array_equal(made, expected, equal_nan=True)


def test_stretches_add_up() -> None:
    values = np.round(STREAMS["float64"], 3) * 1000  # whole numbers, which add up exactly
    values = np.rint(values)
    parts = sketched(values[:1000]) + sketched(values[1000:], 1000)
    assert np.array_equal(parts, sketched(values))
    assert np.abs(sketched(values)).sum() > 0
