"""`write_recording`: tensors that the caller has are kept as they are, or refused."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.models.loading import Loaded
from probe.recordings import RecordingError, read_recording, write_recording
from probe.running.recipes import Recipe
from tests.recordings.examples import FLOAT, QUANTIZED, SMALL_TOKENS, Parts, files, run, small_parts, write, write_small


def test_inputs_can_be_recorded_too(tmp_path: Path, loaded: Loaded, batches: list[Tensor]) -> None:
    given_parts = {FLOAT: run(loaded, FLOAT, batches, None, inputs=True)}
    recording = write(tmp_path / "r", loaded, batches, given_parts)
    assert torch.equal(recording.tensor("fp32", "layer_1.input"), recording.tensor("fp32", "layer_0.output"))
    assert read_recording(tmp_path / "r") == recording


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_float_dtype_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    given_parts = small_parts(dtype=dtype)
    write_recording(tmp_path / "r", [(FLOAT, given_parts)], model="m", device="cpu", batches=SMALL_TOKENS)
    found = read_recording(tmp_path / "r").tensor("fp32", "layer_2.output")
    assert found.dtype == dtype
    assert torch.equal(found.double(), torch.cat([part.double() for part in given_parts["layer_2.output"]]))


def test_nan_and_infinity_are_kept(tmp_path: Path) -> None:
    given_parts = small_parts()
    given_parts["layer_2.output"][1][0, 0, :2] = torch.tensor([torch.nan, -torch.inf])
    write_recording(tmp_path / "r", [(FLOAT, given_parts)], model="m", device="cpu", batches=SMALL_TOKENS)
    found = read_recording(tmp_path / "r").tensor("fp32", "layer_2.output")
    assert found[2, 0, 0].isnan()
    assert found[2, 0, 1] == -torch.inf


def test_how_samples_are_batched_does_not_show(tmp_path: Path, loaded: Loaded, parts: dict[Recipe, Parts]) -> None:
    texts = []
    for size in (1, 2, 3):
        batches = token_batches(text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=size)
        cut = {name: list(torch.split(torch.cat(some), size)) for name, some in parts[QUANTIZED].items()}
        write(tmp_path / str(size), loaded, batches, {QUANTIZED: cut})
        texts.append(files(tmp_path / str(size)))
    assert texts[0] == texts[1] == texts[2]


def test_what_is_returned_is_what_is_read(tmp_path: Path) -> None:
    written = write_small(tmp_path / "r", versions={"torch_neuronx": "2.1"})
    assert written == read_recording(tmp_path / "r")
    assert written.manifest.versions["torch_neuronx"] == "2.1"
    assert written.manifest.fingerprint is None


def test_nothing_is_run_when_there_is_no_place_for_it(folder: Path) -> None:
    def recipes() -> Iterator[tuple[Recipe, Parts]]:
        pytest.fail("the model was run for nothing")
        yield

    with pytest.raises(RecordingError, match="holds a recording already"):
        write_recording(folder, recipes(), model="m", device="d", batches=SMALL_TOKENS)


def test_a_recipe_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def recipes() -> Iterator[tuple[Recipe, Parts]]:
        yield FLOAT, small_parts()
        names = sorted(os.listdir(tmp_path / "r" / ".new"))
        assert names == ["fp32.safetensors", "tokens.safetensors"]  # on disk, without a manifest
        raise RuntimeError("the device fell off the bus")

    with pytest.raises(RuntimeError, match="fell off the bus"):
        write_recording(tmp_path / "r", recipes(), model="m", device="d", batches=SMALL_TOKENS)
    assert list(tmp_path.iterdir()) == []


def with_part(name: str, index: int, tensor: Tensor) -> Parts:
    changed = small_parts()
    changed[name][index] = tensor
    return changed


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ([], r"nothing was recorded for .*r: not one recipe was given"),
        ([(FLOAT, small_parts()), (FLOAT, small_parts())], r"fp32 is given twice"),
        ([(FLOAT, {})], r"fp32 recorded not one layer\. Expected tensors such as layer_0\.output"),
        ([(FLOAT, {"logits": small_parts()["logits"]})], r"fp32 recorded not one layer"),
        (
            [(FLOAT, {**small_parts(), "layer_2.scan": []})],
            r"fp32: 'layer_2\.scan' names no tensor\. Expected layer_0\.o",
        ),
        (
            [(FLOAT, {**small_parts(), "layer_3.output": small_parts()["layer_2.output"][:1]})],
            r"fp32: layer_3\.output has 2 samples of float32 \[4, 5\]\. Expected 3 of one dtype and shape",
        ),
        ([(FLOAT, {**small_parts(), "layer_3.output": []})], r"fp32: layer_3\.output has 0 samples of \. Expected 3"),
        (
            [(FLOAT, with_part("layer_2.output", 1, torch.zeros(1, 3, 5)))],
            r"layer_2\.output has 3 samples of float32 \[3, 5\] and float32 \[4, 5\]\. Expected 3 of one dtype",
        ),
        (
            [(FLOAT, with_part("layer_2.output", 1, torch.zeros(1, 4, 5).half()))],
            r"layer_2\.output has 3 samples of float16 \[4, 5\] and float32 \[4, 5\]",
        ),
        (
            [(FLOAT, {"layer_2.output": [torch.zeros(3, 4, dtype=torch.int32)]})],
            r"layer_2\.output is int32\. Expected one of float64, float32",
        ),
        ([(FLOAT, {**small_parts(), "layer_3.input": small_parts()["layer_2.output"]})], r"layer_3\.input: is neither"),
    ],
)
def test_partial_and_mixed_recordings_are_not_written(tmp_path: Path, recipes: Any, message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        write_recording(tmp_path / "r", recipes, model="m", device="d", batches=SMALL_TOKENS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "batches", [[], [torch.zeros(4)], [torch.zeros(2, 4), torch.zeros(1, 5)], [torch.zeros(0, 4)]], ids=str
)
def test_tokens_are_samples_of_one_length(tmp_path: Path, batches: list[Tensor]) -> None:
    with pytest.raises(
        RecordingError, match=r"batches have the shapes \[.*\]\. Expected \[samples, tokens\], all of one"
    ):
        write_small(tmp_path / "r", batches=batches)
