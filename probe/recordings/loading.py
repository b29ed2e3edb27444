"""The four kinds of files that hold tensors: what is in one, without loading it, and one tensor of it.

Files from elsewhere are never unpickled: weights_only=True, allow_pickle=False, safetensors.
"""

import math
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from probe.recordings.checked import defect
from probe.recordings.disk import reading
from probe.recordings.format import DTYPES, NUMPY_DTYPES, Layout

Kind = tuple[str, tuple[int, ...]]  # dtype as torch calls it, shape
TORCH_NAMES = {name: torch_name for torch_name, name in DTYPES.items()}


@dataclass(frozen=True)
class Reader:
    """How files of a layout are read; `None` is the key of a file that is one tensor."""

    kinds: Callable[[Path], dict[str | None, Kind]]
    load: Callable[[Path, str | None], Tensor]


# ------------------------------------------------------------------------------------------------ safetensors


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with reading(file, "safetensors"), safe_open(file, "pt") as stored:
        yield stored


def _kinds_of_safetensors(file: Path) -> dict[str | None, Kind]:
    with _opened(file) as stored:
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        return {
            name: (TORCH_NAMES.get(one.get_dtype(), one.get_dtype()), tuple(one.get_shape()))
            for name, one in slices.items()
        }


def _load_safetensors(file: Path, key: str | None) -> Tensor:
    with _opened(file) as stored:
        tensor: Tensor = stored.get_tensor(key)
        return tensor


# ------------------------------------------------------------------------------------------------------ numpy


def _header(stream: IO[bytes], size: int, file: Path) -> tuple[Kind, bool]:
    """dtype and shape of an array, and whether it is in Fortran's order, once `size` bytes are known to hold it."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if str(dtype) not in NUMPY_DTYPES:
        raise defect(file, f"holds {dtype}. Expected {', '.join(NUMPY_DTYPES)}")
    expected = stream.tell() + math.prod(shape) * dtype.itemsize
    if size != expected:
        raise defect(file, f"has {size} bytes, and an array of {dtype} {list(shape)} takes {expected}: it is cut short")
    return (str(dtype), tuple(shape)), fortran


def _kinds_of_npy(file: Path) -> dict[str | None, Kind]:
    with reading(file, "an .npy array"), open(file, "rb") as stream:
        return {None: _header(stream, file.stat().st_size, file)[0]}


def _load_npy(file: Path, key: str | None) -> Tensor:
    _kinds_of_npy(file)
    with reading(file, "an .npy array"):  # mapped; torch wants writable memory, and a private map is
        return torch.from_numpy(np.load(file, mmap_mode="c", allow_pickle=False))


def _kinds_of_npz(file: Path) -> dict[str | None, Kind]:
    with reading(file, "an .npz archive"), zipfile.ZipFile(file) as archive:
        found: dict[str | None, Kind] = {}
        for member in archive.infolist():
            with archive.open(member) as stream:
                found[member.filename.removesuffix(".npy")] = _header(stream, member.file_size, file)[0]
        return found


def _load_npz(file: Path, key: str | None) -> Tensor:
    with reading(file, "an .npz archive"), zipfile.ZipFile(file) as archive:
        member = archive.getinfo(f"{key}.npy")
        with archive.open(member) as stream:
            (dtype, shape), fortran = _header(stream, member.file_size, file)
            values = np.empty(math.prod(shape), dtype)
            left = values.data.cast("B")
            while chunk := stream.read(1 << 20):  # to the end, which is where the checksum is looked at
                left[: len(chunk)] = chunk
                left = left[len(chunk) :]
        return torch.from_numpy(values.reshape(shape, order="F" if fortran else "C"))


# --------------------------------------------------------------------------------------------------------- pt


def load_plain(file: Path) -> Any:
    """What a .pt file holds: tensors and plain values only, tensors mapped where the file allows."""
    with reading(file, "a .pt file of tensors and plain values"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mapped = zipfile.is_zipfile(file)  # files of old versions of torch cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _load_pt(file: Path, key: str | None) -> Tensor:
    tensor = load_plain(file)
    if not isinstance(tensor, Tensor):
        raise defect(file, f"holds a {type(tensor).__name__}. Expected one tensor")
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise defect(file, f"holds a tensor that is {tensor.layout} on {tensor.device}. Expected a dense one")
    return tensor.detach()


def _kinds_of_pt(file: Path) -> dict[str | None, Kind]:
    tensor = _load_pt(file, None)
    return {None: (dtype_of(tensor), tuple(tensor.shape))}


READERS: dict[Layout, Reader] = {
    "safetensors": Reader(_kinds_of_safetensors, _load_safetensors),
    "npy": Reader(_kinds_of_npy, _load_npy),
    "npz": Reader(_kinds_of_npz, _load_npz),
    "pt": Reader(_kinds_of_pt, _load_pt),
}


def dtype_of(tensor: Tensor) -> str:
    """As torch calls it: float32."""
    return str(tensor.dtype).removeprefix("torch.")


def stored_dtype(layout: Layout, dtype: str) -> str:
    """The dtype in the file of a tensor that the model gave in `dtype`."""
    return "float32" if layout in ("npy", "npz") and dtype not in NUMPY_DTYPES else dtype


def load_token_ids(file: Path) -> Tensor:
    """The token ids of a recording, int64 [samples, tokens]."""
    ids = _load_safetensors(file, "input_ids")
    if ids.dtype != torch.int64 or ids.dim() != 2:
        raise defect(file, f"its input_ids are {dtype_of(ids)} {list(ids.shape)}. Expected int64 [samples, tokens]")
    return ids
