"""The relations of the modes, over every format: what must be identical, what must differ, what must not leak."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from probe.formats import FORMATS, GATE_FORMATS
from probe.models.forward import output_of
from probe.models.loading import Loaded
from probe.running.calibration import Calibration
from probe.running.capture import capture
from probe.running.measurement import check_applied
from probe.running.modes import GROUPS, MODES, expand_modes, find_mode, register_mode, unregister_mode
from probe.running.recipes import Recipe, apply
from probe.running.reference import run_reference

QUANTIZED = GROUPS["all"]


def same(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
    return model


FORMAT = pytest.mark.parametrize("format", GATE_FORMATS)


@pytest.fixture(scope="module")
def outputs(loaded: Loaded, tokens: Tensor, calibration: Calibration) -> dict[tuple[str, str], Tensor]:
    """Logits of every mode under every format, each model made, run and dropped."""
    return {
        (mode, format): output_of(apply(loaded.model, Recipe(mode, format), calibration), tokens)
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
            output_of(twin, tokens)
        ys[mode] = next(iter(captured.tensors.values()))[0]
    assert (ys["0"] - ys["2-1"]).abs().max() <= 2e-6 * ys["0"].abs().max()


@FORMAT
def test_must_differ(loaded: Loaded, tokens: Tensor, outputs: dict[tuple[str, str], Tensor], format: str) -> None:
    reference = output_of(apply(loaded.model, Recipe("fp32")), tokens)
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
            output_of(twin, tokens)
        for name, (tensor,) in captured.tensors.items():
            seen.setdefault(name, []).append(tensor)
    assert len(seen) == 3
    for name, tensors in seen.items():
        assert all(torch.equal(tensors[0], tensor) for tensor in tensors[1:]), name


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
        again = output_of(apply(loaded.model, Recipe(mode, "int8"), calibration), tokens)
        assert torch.equal(again, outputs[mode, "int8"]), mode


@FORMAT
def test_a_sample_does_not_depend_on_its_batch(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, format: str
) -> None:
    for mode in ("0", "3"):
        twin = apply(loaded.model, Recipe(mode, format), calibration)
        whole, alone = output_of(twin, tokens)[1:], output_of(twin, tokens[1:])
        assert (whole - alone).abs().max() <= 1e-4 * whole.abs().max()


def test_a_mode_leaves_the_model_as_it_was(loaded: Loaded, calibration: Calibration) -> None:
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    apply(loaded.model, Recipe("fp32"))
    for mode in (*QUANTIZED, "linear_w", "linear_wa"):
        apply(loaded.model, Recipe(mode, "int8"), calibration)
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())


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
        (lambda: register_mode("0", same), "there is a mode '0' already"),
        (lambda: register_mode("mode_2_1", same), "there is a mode 'mode_2_1' already"),
        (lambda: register_mode("2_1", same), "there is a mode '2_1' already"),
        (lambda: register_mode("essential", same), "there is a group 'essential' already"),
        (lambda: register_mode("abc", cast(Any, 3)), "mode 'abc' was given a int, expected a function"),
        (lambda: register_mode("a b", same), "cannot be part of a test id"),
        (lambda: unregister_mode("0"), "mode '0' is built in"),
    ],
)
def test_a_mistake_gets_one_clear_message(act: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        act()
    assert message in str(caught.value)


def test_the_table_covers_every_mode_and_the_gate_formats_are_known() -> None:
    assert set(GATE_FORMATS) <= set(FORMATS)
    assert set(QUANTIZED) == {name for name, mode in MODES.items() if mode.kind == "ssm"}
