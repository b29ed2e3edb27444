"""Units: the sites of a model, and models in which one of them is exchanged."""

from typing import Any

import torch
from torch import Tensor

from probe.models.loading import Loaded
from probe.running.calibration import Calibration
from probe.running.capture import capture
from probe.running.recipes import Recipe
from probe.sensitivity import rank_layers
from probe.sensitivity.units import make_twins, mixed, site_units
from tests.sensitivity.models import batches_of


def test_sites_alone_sum_up_to_what_their_layer_holds(mamba: tuple[Loaded, Calibration]) -> None:
    """All sites of a layer taken from the quantized twin are the layer itself: to the order of sums, in every mode."""
    loaded, calibration = mamba
    batch = batches_of(loaded)[0]
    for mode, format in (("2-1", "int8"), ("2-4", "fp8_e4m3"), ("3", "int8"), ("2-0", "nvfp4")):
        recipe = Recipe(mode, format)
        twins = make_twins(loaded.model, recipe, calibration, sites=True)
        paths = [path for unit in site_units(twins, recipe, ["all"], across=True) for path in unit.paths]
        with torch.no_grad():
            together: Any = mixed(twins.floating, twins.quantized, paths)
            quantized, floating, plain = (
                m(batch, use_cache=False).logits for m in (twins.quantized, twins.floating, twins.plain)
            )
            assert torch.equal(together(batch, use_cache=False).logits, quantized)
            assert torch.allclose(floating, plain, rtol=1e-4, atol=1e-3)
            assert not torch.allclose(quantized, plain, rtol=1e-4, atol=1e-3)


def test_conv1d_of_mode_3_reads_float_when_its_own_grid_is_not_taken(mamba: tuple[Loaded, Calibration]) -> None:
    """And not what lies on the grid of in_proj.output, which is that of z alone in this mode."""
    loaded, calibration = mamba
    batch = batches_of(loaded)[0]
    twins = make_twins(loaded.model, Recipe("3", "int8"), calibration, sites=True)
    site = "backbone.layers.0.mixer.sites.in_proj.output"
    seen: list[Tensor] = []
    for model in (twins.floating, mixed(twins.floating, twins.quantized, [site])):
        with capture(model, [r"layers\.0\.mixer\.sites\.conv1d\.input$"]) as captured, torch.no_grad():
            model(batch, use_cache=False)
        seen += captured.tensors["backbone.layers.0.mixer.sites.conv1d.input.output"]
    assert torch.equal(*seen)


def test_every_site_of_every_mode_has_an_effect(mamba: tuple[Loaded, Calibration]) -> None:
    loaded, calibration = mamba
    found = rank_layers(
        loaded.model, Recipe("3", "int8"), batches_of(loaded, 1, 16), calibration, sites="across", advice=False
    )
    names = [effect.name for effect in found.effects]
    assert names[:4] == ["in_proj.input", "in_proj.output", "conv1d.input", "x_proj.input"]
    assert {"A_log", "D", "conv1d.weight", "dt_proj.weight"} <= set(names)
    assert "scan.state" not in names
    assert all(effect.alone.kl and effect.alone.kl > 1e-9 and not effect.alone.identical for effect in found.effects)
