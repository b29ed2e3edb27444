"""Mamba blocks beside those of Mamba itself: FalconMamba, Mamba-2, and Jamba, Bamba and Zamba, which have attention."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from probe.data.library_logs import quietly
from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.data.tokenizers import ByteTokenizer
from probe.formats import FORMATS, GATE_FORMATS
from probe.gate.tolerances import RULES
from probe.models.forward import output_of
from probe.models.loading import Loaded, weight_fingerprint
from probe.models.mamba import SiteMixer
from probe.models.mamba_blocks import SITE_MIXERS, is_all_mamba, mamba_blocks, rotated_twin, with_sites
from probe.models.offload import Room, place
from probe.numerics.grids import weight_on_grid
from probe.recordings.taps import tap_points
from probe.running.calibration import Calibration, calibrate_on
from probe.running.capture import capture
from probe.running.coverage import watching
from probe.running.declarations import DeclaredMode
from probe.running.functions import function_errors
from probe.running.kept_float import float_layers
from probe.running.measurement import check_applied
from probe.running.modes import GROUPS, declare_modes, find_mode, unregister_mode
from probe.running.paths import arguments
from probe.running.recipes import Recipe, apply, gridded_sites, gridded_weights
from probe.running.reference import run_reference
from tests.models.random_models import make_bamba, make_falcon_mamba, make_jamba, make_mamba2, make_zamba, spread_steps

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "falcon_mamba": make_falcon_mamba,
    "jamba": make_jamba,
    "mamba2": make_mamba2,
    "bamba": make_bamba,
    "zamba": make_zamba,
}
#: Norms inside the mixers.
NORMS = {
    **dict.fromkeys(("falcon_mamba", "jamba"), ("dt_layernorm", "b_layernorm", "c_layernorm")),
    **dict.fromkeys(("mamba2", "bamba"), ("norm",)),
    "zamba": (),
}
#: Layers without a Mamba mixer, which stay float.
FLOAT = {"jamba": {"layer_1"}, "bamba": {"layer_1"}}
FORMAT = pytest.mark.parametrize("format", GATE_FORMATS)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    model = spread_steps(FAMILIES[request.param]().requires_grad_(False))
    with torch.no_grad():  # norms without a gain of 1 everywhere, so that one that is left out shows
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    return Loaded(request.param, model, ByteTokenizer(), weight_fingerprint(model))


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return token_batches(text_of("evaluation"), ByteTokenizer(), samples=2, seqlen=40, batch_size=2)[0]


@pytest.fixture(scope="module")
def calibration(loaded: Loaded) -> Calibration:
    return calibrate_on(loaded, "calibration", 2, 64)


@pytest.fixture(scope="module")
def outputs(loaded: Loaded, tokens: Tensor, calibration: Calibration) -> dict[tuple[str, str], Tensor]:
    return {
        (mode, format): output_of(apply(loaded.model, Recipe(mode, format), calibration), tokens)
        for format in GATE_FORMATS
        for mode in GROUPS["all"]
    }


def logits(model: nn.Module, tokens: Tensor, **options: object) -> Tensor:
    with torch.no_grad(), quietly():
        found: Tensor = model(tokens, use_cache=False, **options).logits
    return found


def test_the_blocks_are_found_by_their_mixers(loaded: Loaded) -> None:
    blocks = list(mamba_blocks(loaded.model))
    assert [type(block.mixer).__name__ in SITE_MIXERS for block in blocks] == [True] * len(blocks)
    assert [block.mixer_name for block in blocks] == {
        "falcon_mamba": ["backbone.layers.0.mixer", "backbone.layers.1.mixer"],
        "jamba": ["model.layers.0.mamba"],
        "mamba2": ["backbone.layers.0.mixer", "backbone.layers.1.mixer"],
        "bamba": ["model.layers.0.mamba"],
        "zamba": ["model.layers.0.mamba", *(f"model.layers.{index}.mamba_decoder.mamba" for index in (1, 2))],
    }[loaded.name]
    assert is_all_mamba(loaded.model) == (loaded.name in ("falcon_mamba", "mamba2"))


@pytest.mark.parametrize("scan", ["sequential", "fast"])
@pytest.mark.parametrize("twin", [with_sites, rotated_twin], ids=["plain", "rotated"])
def test_in_float_they_equal_the_stock_forward(
    loaded: Loaded, tokens: Tensor, scan: str, twin: Callable[..., nn.Module]
) -> None:
    stock = logits(loaded.model, tokens)
    made = logits(twin(loaded.model, scan=scan), tokens)
    assert (made - stock).abs().max() <= 2e-5 * stock.abs().max()


@pytest.mark.parametrize("rows", [1, 2])
def test_padding_is_masked_as_in_the_stock_forward(loaded: Loaded, tokens: Tensor, rows: int) -> None:
    tokens = tokens[:rows]
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    stock = logits(loaded.model, tokens, attention_mask=mask)
    made = logits(with_sites(loaded.model), tokens, attention_mask=mask)
    assert (made - stock).abs().max() <= 2e-5 * stock.abs().max()


@pytest.mark.parametrize("scan", ["sequential", "fast"])
def test_decode_continues_what_prefill_began(loaded: Loaded, tokens: Tensor, scan: str) -> None:
    twin: Any = with_sites(loaded.model, scan=scan)
    carried = "cache_params" if is_all_mamba(loaded.model) else "past_key_values"
    whole = logits(loaded.model, tokens[:, :30])
    with torch.no_grad(), quietly():
        step = twin(tokens[:, :20], use_cache=True)
        last = [step.logits[:, -1]]
        for t in range(20, 29):
            options = {"position_ids": torch.full((2, 1), t)} if "position_ids" in arguments(twin) else {}
            step = twin(tokens[:, t : t + 1], use_cache=True, **{carried: getattr(step, carried)}, **options)
            last.append(step.logits[:, -1])
    assert (torch.stack(last, 1) - whole[:, 19:29]).abs().max() <= 2e-5 * whole.abs().max()


def test_the_norms_inside_matter(loaded: Loaded, tokens: Tensor) -> None:
    for name in NORMS[loaded.name]:
        twin = with_sites(loaded.model)
        next(mamba_blocks(twin)).sites.register_module(name, nn.Identity())
        assert not torch.allclose(logits(twin, tokens), logits(loaded.model, tokens), rtol=1e-3, atol=1e-4), name


@FORMAT
@pytest.mark.parametrize(("one", "other"), [("0", "2-0"), ("2-1", "2-2"), ("2-3", "2-1")])
def test_bit_identical(outputs: dict[tuple[str, str], Tensor], format: str, one: str, other: str) -> None:
    assert torch.equal(outputs[one, format], outputs[other, format])


@FORMAT
def test_must_differ(loaded: Loaded, tokens: Tensor, outputs: dict[tuple[str, str], Tensor], format: str) -> None:
    reference = output_of(apply(loaded.model, Recipe("fp32")), tokens)
    assert all(not torch.equal(reference, outputs[mode, format]) for mode in GROUPS["all"])
    assert not torch.equal(outputs["2-4", format], outputs["2-2", format])
    assert not torch.equal(outputs["3", format], outputs["2-4", format])


@FORMAT
def test_every_weight_and_site_is_on_its_grid_and_everything_else_is_float(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, format: str
) -> None:
    recipe = Recipe("2-1", format)
    twin = apply(loaded.model, recipe, calibration)
    inside = set()
    for block in mamba_blocks(twin):
        for name in gridded_weights(find_mode("2-1"), block.layout, block.mixer_name):
            value = dict(block.sites.named_parameters()).get(name)
            inside |= {f"{block.mixer_name}.{name}"}
            if value is not None and format != "nvfp4":
                assert torch.equal(weight_on_grid(value, format), value), name
        inside |= {f"{block.norm_name}.weight"}  # folded into in_proj
        assert {site for site in block.layout.sites if block.sites.site(site).grid is not None} >= {
            "conv1d.output",
            "out_proj.input",
        }
    plain = dict(loaded.model.named_parameters())
    for name, value in twin.named_parameters():
        assert name in inside or torch.equal(value, plain[name]), name
    reference = run_reference(loaded.model, [tokens])
    declared = float_layers(loaded.model, find_mode("2-1"), reference.modules)
    assert declared == FLOAT.get(loaded.name, set())
    check_applied(loaded.model, recipe, reference, calibration)
    assert any(isinstance(module, SiteMixer) for module in twin.modules())


def test_every_site_fires(loaded: Loaded, tokens: Tensor) -> None:
    twin: Any = with_sites(loaded.model)
    with capture(twin, [r"sites\.\w+\.\w+$"]) as captured, torch.no_grad(), quietly():
        twin(tokens, use_cache=True)
    assert {name.split(".sites.")[1].removesuffix(".output") for name in captured.tensors} == set(
        next(mamba_blocks(twin)).layout.sites
    )


@pytest.mark.parametrize(
    ("mode", "format"), [("2-1", "fp8_e4m3"), ("2-3", "fp4_e2m1"), ("3", "fp8_e4m3"), ("2-3", "nvfp4")]
)
def test_a_site_that_is_left_out_is_named(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, mode: str, format: str
) -> None:
    recipe = Recipe(mode, format)
    name, layout = next((block.mixer_name, block.layout) for block in mamba_blocks(loaded.model))
    for site in (None, *gridded_sites(find_mode(mode), FORMATS[format], layout)):
        twin: Any = apply(loaded.model, recipe, calibration)
        if site is not None:
            next(mamba_blocks(twin)).sites.site(site).grid = None
        with torch.no_grad(), quietly(), watching(twin, recipe) as found:
            twin(tokens, use_cache=False)
        if site == "conv1d.input" or (site and next(mamba_blocks(twin)).sites.width(site) < 16):
            continue  # then it has the grid of in_proj.output; it is narrower than a block of nvfp4
        assert (f"{name}.{site}" in found) if site else (found == {}), site


def test_every_function_inside_is_within_a_few_ulps_of_its_formula(loaded: Loaded) -> None:
    twin = apply(loaded.model, Recipe("2-1", "fp8_e4m3"))
    block, stock = (next(mamba_blocks(model)) for model in (twin, loaded.model))
    found = {error.name: error.ulps for error in function_errors(block.mixer, stock.mixer)}
    norms = [name for name in NORMS[loaded.name] if list(stock.mixer.get_submodule(name).parameters())]
    assert set(found) == {"softplus", "A", "gate", "activation", *norms}
    assert max(found.values()) <= RULES["functions.error"].absolute
    with mock.patch.object(block.sites, "rates", return_value=block.sites.rates() * (1 + 1e-5)):
        assert max(function_errors(block.mixer, stock.mixer), key=lambda error: error.ulps).name == "A"


def test_a_weight_of_the_mixer_itself_can_be_kept_float(loaded: Loaded, calibration: Calibration) -> None:
    layout = next(mamba_blocks(loaded.model)).layout
    for weight in layout.own_weights:
        declare_modes({"mixed": DeclaredMode("2-1", (weight,))}, where="here")
        try:
            twin = apply(loaded.model, Recipe("mixed", "fp4_e2m1"), calibration)
        finally:
            unregister_mode("mixed")
        for block, plain in zip(mamba_blocks(twin), mamba_blocks(loaded.model), strict=True):
            for own in layout.own_weights:
                same = torch.equal(block.mixer.get_parameter(own), plain.mixer.get_parameter(own))
                assert same == (own == weight), own


def test_a_layer_of_which_all_weights_are_kept_is_declared_float(loaded: Loaded, tokens: Tensor) -> None:
    block = next(mamba_blocks(loaded.model))
    beside = [f"{block.name}.{name}" for name, child in block.module.named_children() if child is not block.mixer]
    patterns = (*beside, *(f"{block.mixer_name}.{name}" for name in block.layout.modules))
    declare_modes({"mixed": DeclaredMode("2-1", patterns)}, where="here")
    try:
        modules = run_reference(loaded.model, [tokens]).modules
        assert float_layers(loaded.model, find_mode("mixed"), modules) == {"layer_0", *FLOAT.get(loaded.name, ())}
    finally:
        unregister_mode("mixed")


def test_mixer_conv1d_and_scan_can_be_recorded(loaded: Loaded) -> None:
    points = tap_points(with_sites(loaded.model), ["all"], ["mixer", "conv1d", "scan"])
    (first, *_) = mamba_blocks(loaded.model)
    assert points.sources["layer_0.mixer.output"] == (first.mixer_name, "output")
    assert points.sources["layer_0.conv1d.output"] == (f"{first.mixer_name}.sites.conv1d.output", "output")
    assert points.sources["layer_0.scan.output"] == (f"{first.mixer_name}.sites.scan.y", "output")
    assert [label for label in points.layers if f"{label}.scan.input" not in points.sources] == sorted(
        FLOAT.get(loaded.name, ())
    )


def test_a_copy_with_sites_can_be_offloaded(loaded: Loaded, tokens: Tensor) -> None:
    placed = place(with_sites(loaded.model), Room(torch.device("cpu"), 1))
    assert all(parameter.is_meta for parameter in placed.model.parameters())
    assert torch.equal(logits(placed.model, tokens), logits(with_sites(loaded.model), tokens))


def test_the_table_of_docs_names_every_mixer_and_site() -> None:
    text = (Path(__file__).parents[2] / "docs" / "modes.md").read_text(encoding="utf-8")
    table = text.partition("| mixer | layout |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+Mixer)`", table)) == set(SITE_MIXERS)
    for layout in {kind.layout for kind in SITE_MIXERS.values()}:
        assert [site for site in layout.sites if f"[{site}]" not in text] == []
