"""How much of a model is on a grid: counted against numbers that are added up by hand."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probe.files.checked_json import Node
from probe.formats import GATE_FORMATS
from probe.models.loading import Loaded, load_model
from probe.numerics.quantize import fake_quantize
from probe.running.calibration import Calibration
from probe.running.coverage import watching
from probe.running.declarations import DeclaredMode
from probe.running.modes import MODES, declare_modes, register_mode, unregister_mode
from probe.running.recipes import Recipe, apply
from probe.running.weights import Count, Weights, count_by_layer, count_parameters, count_weights
from probe.words import LOGITS
from tests.models.random_models import (
    make_falcon_mamba,
    make_gpt2,
    make_gpt_oss,
    make_jamba,
    make_mixtral,
    make_qwen3_next,
)
from tests.running.declared import declared

FORMAT = pytest.mark.parametrize("format", GATE_FORMATS)
#: Of mixtral: four attention matrices and 3 experts of 3 matrices of 32 x 48 in each of two layers.
ATTENTION, EXPERTS, ROUTERS = 2 * 4 * 32 * 32, 2 * 3 * 3 * 32 * 48, 2 * 3 * 32


def amax(name: str) -> float:
    return 3.0


def counted(model: nn.Module, recipe: Recipe, calibration: Calibration | None = None) -> Weights:
    return count_weights(model, apply(model, recipe, calibration), recipe)


def count(found: Weights) -> Count:
    """The weights alone, as a Count."""
    return Count(found.on_grid, found.floating)


def in_a_mode(model: nn.Module, build: Callable[..., nn.Module], format: str = "int8") -> Weights:
    """The counts under a user's mode."""
    register_mode("mine", build)
    try:
        return counted(model, Recipe("mine", format))
    finally:
        unregister_mode("mine")


@FORMAT
def test_every_expert_and_no_router_is_on_the_grid(format: str) -> None:
    found = counted(make_mixtral(), Recipe("linear_w", format))
    assert count(found) == Count(ATTENTION + EXPERTS, ROUTERS)
    assert found.apart == {"embedding": Count(0, 8192), "head": Count(0, 8192), "norms": Count(0, 160)}
    assert found.line == (
        "weights on a grid: 99.5 % (35,840 of 36,032); float: 192 in model.layers.*.mlp.gate.weight "
        "(routers, not in include); "
        "embedding 8,192 float, head 8,192 float, norms 160 float"
    )
    assert Weights.from_json(Node("", json.loads(json.dumps(found.as_dict())))) == found


def without_experts(model: Any, format: str, calibration: Calibration | None) -> nn.Module:
    """What linear_w was before it knew experts."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not model.lm_head:
                module.weight.copy_(fake_quantize(module.weight, format))
    return model  # type: ignore[no-any-return]


def test_experts_that_stay_float_are_named_with_their_share() -> None:
    found = in_a_mode(make_mixtral(), without_experts)
    assert count(found) == Count(ATTENTION, EXPERTS + ROUTERS)
    assert found.line.startswith(
        "weights on a grid: 22.7 % (8,192 of 36,032); float: 27,648 in model.layers.*.mlp.experts.* (3-D parameters), "
        "192 in model.layers.*.mlp.gate.weight (routers); embedding 8,192 float"
    )


def test_one_float_expert_of_three_is_counted() -> None:
    recipe = Recipe("linear_w", "int8")
    model = make_mixtral()
    twin: Any = apply(model, recipe)
    plain: Any = model
    with torch.no_grad():
        name = "model.layers.1.mlp.experts"
        twin.get_submodule(name).down_proj[2].copy_(plain.get_submodule(name).down_proj[2])
    assert count_weights(model, twin, recipe).floating == ROUTERS + 32 * 48
    with watching(twin, recipe) as strays:
        pass
    assert list(strays) == [f"{name}.down_proj[2]"]


@pytest.mark.parametrize(
    ("make", "floating", "named"),
    [
        (
            make_jamba,
            256 + 256 + 96,
            ["A_log (2-D parameters)", "conv1d.weight (convolutions, of the SSM modes)", "(routers, not"],
        ),
        (make_qwen3_next, 192, ["mlp.gate.weight (routers, not in include)"]),
        (make_gpt_oss, 192, ["mlp.router.weight (routers, not in include)"]),
        (make_gpt2, 0, ["head tied to the embedding", "embedding 16,384 float", "biases 736 float"]),
    ],
)
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "nvfp4"])
def test_what_a_linear_mode_cannot_reach_is_named(
    make: Callable[[], nn.Module], floating: int, named: list[str], format: str
) -> None:
    found = counted(make(), Recipe("linear_w", format))
    assert found.floating == floating
    assert all(one in found.line for one in named), found.line
    assert sum(group.elements for group in found.float_weights) == floating
    assert found.total + sum(one.total for one in found.apart.values()) == sum(
        parameter.numel() for parameter in make().parameters()
    )


def test_an_input_that_linear_wa_cannot_reach_is_named() -> None:
    model = make_jamba()
    assert counted(model, Recipe("linear_w", "fp8_e4m3")).float_inputs == []
    found = counted(model, Recipe("linear_wa", "fp8_e4m3"))
    assert found.float_inputs == ["model.layers.*.mamba.dt_proj.input"]
    assert found.line.endswith("; float inputs, which the mode cannot reach: model.layers.*.mamba.dt_proj.input")
    found = counted(make_qwen3_next(), Recipe("linear_wa", "fp8_e4m3"))
    assert found.float_inputs == ["model.layers.*.linear_attn.conv1d.input"], "its weight is read without a call"


@FORMAT
def test_all_weights_of_a_mamba_block_are_on_the_grid(loaded: Loaded, calibration: Calibration, format: str) -> None:
    found = counted(loaded.model, Recipe("2-1", format), calibration)
    shapes = {name: value for name, value in loaded.model.named_parameters() if ".mixer." in name}
    assert count(found) == Count(sum(value.numel() for value in shapes.values() if value.dim() > 1), 0)
    vectors = {name: value.numel() for name, value in shapes.items() if value.dim() == 1}
    biases = sum(size for name, size in vectors.items() if name.endswith("bias"))
    assert found.apart["biases"] == Count(biases, 0)
    assert found.apart["other vectors"] == Count(sum(vectors.values()) - biases, 0)
    assert found.apart["norms"].on_grid == 0, "ones that folding leaves behind are no grid"


def test_a_linear_mode_leaves_the_rest_of_a_mamba_block_float(loaded: Loaded) -> None:
    found = counted(loaded.model, Recipe("linear_w", "int8"))
    assert [group.names for group in found.float_weights] == [
        "backbone.layers.*.mixer.A_log",
        "backbone.layers.*.mixer.conv1d.weight",
    ]


def test_the_counts_of_layers_add_up_to_the_model(loaded: Loaded, calibration: Calibration) -> None:
    recipe = Recipe("2-1", "int8")
    parameters = count_parameters(loaded.model, apply(loaded.model, recipe, calibration), recipe)
    modules = {f"layer_{index}": f"backbone.layers.{index}" for index in range(4)}
    found = count_by_layer(parameters, modules)
    whole = sum(one.on_grid for one in parameters if one.kind == "weights")
    assert sum(found[label].on_grid for label in modules) == whole
    assert found[LOGITS].on_grid == whole
    assert found[LOGITS].floating == sum(
        one.floating for one in parameters if one.kind in ("weights", "embedding", "head")
    )
    assert count_by_layer(parameters, {"layer_2": modules["layer_2"]}) == {
        label: found[label] for label in ("layer_2", LOGITS)
    }, "no count depends on which layers are selected"


class Small(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x  # type: ignore[no-any-return]


@pytest.mark.parametrize("format", ["int8", "int4", "fp8_e4m3", "nvfp4"])
def test_a_small_weight_that_stayed_float_is_not_taken_for_a_grid(format: str) -> None:
    """256 elements are not more than the levels of int8."""
    recipe = Recipe("linear_w", format)
    model: Any = Small()
    twin: Any = apply(model, recipe)
    assert count(count_weights(model, twin, recipe)) == Count(512, 0)
    with torch.no_grad():
        twin.layers[1].weight.copy_(model.layers[1].weight)
    assert count(count_weights(model, twin, recipe)) == Count(256, 256)
    with torch.no_grad():
        twin.layers[1].weight.copy_(model.layers[1].weight * 1.1)  # changed, and on no grid
    assert count(count_weights(model, twin, recipe)) == Count(256, 256)


def test_a_weight_that_is_on_the_grid_already_counts() -> None:
    model: Any = Small()
    with torch.no_grad():
        model.layers[0].weight.copy_(torch.ones(16, 16))
    assert count(counted(model, Recipe("linear_w", "fp8_e4m3"))) == Count(512, 0)


def test_packed_codes_are_on_a_grid_and_a_removed_layer_is_not() -> None:
    class Packed(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.register_buffer("codes", linear.weight.detach().to(torch.int8))

    def packed(model: Any, format: str, calibration: Calibration | None) -> nn.Module:
        model.layers[0] = Packed(model.layers[0])
        return model  # type: ignore[no-any-return]

    def removed(model: Any, format: str, calibration: Calibration | None) -> nn.Module:
        model.layers[0] = nn.Identity()
        return model  # type: ignore[no-any-return]

    def wrapped(model: Any, format: str, calibration: Calibration | None) -> nn.Module:
        return nn.ModuleDict({"inner": packed(model, format, calibration)})

    assert count(in_a_mode(Small(), packed)) == Count(256, 256)
    assert count(in_a_mode(Small(), wrapped)) == Count(256, 256)
    gone = in_a_mode(Small(), removed)
    assert count(gone) == Count(0, 512)
    assert "256 in layers.0.weight (not in the copy)" in gone.line


def test_torchao_reaches_nothing_of_gpt2_and_all_linears_of_llama_and_mamba(llama: Loaded, loaded: Loaded) -> None:
    pytest.importorskip("torchao")
    reached = counted(loaded.model, Recipe("torchao_w", "int8"))
    assert {group.what for group in reached.float_weights} == {"2-D parameters", "convolutions"}
    assert counted(make_gpt2(), Recipe("torchao_w", "int8")).on_grid == 0
    found = counted(llama.model, Recipe("torchao_w", "int8"))
    assert found.on_grid > 0
    assert found.floating == 0


@pytest.mark.parametrize("mode", ["torchao_w", "torchao_wa"])
@pytest.mark.parametrize("make", [make_jamba, make_falcon_mamba])
def test_torchao_reaches_every_linear_of_mamba_blocks(make: Callable[[], nn.Module], mode: str) -> None:
    pytest.importorskip("torchao")
    model, recipe = make(), Recipe(mode, "int8")
    twin = apply(model, recipe)
    with torch.no_grad():
        assert twin(torch.arange(8)[None]).logits.isfinite().all()
    linears = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and name != "lm_head"}
    assert any(name.endswith("dt_proj") for name in linears)
    assert count_weights(model, twin, recipe).on_grid == sum(one.weight.numel() for one in linears.values())


class ReadsWeight(nn.Module):
    """A block that reads the weight of its dt_proj without calling it, as mixers of code of their own may."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(16, 16), "dt_proj": nn.Linear(16, 16)})])
        self.head = nn.Linear(16, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        layer: Any = self.layers[0]
        found: torch.Tensor = self.head(layer["up"](self.embedding(tokens)) @ layer["dt_proj"].weight.mT)
        return found


@pytest.mark.parametrize("mode", ["torchao_w", "torchao_wa"])
def test_torchao_leaves_what_is_read_without_a_call_and_it_is_said(mode: str) -> None:
    pytest.importorskip("torchao")
    model, recipe = ReadsWeight().eval(), Recipe(mode, "int8")
    twin = apply(model, recipe)
    with torch.no_grad():
        assert twin(torch.arange(8)[None]).isfinite().all()
    found = count_weights(model, twin, recipe)
    assert "256 in layers.*.dt_proj.weight (nn.Linear)" in found.line
    assert found.on_grid == 256


def test_a_float_mode_puts_nothing_on_a_grid(llama: Loaded) -> None:
    assert counted(llama.model, Recipe("bf16")).on_grid == 0


def test_what_a_mode_keeps_float_is_counted_as_float() -> None:
    """Also where rounding would leave it as it is."""
    model: Any = Small()
    with torch.no_grad():
        model.layers[0].weight.copy_(torch.ones(16, 16))
    declare_modes({"mixed": DeclaredMode("linear_w", ("layers.0",))}, where="a test")
    try:
        found = counted(model, Recipe("mixed", "fp8_e4m3"))
    finally:
        del MODES["mixed"]
    assert count(found) == Count(256, 256)
    assert found.float_weights[0].names == "layers.0.weight"


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        ("layers.1", "model.layers.1.* (nn.Linear, kept float)"),
        ("layers.[12]", "model.layers.[1,2].* (nn.Linear, kept float)"),
        ("layers.*.mlp", "model.layers.*.mlp.* (nn.Linear, kept float)"),
        ("layers.2.mlp.up_proj", "model.layers.2.mlp.up_proj.weight (nn.Linear, kept float)"),
    ],
)
def test_float_weights_of_some_layers_are_not_named_as_those_of_all(kept: str, named: str) -> None:
    loaded = load_model("tiny-llama")
    with declared("linear_w", kept) as mode:
        found = counted(loaded.model, Recipe(mode, "int8"))
    assert [f"{group.names} ({group.what})" for group in found.float_weights] == [named]
