"""Corner answers: every site that the recipe puts on a grid is asked, with corner values of that grid."""

import pytest
import torch

from probe.formats import FORMATS
from probe.models.loading import Loaded, load_model
from probe.models.mamba import SITES, SiteMixer
from probe.numerics.grids import corner_values
from probe.running.calibration import Calibration, calibrate_on
from probe.running.corners import corner_answers
from probe.running.modes import GROUPS
from probe.running.recipes import Recipe, SiteGrid, apply


@pytest.fixture(scope="module")
def mamba() -> Loaded:
    return load_model("tiny-mamba")


@pytest.fixture(scope="module")
def calibration(mamba: Loaded) -> Calibration:
    return calibrate_on(mamba, "calibration", 2, 64)


@pytest.mark.parametrize("mode", GROUPS["all"])
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "nvfp4"])
def test_the_sites_that_are_asked_are_those_that_the_recipe_put_on_a_grid(
    mamba: Loaded, calibration: Calibration, mode: str, format: str
) -> None:
    twin = apply(mamba.model, Recipe(mode, format), calibration)
    asked = {name.rpartition(".mixer.")[2] for name in corner_answers(twin, Recipe(mode, format), calibration)}
    mixer = twin.get_submodule("backbone.layers.0.mixer")
    assert isinstance(mixer, SiteMixer)
    assert asked == {site for site in SITES if mixer.site(site).grid is not None}


def test_a_site_is_asked_alone_and_answers_with_values_of_its_grid(mamba: Loaded, calibration: Calibration) -> None:
    recipe = Recipe("3", "int8")
    twin = apply(mamba.model, recipe, calibration)
    ran: list[str] = []
    for name, module in twin.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    answers = corner_answers(twin, recipe, calibration)
    assert ran == []  # the model does not run, and no hook fires
    one = answers["backbone.layers.0.mixer.in_proj.input"]
    assert one.grid == SiteGrid(FORMATS["int8"], calibration.amax_of(one.site))
    assert torch.equal(one.given, corner_values(FORMATS["int8"], 128, amax=one.grid.amax))
    assert torch.unique(one.answer).numel() == 256  # every code, and nothing between
    assert float(one.relative.abs().max()) == pytest.approx(
        float(one.answer.abs().max() / one.given.square().mean().sqrt())
    )


def test_a_float_mode_has_no_corners_and_linears_are_asked_at_their_inputs() -> None:
    llama = load_model("tiny-llama")
    scales = calibrate_on(llama, "calibration", 1, 32)
    found = {}
    for recipe in (Recipe("bf16"), Recipe("linear_w", "int8"), Recipe("linear_wa", "int8")):
        found[recipe.mode] = list(corner_answers(apply(llama.model, recipe, scales), recipe, scales))
    assert found["bf16"] == found["linear_w"] == []
    assert found["linear_wa"][0] == "model.layers.0.self_attn.q_proj.input"
