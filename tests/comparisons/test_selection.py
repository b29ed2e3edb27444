"""Sides of a comparison: tensors by name or label, and labels by pattern."""

from pathlib import Path

import pytest
import torch

from probe.comparisons.selection import Side, match_names, opened, pick_labels, place_of
from tests.comparisons.recorded import plain, recorded

SHAPE = (2, 6, 4)
NAMES = ("embedding.output", "layer_1.output", "layer_10.output", "layer_1.input", "logits")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layer_1", ["layer_1.output"]),
        ("layer_1*", ["layer_1.output", "layer_10.output", "layer_1.input"]),
        ("layer_1.*", ["layer_1.output", "layer_1.input"]),
        ("*.output", ["embedding.output", "layer_1.output", "layer_10.output"]),
        ("ayer_10", ["layer_10.output"]),
        ("log|emb", ["embedding.output", "logits"]),
        ("nothing", []),
    ],
)
def test_devices_take_a_glob_or_else_an_expression_anywhere_in_a_label(pattern: str, names: list[str]) -> None:
    assert match_names(pattern, NAMES) == names


@pytest.mark.parametrize(
    ("pattern", "labels"),
    [
        ("layer_1", ["layer_1"]),
        ("layer_1*", ["layer_1"]),
        ("layer_1.*", ["layer_1.input", "layer_1", "layer_10"]),
        ("10", ["layer_10"]),
        ("log.*|emb.*", ["embedding", "logits"]),
    ],
)
def test_modes_take_an_expression_of_the_whole_label(tmp_path: Path, pattern: str, labels: list[str]) -> None:
    tensors = {name: torch.zeros(SHAPE) for name in NAMES}
    side = Side(recorded(tmp_path / "r", {"fp32": tensors}), "fp32")
    assert pick_labels(side, [pattern]) == labels
    with pytest.raises(ValueError, match="'ayer_10' is no layer of fp32"):
        pick_labels(side, ["ayer_10"])


def test_a_tensor_is_found_by_its_label_and_by_its_name(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "r", {"fp32": {**plain(layers=2), "logits": torch.zeros(2, 6, 4)}})
    side = Side(opened(recording.folder), "fp32")
    assert side.names == ("layer_0.output", "layer_1.output", "logits")
    assert list(side.labels) == ["layer_0", "layer_1", "logits"]
    for name in ("layer_1", "layer_1.output"):
        assert torch.equal(side.tensor(name), plain(layers=2)["layer_1.output"])
        assert (side.shape(name), side.dtype(name)) == ((2, 6, 8), "float32")
    with pytest.raises(KeyError):
        side.shape("layer_2")


def test_a_place_is_an_index_along_every_axis() -> None:
    assert place_of(None, (2, 3)) is None
    assert [place_of(index, (2, 3)) for index in range(6)] == [(i, j) for i in range(2) for j in range(3)]
