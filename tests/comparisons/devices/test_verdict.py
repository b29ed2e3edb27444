"""The verdict of `diff` on small recordings with a known difference, and with a float reference."""

from pathlib import Path

import pytest
import torch

from probe import Recipe, diff
from probe.recordings import Recording, RecordingError
from tests.comparisons.devices.recordings import IDS, as_scripts_leave_it, network, noisy, recorded


@pytest.mark.parametrize(
    ("value", "cause"), [(torch.nan, "NaN on B where A is finite, in one value"), (-torch.inf, "Inf on B")]
)
def test_one_value_that_is_not_finite_is_a_fault_where_all_else_agrees(
    tmp_path: Path, a: Recording, value: float, cause: str
) -> None:
    tensors = network()
    tensors["layer_2.output"] = tensors["layer_2.output"].clone()
    tensors["layer_2.output"][1, 2, 3] = value
    verdict = diff(a, recorded(tmp_path / "b", tensors)).verdict
    assert (verdict.kind, verdict.layer, verdict.sure) == ("device fault", "layer_2", "certain")
    assert verdict.cause.startswith(cause)
    assert verdict.evidence[0] == "layer_2 has 1 of 576 values that are finite on one device only"


def test_an_embedding_that_differs_for_the_same_tokens_is_a_fault_of_the_embedding(tmp_path: Path) -> None:
    x, y = network(), network()
    y["embedding.output"] = y["embedding.output"] * 1.5
    found = diff(recorded(tmp_path / "a", x), recorded(tmp_path / "b", y))
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "embedding")
    assert found.verdict.cause == "its output is 1.5 times A's: the scale is off by +50.00%"


def test_without_ids_the_embedding_tells_another_prompt_and_another_order(tmp_path: Path) -> None:
    a = as_scripts_leave_it(tmp_path / "a", network())
    words = {int(token): network()["embedding.output"].reshape(-1, 24)[i] for i, token in enumerate(IDS.reshape(-1))}
    other = torch.stack([words[int(token)] for token in (IDS * 7 % 19).reshape(-1)]).view(3, 8, 24)
    prompt = diff(a, as_scripts_leave_it(tmp_path / "b", {**network(seed=5), "embedding.output": other})).verdict
    assert (prompt.kind, prompt.layer, prompt.sure) == ("mismatched capture", "embedding", "likely")
    assert prompt.cause == "the inputs differ: another prompt"
    moved = {name: x[[1, 2, 0]] for name, x in network().items()}
    order = diff(a, as_scripts_leave_it(tmp_path / "c", moved)).verdict
    assert (order.kind, order.cause) == ("mismatched capture", "the order of the samples differs")
    late = {name: x.roll(1, 1) for name, x in network().items()}
    shift = diff(a, as_scripts_leave_it(tmp_path / "d", late)).verdict
    assert shift.kind == "mismatched capture"
    assert shift.cause == "the tokens of B come one place later than A's: padding or a begin token"


def test_layers_under_other_names_are_a_mismatched_capture_and_a_skipped_layer_is_a_fault(
    tmp_path: Path, a: Recording
) -> None:
    x = network()
    shifted = {**x, "layer_1.output": x["layer_0.output"], "layer_2.output": x["layer_1.output"]}
    shifted["layer_3.output"] = x["layer_2.output"]
    verdict = diff(a, recorded(tmp_path / "b", shifted)).verdict
    assert (verdict.kind, verdict.layer) == ("mismatched capture", "layer_1")
    assert verdict.cause == "the layers are shifted: layer_1 of B is layer_0 of A, and so on"
    swapped = {**x, "layer_1.output": x["layer_2.output"]}
    verdict = diff(a, recorded(tmp_path / "c", swapped)).verdict
    assert verdict.cause == "layer_1 of B is layer_2 of A: layers under other names"
    last = {**x, "layer_3.output": x["layer_2.output"]}
    verdict = diff(a, recorded(tmp_path / "d", last)).verdict
    assert (verdict.kind, verdict.layer) == ("device fault", "layer_3")
    assert verdict.cause == "returns its input on B: the layer is skipped"


def test_a_layer_that_adds_one_token_late_is_a_fault(tmp_path: Path, a: Recording) -> None:
    x = network()
    added = x["layer_2.output"] - x["layer_1.output"]
    x["layer_2.output"] = x["layer_1.output"] + added.roll(1, 1)
    verdict = diff(a, recorded(tmp_path / "b", x)).verdict
    assert (verdict.kind, verdict.layer) == ("device fault", "layer_2")
    assert verdict.cause == "what it adds comes one token later than on A"


@pytest.mark.parametrize(("size", "kind"), [(3e-7, "dtype noise"), (6e-6, "device fault")])
def test_the_line_between_noise_and_fault_is_where_the_figures_say(
    tmp_path: Path, a: Recording, size: float, kind: str
) -> None:
    """Noise without structure in what layer_2 adds; what sound devices stay below is 1e-6 there."""
    x = network()
    added = (x["layer_2.output"].double() - x["layer_1.output"]) * size
    error = added * torch.randn(added.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x["layer_2.output"] = (x["layer_2.output"] + error).float()
    found = diff(a, recorded(tmp_path / "b", x), layers="layer_[012]")
    assert found.layers[2].noise == pytest.approx(1.1e-6, rel=0.3)
    assert (found.verdict.kind, found.verdict.layer) == (kind, "layer_2")


@pytest.mark.parametrize(("size", "kind"), [(0.8e-6, "dtype noise"), (1.6e-6, "device fault")])
def test_one_sample_that_differs_alone_is_a_fault_if_it_differs_by_more_than_noise(
    tmp_path: Path, a: Recording, size: float, kind: str
) -> None:
    """Two devices may agree in all bits but those of one sample: noise that begins in few elements stays in theirs."""
    x = network()
    added = (x["layer_2.output"].double() - x["layer_1.output"]) * size
    error = added * torch.randn(added.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    error[:2] = 0.0
    x["layer_2.output"] = (x["layer_2.output"] + error).float()
    x["layer_2.output"][:2] = network()["layer_2.output"][:2]
    found = diff(a, recorded(tmp_path / "b", x), layers="layer_[012]")
    assert found.layers[2].added < found.layers[2].noise  # over all samples
    assert (found.verdict.kind, found.verdict.layer) == (kind, "layer_2")


def emulated(size: float = 0.02) -> dict[str, torch.Tensor]:
    return noisy(network(), size, seed=5)


def test_with_a_reference_errors_are_in_units_of_the_recipes_own(tmp_path: Path, a: Recording) -> None:
    recipe = Recipe("2-1", "int8")
    x, y = emulated(), noisy(emulated(), 0.004, seed=6)
    found = diff(recorded(tmp_path / "e", x, recipe=recipe), recorded(tmp_path / "d", y, recipe=recipe), reference=a)
    assert (found.verdict.kind, found.reference) == ("dtype noise", str(a.folder))
    layer, name = found.layers[2], "layer_1.output"
    floats = network()[name]

    def apart(expected: torch.Tensor, output: torch.Tensor) -> float:
        rows = expected.double().square().mean(-1, keepdim=True).sqrt()
        return float((((output - expected).double() / rows).square().mean()).sqrt())

    assert layer.recipe_error == pytest.approx(apart(floats, x[name]), rel=1e-6)
    assert layer.device_error == pytest.approx(apart(floats, y[name]), rel=1e-6)
    assert layer.recipe_errors == pytest.approx(apart(x[name], y[name]) / apart(floats, x[name]), rel=1e-6)
    assert any(line.startswith("the device is at most 0.2") for line in found.verdict.evidence)


def test_a_device_that_runs_the_float_model_is_found(tmp_path: Path, a: Recording) -> None:
    recipe = Recipe("2-1", "int8")
    e, d = (
        recorded(tmp_path / "e", emulated(), recipe=recipe),
        recorded(tmp_path / "d", noisy(network()), recipe=recipe),
    )
    verdict = diff(e, d, reference=a).verdict
    assert (verdict.kind, verdict.layer) == ("device fault", "layer_0")
    assert verdict.cause == "the recipe was not applied: B gives what the float model gives"


def test_a_recipe_that_is_the_float_reference_itself_is_no_recipe(tmp_path: Path, a: Recording) -> None:
    recipe = Recipe("2-1", "int8")
    e, d = recorded(tmp_path / "e", network(), recipe=recipe), recorded(tmp_path / "d", emulated(), recipe=recipe)
    verdict = diff(e, d, reference=a).verdict
    assert (verdict.kind, verdict.cause) == (
        "mismatched capture",
        "A is the float reference itself: its recipe was not applied",
    )


def test_the_reference_must_be_of_the_same_tokens_and_a_float_one(tmp_path: Path, a: Recording) -> None:
    recipe = Recipe("2-1", "int8")
    e = recorded(tmp_path / "e", emulated(), recipe=recipe)
    other = recorded(tmp_path / "o", network(), ids=IDS + 1)
    verdict = diff(e, e, reference=other).verdict
    assert (verdict.kind, verdict.cause) == ("mismatched capture", "the inputs of the reference differ")
    with pytest.raises(RecordingError, match=r"there is no float reference of it. Record fp32 into the reference\."):
        diff(e, e, reference=e)
