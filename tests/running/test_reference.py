"""The float reference: made once, replayed against a copy, and never changed after."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor, nn

from probe.models.forward import output_of
from probe.models.loading import Loaded, weight_fingerprint
from probe.running.capture import UncoveredError
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference, replay, run_reference
from probe.words import LOGITS


class Halves(nn.Module):
    """A layer of two linears, so that selected modules can lie inside one another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


class Stack(nn.Module):
    def __init__(self, *, times: int = 1) -> None:
        super().__init__()
        self.layers, self.times = nn.ModuleList([Halves(), Halves()]), times

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for _ in range(self.times):
                x = layer(x)
        return x


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 3, 4, generator=generator) for rows in (2, 1)]


def replayed(twin: nn.Module, reference: Reference, *, injected: bool) -> dict[str, list[tuple[Tensor, Tensor]]]:
    taken: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def take(label: str, output: Tensor, expected: Tensor) -> None:
        taken.setdefault(label, []).append((output.clone(), expected))

    replay(twin, reference, take, injected=injected)
    return taken


def test_a_reference_holds_inputs_outputs_and_what_the_layers_make_of_rounded_inputs(batches: list[Tensor]) -> None:
    model = Stack()
    reference = run_reference(model, batches)
    assert reference.model == weight_fingerprint(model)
    assert reference.layers == ("layer_0", "layer_1")
    assert reference.modules == {"layer_0": "layers.0", "layer_1": "layers.1"}
    kinds = ("input", "output", "injected")
    assert set(reference.tensors) == {f"{label}.{kind}" for label in reference.layers for kind in kinds}
    for index, batch in enumerate(batches):
        fed = reference.tensors["layer_0.input"][index]
        assert torch.equal(fed, batch.bfloat16())
        assert torch.equal(reference.tensors["layer_0.injected"][index], model.layers[0](fed.float()))
        assert torch.equal(reference.tensors["layer_0.output"][index], model.layers[0](batch))
        assert torch.equal(reference.outputs[index], model(batch))
    assert reference.count("layer_1") == sum(batch.numel() for batch in batches)


def test_it_cannot_be_changed(batches: list[Tensor]) -> None:
    reference = run_reference(Stack(), batches)
    with pytest.raises(FrozenInstanceError):
        reference.layers = ()  # type: ignore[misc]


@pytest.mark.parametrize("injected", [False, True], ids=["propagated", "injected"])
def test_the_float_model_gives_its_own_reference_in_every_layer_and_batch(
    batches: list[Tensor], injected: bool
) -> None:
    model = Stack()
    reference = run_reference(model, batches)
    taken = replayed(model, reference, injected=injected)
    assert set(taken) == {"layer_0", "layer_1"} | (set() if injected else {reference.kind.label})
    for pairs in taken.values():
        assert len(pairs) == len(batches)
        assert all(torch.equal(output, expected) for output, expected in pairs)


def test_modules_inside_one_another_are_fed_in_runs_of_their_own(batches: list[Tensor]) -> None:
    """Feeding the inner module would mask the error of the outer one."""
    model, broken = Stack(), Stack()
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.get_parameter("layers.0.first.weight").add_(1.0)
    reference = run_reference(model, batches, ["first", r"layers\.0\.second$"])
    taken = replayed(broken, reference, injected=True)
    assert not torch.equal(*taken["layer_0"][0]), "the outer module contains the broken one"
    assert torch.equal(*taken["layers.0.second"][0]), "the inner module was fed the reference's input"


def test_injection_keeps_errors_in_their_layer(loaded: Loaded, tokens: Tensor) -> None:
    reference = run_reference(loaded.model, [tokens])
    twin = apply(loaded.model, Recipe("fp32"))
    with torch.no_grad():
        twin.get_parameter("backbone.layers.1.mixer.D").mul_(2.0)
    wrong = {
        injected: [label for label, ((output, expected),) in pairs.items() if not torch.equal(output, expected)]
        for injected in (False, True)
        for pairs in [replayed(twin, reference, injected=injected)]
    }
    assert wrong == {False: ["layer_1", "layer_2", "layer_3", LOGITS], True: ["layer_1"]}


@pytest.mark.parametrize("injected", [False, True])
def test_a_layer_that_the_copy_does_not_have_is_refused(batches: list[Tensor], injected: bool) -> None:
    reference, twin = run_reference(Stack(), batches), Stack()
    del twin.layers[1]
    with pytest.raises(UncoveredError, match=r"has no module layers\.1, which the reference has"):
        replayed(twin, reference, injected=injected)


def test_what_cannot_be_a_reference_is_refused(batches: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="not one batch was given"):
        run_reference(Stack(), [])
    with pytest.raises(ValueError, match=r"layer_0 ran 4 times in 2 forwards\. Only modules that run once"):
        run_reference(Stack(times=2), batches)


def test_a_model_that_returns_no_tensor_is_refused(batches: list[Tensor]) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> list[str]:
            return ["x", "x"]

    with pytest.raises(ValueError, match=r"Pair returned a list without a tensor\. Expected a tensor"):
        output_of(Pair(), batches[0])
