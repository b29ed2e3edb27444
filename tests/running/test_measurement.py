"""A mode that was not applied, or only to some layers, or that gives NaN, is noticed; what was measured stays apart."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import probe.running.recipes
from probe.models.loading import Loaded, load_model
from probe.running.calibration import Calibration
from probe.running.measurement import NotAppliedError, check_applied, measure
from probe.running.modes import register_mode, unregister_mode
from probe.running.recipes import Recipe, apply
from probe.running.reference import run_reference


def test_a_mode_that_skips_a_layer_is_noticed_and_the_layer_named(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = probe.running.recipes._ssm

    def skipping(model: nn.Module, *rest: Any) -> nn.Module:
        twin: Any = real(model, *rest)
        float_twin: Any = apply(model, Recipe("fp32"))
        twin.backbone.layers[2] = float_twin.backbone.layers[2]
        return cast(nn.Module, twin)

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


@pytest.mark.parametrize("injected", [False, True])
def test_measure_refuses_what_the_recipe_left_as_it_was(loaded: Loaded, tokens: Tensor, injected: bool) -> None:
    """The propagated run alone would not show it: every layer after the first differs."""

    def first_only(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
        with torch.no_grad():
            model.get_parameter("backbone.layers.0.mixer.in_proj.weight").mul_(1.01)
        return model

    register_mode("first_only", first_only)
    try:
        reference = run_reference(loaded.model, [tokens])
        with pytest.raises(NotAppliedError, match=r"not applied to layer_1, layer_2, layer_3: .*\(3 of 4 layers\)"):
            measure(loaded.model, Recipe("first_only", "int8"), reference, injected=injected)
    finally:
        unregister_mode("first_only")
    assert measure(loaded.model, Recipe("fp32"), reference, injected=injected).layers["layer_0"].identical


def test_nan_is_told_as_such(loaded: Loaded, tokens: Tensor) -> None:
    def poisoned(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
        with torch.no_grad():
            model.get_parameter("backbone.layers.1.mixer.in_proj.weight")[0, 0] = float("nan")
        return model

    register_mode("poisoned", poisoned)
    try:
        with pytest.raises(ValueError, match="poisoned-int8 gives NaN or Inf in layer_1, given the finite input"):
            check_applied(loaded.model, Recipe("poisoned", "int8"), run_reference(loaded.model, [tokens]))
    finally:
        unregister_mode("poisoned")


def test_the_calibration_and_the_reference_of_other_weights_are_refused(
    loaded: Loaded, tokens: Tensor, calibration: Calibration
) -> None:
    other = load_model("tiny-mamba").model
    with torch.no_grad():
        other.get_parameter("backbone.layers.0.mixer.D")[0] *= 1.5
    with pytest.raises(ValueError, match=r"the calibration belongs to a model with fingerprint \w+, this one has"):
        apply(other, Recipe("0", "int8"), calibration)
    with pytest.raises(ValueError, match=r"the reference is of a model with fingerprint \w+, this one has"):
        measure(other, Recipe("0", "mxint8"), run_reference(loaded.model, [tokens]))
