"""A recipe applied to a model: which grid lies where, what stays float, and what cannot be applied."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import probe.numerics.grids
from probe.data.library_logs import quietly
from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.data.tokenizers import ByteTokenizer
from probe.formats import GATE_FORMATS
from probe.models.forward import output_of
from probe.models.loading import Loaded, load_model, weight_fingerprint
from probe.models.mamba import Site, SiteMixer
from probe.models.mamba_blocks import mamba_blocks
from probe.running.calibration import Calibration, calibrate_on
from probe.running.capture import capture
from probe.running.measurement import Measured, check_applied, measure
from probe.running.modes import register_mode, unregister_mode
from probe.running.recipes import Recipe, apply, check_recipes
from probe.running.reference import run_reference
from tests.models.random_models import make_gpt2, make_mamba2, make_mixtral, make_t5, make_vit

FORMAT = pytest.mark.parametrize("format", GATE_FORMATS)


def mse_of(measured: Measured, label: str) -> float:
    found = measured.layers[label].mse
    assert found is not None
    return found


@FORMAT
def test_every_weight_and_site_lies_on_its_grid(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, format: str
) -> None:
    twin = apply(loaded.model, Recipe("2-1", format), calibration)
    for block in mamba_blocks(twin):
        name, mixer = block.name, block.sites
        linears = [f"{module}.weight" for module in ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj")]
        for weight in (*linears, "conv1d.bias", "dt_proj.bias", "A_log", "D"):
            value = mixer.get_parameter(weight)
            if format != "nvfp4":  # its tensor scale is taken anew from the rounded tensor
                assert torch.equal(probe.numerics.grids.weight_on_grid(value, format), value), (name, weight)
        sites = (
            "in_proj.input",
            "in_proj.output",
            "conv1d.output",
            "x_proj.output",
            "dt_proj.output",
            "out_proj.input",
        )
        assert all(mixer.site(site).grid is not None for site in sites)
    with capture(twin, [r"sites\.(in_proj|conv1d|x_proj|dt_proj|out_proj)\."]) as captured:
        output_of(twin, tokens)
    for name, (tensor,) in captured.tensors.items():
        site = twin.get_submodule(name.removesuffix(".output"))
        assert isinstance(site, Site)
        if site.grid is not None and format != "nvfp4":
            assert torch.equal(site.grid(tensor), tensor), name


def test_int8_sites_round_as_the_cuda_kernels_do(loaded: Loaded, calibration: Calibration) -> None:
    mixer = apply(loaded.model, Recipe("2-1", "int8"), calibration).get_submodule("backbone.layers.0.mixer")
    assert isinstance(mixer, SiteMixer)
    for site, away in (
        ("conv1d.output", True),
        ("out_proj.input", True),
        ("in_proj.input", False),
        ("x_proj.output", False),
    ):
        grid = mixer.site(site).grid
        assert isinstance(grid, probe.numerics.grids.IntegerGrid)
        scale = grid.parameters.scale.item()
        amax = calibration.amax_of(f"backbone.layers.0.mixer.{site}")
        assert scale == torch.tensor(amax / 127, dtype=torch.float32).item()
        exact = probe.numerics.grids.IntegerGrid(
            probe.integer_parameters(torch.tensor(-127.0), torch.tensor(127.0)), grid.rounding
        )
        assert exact(torch.tensor([0.5, 1.5, -2.5, 300.0])).tolist() == ([1, 2, -3, 127] if away else [0, 2, -2, 127])


def test_nvfp4_activations_use_the_calibrated_tensor_scale(loaded: Loaded, calibration: Calibration) -> None:
    mixer = apply(loaded.model, Recipe("2-2", "nvfp4"), calibration).get_submodule("backbone.layers.1.mixer")
    assert isinstance(mixer, SiteMixer)
    grid = mixer.site("in_proj.output").grid
    assert isinstance(grid, probe.numerics.grids.BlockGrid)
    amax = calibration.amax_of("backbone.layers.1.mixer.in_proj.output")
    assert grid.tensor_scale is not None
    assert grid.tensor_scale.item() == pytest.approx(amax / 2688)
    x = torch.randn(4, 3, 64)
    assert torch.equal(grid(x)[1:2], grid(x[1:2]))  # nothing depends on the batch


@FORMAT
def test_embedding_final_norm_and_head_stay_float(loaded: Loaded, calibration: Calibration, format: str) -> None:
    twin = apply(loaded.model, Recipe("0", format), calibration)
    for name in ("backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"):
        assert torch.equal(twin.get_parameter(name), loaded.model.get_parameter(name)), name


def test_float_modes_run_in_their_dtype(loaded: Loaded, tokens: Tensor) -> None:
    reference = run_reference(loaded.model, [tokens])
    errors = {}
    for mode, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        twin = apply(loaded.model, Recipe(mode))
        assert all(p.dtype == dtype for p in twin.parameters())
        errors[mode] = mse_of(check_applied(loaded.model, Recipe(mode), reference), "layer_3")
    assert 0 < errors["fp16"] < errors["bf16"]


@FORMAT
@pytest.mark.parametrize("mode", ["linear_w", "linear_wa"])
def test_linear_modes_also_work_on_a_mamba(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, mode: str, format: str
) -> None:
    check_applied(loaded.model, Recipe(mode, format), run_reference(loaded.model, [tokens]), calibration)


@FORMAT
@pytest.mark.parametrize("mode", ["linear_w", "linear_wa"])
def test_linear_modes_quantize_every_layer_of_a_transformer(llama: Loaded, mode: str, format: str) -> None:
    tokens = token_batches(text_of("evaluation"), llama.tokenizer, samples=2, seqlen=32, batch_size=2)
    reference = run_reference(llama.model, tokens)
    calibration = calibrate_on(llama, "calibration", 2, 64)
    measured = check_applied(llama.model, Recipe(mode, format), reference, calibration)
    assert set(measured.layers) == {f"layer_{i}" for i in range(4)}
    wholly = measure(llama.model, Recipe(mode, format), reference, calibration)
    assert wholly.output.classes is not None
    assert wholly.output.classes.kl is not None
    assert 0 < wholly.output.classes.kl < 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["torchao_w", "torchao_wa"])
def test_a_foreign_quantizer_plugs_in(llama: Loaded, mode: str) -> None:
    tokens = token_batches(text_of("evaluation"), llama.tokenizer, samples=2, seqlen=32, batch_size=2)
    reference = run_reference(llama.model, tokens)
    measured = check_applied(llama.model, Recipe(mode, "int8"), reference)
    ours = check_applied(llama.model, Recipe("linear_w", "int8"), reference)
    for label in measured.layers:
        assert 0 < mse_of(measured, label) < 10 * mse_of(ours, label)
    with pytest.raises(ValueError, match="take the format int8, not fp4_e2m1"):
        apply(llama.model, Recipe(mode, "fp4_e2m1"))


def test_a_mixer_with_limited_time_steps_is_quantized_by_its_linears_only() -> None:
    """transformers limits the time steps of Mamba-2 in prefill and not in decode."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        num_heads=4,
        head_dim=16,
        vocab_size=256,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        n_groups=1,
        expand=2,
        time_step_limit=(0.0, 0.5),
    )
    with quietly():
        model = transformers.Mamba2ForCausalLM(config).eval()
        tokens = torch.arange(64).reshape(2, 32)
        reference = run_reference(model, [tokens])
        assert reference.layers == ("layer_0", "layer_1")
        measured = check_applied(model, Recipe("linear_w", "fp4_e2m1"), reference)
        assert all(metrics.mse for metrics in measured.layers.values())
        loaded = Loaded("limited", model, ByteTokenizer(), weight_fingerprint(model))
        reason = (
            r"\(backbone.layers.0.mixer: Mamba2Mixer limits its time steps to \(0, 0.5\), in prefill and not in decode"
        )
        with pytest.raises(ValueError, match=f"has no Mamba blocks, which the modes 0 to 3 quantize {reason}"):
            apply(model, Recipe("0", "mxint8"))
        with pytest.raises(ValueError, match=f"mode_0-mxint8 quantizes Mamba blocks and limited has none {reason}"):
            check_recipes(loaded, [Recipe("0", "mxint8")])


def test_blocks_of_a_format_do_not_reach_from_x_into_b() -> None:
    model = make_mamba2(hidden_size=24, num_heads=3, n_groups=1)
    message = "x of backbone.layers.0.mixer has 48 channels, no multiple of 32, so that a block of conv1d.output"
    with pytest.raises(ValueError, match=f"mode_2_1-mxint8: {message}.*Use the format int8, or the modes linear_w"):
        apply(model, Recipe("2-1", "mxint8"))
    loaded = Loaded("narrow", model, ByteTokenizer(), weight_fingerprint(model))
    with pytest.raises(ValueError, match=message):
        check_recipes(loaded, [Recipe("2-1", "mxint8")])
    check_recipes(loaded, [Recipe("2-1", "int8"), Recipe("linear_wa", "mxint8"), Recipe("2-1", "nvfp4")])


def test_a_copy_made_by_a_mode_is_not_quantized_again(loaded: Loaded, calibration: Calibration) -> None:
    for recipe in (Recipe("2-1", "mxint8"), Recipe("fp16"), Recipe("linear_w", "mxint8")):
        with pytest.raises(ValueError, match="already a copy made by a mode"):
            apply(apply(loaded.model, recipe), Recipe("2-1", "mxint8"))
    llama = load_model("tiny-llama").model
    with pytest.raises(ValueError, match="already a copy made by a mode"):
        apply(apply(llama, Recipe("linear_w", "int4")), Recipe("linear_w", "int4"))


def test_static_formats_without_calibration_are_refused(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="format int8 needs calibrated scales and none were given"):
        apply(loaded.model, Recipe("0", "int8"))
    apply(loaded.model, Recipe("0", "mxint8"))


def test_an_ssm_mode_on_a_transformer_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no Mamba blocks"):
        apply(load_model("tiny-llama").model, Recipe("0", "mxint8"))


def test_a_registered_mode_must_return_a_model(loaded: Loaded) -> None:
    register_mode("none", lambda model, format, calibration: None)  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(ValueError, match="mode 'none' returned a NoneType, expected the quantized"):
            apply(loaded.model, Recipe("none", "int8"))
    finally:
        unregister_mode("none")


@pytest.mark.parametrize("make", [make_gpt2, make_mixtral, make_vit, make_t5], ids=lambda make: make.__name__)
@pytest.mark.parametrize("mode", ["linear_w", "linear_wa"])
def test_a_copy_shares_no_tensor_with_the_model(make: Callable[[], nn.Module], mode: str) -> None:
    """Though the weights that are put on a grid are not copied first."""
    model = make()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    twin = apply(model, Recipe(mode, "fp8_e4m3"))
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert [name for name, parameter in twin.named_parameters() if parameter.data_ptr() in own] == []
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
