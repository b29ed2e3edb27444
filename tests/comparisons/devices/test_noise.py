"""How far sound devices may differ: units of dtypes, floors of noise, the error of a recipe itself."""

import pytest
import torch

from probe.comparisons.devices.noise import GAIN, ROUNDINGS, SUMS, UNITS, floor_of, own_error_of, unit_of


def test_units_are_half_a_step_of_torch() -> None:
    for name, unit in UNITS.items():
        assert unit == torch.finfo(getattr(torch, name)).eps / 2


def test_the_unit_of_a_device_is_what_it_began_with_or_what_most_layers_are() -> None:
    layers = {f"layer_{i}.output": "float32" for i in range(5)}
    assert unit_of(layers) == UNITS["float32"]
    assert unit_of({"embedding.output": "bfloat16", **layers}) == UNITS["bfloat16"]
    assert unit_of({**layers, "layer_3.output": "bfloat16"}) == UNITS["float32"]  # one narrow layer is a fault
    assert unit_of({**dict.fromkeys(layers, "float16"), "layer_0.output": "float32"}) == UNITS["float16"]
    assert unit_of({"layer_0.mixer.output": "float16", "logits": "float32"}) == UNITS["float16"]


def test_the_floor_grows_with_what_is_given_with_width_and_with_a_small_part() -> None:
    def floor(unit: float, *, given: float = 0.0, part: float = 1e9, channels: int = 64, own: float = 0.0) -> float:
        return floor_of(unit, given=given, part=part, channels=channels, own=own)

    assert floor(2.0**-24) == pytest.approx(SUMS * 2.0**-24)
    assert floor(2.0**-24, channels=128 * 16) == pytest.approx(4 * SUMS * 2.0**-24)
    assert floor(2.0**-8, channels=128 * 16) == pytest.approx(ROUNDINGS * 2.0**-8)
    assert floor(2.0**-24, given=0.1) == pytest.approx(GAIN * 0.1, rel=1e-6)
    assert floor(2.0**-24, part=1e-3) == pytest.approx(2000 * 2.0**-24, rel=1e-2)
    assert floor(2.0**-24, own=0.3) == 0.3


def test_a_recipe_may_differ_by_its_own_error() -> None:
    errors = {name: own_error_of(name) for name in (None, "mxint8", "fp8_e4m3", "int8", "nvfp4", "fp4_e2m1")}
    assert errors == {None: 0, "mxint8": 2**-5, "fp8_e4m3": 0.25, "int8": 0.125, "nvfp4": 0.5, "fp4_e2m1": 0.5}
    assert own_error_of("somebody's") == 0
