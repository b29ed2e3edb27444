"""Was the recipe applied? Told from values alone, whatever their scale."""

from contextlib import nullcontext

import pytest
import torch

import probe
from probe.formats import GATE_FORMATS
from probe.gate.observations import observe
from probe.models.mamba import MAMBA, SiteMixer
from probe.running.coverage import STRAY, expected_on_grid, off_grid, rounding_bound, watching
from probe.running.modes import GROUPS, find_mode
from probe.running.recipes import Recipe

#: Left out there, values lie on a grid all the same: of conv1d.output, and of in_proj.output. The figures tell these.
STILL_ON_A_GRID = {("2-0", "scan.u"), ("3", "conv1d.input")}
X = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("format", GATE_FORMATS)
@pytest.mark.parametrize("factor", [1.0, 2.0**-20, 1024.0])
def test_what_lies_on_a_grid_is_told_from_what_does_not(format: str, factor: float) -> None:
    quantized = probe.fake_quantize(X * factor, format)
    assert off_grid(quantized, format) == 0.0
    assert off_grid(X * factor, format) > 0.9
    assert off_grid(torch.zeros(4, 32), format) == 0.0


def test_a_wrong_scale_is_not_taken_for_a_missing_grid() -> None:
    assert off_grid(probe.fake_quantize(X, "int8") * 1.01, "int8") == 0.0
    assert off_grid(probe.fake_quantize(X, "nvfp4") * 1.01, "nvfp4") < STRAY


@pytest.fixture(scope="module")
def parts() -> tuple[probe.Loaded, probe.Calibration, probe.Reference]:
    loaded = probe.load_model("tiny-mamba")
    text = probe.text_of("evaluation")
    batches = probe.token_batches(text, loaded.tokenizer, samples=2, seqlen=48, batch_size=2)
    return loaded, probe.calibrate_on(loaded, "calibration", 2, 64), probe.run_reference(loaded.model, batches)


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("mode", GROUPS["all"])
def test_every_site_that_is_left_out_is_named_in_its_layer_only(
    parts: tuple[probe.Loaded, probe.Calibration, probe.Reference], mode: str, format: str
) -> None:
    loaded, calibration, reference = parts
    recipe = Recipe(mode, format)
    for site in expected_on_grid(recipe, MAMBA):
        twin = probe.apply(loaded.model, recipe, calibration)
        mixer = twin.get_submodule("backbone.layers.2.mixer")
        assert isinstance(mixer, SiteMixer)
        if mixer.site(site).grid is None or (mode, site) in STILL_ON_A_GRID:
            continue
        mixer.site(site).grid = None
        with torch.no_grad(), watching(twin, recipe) as found:
            twin(reference.batches[0], use_cache=False)
        assert any(name.startswith("backbone.layers.2.mixer.") for name in found), site
        assert all(name.startswith("backbone.layers.2.mixer.") for name in found), found
    twin = probe.apply(loaded.model, recipe, calibration)
    with torch.no_grad(), watching(twin, recipe) as found:
        twin(reference.batches[0], use_cache=False)
    assert found == {}


@pytest.mark.parametrize("recipe", ["fp16", "bf16", *(f"2-1 {f}" for f in GATE_FORMATS), "linear_w mxint8"])
def test_the_error_of_a_recipe_that_was_applied_is_above_the_bound(
    parts: tuple[probe.Loaded, probe.Calibration, probe.Reference], recipe: str
) -> None:
    loaded, calibration, reference = parts
    seen = observe(loaded.model, Recipe(*recipe.split()), reference, calibration)
    assert all(one.flaws == () for one in seen.values())


def test_an_error_too_small_for_its_rounding_is_told(
    parts: tuple[probe.Loaded, probe.Calibration, probe.Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8 that is in truth bfloat16: the error is not zero, but far too small."""
    loaded, _, reference = parts
    finer = lambda model, recipe, calibration=None: probe.apply(model, Recipe("bf16"))  # noqa: E731
    monkeypatch.setattr("probe.gate.observations.apply", finer)
    monkeypatch.setattr("probe.gate.observations.watching", lambda twin, recipe: nullcontext({}))
    seen = observe(loaded.model, Recipe("linear_w", "fp4_e2m1"), reference)
    flaws = [flaw for one in seen.values() for flaw in one.flaws]
    assert {flaw.verdict for flaw in flaws} == {"not applied"}
    assert all("below what rounding to fp4_e2m1 must cause" in flaw.message for flaw in flaws)


def test_the_bound_grows_with_coarser_formats_and_binds_no_user_mode() -> None:
    bounds = [rounding_bound(Recipe("2-1", format), 1.0) for format in ("mxint8", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")]
    assert bounds == sorted(bounds)
    assert rounding_bound(Recipe("fp32"), 1.0) == 0.0
    assert find_mode("torchao_w").kind == "user"
    assert rounding_bound(Recipe("torchao_w", "int8"), 1.0) == 0.0
