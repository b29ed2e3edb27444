"""Reading: what is read is what was written, and every defect of a file is told."""

import errno
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save

from probe.recordings import (
    RecordingError,
    read_recording,
    write_recording,
)
from probe.running.recipes import Recipe
from tests.recordings.examples import FLOAT, LAYERS, QUANTIZED, RECIPE, RECIPES, Parts, is_refused, is_sound, put_file


def test_three_lines_of_torch_read_it(stored: Path, parts: dict[Recipe, Parts]) -> None:
    tensors = load_file(stored / "mode_2_1-fp8_e4m3.safetensors")
    assert torch.equal(tensors["layer_3.output"], torch.cat(parts[QUANTIZED]["layer_3.output"]))


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


# ----------------------------------------------------------------------------------------------------- defects of files

OUTPUT = "layer_2.output"


@pytest.mark.parametrize("name", ["manifest.json", f"{RECIPE}.safetensors"])
def test_links_that_leave_the_folder_are_refused(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "outside")
    (folder / name).symlink_to(folder.parent / "outside")
    with pytest.raises(RecordingError, match=rf"{name}: is a link to .*outside, which is not in the folder\. Copy"):
        read_recording(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(folder / name)
    with pytest.raises(RecordingError, match=f"{name}: is missing"):
        read_recording(folder)


def test_missing_folders_and_files_are_told(folder: Path) -> None:
    with pytest.raises(RecordingError, match=r"there is no folder .*nowhere\. .* first: probe record --modes fp32"):
        read_recording(folder / "nowhere")
    with pytest.raises(RecordingError, match="there is no folder"):
        read_recording(folder / "manifest.json")
    with pytest.raises(RecordingError, match=r"there is no folder|cannot be read"):
        read_recording(folder / ("x" * 300))
    (folder / f"{RECIPE}.safetensors").unlink()
    with pytest.raises(RecordingError, match=rf"{RECIPE}\.safetensors: is missing, so the folder is not whole\. Copy"):
        read_recording(folder)
    (folder / f"{RECIPE}.safetensors").mkdir()
    with pytest.raises(RecordingError, match=rf"{RECIPE}\.safetensors: is missing"):
        read_recording(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(RecordingError, match=r"manifest\.json: is missing, so this is no whole recording"):
        read_recording(folder)


def test_files_that_the_system_refuses_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(RecordingError, match=r"manifest\.json: cannot be read: Permission denied\. Copy"):
        read_recording(folder)


def test_a_file_with_more_or_fewer_tensors_than_the_manifest_is_told(folder: Path) -> None:
    file = folder / f"{RECIPE}.safetensors"
    tensors = load_file(file)
    put_file(folder, save({**tensors, "layer_3.output": torch.zeros(3, 4, 5)}))
    with pytest.raises(RecordingError, match=rf"{RECIPE}\.safetensors: layer_3\.output is in the file only\. Copy"):
        read_recording(folder)
    put_file(folder, save({**tensors, "\x1b[2J": torch.zeros(3)}))
    with pytest.raises(RecordingError, match=r": \\x1b\[2J is in the file only\. Copy"):
        read_recording(folder)
    put_file(folder, save({name: tensor for name, tensor in tensors.items() if name != OUTPUT}))
    with pytest.raises(RecordingError, match=rf"{RECIPE}\.safetensors: layer_2\.output is in the manifest only\. Copy"):
        read_recording(folder)


def test_the_file_of_another_recipe_is_told(folder: Path) -> None:
    shutil.copy(folder / "fp32.safetensors", folder / f"{RECIPE}.safetensors")
    with pytest.raises(RecordingError, match=r"it was cut short or changed|belongs to another recording"):
        read_recording(folder)


def test_a_flipped_bit_is_told(folder: Path) -> None:
    file = folder / f"{RECIPE}.safetensors"
    data = file.read_bytes()
    for place in (0, 8, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(RecordingError, match="its sha256 is"):
            read_recording(folder)


def test_nothing_is_unpickled(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(folder / "sprung"),)

    put_file(folder, pickle.dumps(Trap()))
    with pytest.raises(RecordingError, match="is not safetensors that can be read"):
        read_recording(folder)
    put_file(folder, b"")
    torch.save({"x": Trap()}, folder / f"{RECIPE}.safetensors")
    put_file(folder, (folder / f"{RECIPE}.safetensors").read_bytes())
    with pytest.raises(RecordingError, match="is not safetensors that can be read"):
        read_recording(folder)
    assert not (folder / "sprung").exists()


@pytest.mark.parametrize("believed", [False, True], ids=["sha256 as before", "sha256 of what is left"])
def test_a_file_cut_anywhere_is_told(folder: Path, believed: bool) -> None:
    file = folder / f"{RECIPE}.safetensors"
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for length in (*range(0, header + 4, 3), *range(header, len(data), 37), len(data) - 1):
        if believed:
            put_file(folder, data[:length])
        else:
            file.write_bytes(data[:length])
        with pytest.raises(RecordingError, match=rf"{RECIPE}\.safetensors: .*\. Copy the recording again"):
            read_recording(folder)
    put_file(folder, data)
    read_recording(folder)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=200))
def test_any_bytes_are_a_recording_error(folder: Path, tiny: Path, junk: bytes) -> None:
    shutil.copy(tiny / "manifest.json", folder)
    put_file(folder, junk)
    assert is_refused(folder)
    (folder / "manifest.json").write_bytes(junk)
    assert is_refused(folder)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_in_a_header_are_a_recording_error_or_harmless(folder: Path, tiny: Path, data: st.DataObject) -> None:
    shutil.copy(tiny / "manifest.json", folder)
    sound = (tiny / f"{RECIPE}.safetensors").read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    place, junk = data.draw(st.integers(0, header - 1)), data.draw(st.binary(min_size=1, max_size=4))
    put_file(folder, sound[:place] + junk + sound[place + len(junk) :])
    assert is_refused(folder) or is_sound(folder)
