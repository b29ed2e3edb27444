"""Capture: what was selected is what is seen, nothing outlives the block, and silence is an error."""

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from probe.models.layers import blocks_of, select
from probe.running.capture import UncoveredError, capture


class Block(nn.Module):
    def __init__(self, width: int, wrap: str | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.unused = nn.Linear(width, width)
        self.wrap = wrap

    def forward(self, x: Tensor) -> object:
        y = self.inner(x) + x
        return {"tuple": (y, None), "mapping": OrderedDict(hidden=y), None: y}[self.wrap]


class Stack(nn.Module):
    def __init__(self, depth: int = 12, wrap: str | None = None, width: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(width, 2)])
        self.layers = nn.ModuleList([Block(width, wrap) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x)
            x = out if isinstance(out, Tensor) else next(iter(out.values())) if isinstance(out, dict) else out[0]
        result: Tensor = self.heads[0](x)
        return result


X = torch.randn(2, 3, 4)


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_the_layers_of_a_model_are_its_longest_list_in_numeric_order() -> None:
    assert blocks_of(Stack()) == [f"layers.{i}" for i in range(12)]
    assert list(select(Stack(), ["all"])) == [f"layer_{i}" for i in range(12)]


@pytest.mark.parametrize(
    ("wanted", "labels"),
    [
        ([0, "last"], ["layer_0", "layer_11"]),
        (["first", "layer_3", "10"], ["layer_0", "layer_3", "layer_10"]),
        ([r"layers\.1\.inner$"], ["layers.1.inner"]),
        ([r"\.unused$", "first"][1:], ["layer_0"]),
        ([r"^layers\.(2|10)$"], ["layer_2", "layer_10"]),
    ],
)
def test_layers_are_chosen_by_index_position_or_regular_expression(wanted: list[str | int], labels: list[str]) -> None:
    assert list(select(Stack(), wanted)) == labels


@pytest.mark.parametrize("wrap", [None, "tuple", "mapping"])
def test_inputs_and_outputs_are_those_of_the_module_in_their_own_dtype(wrap: str | None) -> None:
    model = Stack(3, wrap).to(torch.bfloat16)
    x = X.bfloat16()
    with capture(model, ["all"], inputs=True) as captured, torch.no_grad():
        model(x)
    assert torch.equal(captured.tensors["layer_0.input"][0], x)
    for i in (1, 2):
        assert torch.equal(captured.tensors[f"layer_{i}.input"][0], captured.tensors[f"layer_{i - 1}.output"][0])
    assert captured.tensors["layer_2.output"][0].dtype == torch.bfloat16
    assert captured.fired == {"layer_0": 1, "layer_1": 1, "layer_2": 1}


def test_weights_and_repeated_calls_are_kept() -> None:
    model = Stack(2)
    with capture(model, ["first"], weights=True) as captured, torch.no_grad():
        model(X)
        model(X * 2)
    assert len(captured.tensors["layer_0.output"]) == 2
    assert torch.equal(captured.tensors["layer_0.inner.weight"][0], model.get_parameter("layers.0.inner.weight"))


def test_a_consumer_gets_every_tensor_and_nothing_is_kept() -> None:
    seen: list[str] = []
    model = Stack(4)
    with capture(model, consumer=lambda name, tensor: seen.append(name)) as captured, torch.no_grad():
        model(X)
    assert seen == [f"layer_{i}.output" for i in range(4)]
    assert captured.tensors == {}


def test_a_copy_is_kept_where_the_model_goes_on_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Identity(), nn.Identity()])

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layers[1](self.layers[0](x).mul_(0))
            return result

    model = InPlace()
    with capture(model, ["first"]) as captured:
        model(torch.ones(3))
    assert captured.tensors["layer_0.output"][0].tolist() == [1, 1, 1]


def test_a_selected_layer_that_never_fires_is_an_error_with_its_name() -> None:
    model = Stack(2)
    silent = r"2 of 3 selected layers never ran: layers\.0\.unused, layers\.1\.unused"
    with pytest.raises(UncoveredError, match=silent), capture(model, ["first", r"unused"]), torch.no_grad():
        model(X)
    assert hooks_on(model) == 0
    with pytest.raises(UncoveredError, match="the model was not run inside the block"), capture(model, ["first"]):
        pass


def test_hooks_never_survive_the_block_and_its_own_error_comes_through() -> None:
    model = Stack(2)
    with pytest.raises(ZeroDivisionError), capture(model, ["all"]):
        model(X / 0 if hooks_on(model) != 2 else 1 / 0)
    assert hooks_on(model) == 0


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["lyers.0"], r"layer 'lyers.0' matches none of the \d+ modules of Stack. Nearest: layers.0"),
        (
            [99],
            r"layer 99 matches none of the \d+ modules of Stack\. It has: .* Give 0 to 11, first, last, all or a",
        ),
        (
            ["zzz"],
            r"matches none of the \d+ modules of Stack. It has: \S+, .* more. Give 0 to 11, first, last, all or a reg",
        ),
        ([r"z\.z"], r"layer 'z\\.z' matches none"),
        (["a("], r"layer 'a\(' is not a regular expression"),
    ],
)
def test_a_pattern_without_match_shows_the_nearest(wanted: list[str | int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(Stack(), wanted)
    assert list(select(Stack(), "last")) == ["layer_11"]
    with pytest.raises(ValueError, match="no layer was asked for"):
        select(Stack(), [])
    with pytest.raises(ValueError, match="nothing to capture"), capture(Stack(), outputs=False):
        pass


def test_a_model_without_a_stack_is_asked_for_a_regular_expression() -> None:
    with pytest.raises(ValueError, match=r"It has: 0, 1\. Give a regular expression\. List them with: probe layers"):
        select(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "zzz")


def test_an_output_without_a_tensor_is_named() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Module()])
            self.layers[0].forward = lambda x: "text"

        def forward(self, x: Tensor) -> Tensor:
            self.layers[0](x)
            return x

    model = Empty()
    with (
        pytest.raises(UncoveredError, match="the output of layer_0 holds no tensor but a str"),
        capture(model, ["first"]),
    ):
        model(X)
