"""Tensor files (.safetensors, .npy, .npz, .pt): list their tensors without loading them, load one, write one.

Nothing is ever unpickled, and the claims of a header are checked against the size of the file. Whatever is wrong with
a file is a DefectError (`reading` adds the name of the file). Tensors larger than memory can be used: they are mapped
from the disk where the file allows it, and .npy and .npz files are written row by row.
"""

import json
import math
import mmap
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from probe.files.atomic import create
from probe.files.defects import DefectError, parsing
from probe.words import first_few

#: Torch's name of each type, and that of safetensors. A type that torch lacks keeps its safetensors name.
SAFETENSORS_TYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL", "complex64": "C64"},
    **{"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8"},
}
_TORCH_TYPES = {theirs: torchs for torchs, theirs in SAFETENSORS_TYPES.items()}
CHUNK = 1 << 20


class Kind(NamedTuple):
    """The type of a tensor, as torch calls it (`bfloat16`), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def kind_of(tensor: Tensor) -> Kind:
    """The type and shape of a tensor in memory."""
    return Kind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensors_in(file: Path) -> dict[str | None, Kind]:
    """The tensors of a file by name, in the order of the file; a file that is one tensor has the name None."""
    return _READERS[file.suffix].kinds(file)


def load_tensor(file: Path, name: str | None = None) -> Tensor:
    """One tensor, on the CPU. Writing to a mapped tensor changes neither the file nor another mapping of it."""
    return _READERS[file.suffix].load(file, name)


# ------------------------------------------------------------------------------------------------ safetensors


@contextmanager
def _safetensors(file: Path) -> Iterator[Any]:
    from safetensors import safe_open

    with parsing("safetensors"), safe_open(file, "pt") as opened:
        yield opened


def _kinds_of_safetensors(file: Path) -> dict[str | None, Kind]:
    with _safetensors(file) as opened:
        heads = {name: opened.get_slice(name) for name in sorted(opened.keys())}
        return {
            name: Kind(_TORCH_TYPES.get(head.get_dtype(), head.get_dtype()), tuple(head.get_shape()))
            for name, head in heads.items()
        }


def _load_safetensors(file: Path, name: str | None) -> Tensor:
    with parsing("safetensors"):
        places = _safetensors_places(file, _version(file))
        if name not in places:
            raise DefectError(f"has no tensor {name!r}")
        kind, start = places[name]
        dtype, count = getattr(torch, kind.dtype), math.prod(kind.shape)
        if not count:  # nothing cannot be mapped
            return torch.empty(kind.shape, dtype=dtype)
        before = start % mmap.ALLOCATIONGRANULARITY
        with open(file, "rb") as stream:
            size = before + count * dtype.itemsize
            mapped = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY, offset=start - before)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=before).reshape(kind.shape)


def _version(file: Path) -> tuple[int, int, int]:
    """What changes with the contents of a file."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=8)
def _safetensors_places(file: Path, version: tuple[int, int, int]) -> dict[str | None, tuple[Kind, int]]:
    """Kind and first byte of every tensor of a `version` of a file.

    The header is parsed once: parsing it for each tensor would take time quadratic in their number.
    """
    kinds = _kinds_of_safetensors(file)  # which checks the header
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {name: (kind, 8 + length + header[name]["data_offsets"][0]) for name, kind in kinds.items()}


# ------------------------------------------------------------------------------------------------------ numpy


def _checked_kind(stream: IO[bytes], size: int) -> Kind:
    """The kind of the array in a stream of `size` bytes, which must be exactly what its header claims."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.kind not in "fiub":
        raise DefectError(f"holds {dtype}, not numbers that torch knows. Expected floats, such as float32")
    expected = stream.tell() + math.prod(shape) * dtype.itemsize
    if size != expected:
        raise DefectError(f"has {size} bytes, and an array of {dtype} {list(shape)} takes {expected}: it is cut short")
    return Kind(str(_native(dtype)), shape)


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in memory: torch has neither the other byte order nor floats of more than 64 bits."""
    return np.dtype(np.float64) if dtype.char == "g" else dtype.newbyteorder("=")


def _tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(array.astype(_native(array.dtype), copy=False))


def _kinds_of_npy(file: Path) -> dict[str | None, Kind]:
    with parsing("an .npy array"), open(file, "rb") as stream:
        return {None: _checked_kind(stream, file.stat().st_size)}


def _load_npy(file: Path, name: str | None) -> Tensor:
    if name is not None:
        raise DefectError(f"is one array and has no {name!r}", remedy="Leave the name out.")
    size = math.prod(_kinds_of_npy(file)[None].shape)
    mode: Any = "c" if size else None  # torch wants writable memory; an empty array cannot be mapped
    with parsing("an .npy array"):
        return _tensor_of(np.load(file, mmap_mode=mode, allow_pickle=False))


def _kinds_of_npz(file: Path) -> dict[str | None, Kind]:
    with parsing("an .npz archive"), zipfile.ZipFile(file) as archive:
        kinds: dict[str | None, Kind] = {}
        for member in archive.infolist():
            with archive.open(member) as stream:
                kinds[member.filename.removesuffix(".npy")] = _checked_kind(stream, member.file_size)
        return kinds


def _load_npz(file: Path, name: str | None) -> Tensor:
    with parsing("an .npz archive"):
        member = _npz_members(file, _version(file)).get(f"{name}.npy")
        if member is None:
            raise DefectError(f"has no array {name!r}")
        with _opened_member(file, member) as stream:
            _checked_kind(stream, member.file_size)
            stream.seek(0)
            return _tensor_of(np.lib.format.read_array(stream, allow_pickle=False))  # zipfile compares the checksum


@lru_cache(maxsize=8)
def _npz_members(file: Path, version: tuple[int, int, int]) -> dict[str, zipfile.ZipInfo]:
    """The arrays of a `version` of an archive, whose directory is parsed once, as is the header of safetensors."""
    with zipfile.ZipFile(file) as archive:
        return {member.filename: member for member in archive.infolist()}


@contextmanager
def _opened_member(file: Path, member: zipfile.ZipInfo) -> Iterator[IO[bytes]]:
    """One member of an archive whose directory was read before. Its own header, of 30 bytes and two texts, is skipped.

    `ZipFile.open` does the same, but a ZipFile has to read the whole directory first.
    """
    with open(file, "rb") as stream:
        stream.seek(member.header_offset)
        header = stream.read(30)
        if header[:4] != b"PK\3\4" or len(header) < 30 or member.flag_bits & 1:
            raise DefectError(f"has no array at the place of {member.filename!r}, or one with a password")
        stream.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), os.SEEK_CUR)
        with zipfile.ZipExtFile(stream, "r", member) as opened:
            yield cast(IO[bytes], opened)


def numpy_dtype(dtype: str) -> str:
    """The numpy type that represents all values of a torch type: the same, or float32 where numpy has none."""
    return dtype if hasattr(np, dtype) else "float32"


def write_npy(file: Path, tensor: Tensor) -> None:
    """Write a new file, not yet synced to the disk; types that numpy lacks become float32."""
    with create(file) as stream:
        _write_array(stream, tensor)


@contextmanager
def npz_writer(file: Path) -> Iterator[Callable[[str, Tensor], None]]:
    """Yields `add(name, tensor)` for a new compressed archive. The same tensors always give the same bytes."""
    with create(file) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, tensor: Tensor) -> None:
            member = zipfile.ZipInfo(f"{name}.npy")  # without the present time
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as opened:
                _write_array(opened, tensor)

        yield add


def _write_array(stream: IO[bytes], tensor: Tensor) -> None:
    dtype = numpy_dtype(kind_of(tensor).dtype)
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": tuple(tensor.shape)}
    np.lib.format.write_array_header_1_0(stream, header)
    for row in tensor if tensor.dim() else tensor[None]:
        stream.write(row.to(getattr(torch, dtype)).reshape(-1).view(torch.uint8).numpy().data)


# --------------------------------------------------------------------------------------------------------- pt


def load_plain(file: Path) -> Any:
    """The content of a .pt file of tensors and plain values; tensors are mapped where the file allows it."""
    with parsing("a .pt file of tensors and plain values"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mapped = zipfile.is_zipfile(file)  # files of old versions of torch cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _pt_tensors(file: Path) -> dict[str | None, Tensor]:
    content = load_plain(file)
    if isinstance(content, Mapping):
        tensors: dict[str | None, Tensor] = {
            name: value for name, value in content.items() if isinstance(name, str) and _is_dense(value)
        }
        if not tensors:
            keys = first_few([str(key) for key in content]) or "nothing"
            raise DefectError(f"is not a tensor but a dict of {keys}, none of which is one")
        for tensor in tensors.values():
            check_storage(tensor)
        return tensors
    if not isinstance(content, Tensor):
        raise DefectError(f"is not a tensor but a {type(content).__name__}")
    if not _is_dense(content):
        special = "nested" if content.is_nested else "quantized" if content.is_quantized else str(content.layout)
        raise DefectError(f"holds a tensor that is {special} on {content.device}. Expected a dense one")
    check_storage(content)
    return {None: content}


def check_storage(tensor: Tensor) -> None:
    """Refuse a tensor with more elements than its file holds: a view by strides, which may claim any size."""
    stored = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.element_size() > stored:
        raise DefectError(
            f"claims a tensor of {kind_of(tensor)} and holds {stored} bytes of it",
            remedy="If that is meant, save it again after .contiguous().",
        )


def _is_dense(value: Any) -> bool:
    plain = isinstance(value, Tensor) and not value.is_nested and not value.is_quantized
    return plain and value.layout == torch.strided and value.device.type == "cpu"


def _kinds_of_pt(file: Path) -> dict[str | None, Kind]:
    return {name: kind_of(tensor) for name, tensor in _pt_tensors(file).items()}


def _load_pt(file: Path, name: str | None) -> Tensor:
    tensors = _pt_tensors(file)
    if name not in tensors:
        if name is not None:
            raise DefectError(f"has no tensor {name!r}")
        raise DefectError(f"is not a tensor but a dict of {first_few([str(key) for key in tensors])}")
    return tensors[name].detach()


def write_pt(file: Path, value: Any) -> None:
    """Write a new file with a tensor, or with tensors and plain values, not yet synced to the disk."""
    with create(file) as stream:
        try:
            torch.save(value, stream)
        except RuntimeError as problem:
            if isinstance(problem.__context__, OSError):  # torch hides a full disk behind an error of its own
                raise problem.__context__ from None
            raise


class _Reader(NamedTuple):
    kinds: Callable[[Path], dict[str | None, Kind]]
    load: Callable[[Path, str | None], Tensor]


#: A new kind of file is a new row.
_READERS = {
    ".safetensors": _Reader(_kinds_of_safetensors, _load_safetensors),
    ".npy": _Reader(_kinds_of_npy, _load_npy),
    ".npz": _Reader(_kinds_of_npz, _load_npz),
    ".pt": _Reader(_kinds_of_pt, _load_pt),
}
