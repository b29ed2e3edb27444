"""Predicted errors against measured ones: closed forms, every format, both embedded models, the sites of Mamba."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from probe.activations.plan import expert_rows
from probe.activations.prediction import (
    Prediction,
    _mean_error,
    keep_in_higher_precision,
    mismatched_channels,
    predict_layers,
    predict_linear,
    predict_tensor,
    spoiled_share,
)
from probe.activations.run import analyze, prepare
from probe.activations.settings import read_configuration
from probe.activations.statistics import LayerStatistics, measure
from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.formats import FORMATS, GATE_FORMATS
from probe.models.linear import linear_key, linear_layers
from probe.models.linear_grids import put_expert_sites
from probe.models.loading import load_model
from probe.models.mamba_blocks import rotated_twin
from probe.numerics.grids import activation_grid
from probe.numerics.quantize import fake_quantize
from probe.running.calibration import calibrate_on
from probe.running.capture import capture
from probe.running.measurement import measure as measure_recipe
from probe.running.recipes import Recipe
from probe.running.reference import run_reference
from tests.models.random_models import make_gpt_oss, make_mixtral


def known(x: Tensor, kind: Any = "input", module: str = "m") -> LayerStatistics:
    return measure(x, module=module, kind=kind, fast=False)[0]


def spearman(a: list[float], b: list[float]) -> float:
    """The correlation of ranks; there are no ties among measured errors."""
    first, second = (np.argsort(np.argsort(values)).astype(np.float64) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def even(low: float, high: float, count: int = 2**16) -> Tensor:
    """Numbers spread evenly over [low, high], shuffled, in rows of 64, so that blocks are alike."""
    values = low + (high - low) * (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return values[torch.randperm(count, generator=torch.Generator().manual_seed(0))].float().view(-1, 64)


@pytest.mark.parametrize("format", ["int8", "int4", "int2"])
def test_integers_of_evenly_spread_data_err_by_a_step_squared_over_12(format: str) -> None:
    """Clipping adds nothing; the two ends, half a step each, are rounded as all others."""
    step = 3.0 / FORMATS[format].max
    found = predict_tensor(known(even(-3.0, 3.0)), format, amax=3.0)
    assert found.mse == pytest.approx(step**2 / 12, rel=2e-3)


@pytest.mark.parametrize(
    ("format", "step"),
    [
        *[("fp8_e4m3", 2**-3), ("fp8_e5m2", 2**-2), ("fp6_e2m3", 2**-3), ("fp6_e3m2", 2**-2), ("fp4_e2m1", 2**-1)],
        *[("mxint8", 2**-6), ("bf16", 2**-7), ("fp16", 2**-10)],
    ],
)
def test_one_octave_below_saturation_errs_by_a_step_squared_over_12(format: str, step: float) -> None:
    """All values in [1, 1.5], so that no format saturates; their blocks have the exponent 0."""
    found = predict_tensor(known(even(1.0, 1.5)), format)
    assert found.mse == pytest.approx(step**2 / 12, rel=5e-3)
    assert found.sqnr == pytest.approx(10 * math.log10(known(even(1.0, 1.5)).moments.mean_square / found.mse))


def test_saturation_is_the_distance_to_the_last_value() -> None:
    """int8 calibrated to 1 on data over [2, 3]: (x - 1)^2, whose mean is (2^3 - 1^3) / 3."""
    assert predict_tensor(known(even(2.0, 3.0)), "int8", amax=1.0).mse == pytest.approx(7 / 3, rel=1e-4)


def test_what_becomes_zero_errs_by_its_square() -> None:
    """Blocks with one value of 1 and others at 2^-6: fp4 ends at 2^-3 of the largest and has no more of them."""
    x = torch.full((64, 32), 2.0**-6)
    x[:, 5] = 1.0
    found = predict_tensor(known(x), "fp4_e2m1")
    spread = np.mean((2.0**-6 * np.linspace(1, 1 + 1 / 64, 1001)) ** 2)  # a bucket is 1/64 wide
    own = float(_mean_error(np.array([4.0]), np.array([4.0 * (1 + 1 / 64)]), FORMATS["fp4_e2m1"])[0]) / 16
    assert found.mse == pytest.approx((31 * spread + own) / 32, rel=1e-3)


@pytest.mark.parametrize("format", [name for name in FORMATS if FORMATS[name].bits <= 8])
def test_the_mean_error_of_a_bucket_is_that_of_the_quantizer(format: str) -> None:
    """Against the average over ten thousand numbers in each of many intervals, through the reference's rounding."""
    from probe.numerics.reference import round_elements

    fmt = FORMATS[format]
    ends = np.exp2(np.arange(-9, fmt.max_exponent + 2, 1 / 16))
    for low, after in itertools.pairwise(ends):
        high = min(after, 2.0 ** (math.floor(math.log2(low) + 1e-9) + 1))
        y = torch.linspace(low, high, 10001, dtype=torch.float64)
        y = (y[:-1] + y[1:]) / 2
        q = torch.round(y).clamp(max=fmt.max) if fmt.scale == "float32" else round_elements(y, fmt, "half_even", None)
        found = float(_mean_error(np.array([low]), np.array([high]), fmt)[0])
        assert found == pytest.approx(float((y - q).square().mean()), rel=2e-3, abs=1e-15), (low, high)


@pytest.mark.parametrize("format", [*GATE_FORMATS, "int4", "bf16", "fp16"])
@pytest.mark.parametrize("data", ["normal", "outliers", "heavy"])
def test_tensors_of_every_shape_are_predicted(format: str, data: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 128, generator=generator)
    if data == "outliers":
        x[:, 7] *= 60
    if data == "heavy":
        x = x**3
    measured = float((fake_quantize(x, format).double() - x.double()).square().mean())
    near = 0.2 if format == "nvfp4" else 0.12  # its blocks of 16 are inferred from those of 32
    assert predict_tensor(known(x), format).mse == pytest.approx(measured, rel=near)


@pytest.mark.parametrize("name", ["tiny-mamba", "tiny-llama"])
def test_predicted_errors_of_linear_layers_rank_as_the_measured_ones(name: str) -> None:
    """Every linear in every format of the gate, given the float model's input: Spearman 0.9 at the least."""
    loaded = load_model(name)
    batches = token_batches(text_of("evaluation"), loaded.tokenizer, samples=2, seqlen=64, batch_size=2)
    calibration = calibrate_on(loaded, "calibration", 4, 64)
    names = [name for name, layer in linear_layers(loaded.model).items() if layer.inputs]
    reference = run_reference(loaded.model, batches, [f"^{re.escape(linear)}$" for linear in names])
    statistics: dict[tuple[str, str], LayerStatistics] = {}
    for linear in names:
        given = torch.cat(reference.tensors[f"{linear}.input"]).float()
        statistics[linear, "input"] = known(given, "input", linear)
        output = torch.cat(reference.tensors[f"{linear}.injected"])
        statistics[linear, "output"] = known(output, "output", linear)
        statistics[linear, "weight"] = known(loaded.model.get_submodule(linear).weight, "weight", linear)  # type: ignore[arg-type]
    amax = {linear: calibration.amax_of(linear_key(linear)) for linear in names}
    predicted, measured = [], []
    for format in GATE_FORMATS:
        guesses = {one.module: one for one in predict_layers(statistics, [format], amax=amax)}
        found = measure_recipe(loaded.model, Recipe("linear_wa", format), reference, calibration, injected=True)
        assert list(guesses) == names
        mine, theirs = [guesses[n].mse for n in names], [found.layers[n].mse or 0.0 for n in names]
        assert spearman(mine, theirs) >= 0.9, format
        predicted += mine
        measured += theirs
        for linear in names:
            sqnr = found.layers[linear].sqnr
            assert sqnr is not None
            assert guesses[linear].sqnr == pytest.approx(sqnr, abs=3.6), (format, linear)
    assert spearman(predicted, measured) >= 0.98
    ratios = sorted(a / b for a, b in zip(predicted, measured, strict=True))
    assert ratios[0] > 0.4
    assert ratios[-1] < 1.4
    assert 0.85 < ratios[len(ratios) // 2] < 1.1


def test_predicted_errors_of_conv1d_of_gpt2_rank_as_the_measured_ones() -> None:
    """Its weights are [in, out]. x and W on the grid in blocks along inputs, measured with plain torch."""
    given = {"model.path": "tests.activations.toys:make_gpt2", "data.num_samples": "4", "data.seq_len": "48"}
    settings = read_configuration(None, list(given.items()))
    analysis = analyze(settings, progress=lambda _: None)
    prepared = prepare(settings, progress=lambda _: None)
    names = [name for name, module in prepared.model.named_modules() if type(module).__name__ == "Conv1D"]
    assert len(names) == 12
    assert {name for name, kind in analysis.statistics if kind == "weight"} == set(names)
    inputs: dict[str, Tensor] = {}
    for name in names:
        prepared.model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: inputs.update({name: args[0].flatten(0, 1)})
        )
    (batch,) = prepared.batches
    with torch.no_grad():
        prepared.model(batch.tokens, use_cache=False)
    statistics = {key: s for key, s in analysis.statistics.items() if key[0] in names}
    ratios = []
    for format in GATE_FORMATS:
        guesses = {one.module: one for one in predict_layers(statistics, [format])}
        assert {one.of for one in guesses.values()} == {"linear"}
        measured = []
        for name in names:
            module: Any = prepared.model.get_submodule(name)
            x, rows = inputs[name], module.weight.detach().T.contiguous()  # [out, in]
            s = analysis.statistics[name, "weight"]
            assert (s.rows, s.channel_amax.size) == rows.shape == (module.nf, module.nx), name
            assert s.channel_amax == pytest.approx(rows.abs().amax(0).numpy())
            exact = x.double() @ rows.T.double()
            on_grid = fake_quantize(x, format).double() @ fake_quantize(rows, format).T.double()
            measured.append(float((on_grid - exact).square().mean()))
        mine = [guesses[name].mse for name in names]
        assert spearman(mine, measured) >= 0.9, format
        ratios += [a / b for a, b in zip(mine, measured, strict=True)]
    ratios.sort()
    assert ratios[0] > 0.4
    assert ratios[-1] < 1.4
    assert 0.85 < ratios[len(ratios) // 2] < 1.1


def test_predicted_errors_of_the_sites_of_a_mamba_rank_as_the_measured_ones() -> None:
    loaded = load_model("tiny-mamba")
    (batch,) = token_batches(text_of("evaluation"), loaded.tokenizer, samples=2, seqlen=64, batch_size=2)
    calibration = calibrate_on(loaded, "calibration", 4, 64)
    twin: Any = rotated_twin(loaded.model, scan="fast")
    pattern = r"mixer\.sites\.(in_proj\.(in|out)put|conv1d\.output|x_proj\.output|dt_proj\.output|out_proj\.input)$"
    with capture(twin, [pattern]) as captured, torch.no_grad():
        twin(batch, use_cache=False)
    predicted, measured = [], []
    for label, (x,) in captured.tensors.items():
        site = label.removesuffix(".output").replace(".sites.", ".")
        statistics, amax = known(x, "output", site), calibration.amax_of(site)
        for format in GATE_FORMATS:
            predicted.append(predict_tensor(statistics, format, amax=amax).mse)
            measured.append(float((activation_grid(format, amax)(x).double() - x.double()).square().mean()))
    assert len(predicted) == 4 * 6 * len(GATE_FORMATS)
    assert spearman(predicted, measured) >= 0.98
    ratios = [a / b for a, b in zip(predicted, measured, strict=True)]
    assert 0.75 < min(ratios) < max(ratios) < 1.35


def test_a_linear_layer_adds_the_errors_of_input_and_weight() -> None:
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(4096, 64, generator=generator), torch.randn(48, 64, generator=generator) / 8
    given, weight = known(x), known(w, "weight")
    both = predict_linear(given, weight, "fp4_e2m1")
    parts = [predict_linear(given, weight, "fp4_e2m1", inputs=i, weights=not i).mse for i in (True, False)]
    dx, dw = (predict_tensor(one, "fp4_e2m1").mse for one in (given, weight))
    assert both.mse == pytest.approx(sum(parts) + 64 * dx * dw)
    assert parts[0] == pytest.approx(64 * dx * weight.moments.mean_square)
    assert both.mean_square == pytest.approx(float((x @ w.T).square().mean()), rel=0.05)
    with pytest.raises(ValueError, match="the weight of m has 32 inputs and the input of m 64 channels"):
        predict_linear(given, known(w[:, :32], "weight"), "int8")


def test_what_was_predicted_is_said() -> None:
    """A weight that does not fit its input is left out, and that is no secret."""
    x, w = torch.randn(64, 40), torch.randn(8, 40)
    given, output = known(x, "input", "a"), known(x @ w.T, "output", "a")
    fits, other = known(w, "weight", "a"), known(w[:, :3], "weight", "a")
    cases: list[tuple[list[LayerStatistics], str, dict[str, tuple[int, int]]]] = [
        ([given, fits, output], "linear", {}),
        ([given, other, output], "input", {"a": (40, 3)}),
        ([given], "input", {}),
        ([output, fits], "output", {}),
        ([fits], "weight", {}),
    ]
    for statistics, of, apart in cases:
        named: dict[tuple[str, str], LayerStatistics] = {(s.module, s.kind): s for s in statistics}
        assert [one.of for one in predict_layers(named, ["int8", "mxint8"])] == [of, of]
        assert mismatched_channels(named) == apart
    assert predict_layers({("a", "weight"): fits}, ["int8"])[0].as_dict()["of"] == "weight"


def test_spoiled_blocks_are_those_with_a_largest_value_far_above_their_median() -> None:
    x = torch.full((10, 64), 1.0)
    x[:4, 3] = 2.0**5  # the first block of four rows
    x[4:6, 40] = 2.0**4
    x[9] = 0.0
    found = known(x)
    assert found.blocks == 20
    assert spoiled_share(found) == 4 / 20
    assert spoiled_share(found, octaves=4) == 6 / 20
    assert spoiled_share(found, octaves=6) == 0
    assert spoiled_share(known(torch.zeros(0, 64))) == 0
    with pytest.raises(ValueError, match="octaves is 0; expected 1 to 31"):
        spoiled_share(found, octaves=0)


def test_the_layers_to_keep_hold_half_of_the_noise() -> None:
    def layer(name: str, noise: float, format: str = "int8") -> Prediction:
        return Prediction(name, format, noise, 1.0)

    layers = [layer("a", 0.1), layer("b", 0.4), layer("c", 0.3), layer("d", 0.2)]
    assert keep_in_higher_precision(layers) == ["b", "c"]
    assert keep_in_higher_precision(layers, share=0.4) == ["b"]
    assert keep_in_higher_precision(layers, share=1) == ["b", "c", "d", "a"]
    assert keep_in_higher_precision([Prediction("z", "int8", 0.0, 0.0)]) == []
    assert keep_in_higher_precision([*layers, Prediction("z", "int8", 1.0, 0.0)]) == ["z"]
    with pytest.raises(ValueError, match="predictions are of 2 formats: int4, int8"):
        keep_in_higher_precision([*layers, layer("e", 1.0, "int4")])
    with pytest.raises(ValueError, match="share is 0; expected above 0"):
        keep_in_higher_precision(layers, share=0)


def test_figures_without_a_number_go_to_json_as_none() -> None:
    assert Prediction("m", "int8", 0.0, 1.0).as_dict()["sqnr"] is None
    assert Prediction("m", "int8", 0.0, 1.0).sqnr == math.inf
    assert Prediction("m", "int8", 1.0, 0.0).sqnr == -math.inf
    assert Prediction("m", "int8", 0.01, 1.0).as_dict()["sqnr"] == pytest.approx(20.0)


def test_mistakes_are_one_message() -> None:
    with pytest.raises(ValueError, match="input of m has no finite element to predict from"):
        predict_tensor(known(torch.full((1, 4), torch.nan)), "int8")
    with pytest.raises(ValueError, match="unknown format 'int9'"):
        predict_tensor(known(even(1, 2)), "int9")


def test_a_tensor_of_zeros_has_no_error_and_a_site_is_predicted_by_its_output() -> None:
    for format in FORMATS:
        assert predict_tensor(known(torch.zeros(4, 32)), format).mse == 0
    x = even(0.5, 1.0)
    (found,) = predict_layers({("site", "output"): known(x, "output", "site")}, ["fp8_e4m3"])
    assert found == predict_tensor(known(x, "output", "site"), "fp8_e4m3")


@pytest.mark.parametrize("factory", ["make_mixtral", "make_gpt_oss", "make_qwen3_next"])
def test_predicted_errors_of_experts_are_near_the_measured_ones(factory: str) -> None:
    """Both products of every set of experts, measured with plain torch: all experts on all rows of their input."""
    path = f"tests.models.random_models:{factory}"
    given = {"model.path": path, "data.num_samples": "4", "data.seq_len": "48"}
    settings = read_configuration(None, list(given.items()))
    analysis = analyze(settings, progress=lambda _: None)
    prepared = prepare(settings, progress=lambda _: None)
    names = [name for name, kind in analysis.statistics if kind == "weight" and ".experts." in name]
    assert [name.rpartition(".experts.")[2] for name in names] == ["input", "middle"] * 2
    seen: dict[str, Tensor] = {}
    for name in names:
        prepared.model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: args[0]})
        )
    (batch,) = prepared.batches
    with torch.no_grad():
        prepared.model(batch.tokens, use_cache=False)
    for format in ("fp8_e4m3", "fp4_e2m1", "mxint8"):
        statistics = {key: s for key, s in analysis.statistics.items() if key[0] in names and key[1] != "output"}
        guesses = {one.module: one for one in predict_layers(statistics, [format])}
        for name in names:
            owner, _, site = name.rpartition(".")
            weight = prepared.model.get_submodule(owner).get_parameter(
                "gate_up_proj" if site == "input" else "down_proj"
            )
            errors = []
            for matrix in weight.detach().mT if factory == "make_gpt_oss" else weight.detach():
                matrix = matrix.contiguous()
                x = seen[name]
                made = fake_quantize(x, format).double() @ fake_quantize(matrix, format).T.double()
                errors.append(float((made - x.double() @ matrix.T.double()).square().mean()))
            assert guesses[name].of == "linear"
            assert guesses[name].mse == pytest.approx(sum(errors) / len(errors), rel=0.35), (format, name)


@pytest.mark.parametrize("make", [make_mixtral, make_gpt_oss])
def test_the_rows_of_experts_are_those_of_every_matrix(make: Callable[[], nn.Module]) -> None:
    model = make()
    put_expert_sites(model)
    experts = model.get_submodule("model.layers.1.mlp.experts")
    for parameter, inputs in (("gate_up_proj", 32), ("down_proj", 48)):
        weight = experts.get_parameter(parameter).detach()
        rows = (weight.mT if make is make_gpt_oss else weight).reshape(-1, inputs)
        assert torch.equal(expert_rows(experts, parameter), rows)
