"""Recordings read back as written."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from probe.data.batches import token_batches, token_fingerprint
from probe.data.texts import text_of
from probe.models.loading import Loaded
from probe.recordings import RecordingError, read_recording, write_recording
from probe.recordings.manifest import manifest_from_json, manifest_to_json
from probe.running.recipes import Recipe
from tests.recordings.examples import (
    FLOAT,
    LAYERS,
    QUANTIZED,
    RECIPES,
    SMALL_TOKENS,
    Parts,
    files,
    run,
    small_parts,
    write,
)


def test_the_manifest_states_what_ran(stored: Path, loaded: Loaded, batches: list[Tensor]) -> None:
    document = json.loads((stored / "manifest.json").read_text())
    assert sorted(path.name for path in stored.iterdir()) == sorted(
        ["manifest.json", "tokens.safetensors", *(f"{recipe}.safetensors" for recipe in RECIPES)]
    )
    assert {key: document[key] for key in ("version", "model", "fingerprint", "device")} == {
        "version": 1,
        "model": "tiny-mamba",
        "fingerprint": loaded.fingerprint,
        "device": "neuron trn1",
    }
    assert document["tokens"] == {
        "count": 48,
        "samples": 3,
        "seqlen": 16,
        "fingerprint": token_fingerprint(batches),
        "file": "tokens.safetensors",
        "source": None,
    }
    assert document["unfinished"] is None
    assert document["versions"]["torch"] == torch.__version__
    assert {"probe", "python"} < document["versions"].keys()
    entry = document["recipes"]["mode_2_1-fp8_e4m3"]
    data = (stored / "mode_2_1-fp8_e4m3.safetensors").read_bytes()
    file = document["files"]["mode_2_1-fp8_e4m3.safetensors"]
    assert file == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert {one["file"] for one in entry["tensors"].values()} == {"mode_2_1-fp8_e4m3.safetensors"}
    assert {name: one["key"] for name, one in entry["tensors"].items()} == {name: name for name in entry["tensors"]}
    assert (entry["mode"], entry["format"]) == ("mode_2_1", "fp8_e4m3")
    assert entry["layers"] == list(LAYERS)
    assert entry["tensors"]["layer_0.output"]["shape"] == [3, 16, 128]
    assert entry["tensors"]["logits"]["shape"] == [3, 16, 256]
    assert document["recipes"]["fp32"]["format"] is None


def test_the_manifest_is_sorted_with_an_indent_of_one(stored: Path) -> None:
    text = (stored / "manifest.json").read_text()
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"


def test_the_manifest_survives_its_text(stored: Path) -> None:
    data = (stored / "manifest.json").read_bytes()
    assert manifest_to_json(manifest_from_json(data)) == data


def test_three_lines_of_torch_read_it(stored: Path, parts: dict[Recipe, Parts]) -> None:
    tensors = load_file(stored / "mode_2_1-fp8_e4m3.safetensors")
    assert torch.equal(tensors["layer_3.output"], torch.cat(parts[QUANTIZED]["layer_3.output"]))


def test_the_manifest_states_the_dtype_that_ran(tmp_path: Path) -> None:
    given_parts = {**small_parts(dtype=torch.bfloat16), "logits": small_parts()["logits"]}
    write_recording(tmp_path / "r", [(Recipe("bf16"), given_parts)], model="m", device="cpu", batches=SMALL_TOKENS)
    entry = json.loads((tmp_path / "r" / "manifest.json").read_text())["recipes"]["bf16"]
    dtypes = {name: one["dtype"] for name, one in entry["tensors"].items()}
    assert dtypes == {"layer_2.output": "bfloat16", "layer_10.output": "bfloat16", "logits": "float32"}


def test_what_is_read_is_what_the_model_gave(stored: Path, parts: dict[Recipe, Parts]) -> None:
    recording = read_recording(str(stored))
    assert set(recording.recipes) == {str(recipe) for recipe in RECIPES}
    for recipe, given_parts in parts.items():
        assert recording.layers(str(recipe)) == LAYERS
        for name, tensors in given_parts.items():
            found = recording.tensor(str(recipe), name)
            assert found.dtype == tensors[0].dtype
            assert torch.equal(found, torch.cat(tensors)), (recipe, name)


def test_layers_keep_their_order_and_are_never_sorted_as_text(tiny: Path) -> None:
    assert read_recording(tiny).layers("fp32") == ("layer_2", "layer_10")


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


def test_reading_a_tensor_maps_it(tmp_path: Path) -> None:
    """Neither validation nor a slice brings a tensor of 64 MB into memory of our own."""
    mega = {"layer_0.output": [torch.zeros(2, 8, 2**20)], "logits": [torch.zeros(2, 8, 2)]}
    tokens = [torch.zeros(2, 8, dtype=torch.int64)]
    write_recording(tmp_path / "r", [(FLOAT, mega)], model="m", device="cpu", batches=tokens)
    mega.clear()

    def own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    before = own()
    tensor = read_recording(tmp_path / "r").tensor("fp32", "layer_0.output")
    assert float(tensor.sum()) == 0
    assert own() - before < 16_000


def test_tensors_that_are_not_there_are_told(tiny: Path) -> None:
    recording = read_recording(tiny)
    with pytest.raises(RecordingError, match=r"small has no recipe 'fp99'\. It has: fp32, mode_2_1-fp8_e4m3\."):
        recording.layers("fp99")
    with pytest.raises(
        RecordingError, match=r"has no layer_3.output of fp32\. It has: layer_2.output, layer_10.output"
    ):
        recording.tensor("fp32", "layer_3.output")


def test_a_file_that_vanished_after_reading_is_told(folder: Path) -> None:
    recording = read_recording(folder)
    (folder / "fp32.safetensors").unlink()
    with pytest.raises(RecordingError, match=r"fp32\.safetensors: cannot be read: No such file"):
        recording.tensor("fp32", "logits")


def test_a_recording_can_be_moved(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for place in ("elsewhere", "link"):
        assert read_recording(tmp_path / place).tensor("fp32", "logits").shape == (3, 4, 7)
