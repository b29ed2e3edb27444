"""What can be given to `probe scaling`: files, one tensor of a file, folders, recordings; and what cannot."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from probe import Recipe
from probe.recordings import write_recording
from probe.recordings.tensor_sources import tensor_sources
from tests.scaling.tensors import normal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    x = normal(4, 6)
    torch.save(x.bfloat16(), tmp_path / "a.pt")
    np.save(tmp_path / "b.npy", x.numpy())
    np.savez(tmp_path / "c.npz", one=x.numpy(), two=2 * x.numpy())
    (tmp_path / "deep" / "er").mkdir(parents=True)
    save_file({"w.0": x, "v/1": 3 * x}, tmp_path / "deep" / "er" / "d.safetensors")
    (tmp_path / "notes.txt").write_text("no tensor")
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_a_folder_is_walked_and_files_with_several_tensors_are_taken_apart(folder: Path) -> None:
    found = tensor_sources([str(folder)])
    assert [source.name for source in found] == ["a", "b", "c.one", "c.two", "d.v_1", "d.w.0"]
    x = normal(4, 6)
    expected = [x.bfloat16(), x, x, 2 * x, 3 * x, x]
    for source, tensor in zip(found, expected, strict=True):
        assert torch.equal(source.load(), tensor)


@pytest.mark.parametrize(
    ("given", "factor"),
    [
        ("deep/er/d.safetensors:v/1", 3),
        ("deep/er/d.safetensors:w.0", 1),
        ("c.npz:two", 2),
        ("state.pt:layer.weight", 5),
    ],
)
def test_one_tensor_of_a_file_is_named_behind_a_colon(folder: Path, given: str, factor: int) -> None:
    torch.save({"layer.weight": 5 * normal(4, 6), "step": 7}, folder / "state.pt")
    (source,) = tensor_sources([str(folder / given)])
    assert torch.equal(source.load(), factor * normal(4, 6))


def test_layers_of_a_recording_are_tensors(tmp_path: Path) -> None:
    tokens = [torch.zeros(2, 3, dtype=torch.int64)]
    parts = {name: [normal(2, 3, 4, seed=seed)] for seed, name in enumerate(("layer_0.output", "layer_1.output"))}
    recipes = [(Recipe("fp32"), {**parts, "logits": [normal(2, 3, 5)]}), (Recipe("0", "int8"), parts)]
    write_recording(tmp_path / "rec", recipes, model="m", batches=tokens, device="cpu")
    where = str(tmp_path / "rec")
    assert [source.text.removeprefix(where) for source in tensor_sources([where])] == [
        *(":fp32:layer_0.output", ":fp32:layer_1.output", ":mode_0-int8:layer_0.output", ":mode_0-int8:layer_1.output")
    ]
    (one,) = tensor_sources([f"{where}:mode_0-int8:layer_1"])
    assert torch.equal(one.load(), normal(2, 3, 4, seed=1))
    assert one.name == "rec.mode_0-int8.layer_1.output"
    assert len(tensor_sources([f"{where}:layer_0"])) == 2
    assert len(tensor_sources([f"{where}:fp32:*"])) == 3
    (wrong,) = tensor_sources([f"{where}:layer_9"])
    with pytest.raises(ValueError, match=r"has nothing that 'layer_9' chooses. It has: fp32:layer_0\.output"):
        wrong.load()


class Unpicklable:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("run by a pickle",))


def bad_files(folder: Path) -> dict[str, str]:
    torch.save({"a": torch.ones(2), "b": 1}, folder / "dict.pt")
    torch.save([1, 2], folder / "list.pt")
    (folder / "evil.pt").write_bytes(pickle.dumps(Unpicklable()))
    (folder / "noise.pt").write_bytes(b"noise")
    np.save(folder / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(folder / "text.npy", np.array(["a"]))
    (folder / "noise.npy").write_bytes(b"noise")
    (folder / "noise.npz").write_bytes(b"noise")
    (folder / "noise.safetensors").write_bytes(b"noise")
    save_file({}, folder / "none.safetensors")
    return {
        "missing.pt": "there is no file .*missing.pt",
        "missing.pt:name": "there is no file .*missing.pt",
        "notes.txt": "does not end in .pt, .npy, .npz, .safetensors",
        "dict.pt": "is not a tensor but a dict of a. Name one: .*dict.pt:a",
        "dict.pt:b": "has no tensor 'b'. It has: a.",
        "dict.pt:c": "has no tensor 'c'. It has: a.",
        "list.pt": "is not a tensor but a list. Save it again",
        "evil.pt": "is not a .pt file of tensors and plain values that can be read",
        "noise.pt": "is not a .pt file of tensors and plain values that can be read",
        "object.npy": "holds object, not numbers that torch knows",
        "text.npy": "not numbers that torch knows",
        "noise.npy": "is not an .npy array that can be read",
        "b.npy:x": "has no tensor 'x'. It is one tensor",
        "noise.npz": "is not an .npz archive that can be read",
        "c.npz:three": "has no tensor 'three'. It has: one, two.",
        "noise.safetensors": "is not safetensors that can be read",
        "none.safetensors": "has no tensors in it",
        "deep/er/d.safetensors:w": "has no tensor 'w'. It has: v/1, w.0.",
        "empty": "has no tensor in it",
        "empty:x": "no recording: it has no 'x'",
    }


def test_bad_input_is_one_clear_line_and_nothing_is_unpickled(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in bad_files(folder).items():
        (source,) = tensor_sources([str(folder / given)])
        with pytest.raises(ValueError, match=message) as caught:
            source.load()
        assert "\n" not in str(caught.value), given
    assert "run by a pickle" not in capsys.readouterr().out


def test_other_floats_are_taken(tmp_path: Path) -> None:
    torch.save(torch.ones(4).to(torch.float8_e4m3fn), tmp_path / "f8.pt")
    np.save(tmp_path / "big-endian.npy", np.ones(3, dtype=">f4"))
    np.save(tmp_path / "long.npy", np.ones(3, dtype=np.longdouble))
    np.save(tmp_path / "fortran.npy", np.asfortranarray(np.ones((2, 3))))
    for name in ("f8.pt", "big-endian.npy", "long.npy", "fortran.npy"):
        (source,) = tensor_sources([str(tmp_path / name)])
        assert float(source.load().float().sum()) in (3, 4, 6)
