"""`--layers`: the choice of tensors does not change what is said of them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from probe import Recipe, diff
from probe.recordings import Recording
from tests.comparisons.devices.recordings import as_scripts_leave_it, network, noisy, recorded


def broken(layer: int, kind: str) -> dict[str, Tensor]:
    """The network with what one layer adds moved; later layers stay sound beside their input."""
    tensors = network()
    names = list(tensors)
    name = f"layer_{layer}.output"
    before = tensors[names[names.index(name) - 1]]
    added = tensors[name] - before
    moved = {
        "swapped samples": lambda: added[[1, 0, 2]],
        "late token": lambda: added.roll(1, 1),
        "half": lambda: added * (1 + 2.0**-9 * torch.randn(added.shape, generator=torch.Generator().manual_seed(1))),
    }[kind]()
    error = moved - added
    return {n: x + error if names.index(n) >= names.index(name) and n != "logits" else x for n, x in tensors.items()}


@pytest.mark.parametrize("kind", ["swapped samples", "late token", "half"])
@pytest.mark.parametrize("layers", ["layer_[12]*", "layer_1", "layer_1*", "layer_[123]"])
def test_a_fault_in_the_first_selected_layer_is_the_same_fault(
    tmp_path: Path, a: Recording, kind: str, layers: str
) -> None:
    b = recorded(tmp_path / "b", broken(1, kind))
    whole, selected = diff(a, b).verdict, diff(a, b, layers=layers).verdict
    assert (whole.kind, whole.layer) == ("device fault", "layer_1")
    assert selected == whole


def test_a_fault_before_the_selected_layers_is_no_mismatched_capture(tmp_path: Path, a: Recording) -> None:
    b = recorded(tmp_path / "b", broken(0, "swapped samples"))
    found = diff(a, b, layers="layer_[12]*")
    assert [layer.label for layer in found.layers] == ["layer_1", "layer_2"]
    assert found.verdict.kind == "dtype noise"  # beside their input
    assert "layer_1 was made of layer_0, which was not selected and differs by " in found.verdict.evidence[2]
    assert not found.passed  # the limits


def test_a_second_fault_is_reported_with_the_first_one_that_was_not_selected(tmp_path: Path, a: Recording) -> None:
    tensors = broken(0, "late token")
    tensors["layer_2.output"] = -tensors["layer_2.output"]
    verdict = diff(a, recorded(tmp_path / "b", tensors), layers="layer_[23]").verdict
    assert (verdict.kind, verdict.layer) == ("device fault", "layer_2")
    assert verdict.evidence[1].startswith("the difference began before it, in layer_0, which was not selected: what ")


@pytest.mark.parametrize("layers", ["layer_[12]*", "layer_3", "logits", "embedding"])
def test_another_capture_is_recognised_whatever_is_selected(tmp_path: Path, layers: str) -> None:
    a = as_scripts_leave_it(tmp_path / "a", network())
    b = as_scripts_leave_it(tmp_path / "b", {name: x[[1, 2, 0]] for name, x in network().items()})
    verdict = diff(a, b, layers=layers).verdict
    assert (verdict.kind, verdict.layer, verdict.sure) == ("mismatched capture", "embedding", "certain")
    assert verdict == diff(a, b).verdict


@pytest.mark.parametrize("layers", ["layer_[12]*", "layer_[23]", "logits"])
def test_sound_layers_are_noise_whatever_is_selected(tmp_path: Path, a: Recording, layers: str) -> None:
    found = diff(a, recorded(tmp_path / "b", noisy(network())), layers=layers)
    assert (found.verdict.kind, found.passed) == ("dtype noise", True)


def test_a_selected_embedding_does_not_make_a_recipe_the_float_reference(tmp_path: Path, a: Recording) -> None:
    recipe = Recipe("2-1", "int8")
    x = noisy(network(), 0.02, seed=5)  # the embedding is not quantized
    y = {**noisy(x, 1e-3, seed=6), "embedding.output": x["embedding.output"] * (1 + 2.0**-23)}
    e, d = (recorded(tmp_path / name, tensors, recipe=recipe) for name, tensors in (("e", x), ("d", y)))
    assert diff(e, d, reference=a, layers="embedding").verdict.kind == "dtype noise"
    plain = recorded(tmp_path / "p", network(), recipe=recipe)
    cause = "A is the float reference itself: its recipe was not applied"
    assert diff(plain, d, reference=a, layers="embedding").verdict.cause == cause


def test_a_device_in_half_precision_is_recognised_by_its_first_layer_and_all_others(tmp_path: Path) -> None:
    """One layer with the noise of bfloat16 is a fault; the other layers, which are not selected, decide."""
    x = network()
    draw = torch.Generator().manual_seed(1)

    def rough(t: Tensor) -> Tensor:
        return t * (1 + 2.0**-9 * torch.randn(t.shape, generator=draw))

    everywhere = {"embedding.output": x["embedding.output"]}
    before = x["embedding.output"]
    shift = torch.zeros_like(before)
    for layer in range(4):
        name = f"layer_{layer}.output"
        added = x[name] - before
        shift = shift + rough(added) - added
        before, everywhere[name] = x[name], x[name] + shift
    a = recorded(tmp_path / "a", {name: t for name, t in x.items() if name != "logits"})
    b = recorded(tmp_path / "b", everywhere)
    whole, selected = diff(a, b).verdict, diff(a, b, layers="layer_0").verdict
    assert (whole.kind, whole.sure) == ("dtype noise", "possible")
    assert selected == whole
