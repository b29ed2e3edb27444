"""The relations of the modes, over every format: what must be identical, what must differ, what must not leak."""

import pytest
import torch
from torch import Tensor, nn

import probe.numerics.grids
import probe.running.recipes
from probe.data.batches import token_batches
from probe.data.texts import text_of
from probe.formats import FORMATS, GATE_FORMATS
from probe.models.loading import Loaded, load_model
from probe.models.mamba import SiteMixer, mamba_blocks
from probe.running.calibration import Calibration, calibrate_on
from probe.running.capture import capture
from probe.running.measurement import NotAppliedError, check_applied, measure
from probe.running.modes import GROUPS, MODES, expand_modes, find_mode, register_mode, unregister_mode
from probe.running.recipes import Recipe, apply
from probe.running.reference import run_reference

QUANTIZED = GROUPS["all"]
FORMAT = pytest.mark.parametrize("format", GATE_FORMATS)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model("tiny-mamba")


@pytest.fixture(scope="module")
def tokens(loaded: Loaded) -> Tensor:
    return token_batches(text_of("evaluation"), loaded.tokenizer, samples=2, seqlen=64, batch_size=2)[0]


@pytest.fixture(scope="module")
def calibration(loaded: Loaded) -> Calibration:
    return calibrate_on(loaded, "calibration", 4, 128)


def run(model: nn.Module, tokens: Tensor, **options: object) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False, **options).logits


@pytest.fixture(scope="module")
def outputs(loaded: Loaded, tokens: Tensor, calibration: Calibration) -> dict[tuple[str, str], Tensor]:
    """Logits of every mode under every format, each model made, run and dropped."""
    return {
        (mode, format): run(apply(loaded.model, Recipe(mode, format), calibration), tokens)
        for format in GATE_FORMATS
        for mode in QUANTIZED
    }


@FORMAT
@pytest.mark.parametrize(("one", "other"), [("0", "2-0"), ("2-1", "2-2"), ("2-3", "2-1")])
def test_bit_identical(outputs: dict[tuple[str, str], Tensor], format: str, one: str, other: str) -> None:
    assert torch.equal(outputs[one, format], outputs[other, format])


@FORMAT
def test_fast_and_sequential_modes_are_equal_in_the_first_layer_up_to_summation_order(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, format: str
) -> None:
    ys = {}
    for mode in ("0", "2-1"):
        twin = apply(loaded.model, Recipe(mode, format), calibration)
        with capture(twin, [r"layers\.0\.mixer\.sites\.scan\.y$"]) as captured:
            run(twin, tokens)
        ys[mode] = next(iter(captured.tensors.values()))[0]
    assert (ys["0"] - ys["2-1"]).abs().max() <= 2e-6 * ys["0"].abs().max()


@FORMAT
def test_must_differ(loaded: Loaded, tokens: Tensor, outputs: dict[tuple[str, str], Tensor], format: str) -> None:
    reference = run(apply(loaded.model, Recipe("fp32")), tokens)
    for mode in QUANTIZED:
        assert not torch.equal(outputs[mode, format], reference), mode
    assert not torch.equal(outputs["2-4", format], outputs["2-2", format])
    assert not torch.equal(outputs["3", format], outputs["2-4", format])


@FORMAT
@pytest.mark.parametrize("mode", QUANTIZED)
def test_every_layer_of_every_recipe_differs_from_float_given_the_same_input(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, mode: str, format: str
) -> None:
    reference = run_reference(loaded.model, [tokens])
    measured = check_applied(loaded.model, Recipe(mode, format), reference, calibration)
    assert all(metrics.mse for metrics in measured.layers.values())


@FORMAT
def test_x_proj_input_dt_b_and_c_are_the_same_in_every_mode_given_the_same_block_input(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, format: str
) -> None:
    seen: dict[str, list[Tensor]] = {}
    for mode in QUANTIZED[:-1]:  # mode 3 has another scale at the input of conv1d
        twin = apply(loaded.model, Recipe(mode, format), calibration)
        with capture(twin, [r"layers\.0\.mixer\.sites\.(x_proj|dt_proj)\."]) as captured:
            run(twin, tokens)
        for name, (tensor,) in captured.tensors.items():
            seen.setdefault(name, []).append(tensor)
    assert len(seen) == 3
    for name, tensors in seen.items():
        assert all(torch.equal(tensors[0], tensor) for tensor in tensors[1:]), name


@FORMAT
def test_every_weight_and_site_lies_on_its_grid(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, format: str
) -> None:
    twin = apply(loaded.model, Recipe("2-1", format), calibration)
    for name, block in mamba_blocks(twin):
        mixer = block.mixer
        assert isinstance(mixer, SiteMixer)
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
        run(twin, tokens)
    for name, (tensor,) in captured.tensors.items():
        site = twin.get_submodule(name.removesuffix(".output"))
        if site.grid is not None and format != "nvfp4":
            assert torch.equal(site.grid(tensor), tensor), name


def test_prefill_does_not_depend_on_the_scale_of_the_state(
    loaded: Loaded, tokens: Tensor, calibration: Calibration
) -> None:
    amax = {name: (value * 7 if name.endswith("scan.state") else value) for name, value in calibration.amax.items()}
    other = Calibration(amax, calibration.model, calibration.data, calibration.percentile, calibration.tokens)
    results = []
    for given in (calibration, other):
        twin = apply(loaded.model, Recipe("2-1", "int8"), given)
        with torch.no_grad():
            prefill = twin(tokens[:, :32], use_cache=True)
            step = twin(tokens[:, 32:33], cache_params=prefill.cache_params, use_cache=True)
        results.append((prefill.logits, step.logits))
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][1], results[1][1])  # decode does


def test_the_order_in_which_modes_run_does_not_matter(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, outputs: dict[tuple[str, str], Tensor]
) -> None:
    for mode in reversed(QUANTIZED):
        again = run(apply(loaded.model, Recipe(mode, "int8"), calibration), tokens)
        assert torch.equal(again, outputs[mode, "int8"]), mode


@FORMAT
def test_a_sample_does_not_depend_on_its_batch(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, format: str
) -> None:
    for mode in ("0", "3"):
        twin = apply(loaded.model, Recipe(mode, format), calibration)
        whole, alone = run(twin, tokens)[1:], run(twin, tokens[1:])
        assert (whole - alone).abs().max() <= 1e-4 * whole.abs().max()


def test_a_mode_leaves_the_model_as_it_was(loaded: Loaded, calibration: Calibration) -> None:
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    apply(loaded.model, Recipe("fp32"))
    for mode in (*QUANTIZED, "linear_w", "linear_wa"):
        apply(loaded.model, Recipe(mode, "int8"), calibration)
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())


@FORMAT
@pytest.mark.parametrize("mode", ["linear_w", "linear_wa"])
def test_linear_modes_also_work_on_a_mamba(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, mode: str, format: str
) -> None:
    check_applied(loaded.model, Recipe(mode, format), run_reference(loaded.model, [tokens]), calibration)


# breaking modes on purpose -----------------------------------------------------------------------------------------


def test_a_mode_that_skips_a_layer_is_noticed_and_the_layer_named(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = probe.running.recipes._ssm

    def skipping(model: nn.Module, *rest: object) -> nn.Module:
        twin = real(model, *rest)
        float_twin = apply(model, Recipe("fp32"))
        twin.backbone.layers[2] = float_twin.backbone.layers[2]
        return twin

    monkeypatch.setattr(probe.running.recipes, "_ssm", skipping)
    reference = run_reference(loaded.model, [tokens])
    with pytest.raises(NotAppliedError, match=r"mode_2_1-int8 was not applied to layer_2: .*\(1 of 4 layers\)"):
        check_applied(loaded.model, Recipe("2-1", "int8"), reference, calibration)


def test_a_mode_that_does_nothing_is_noticed(loaded: Loaded, tokens: Tensor) -> None:
    """The upstream tools compared the quantized checkpoint with itself, and nothing noticed."""
    register_mode("same", lambda model, format, calibration: model)
    try:
        with pytest.raises(NotAppliedError, match=r"same-int8 was not applied to layer_0, layer_1, layer_2, layer_3"):
            check_applied(loaded.model, Recipe("same", "int8"), run_reference(loaded.model, [tokens]))
    finally:
        unregister_mode("same")


def test_a_mode_that_returns_the_original_model_is_noticed_too(loaded: Loaded, tokens: Tensor) -> None:
    """It runs the stock mixer, whose sums have another order: not the same bits, but nothing was quantized."""
    register_mode("original", lambda model, format, calibration: loaded.model)
    try:
        with pytest.raises(
            NotAppliedError, match="original-int8 was not applied to layer_0, layer_1, layer_2, layer_3"
        ):
            check_applied(loaded.model, Recipe("original", "int8"), run_reference(loaded.model, [tokens]))
    finally:
        unregister_mode("original")


def test_the_calibration_and_the_reference_of_other_weights_are_refused(
    loaded: Loaded, tokens: Tensor, calibration: Calibration
) -> None:
    other = load_model("tiny-mamba").model
    with torch.no_grad():
        other.backbone.layers[0].mixer.D[0] *= 1.5
    with pytest.raises(ValueError, match=r"the calibration belongs to a model with fingerprint \w+, this one has"):
        apply(other, Recipe("0", "int8"), calibration)
    with pytest.raises(ValueError, match=r"the reference is of a model with fingerprint \w+, this one has"):
        measure(other, Recipe("0", "mxint8"), run_reference(loaded.model, [tokens]))


def test_a_copy_made_by_a_mode_is_not_quantized_again(loaded: Loaded, calibration: Calibration) -> None:
    for recipe in (Recipe("2-1", "mxint8"), Recipe("fp16"), Recipe("linear_w", "mxint8")):
        with pytest.raises(ValueError, match="already a copy made by a mode"):
            apply(apply(loaded.model, recipe), Recipe("2-1", "mxint8"))
    llama = load_model("tiny-llama").model
    with pytest.raises(ValueError, match="already a copy made by a mode"):
        apply(apply(llama, Recipe("linear_w", "int4")), Recipe("linear_w", "int4"))


def test_nan_is_told_as_such(loaded: Loaded, tokens: Tensor) -> None:
    def poisoned(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
        with torch.no_grad():
            model.backbone.layers[1].mixer.in_proj.weight[0, 0] = float("nan")
        return model

    register_mode("poisoned", poisoned)
    try:
        with pytest.raises(ValueError, match="poisoned-int8 gives NaN or Inf in layer_1, given the finite input"):
            check_applied(loaded.model, Recipe("poisoned", "int8"), run_reference(loaded.model, [tokens]))
    finally:
        unregister_mode("poisoned")


# names, registration, other models ---------------------------------------------------------------------------------


def test_both_spellings_name_the_same_mode() -> None:
    assert find_mode("mode_2_1") is find_mode("2-1")
    assert find_mode("2-1").id == "mode_2_1"
    assert str(Recipe("mode_2_1", "fp8_e4m3")) == "mode_2_1-fp8_e4m3"
    assert str(Recipe("fp16")) == "fp16"
    assert [mode.name for mode in expand_modes(["essential", "2-1", "mode_3"])] == [
        "fp32",
        "0",
        "2-1",
        "2-2",
        "2-4",
        "3",
    ]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Recipe("2-5", "int8"), "unknown mode '2-5'. Did you mean '2-"),
        (lambda: Recipe("2-1"), "mode 2-1 quantizes and needs a format"),
        (lambda: Recipe("fp32", "int8"), "mode fp32 is a float mode and takes no format"),
        (lambda: Recipe("0", "fp9"), "unknown format 'fp9'"),
        (lambda: register_mode("0", lambda *a: a), "there is a mode '0' already"),
        (lambda: register_mode("mode_2_1", lambda *a: a), "there is a mode 'mode_2_1' already"),
        (lambda: register_mode("2_1", lambda *a: a), "there is a mode '2_1' already"),
        (lambda: register_mode("essential", lambda *a: a), "there is a mode 'essential' already"),
        (lambda: register_mode("abc", 3), "mode 'abc' was given a int, expected a function"),
        (lambda: register_mode("a b", lambda *a: a), "cannot be part of a test id"),
        (lambda: unregister_mode("0"), "mode '0' is built in"),
    ],
)
def test_a_mistake_gets_one_clear_message(act, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        act()
    assert message in str(caught.value)


def test_static_formats_without_calibration_are_refused(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="format int8 needs calibrated scales and none were given"):
        apply(loaded.model, Recipe("0", "int8"))
    apply(loaded.model, Recipe("0", "mxint8"))


def test_an_ssm_mode_on_a_transformer_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no Mamba-1 blocks"):
        apply(load_model("tiny-llama").model, Recipe("0", "mxint8"))


def test_a_registered_mode_must_return_a_model(loaded: Loaded) -> None:
    register_mode("none", lambda model, format, calibration: None)  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(ValueError, match="mode 'none' returned a NoneType, expected the quantized"):
            apply(loaded.model, Recipe("none", "int8"))
    finally:
        unregister_mode("none")


@pytest.fixture(scope="module")
def llama() -> Loaded:
    return load_model("tiny-llama")


@FORMAT
@pytest.mark.parametrize("mode", ["linear_w", "linear_wa"])
def test_linear_modes_quantize_every_layer_of_a_transformer(llama: Loaded, mode: str, format: str) -> None:
    tokens = token_batches(text_of("evaluation"), llama.tokenizer, samples=2, seqlen=32, batch_size=2)
    reference = run_reference(llama.model, tokens)
    calibration = calibrate_on(llama, "calibration", 2, 64)
    measured = check_applied(llama.model, Recipe(mode, format), reference, calibration)
    assert set(measured.layers) == {f"layer_{i}" for i in range(4)}
    wholly = measure(llama.model, Recipe(mode, format), reference, calibration)
    assert wholly.logits.kl is not None
    assert 0 < wholly.logits.kl < 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["torchao_w", "torchao_wa"])
def test_a_foreign_quantizer_plugs_in(llama: Loaded, mode: str) -> None:
    tokens = token_batches(text_of("evaluation"), llama.tokenizer, samples=2, seqlen=32, batch_size=2)
    reference = run_reference(llama.model, tokens)
    measured = check_applied(llama.model, Recipe(mode, "int8"), reference)
    ours = check_applied(llama.model, Recipe("linear_w", "int8"), reference)
    for label, metrics in measured.layers.items():
        assert 0 < metrics.mse < 10 * ours.layers[label].mse
    with pytest.raises(ValueError, match="take the format int8, not fp4_e2m1"):
        apply(llama.model, Recipe(mode, "fp4_e2m1"))


def test_float_modes_run_in_their_dtype(loaded: Loaded, tokens: Tensor) -> None:
    reference = run_reference(loaded.model, [tokens])
    errors = {}
    for mode, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        twin = apply(loaded.model, Recipe(mode))
        assert all(p.dtype == dtype for p in twin.parameters())
        errors[mode] = check_applied(loaded.model, Recipe(mode), reference).layers["layer_3"].mse
    assert 0 < errors["fp16"] < errors["bf16"]


def test_the_table_covers_every_mode_and_the_gate_formats_are_known() -> None:
    assert set(GATE_FORMATS) <= set(FORMATS)
    assert set(QUANTIZED) == {name for name, mode in MODES.items() if mode.kind == "ssm"}


def test_mamba2_is_captured_by_hooks_and_quantized_by_its_linears() -> None:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    from probe.data.library_logs import quietly

    torch.manual_seed(0)
    config = Mamba2Config(
        num_heads=4,
        head_dim=16,
        vocab_size=256,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        n_groups=1,
        expand=2,
    )
    with quietly():
        model = Mamba2ForCausalLM(config).eval()
        tokens = torch.arange(64).reshape(2, 32)
        reference = run_reference(model, [tokens])
        assert reference.layers == ("layer_0", "layer_1")
        measured = check_applied(model, Recipe("linear_w", "fp4_e2m1"), reference)
        assert all(metrics.mse for metrics in measured.layers.values())
        with pytest.raises(ValueError, match="has no Mamba-1 blocks"):
            apply(model, Recipe("0", "mxint8"))


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


@FORMAT
def test_embedding_final_norm_and_head_stay_float(loaded: Loaded, calibration: Calibration, format: str) -> None:
    twin = apply(loaded.model, Recipe("0", format), calibration)
    for name in ("backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"):
        assert torch.equal(twin.get_parameter(name), loaded.model.get_parameter(name)), name


def test_nvfp4_activations_use_the_calibrated_tensor_scale(loaded: Loaded, calibration: Calibration) -> None:
    mixer = apply(loaded.model, Recipe("2-2", "nvfp4"), calibration).get_submodule("backbone.layers.1.mixer")
    assert isinstance(mixer, SiteMixer)
    grid = mixer.site("in_proj.output").grid
    assert isinstance(grid, probe.numerics.grids.BlockGrid)
    amax = calibration.amax_of("backbone.layers.1.mixer.in_proj.output")
    assert grid.tensor_scale.item() == pytest.approx(amax / 2688)
    x = torch.randn(4, 3, 64)
    assert torch.equal(grid(x)[1:2], grid(x[1:2]))  # nothing depends on the batch
