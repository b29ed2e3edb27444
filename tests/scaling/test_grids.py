"""A level as a grid: for tensors, a calibration, a mode; and the check for underflow of the quantizers."""

import pytest
import torch
from torch import nn

import probe
from probe import recommend, scaling_sweep
from probe.running.recipes import apply
from probe.scaling.advice import amax_of, grid_of
from tests.numerics.tensors import assert_same_bits
from tests.scaling.tensors import FORMATS_OF_THE_SPEC, normal


@pytest.mark.parametrize("format", [*FORMATS_OF_THE_SPEC, "mxint8"])
@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_the_grid_of_a_level_has_its_figures(format: str, granularity: str) -> None:
    x = normal(20, 70, seed=4)
    result = scaling_sweep(x, format, granularity=granularity, num_levels=6)
    for level in result.levels:
        y = grid_of(result, level)(x.double())  # values of fractional scales do not fit float32
        d = y - x.double()
        assert level.mse == pytest.approx(float((d * d).mean()), rel=1e-12)
        assert level.max_abs_error == float(d.abs().max())
    y = grid_of(result)(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert y.shape == x.shape


def test_a_recommended_int8_scale_goes_through_a_calibration() -> None:
    result = scaling_sweep(normal(500), "int8", max_scale_exp=-4, min_scale_exp=-8, num_levels=5)
    found = recommend(result)
    amax = torch.tensor(amax_of(result))
    assert float(probe.integer_parameters(-amax, amax).scale) == found.scale
    blocks = scaling_sweep(normal(500), "int8", granularity="block")
    with pytest.raises(ValueError, match=r"have no amax\. Use grid_of"):
        amax_of(blocks)


def test_a_recommended_scale_is_used_in_a_mode() -> None:
    """The mode puts every weight on the grid that its own sweep recommends; the result is what the grid gives."""

    def build(model: nn.Module, format: str, calibration: object) -> nn.Module:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                with torch.no_grad():
                    layer.weight.copy_(grid_of(scaling_sweep(layer.weight, format))(layer.weight))
        return model

    probe.register_mode("swept", build)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))
        quantized = apply(model, probe.Recipe("swept", "fp4_e2m1"))
        weight = model.get_parameter("0.weight").detach()
        result = scaling_sweep(weight, "fp4_e2m1")
        scale = recommend(result).scale
        expected = probe.round_to(weight.double() / scale, "fp4_e2m1") * scale
        assert_same_bits(quantized.get_parameter("0.weight").detach(), expected.float())
        d = quantized[0].weight.detach().double() - weight.double()  # type: ignore[index]
        assert float((d * d).mean()) == pytest.approx(recommend(result).level.mse, rel=1e-5)
    finally:
        probe.unregister_mode("swept")


def test_quantizers_check_for_underflow_when_asked() -> None:
    x = torch.ones(64)
    x[1::2] = 1e-6
    with pytest.warns(probe.UnderflowWarning, match="50.00% lie below the smallest number") as caught:
        y = probe.fake_quantize(x, "fp4_e2m1", check_underflow=True)
    assert caught[0].filename == __file__
    assert_same_bits(y, probe.fake_quantize(x, "fp4_e2m1"))
    with pytest.warns(probe.UnderflowWarning):
        probe.quantize(x, "fp4_e2m1", check_underflow=True)
    probe.fake_quantize(torch.ones(64), "fp4_e2m1", check_underflow=True)  # nothing to warn of: warnings are errors
