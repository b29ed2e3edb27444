"""The gate on a model whose weights accelerate keeps on disk: every case, from missing to a broken weight."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from probe.gate.matrix import BROUGHT_IN
from probe.models.loading import load_model
from probe.models.offload import Room, brought_in, is_offloaded, offload, size_of
from probe.running.recipes import Recipe, apply
from probe.words import OUTSIDE, PATHS
from tests.faults.bench import SmallGate, settings_of
from tests.faults.breaking import Patient, damaged

CPU = torch.device("cpu")


def llama() -> nn.Module:
    """All of it on disk."""
    return offload(load_model("tiny-llama").model, Room(CPU, 1)).model


def mamba() -> nn.Module:
    """Half of it on disk."""
    model = load_model("tiny-mamba").model
    return offload(model, Room(CPU, size_of(model) // 2)).model


def one_code(weight: str) -> Callable[[Patient], None]:
    """One value of a quantized weight becomes its neighbour."""

    def damage(patient: Patient) -> None:
        values: Tensor = patient.block.get_parameter(weight)
        values[3, 5] = values[3, 4] if values[3, 4] != values[3, 5] else 0.0

    return damage


@pytest.mark.parametrize(
    ("make", "recipe", "weight"),
    [
        ("llama", "linear_wa-int8", "mlp.down_proj.weight"),
        ("mamba", "mode_2_1-fp8_e4m3", "mixer.out_proj.weight"),
    ],
)
def test_an_offloaded_model_goes_through_the_gate_with_all_its_cases(
    tmp_path: Path, make: str, recipe: str, weight: str
) -> None:
    assert is_offloaded(globals()[make]())
    model = f"{__name__}:{make}"
    gate = SmallGate(tmp_path, {model: settings_of(model, [recipe])})
    assert {one.verdict for one in gate.judge(model, recipe).values()} == {"missing"}
    gate.make_baselines(model, [recipe])
    found = gate.judge(model, recipe)
    assert {*OUTSIDE, *PATHS, "layer_0", "layer_3", "logits"} <= set(found)
    assert {layer: one.message for layer, one in found.items() if one.status != "passed"} == {}
    assert {one.not_run for one in found.values()} == {BROUGHT_IN}
    with damaged(one_code(weight), 1):
        broken = gate.judge(model, recipe)
    assert broken["layer_1"].status == "failed"
    assert any(f"weight {weight}[3, 5]: " in line for line in broken["layer_1"].details)
    assert f"weight {weight.removeprefix('mixer.')}; one value, at [3, 5]" in broken["layer_1"].cause
    assert next(layer for layer, one in broken.items() if one.is_own and one.status == "failed") == "layer_1"


@pytest.mark.parametrize("make", [llama, mamba])
def test_what_is_brought_in_is_the_model_itself_tied_weights_and_all(make: Callable[[], nn.Module]) -> None:
    plain = load_model(f"tiny-{make.__name__}").model
    whole = brought_in(make())
    assert not is_offloaded(whole)
    assert sum(1 for _ in whole.parameters()) == sum(1 for _ in plain.parameters())
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(whole(tokens).logits, plain(tokens).logits)


def test_a_recipe_refuses_an_offloaded_model_and_says_what_to_do() -> None:
    expected = "LlamaForCausalLM is offloaded, and a recipe changes weights in memory. Bring them in first: probe."
    with pytest.raises(ValueError, match=re.escape(expected)):
        apply(llama(), Recipe("linear_w", "int8"))


def half_precision() -> nn.Module:
    """A factory whose offloaded weights are not float32."""
    return offload(load_model("tiny-llama", dtype=torch.bfloat16).model, Room(CPU, 1)).model


def test_offloaded_weights_of_another_dtype_are_refused_with_the_way_out() -> None:
    expected = "its offloaded weights are bfloat16, expected float32. Load them so in the factory."
    with pytest.raises(ValueError, match=re.escape(expected)):
        load_model(f"{__name__}:half_precision")
