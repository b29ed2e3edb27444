"""Tensor files: what is written is what is read; nothing runs, nothing is believed that the file cannot hold."""

import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from torch import Tensor

from probe.files.defects import DefectError
from probe.files.tensors import (
    SAFETENSORS_TYPES,
    Kind,
    kind_of,
    load_plain,
    load_tensor,
    npz_writer,
    numpy_dtype,
    tensors_in,
    write_npy,
    write_pt,
)
from tests.files.accidents import files_of_at_most

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
Write = Callable[[Path, dict[str, Tensor]], None]


def example(dtype: str, shape: tuple[int, ...] = (2, 3, 4)) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(shape) * 4).to(getattr(torch, dtype))


def same(one: Tensor, other: Tensor) -> bool:
    return kind_of(one) == kind_of(other) and torch.equal(one.double(), other.double())


# ------------------------------------------------------------------------------------------- written and read


@pytest.mark.parametrize("dtype", [*FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), (), (0, 3)], ids=str)
def test_every_kind_of_file_gives_back_the_tensor(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    tensor = example(dtype, shape)
    save_file({"x": tensor}, tmp_path / "a.safetensors")
    write_pt(tmp_path / "a.pt", tensor)
    write_npy(tmp_path / "a.npy", tensor)
    with npz_writer(tmp_path / "a.npz") as add:
        add("x", tensor)
    in_numpy = tensor.to(getattr(torch, numpy_dtype(dtype)))
    for suffix, name, expected in (
        ("safetensors", "x", tensor), ("pt", None, tensor), ("npy", None, in_numpy), ("npz", "x", in_numpy)
    ):  # fmt: skip
        file = tmp_path / f"a.{suffix}"
        assert tensors_in(file) == {name: kind_of(expected)}
        assert same(load_tensor(file, name), expected)
    assert np.array_equal(np.load(tmp_path / "a.npy", allow_pickle=False), in_numpy.numpy())
    assert np.array_equal(np.load(tmp_path / "a.npz", allow_pickle=False)["x"], in_numpy.numpy())


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.dictionaries(
        st.text("abc._0", min_size=1, max_size=6),
        st.tuples(st.sampled_from(FLOATS), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
        min_size=1,
        max_size=4,
    )
)
def test_any_tensors_in_one_file(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    folder = tmp_path_factory.mktemp("t")
    given = {name: example(*kind) for name, kind in tensors.items()}
    save_file(given, folder / "a.safetensors")
    write_pt(folder / "a.pt", {**given, "step": 3, 4: torch.ones(2)})
    with npz_writer(folder / "a.npz") as add:
        for name, tensor in given.items():
            add(name, tensor)
    assert tensors_in(folder / "a.safetensors") == {name: Kind(*kind) for name, kind in tensors.items()}
    assert tensors_in(folder / "a.pt") == tensors_in(folder / "a.safetensors"), "only tensors, only names"
    assert list(tensors_in(folder / "a.npz")) == list(given), "in the order of the file"
    for name, tensor in given.items():
        assert same(load_tensor(folder / "a.safetensors", name), tensor)
        assert same(load_tensor(folder / "a.pt", name), tensor)
        assert torch.equal(load_tensor(folder / "a.npz", name).double(), tensor.double())


def test_every_type_that_torch_and_safetensors_share_is_known(tmp_path: Path) -> None:
    for dtype in SAFETENSORS_TYPES:
        if dtype == "float8_e8m0fnu":
            continue  # safetensors of this version does not write it
        save_file({"x": torch.zeros(2).to(getattr(torch, dtype))}, tmp_path / "a.safetensors")
        assert tensors_in(tmp_path / "a.safetensors") == {"x": Kind(dtype, (2,))}


def test_an_archive_has_the_same_bytes_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for year, name in ((2001, "a.npz"), (2030, "b.npz")):
        monkeypatch.setattr("time.localtime", lambda *when, year=year: (year, 1, 1, 0, 0, 0, 0, 1, 0))
        with npz_writer(tmp_path / name) as add:
            add("x", torch.ones(3))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_arrays_of_other_machines_are_read(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    arrays = {
        "big endian": (values.astype(">f4"), "float32"),
        "fortran": (np.asfortranarray(values), "float64"),
        "long": (values.astype(np.longdouble), "float64"),
        "fortran big": (np.asfortranarray(values.astype(">f8")), "float64"),
        "whole": (values.astype(np.int16), "int16"),
    }
    np.savez(tmp_path / "a.npz", **{name: array for name, (array, _) in arrays.items()})  # type: ignore[arg-type]
    for name, (array, dtype) in arrays.items():
        np.save(tmp_path / "a.npy", array)
        for file, key in ((tmp_path / "a.npy", None), (tmp_path / "a.npz", name)):
            assert tensors_in(file)[key] == Kind(dtype, (2, 3, 4))
            assert torch.equal(load_tensor(file, key).double(), torch.from_numpy(values)), (name, file)


def test_a_mapped_tensor_can_be_changed_without_changing_the_file(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", torch.ones(3))
    write_pt(tmp_path / "a.pt", torch.ones(3))
    for file in (tmp_path / "a.npy", tmp_path / "a.pt"):
        load_tensor(file).zero_()
        assert torch.equal(load_tensor(file), torch.ones(3))


def test_files_of_old_versions_of_torch_are_read(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(load_tensor(tmp_path / "a.pt"), torch.ones(3))


def test_plain_values_beside_tensors(tmp_path: Path) -> None:
    write_pt(tmp_path / "a.pt", {"prompt": "hi", "ids": torch.arange(3), "none": None})
    found = load_plain(tmp_path / "a.pt")
    assert (found["prompt"], found["none"]) == ("hi", None)
    assert torch.equal(found["ids"], torch.arange(3))


# ------------------------------------------------------------------------------------------------ files that lie


class Trap:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder / "sprung"),)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    trap = Trap(tmp_path)
    objects = np.array([trap], dtype=object)
    torch.save({"x": trap}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(trap))
    np.save(tmp_path / "a.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=objects)
    (tmp_path / "a.safetensors").write_bytes(pickle.dumps(trap))
    for name in ("a.pt", "b.pt", "a.npy", "a.npz", "a.safetensors"):
        for read in (tensors_in, lambda file: load_tensor(file, None if file.suffix in (".pt", ".npy") else "x")):
            with pytest.raises(DefectError, match=r"that can be read|holds object, not numbers"):
                read(tmp_path / name)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(pickle.dumps(trap))
    assert (tmp_path / "sprung").exists(), "the trap is a real one"


@pytest.mark.parametrize("suffix", ["safetensors", "npy", "npz", "pt"])
def test_a_file_cut_anywhere_or_full_of_noise_is_a_defect(tmp_path: Path, suffix: str) -> None:
    name = "x" if suffix in ("safetensors", "npz") else None
    save_file({"x": torch.ones(40)}, tmp_path / "a.safetensors")
    write_npy(tmp_path / "a.npy", torch.ones(40))
    write_pt(tmp_path / "a.pt", torch.ones(40))
    with npz_writer(tmp_path / "a.npz") as add:
        add("x", torch.ones(40))
    file = tmp_path / f"a.{suffix}"
    data = file.read_bytes()
    for length in (0, 3, len(data) // 3, len(data) // 2, len(data) - 20, len(data) - 1):
        for content in (data[:length], b"404: Not Found\n"[:length]):
            file.write_bytes(content)
            for read in (tensors_in, lambda file: load_tensor(file, name)):
                with pytest.raises(DefectError) as problem:
                    read(file)
                assert "\n" not in str(problem.value)
    file.write_bytes(data)
    assert torch.equal(load_tensor(file, name), torch.ones(40))


def test_a_header_that_claims_more_than_the_file_holds_is_a_defect(tmp_path: Path) -> None:
    """Nothing of that size is ever allocated."""
    write_npy(tmp_path / "a.npy", torch.ones(9))
    data = (tmp_path / "a.npy").read_bytes()
    claim = data.replace(b"(9,), }" + b" " * 12, b"(9999999999999,), }")
    assert claim != data
    (tmp_path / "a.npy").write_bytes(claim)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", claim)
    for file, name in ((tmp_path / "a.npy", None), (tmp_path / "a.npz", "x")):
        for read in (tensors_in, lambda file, name=name: load_tensor(file, name)):
            with pytest.raises(DefectError, match=r"has \d+ bytes, and an array of float32 \[9999999999999\] takes"):
                read(file)


def test_an_archive_that_lies_about_a_size_gives_no_memory_of_ours(tmp_path: Path) -> None:
    """The directory of the archive claims as many bytes as the header does; the member has fewer."""
    write_npy(tmp_path / "a.npy", torch.ones(1000))
    whole = (tmp_path / "a.npy").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", whole[:-2000])
    data = (tmp_path / "a.npz").read_bytes()
    lie = data.replace(struct.pack("<L", len(whole) - 2000), struct.pack("<L", len(whole)))
    assert lie != data
    (tmp_path / "a.npz").write_bytes(lie)
    with pytest.raises(DefectError, match=r"x ends 2000 bytes early: it is cut short|that can be read"):
        load_tensor(tmp_path / "a.npz", "x")


def test_a_changed_byte_in_an_archive_is_found_by_its_checksum(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array(member, np.arange(60_000, dtype=np.float32))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[400] ^= 1
    (tmp_path / "a.npz").write_bytes(bytes(data))
    assert tensors_in(tmp_path / "a.npz") == {"x": Kind("float32", (60_000,))}
    with pytest.raises(DefectError, match=r"is not an \.npz archive that can be read \(Bad CRC"):
        load_tensor(tmp_path / "a.npz", "x")


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ([1, 2], None, "is not a tensor but a list"),
        ({"a": 1, "b": "x"}, None, "is not a tensor but a dict of a, b, none of which is one"),
        ({}, None, "is not a tensor but a dict of nothing, none of which is one"),
        ({"a": torch.ones(2), "b": 1}, None, "is not a tensor but a dict of a$"),
        ({"a": torch.ones(2), "b": 1}, "b", "has no tensor 'b'"),
        (torch.ones(2), "a", "has no tensor 'a'"),
        (torch.ones(2, 2).to_sparse(), None, r"holds a tensor that is torch\.sparse_coo on cpu\. Expected a dense one"),
    ],
)
def test_a_pt_file_of_something_else_says_what_it_is(
    tmp_path: Path, content: Any, name: str | None, message: str
) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(DefectError, match=message):
        load_tensor(tmp_path / "a.pt", name)


def test_names_that_a_file_does_not_have(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    write_npy(tmp_path / "a.npy", torch.ones(2))
    with npz_writer(tmp_path / "a.npz") as add:
        add("x", torch.ones(2))
    for suffix, message in (("safetensors", "y"), ("npz", "y"), ("npy", "is one array and has no 'y'")):
        with pytest.raises(DefectError, match=message):
            load_tensor(tmp_path / f"a.{suffix}", "y")
    np.save(tmp_path / "a.npy", np.array(["text"]))
    with pytest.raises(
        DefectError, match=r"holds <U4, not numbers that torch knows\. Expected floats, such as float32"
    ):
        tensors_in(tmp_path / "a.npy")


def test_a_file_that_is_not_there_is_a_refusal_of_the_system(tmp_path: Path) -> None:
    for suffix in ("safetensors", "npy", "npz", "pt"):
        for read in (tensors_in, lambda file: load_tensor(file, "x" if file.suffix != ".npy" else None)):
            with pytest.raises(FileNotFoundError):
                read(tmp_path / f"a.{suffix}")


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    def archive(file: Path, tensor: Tensor) -> None:
        with npz_writer(file) as add:
            add("x", tensor)

    for write in (write_npy, write_pt, archive):
        with pytest.raises(OSError, match="File too large"), files_of_at_most(10_000):
            write(tmp_path / "a", torch.randn(100_000))


def test_a_large_array_is_mapped_and_not_loaded(tmp_path: Path) -> None:
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float32, (2**24,)).flush()
    torch.save(torch.zeros(2**24), tmp_path / "a.pt")

    def own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    for name in ("a.npy", "a.pt"):
        before = own()
        tensor = load_tensor(tmp_path / name)
        assert float(tensor.sum()) == 0
        assert own() - before < 16_000


def test_the_header_of_safetensors_is_parsed_once_for_all_of_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, opened = tmp_path / "a.safetensors", Mock(wraps=safetensors.safe_open)
    monkeypatch.setattr("safetensors.safe_open", opened)
    for turn in range(2):  # a file that was replaced is parsed anew
        tensors = {f"x{place}": example("bfloat16") + place + turn for place in range(50)}
        save_file(tensors, file)
        os.utime(file, ns=(turn, turn))
        assert all(same(load_tensor(file, name), tensor) for name, tensor in tensors.items())
    assert opened.call_count == 2
