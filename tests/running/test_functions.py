"""Functions on the way through a layer: right ones are within a few ulps of their formulas, wrong ones far off."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.gate.tolerances import RULES
from probe.models import scans
from probe.models.loading import load_model
from probe.running.functions import function_errors, scan_error
from probe.running.recipes import Recipe, apply

FEW = RULES["functions.error"].absolute
RECIPES = {
    "tiny-mamba": (Recipe("2-1", "fp8_e4m3"), Recipe("bf16"), Recipe("fp16")),
    "tiny-llama": (Recipe("linear_wa", "fp8_e4m3"), Recipe("bf16")),
}
NAMES = {
    "tiny-mamba": {"norm", "mixer.softplus", "mixer.A", "mixer.gate", "mixer.activation"},
    "tiny-llama": {"mlp.act_fn", "input_layernorm", "post_attention_layernorm"},
}
EVERY = [(model, recipe) for model, recipes in RECIPES.items() for recipe in recipes]


def layers(model: str, recipe: Recipe) -> tuple[Any, Any]:
    loaded = load_model(model)
    twin: Any = apply(loaded.model, recipe)
    whole: Any = loaded.model
    return (twin.backbone if hasattr(twin, "backbone") else twin.model).layers[1], (
        whole.backbone if hasattr(whole, "backbone") else whole.model
    ).layers[1]


def worst(layer: nn.Module, stock: nn.Module) -> tuple[str, float]:
    found = max(function_errors(layer, stock), key=lambda one: one.ulps)
    return found.name, found.ulps


@pytest.mark.parametrize(("model", "recipe"), EVERY, ids=str)
def test_every_function_is_within_a_few_ulps(model: str, recipe: Recipe) -> None:
    layer, stock = layers(model, recipe)
    found = {one.name: one.ulps for one in function_errors(layer, stock)}
    mixer = {"norm", "mixer.softplus", "mixer.A", "mixer.gate", "mixer.activation"}
    assert set(found) == (
        mixer if model == "tiny-mamba" else {"mlp.act_fn", "input_layernorm", "post_attention_layernorm"}
    )
    assert max(found.values()) < FEW
    assert min(found.values()) > 0  # a comparison with itself would be 0


class TanhSiLU(nn.Module):
    """Right in exact arithmetic; in float32 it loses all digits of small results."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.tanh(x / 2))


def other_eps(layer: Any) -> None:
    layer.norm.variance_epsilon = 1e-3


def tanh(layer: Any) -> None:
    layer.mixer.activation = TanhSiLU()


def fast_softplus(layer: Any) -> None:
    bias = layer.mixer.dt_proj.bias
    layer.mixer.delta = lambda step: torch.relu(step + bias) + torch.exp(-(step + bias).abs())


def sigmoid_gate(layer: Any) -> None:
    layer.mixer.gated = lambda y, u, z: (y + layer.mixer.D * u) * torch.sigmoid(z)


def without_skip(layer: Any) -> None:
    layer.mixer.gated = lambda y, u, z: y * functional.silu(z)


def bf16_exp(layer: Any) -> None:
    layer.mixer.rates = lambda: -torch.exp(layer.mixer.A_log.bfloat16()).float()


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (other_eps, "norm"),
        (tanh, "mixer.activation"),
        (fast_softplus, "mixer.softplus"),
        (sigmoid_gate, "mixer.gate"),
        (without_skip, "mixer.gate"),
        (bf16_exp, "mixer.A"),
    ],
)
def test_a_function_that_is_another_is_far_off_and_named(damage: Callable[[Any], None], name: str) -> None:
    layer, stock = layers("tiny-mamba", Recipe("2-1", "fp8_e4m3"))
    _, before = worst(layer, stock)
    damage(layer)
    found, after = worst(layer, stock)
    assert found == name
    assert after > 100 * (before + FEW)


def test_the_epsilon_is_that_of_the_float_model_in_bf16_too() -> None:
    layer, stock = layers("tiny-llama", Recipe("bf16"))
    layer.input_layernorm.variance_epsilon = 1e-3
    name, ulps = worst(layer, stock)
    assert name == "input_layernorm"
    assert ulps > 10 * FEW


@pytest.mark.parametrize("module", [nn.LayerNorm(24), nn.RMSNorm(24, eps=1e-6), nn.GELU(), nn.GELU("tanh"), nn.ELU()])
def test_modules_of_torch_are_known(module: nn.Module) -> None:
    found = function_errors(nn.ModuleDict({"f": module}), nn.ModuleDict({"f": module}))
    assert [one.name for one in found] == ["f"]
    assert found[0].ulps < 5
    exact, other = nn.ModuleDict({"f": nn.GELU()}), nn.ModuleDict({"f": nn.GELU("tanh")})
    assert function_errors(other, exact)[0].ulps > 2**10


def test_a_layer_without_functions_has_no_errors() -> None:
    assert function_errors(nn.Linear(3, 3), nn.Linear(3, 3)) == []
    assert scan_error(nn.Linear(3, 3)) is None


def late(u: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    y, h = scans.fast(u, *rest)
    y[:, u.shape[1] // 32 * 32 :] = 0
    return y, h


def forgetful(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None) -> Any:
    return scans.fast(u, delta, A, B, C, None)


def test_the_fast_scan_is_the_sequential_one_up_to_sums() -> None:
    layer, _ = layers("tiny-mamba", Recipe("0", "fp8_e4m3"))
    healthy = scan_error(layer)
    assert healthy is not None
    assert healthy < 1e-6
    for broken in (late, forgetful):
        with mock.patch.dict(scans.SCANS, {"fast": broken}):
            assert (scan_error(layer) or 0) > 0.01
    sequential, _ = layers("tiny-mamba", Recipe("2-1", "fp8_e4m3"))
    assert scan_error(sequential) is None
