"""`diff`: the order and ranking of layers, the choice of layers and recipes, notes, progress."""

import dataclasses
from pathlib import Path

import pytest
import torch

from probe import DeviceComparison, Recipe, diff, read_recording
from probe.recordings import Recording, RecordingError
from tests.comparisons.devices.recordings import IDS, as_scripts_leave_it, network, recorded


def test_layers_come_in_numeric_order(tmp_path: Path) -> None:
    tensors = network(layers=12)
    a, b = (as_scripts_leave_it(tmp_path / name, tensors) for name in "ab")
    labels = [layer.label for layer in diff(a, b).layers]
    assert labels == ["embedding", *(f"layer_{i}" for i in range(12)), "logits"]


def test_the_five_worst_by_two_rankings(tmp_path: Path, a: Recording) -> None:
    tensors = network()
    tensors["layer_1.output"] = tensors["layer_1.output"].clone()
    tensors["layer_1.output"][0, 0, 0] += 50
    tensors["layer_3.output"] = -tensors["layer_3.output"]
    found = diff(a, recorded(tmp_path / "b", tensors))
    assert [layer.label for layer in found.worst_by_max_abs][:2] == ["layer_1", "layer_3"]
    assert [layer.label for layer in found.worst_by_cosine][:2] == ["layer_3", "layer_1"]
    assert len(found.worst_by_max_abs) == len(found.worst_by_cosine) == 5


def test_a_cosine_of_exactly_zero_is_a_low_one(tmp_path: Path) -> None:
    x, turned = torch.zeros(3, 8, 4), torch.zeros(3, 8, 4)
    x[..., 0], turned[..., 1] = 1.0, 1.0
    a = recorded(tmp_path / "a", {"layer_0.output": x, "layer_1.output": x})
    b = recorded(tmp_path / "b", {"layer_0.output": x + turned, "layer_1.output": turned})
    found = diff(a, b)
    assert found.layers[1].cosine == 0
    assert [layer.label for layer in found.worst_by_cosine] == ["layer_1", "layer_0"]


def test_what_is_finite_on_one_side_only_is_the_worst_of_all(tmp_path: Path, a: Recording) -> None:
    tensors = network()
    tensors["layer_2.output"] = torch.full_like(tensors["layer_2.output"], torch.nan)
    tensors["layer_3.output"] = -tensors["layer_3.output"]
    found = diff(a, recorded(tmp_path / "b", tensors))
    assert found.worst_by_max_abs[0].label == found.worst_by_cosine[0].label == "layer_2"
    assert (found.layers[3].max_abs, found.layers[3].within) == (None, 0.0)
    assert found.layers[3].exceeded == ("max_abs", "mean_abs", "cosine", "finite")


@pytest.mark.parametrize(
    ("pattern", "labels"),
    [
        ("layer_*", ["layer_0", "layer_1", "layer_2", "layer_3"]),
        ("layer_[12]", ["layer_1", "layer_2"]),
        ("layer_1", ["layer_1"]),
        (r"_(0|3)$", ["layer_0", "layer_3"]),
        ("logits", ["logits"]),
    ],
)
def test_layers_by_glob_or_regular_expression(a: Recording, pattern: str, labels: list[str]) -> None:
    assert [layer.label for layer in diff(a, a, layers=pattern).layers] == labels


def test_a_pattern_that_matches_nothing_is_refused(a: Recording) -> None:
    names = "embedding, layer_0, layer_1, layer_2, layer_3, logits"
    with pytest.raises(ValueError, match="matches none") as caught:
        diff(a, a, layers="block_*")
    assert str(caught.value) == (
        f"layers 'block_*' matches none of {names}. Give a glob such as 'layer_*', or a regular expression."
    )
    with pytest.raises(ValueError, match=r"is not a regular expression \(missing \), unterminated") as caught:
        diff(a, a, layers="(")
    assert f"As a glob it matches none of {names}. Give a glob" in str(caught.value)


def test_recipes_are_found_or_asked_for(tmp_path: Path, a: Recording) -> None:
    one = recorded(tmp_path / "b", network(), recipe=Recipe("bf16"))
    assert (diff(a, one).recipe_a, diff(a, one).recipe_b) == ("fp32", "bf16")
    with pytest.raises(ValueError, match="has no mode 'bf16'"):
        diff(a, one, recipe="bf16")
    assert diff(a, one, recipe=("fp32", "bf16")).verdict.kind == "identical"
    with pytest.raises(ValueError, match=r"format 'int8' is given without a recipe\. Give the mode too\."):
        diff(a, one, format="int8")


def test_several_recipes_need_a_choice(tmp_path: Path) -> None:
    from probe.recordings import write_recording

    parts = {name: [x] for name, x in network().items()}
    recipes = [(Recipe("fp32"), parts), (Recipe("2-1", "int8"), parts)]
    both = write_recording(tmp_path / "both", recipes, model="m", batches=[IDS], device="cpu")
    with pytest.raises(RecordingError, match="which are to be compared"):
        diff(both, both)
    assert diff(both, both, recipe="2-1").recipe_b == "mode_2_1-int8"
    assert diff(both, both, recipe="2-1", format="int8").recipe_a == "mode_2_1-int8"


def test_nothing_in_common_is_refused(tmp_path: Path, a: Recording) -> None:
    b = recorded(tmp_path / "b", {"layer_9.output": torch.zeros(3, 8, 4)})
    with pytest.raises(RecordingError, match=r"have no tensor in common: .* Record the same layers on both\."):
        diff(a, b)


def test_what_only_one_has_and_other_weights_are_noted(tmp_path: Path) -> None:
    x = network()
    a = recorded(tmp_path / "a", x, fingerprint="11")
    b = recorded(tmp_path / "b", {name: t for name, t in x.items() if name != "logits"}, fingerprint="22")
    notes = diff(a, b).notes
    assert "only A has logits: not compared" in notes
    assert "the weights differ: fingerprint 11 on A, 22 on B (of another dtype, or of another model)" in notes


def test_the_comparison_is_a_frozen_value(a: Recording) -> None:
    found = diff(a, read_recording(a.folder))
    assert isinstance(found, DeviceComparison)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rtol = 1.0  # type: ignore[misc]


def test_progress_is_reported_tensor_by_tensor(a: Recording) -> None:
    lines: list[str] = []
    diff(a, a, layers="layer_[01]", progress=lines.append)
    assert lines == ["0 of 2 tensors: layer_0.output", "1 of 2 tensors: layer_1.output"]
