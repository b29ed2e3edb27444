"""Results go to JSON and come back; a damaged one is refused."""

from typing import Any

import pytest

from probe import ScalingResult, scaling_sweep
from tests.scaling.tensors import (
    grid_of_the_format,
    normal,
)


@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_json_round_trip(granularity: str) -> None:
    for x in (normal(6, 40).bfloat16(), grid_of_the_format("fp4_e2m1")):  # the second has a lossless level
        result = scaling_sweep(x, "fp4_e2m1", granularity=granularity, name="a/b $x$")
        assert ScalingResult.from_json(result.to_json()) == result
        assert ScalingResult.from_json(result.to_json(recommendation={}, source="x")) == result
        assert "Infinity" not in result.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "[]", "not a JSON object"),
        (lambda text: text[:-30], "is not JSON"),
        (lambda text: text.replace('"version": 2', '"version": 1'), "has version 1, and this probe reads 2"),
        (lambda text: text.replace('"zeros"', '"nulls"'), "'nulls'|misses 'zeros'"),
        (lambda text: text.replace('"rmse"', '"rms"'), "is damaged"),
    ],
)
def test_a_damaged_result_is_refused(change: Any, message: str) -> None:
    text = scaling_sweep(normal(40), "int8").to_json()
    with pytest.raises(ValueError, match=message):
        ScalingResult.from_json(change(text))
