"""Folders of the users' own scripts are read as far as they can be believed; nothing in them ever runs."""

import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import probe
from probe.data.calls import input_fingerprint
from probe.recordings import RecordingError, read_recording
from tests.recordings.models import Stack

UNVERIFIED = "no manifest: the model, its weights and the device are not known, and no file can be verified"
IDS = torch.arange(6)[None]


def pt_folder(folder: Path, layers: tuple[int, ...] = (2, 10, 0), dtype: torch.dtype = torch.bfloat16) -> Path:
    """What a script on a machine with a GPU leaves."""
    folder.mkdir()
    for index in layers:
        torch.save(torch.full((1, 6, 3), float(index)).to(dtype), folder / f"layer_{index}_output.pt")
    torch.save(torch.ones(1, 6, 3), folder / "embedding_output.pt")
    torch.save({"prompt": "abc", "input_ids": IDS, "statistics": {}}, folder / "metadata.pt")
    return folder


def npy_folder(folder: Path) -> Path:
    folder.mkdir()
    for place, mode in enumerate(("2-1", "fp32", "0", "2-4-fp8_e4m3", "quarot")):
        for layer in (0, 23, 3):
            np.save(folder / f"mode_{mode}_layer_{layer}.npy", np.full((2, 4, 3), 100 * place + layer, np.float32))
    (folder / "mode_0_stats.json").write_text("{}")
    return folder


def test_a_folder_of_pt_files_is_read(tmp_path: Path) -> None:
    found = read_recording(pt_folder(tmp_path / "gpu"))
    assert found.recipes == ("unknown",)
    assert found.layers("unknown") == ("layer_0", "layer_2", "layer_10"), "as numbers, not as text"
    assert found.names("unknown") == ("embedding.output", "layer_0.output", "layer_2.output", "layer_10.output")
    tensor = found.tensor("unknown", "layer_10.output")
    assert (tensor.dtype, found.dtype("unknown", "layer_10.output")) == (torch.bfloat16, "bfloat16")
    assert torch.equal(tensor, torch.full((1, 6, 3), 10.0).bfloat16())
    ids = found.input_ids()
    assert ids is not None
    assert torch.equal(ids, IDS)
    assert found.manifest.tokens.fingerprint == input_fingerprint([IDS])
    assert found.notes == (UNVERIFIED, "no manifest: which mode ran is not known; it is called 'unknown'")


def test_without_metadata_the_inputs_are_said_to_be_unknown(tmp_path: Path) -> None:
    folder = pt_folder(tmp_path / "gpu")
    (folder / "metadata.pt").unlink()
    found = read_recording(folder)
    assert found.input_ids() is None
    assert "no manifest: the inputs cannot be verified" in found.notes
    torch.save({"prompt": "abc"}, folder / "metadata.pt")
    assert "no manifest: the inputs cannot be verified" in read_recording(folder).notes
    torch.save({"input_ids": [[1, 2, 3]]}, folder / "metadata.pt")
    found = read_recording(folder)
    assert found.notes[-1] == "metadata.pt has 1 x 3 tokens, layer_0 is [1, 6, 3]: padded, or another run"


def test_a_folder_of_npy_files_is_read_with_recipes_from_their_names(tmp_path: Path) -> None:
    found = read_recording(npy_folder(tmp_path / "r"))
    assert found.recipes == ("fp32", "mode_0-int8", "mode_2_1-int8", "mode_2_4-fp8_e4m3", "quarot")
    assert found.layers("fp32") == ("layer_0", "layer_3", "layer_23")
    assert float(found.tensor("mode_2_4-fp8_e4m3", "layer_23.output")[1, 3, 2]) == 323
    assert found.input_ids() is None
    assert found.notes == (UNVERIFIED, "no manifest: the inputs cannot be verified")


@pytest.mark.parametrize("alone", [False, True], ids=["folder", "file"])
def test_an_npz_of_the_first_layer_is_read(tmp_path: Path, alone: bool) -> None:
    names = [f"mode_{mode}_{side}" for mode in ("0", "fp32") for side in ("input", "output")]
    arrays: dict[str, Any] = dict.fromkeys(names, np.full((1, 4, 3), 7, np.float32))
    np.savez_compressed(tmp_path / "mine.npz", **arrays)
    found = read_recording(tmp_path / "mine.npz" if alone else tmp_path)
    assert found.recipes == ("fp32", "mode_0-int8")
    assert found.names("fp32") == ("layer_0.input", "layer_0.output")
    assert torch.equal(found.tensor("mode_0-int8", "layer_0.input"), torch.full((1, 4, 3), 7.0))


def test_two_archives_are_not_guessed_between(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", mode_0_output=np.zeros((1, 4, 3), np.float32))
    with pytest.raises(RecordingError, match=r"has 2 \.npz files: a\.npz, b\.npz\. Give one of them\."):
        read_recording(tmp_path)


@pytest.mark.parametrize("layout", ["npy", "npz", "pt"])
def test_our_own_layouts_are_read_without_their_manifest(tmp_path: Path, layout: str) -> None:
    taps = ["inputs", "embedding", "final_norm", "logits"]
    given = probe.record(tmp_path / "r", model=Stack(3), modes=["fp32"], layers=["all"], taps=taps, batches=[IDS],
                         layout=layout)  # fmt: skip
    (tmp_path / "r" / "manifest.json").unlink()
    found = read_recording(tmp_path / "r")
    (recipe,) = found.recipes
    assert found.names(recipe) == given.names("fp32")
    for name in given.names("fp32"):
        assert torch.equal(found.tensor(recipe, name), given.tensor("fp32", name)), name


# ------------------------------------------------------------------------------------------------ files that lie


class Trap:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder / "sprung"),)


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path) -> None:
    for place in ("layer_2_output.pt", "metadata.pt"):
        folder = pt_folder(tmp_path / place)
        torch.save({"x": Trap(tmp_path)}, folder / place)
        with pytest.raises(RecordingError, match=rf"{place}: is not a \.pt file of tensors and plain values that can"):
            read_recording(folder)
        (folder / place).write_bytes(pickle.dumps(Trap(tmp_path)))
        with pytest.raises(RecordingError, match=rf"{place}: is not a \.pt file of tensors and plain values that can"):
            read_recording(folder)
    folder = npy_folder(tmp_path / "n")
    objects = np.array([Trap(tmp_path)], dtype=object)
    np.save(folder / "mode_0_layer_0.npy", objects, allow_pickle=True)
    with pytest.raises(RecordingError, match=r"mode_0_layer_0\.npy: holds object, not numbers that torch knows"):
        read_recording(folder)
    np.savez(tmp_path / "x.npz", mode_0_output=objects)
    with pytest.raises(RecordingError, match=r"x\.npz: holds object"):
        read_recording(tmp_path / "x.npz")
    assert not (tmp_path / "sprung").exists()
    pickle.loads(pickle.dumps(Trap(tmp_path)))
    assert (tmp_path / "sprung").exists(), "the trap is a real one"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def text(file: Path) -> None:
    file.write_text("404: Not Found\n")


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, text, empty])
@pytest.mark.parametrize("layout", ["safetensors", "npy", "npz", "pt"])
@pytest.mark.parametrize("believed", [False, True], ids=["with a manifest", "without"])
def test_files_that_are_cut_short_or_text_are_told_by_name(
    tmp_path: Path, damage: Any, layout: str, believed: bool
) -> None:
    folder = tmp_path / "r"
    probe.record(folder, model=Stack(2), modes=["fp32"], layers=["all"], batches=[IDS], layout=layout)
    file = max((path for path in folder.iterdir() if path.suffix == f".{layout}"), key=lambda path: path.stat().st_size)
    damage(file)
    if believed:
        if layout == "safetensors":
            return
        (folder / "manifest.json").unlink()
    with pytest.raises(RecordingError, match=rf"{file.name}: .*\. Copy the recording again") as problem:
        read_recording(folder)
    assert "\n" not in str(problem.value)
    if not believed:
        with pytest.raises(RecordingError, match=rf"{file.name}: has \d+ bytes and the manifest says \d+"):
            read_recording(folder, verify=False)


def test_without_verification_sizes_and_headers_still_count(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    probe.record(folder, model=Stack(2), modes=["fp32"], layers=["all"], batches=[IDS], layout="npy")
    file = folder / "mode_fp32_layer_1.npy"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"\x7f")
    with pytest.raises(RecordingError, match="its sha256 is"):
        read_recording(folder)
    read_recording(folder, verify=False)
    file.write_bytes(data.replace(b"(1, 6, 128)", b"(1, 128, 6)"))
    with pytest.raises(RecordingError, match=r"is float32 \[1, 128, 6\], and the manifest says float32 \[1, 6, 128\]"):
        read_recording(folder, verify=False)


def test_a_changed_byte_in_an_archive_is_found_by_its_checksum(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive, archive.open("mode_0_output.npy", "w") as member:
        np.lib.format.write_array(member, np.arange(60_000, dtype=np.float32).reshape(1, 20_000, 3))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[400] ^= 1
    (tmp_path / "x.npz").write_bytes(bytes(data))
    found = read_recording(tmp_path / "x.npz")
    with pytest.raises(RecordingError, match=r"x\.npz: is not an \.npz archive that can be read \(Bad CRC"):
        found.tensor("mode_0-int8", "layer_0.output")


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([1, 2], r"is not a tensor but a list"),
        (torch.ones(2, 2).to_sparse(), r"holds a tensor that is torch\.sparse_coo on cpu\. Expected a dense one"),
        (torch.ones(2, 2, dtype=torch.int64), r"is int64 \[2, 2\]\. Expected floats"),
        (torch.tensor(1.0), r"is float32 \[\]\. Expected floats, samples along the first axis"),
        (torch.ones(0, 2), r"is float32 \[0, 2\]\. Expected floats"),
    ],
    ids=["list", "sparse", "integers", "scalar", "empty"],
)
def test_files_that_hold_something_else_are_told(tmp_path: Path, held: Any, message: str) -> None:
    folder = pt_folder(tmp_path / "r")
    torch.save(held, folder / "layer_2_output.pt")
    with pytest.raises(RecordingError, match=rf"layer_2_output\.pt: .*{message}"):
        read_recording(folder)


def test_files_of_old_versions_of_torch_and_of_fortran_are_read(tmp_path: Path) -> None:
    folder = pt_folder(tmp_path / "r")
    torch.save(torch.full((1, 6, 3), 2.0), folder / "layer_2_output.pt", _use_new_zipfile_serialization=False)
    assert float(read_recording(folder).tensor("unknown", "layer_2.output").sum()) == 36
    other = npy_folder(tmp_path / "n")
    array = np.asfortranarray(np.arange(24, dtype=np.float64).reshape(2, 4, 3))
    np.save(other / "mode_0_layer_0.npy", array)
    found = read_recording(other).tensor("mode_0-int8", "layer_0.output")
    assert torch.equal(found, torch.from_numpy(np.ascontiguousarray(array)))


def test_a_folder_of_something_else_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(RecordingError, match=r"manifest\.json: is missing, so this is no whole recording"):
        read_recording(tmp_path)
    np.savez(tmp_path / "x.npz", other=np.zeros(3, np.float32))
    with pytest.raises(RecordingError, match=r"x\.npz: the key other is not as in mode_2-1_output"):
        read_recording(tmp_path)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    torch.save(torch.ones(1, 2, 3), tmp_path / "embedding_output.pt")
    with pytest.raises(RecordingError, match=r"has not one layer of unknown\. Expected files such as layer_0_output"):
        read_recording(tmp_path)


def test_mapping_a_large_array_takes_no_memory_of_our_own(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    shape = (2, 8, 2**20)
    np.lib.format.open_memmap(tmp_path / "r" / "mode_0_layer_0.npy", "w+", np.float32, shape).flush()

    def own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    before = own()
    tensor = read_recording(tmp_path / "r").tensor("mode_0-int8", "layer_0.output")
    assert float(tensor.sum()) == 0
    assert own() - before < 16_000


def test_token_ids_are_in_a_file_that_anyone_can_read(tmp_path: Path) -> None:
    probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=[IDS])
    assert torch.equal(load_file(tmp_path / "r" / "tokens.safetensors")["input_ids"], IDS)
