import math

import pytest

from probe.metrics import label_correlation, label_mse, label_relative_mse

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("mse", "label"),
    [
        *((0.0, "excellent"), (9.9e-5, "excellent"), (1e-4, "good"), (9.9e-4, "good"), (1e-3, "fair")),
        *((9.9e-3, "fair"), (1e-2, "poor"), (INF, "poor"), (NAN, "poor"), (None, "undefined")),
    ],
)
def test_labels_of_mse_and_relative_mse(mse: float | None, label: str) -> None:
    assert label_mse(mse) == label_relative_mse(mse) == label


@pytest.mark.parametrize(
    ("correlation", "label"),
    [
        *((1.0, "excellent"), (0.99991, "excellent"), (0.9999, "good"), (0.9991, "good"), (0.999, "fair")),
        *((0.991, "fair"), (0.99, "poor"), (-1.0, "poor"), (NAN, "poor"), (None, "undefined")),
    ],
)
def test_labels_of_correlation(correlation: float | None, label: str) -> None:
    assert label_correlation(correlation) == label
