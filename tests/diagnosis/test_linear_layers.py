"""A fault in an expert, a Conv1D or a convolution is named by its matrix or its input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from probe.diagnosis.causes import diagnose
from probe.models.loading import weight_fingerprint
from probe.numerics.grids import activation_grid
from probe.running.calibration import calibrate
from probe.running.recipes import Recipe
from probe.running.reference import run_reference
from probe.running.traces import LayerTrace
from tests.models.random_models import make_gpt2, make_gpt_oss, make_mixtral

TOKENS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))


def layer_trace(make: Callable[[], nn.Module]) -> LayerTrace:
    model = make()
    calibration = calibrate(model, [TOKENS], model_fingerprint=weight_fingerprint(model), data_fingerprint="-")
    return LayerTrace(model, Recipe("linear_wa", "int8"), run_reference(model, [TOKENS]), calibration, "layer_1")


def trace_of(make: Callable[[], nn.Module], change: Callable[[Any], None]) -> str:
    trace = layer_trace(make)
    with torch.no_grad():
        change(trace.twin)
    return diagnose(trace)


def test_a_sound_layer_has_no_cause_in_its_steps() -> None:
    for make in (make_mixtral, make_gpt_oss, make_gpt2):
        assert "steps of layer_1 agree with their definitions" in trace_of(make, lambda twin: None)


def test_both_inputs_of_experts_are_traced_on_text() -> None:
    """Corner values judge the grid first; only real values show what the site does in a forward."""
    (batch,) = layer_trace(make_mixtral).batches()
    assert set(batch.parts["mlp.experts"]) == {"input.given", "input.made", "middle.given", "middle.made"}


def test_a_zeroed_expert_is_named() -> None:
    def change(twin: Any) -> None:
        twin.model.layers[1].mlp.experts.down_proj[2].zero_()

    assert "weight mlp.experts.down_proj[2]; zero" in trace_of(make_mixtral, change)


def test_a_float_expert_is_named() -> None:
    plain: Any = make_gpt_oss()

    def change(twin: Any) -> None:
        twin.model.layers[1].mlp.experts.gate_up_proj[1].copy_(plain.model.layers[1].mlp.experts.gate_up_proj[1])

    assert "weight mlp.experts.gate_up_proj[1]; not quantized" in trace_of(make_gpt_oss, change)


def test_the_input_of_down_proj_without_its_grid_is_named() -> None:
    def change(twin: Any) -> None:
        twin.model.layers[1].mlp.experts.middle.grid = None

    assert "site mlp.experts.middle; not quantized" in trace_of(make_mixtral, change)


@pytest.mark.parametrize("name", ["attn.c_attn", "mlp.c_proj"])
def test_a_conv1d_with_another_scale_is_named(name: str) -> None:
    def change(twin: Any) -> None:
        twin.transformer.h[1].get_submodule(name).input.grid = activation_grid("int8", 0.5)

    assert f"site {name}.input; " in trace_of(make_gpt2, change)


def test_a_zeroed_conv1d_is_named() -> None:
    def change(twin: Any) -> None:
        twin.transformer.h[1].mlp.c_fc.weight.zero_()

    assert "weight mlp.c_fc.weight; zero" in trace_of(make_gpt2, change)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(40, 40, 3, padding=1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.conv(x.mT)).mT


class Convolved(nn.Module):
    """Two layers of a convolution over the text, with a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, 40)
        self.layers = nn.ModuleList(Convolution() for _ in range(2))
        self.head = nn.Linear(40, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def no_change(conv: Any) -> None:
    pass


def zero_channel(conv: Any) -> None:
    conv.weight[7] = 0


def float_input(conv: Any) -> None:
    conv.input.grid = None


def no_bias(conv: Any) -> None:
    conv.register_forward_hook(lambda module, args, output: output - module.bias[:, None], prepend=True)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (no_change, "steps of layer_1 agree with their definitions"),
        (zero_channel, "weight conv.weight; "),
        (float_input, "site conv.input; not quantized"),
        (no_bias, "conv; the bias is left out"),
    ],
)
def test_a_fault_in_a_convolution_is_named(change: Callable[[Any], None], cause: str) -> None:
    assert cause in trace_of(Convolved, lambda twin: change(twin.layers[1].conv))
