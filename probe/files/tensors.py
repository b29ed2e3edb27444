"""Tensor files, .safetensors .npy .npz .pt: what is in one without loading it, one tensor of it, and writing one.

Nothing is ever unpickled, and what a header claims is checked against the size of the file. Whatever is wrong with a
file is a DefectError (`reading` names the file). Sizes beyond memory are no problem: tensors are mapped from the disk
where the file allows it, and .npy and .npz files are written row by row.
"""

import math
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from probe.files.atomic import create
from probe.files.defects import DefectError, parsing
from probe.words import first_few

#: Types as torch calls them, and as safetensors does. Others keep the name of safetensors.
SAFETENSORS_TYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL", "complex64": "C64"},
    **{"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8"},
}
_TORCH_TYPES = {theirs: ours for ours, theirs in SAFETENSORS_TYPES.items()}
CHUNK = 1 << 20


class Kind(NamedTuple):
    """The type of a tensor, as torch calls it (`bfloat16`), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def kind_of(tensor: Tensor) -> Kind:
    """The kind of a tensor in memory."""
    return Kind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensors_in(file: Path) -> dict[str | None, Kind]:
    """The tensors of a file by name, in its order; None is the name in a file that is one tensor."""
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
    with _safetensors(file) as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


# ------------------------------------------------------------------------------------------------------ numpy


class _Header(NamedTuple):
    """Of an array: its type as it is stored, and whether its memory is in the order of Fortran."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool

    @property
    def loaded(self) -> np.dtype[Any]:
        """The type in memory: torch has neither the other byte order nor floats of more than 64 bits."""
        return np.dtype(np.float64) if self.dtype.char == "g" else self.dtype.newbyteorder("=")

    @property
    def kind(self) -> Kind:
        return Kind(str(self.loaded), self.shape)


def _header(stream: IO[bytes], size: int) -> _Header:
    """Read the head of an array, once `size` bytes are known to hold it whole."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.kind not in "fiub":
        raise DefectError(f"holds {dtype}, not numbers that torch knows. Expected floats, such as float32")
    expected = stream.tell() + math.prod(shape) * dtype.itemsize
    if size != expected:
        raise DefectError(f"has {size} bytes, and an array of {dtype} {list(shape)} takes {expected}: it is cut short")
    return _Header(dtype, shape, fortran)


def _tensor_of(array: np.ndarray[Any, Any], header: _Header) -> Tensor:
    return torch.from_numpy(array if array.dtype == header.loaded else array.astype(header.loaded))


def _npy_header(file: Path) -> _Header:
    with parsing("an .npy array"), open(file, "rb") as stream:
        return _header(stream, file.stat().st_size)


def _kinds_of_npy(file: Path) -> dict[str | None, Kind]:
    return {None: _npy_header(file).kind}


def _load_npy(file: Path, name: str | None) -> Tensor:
    if name is not None:
        raise DefectError(f"is one array and has no {name!r}", remedy="Leave the name out.")
    header = _npy_header(file)
    mode: Any = "c" if math.prod(header.shape) else None  # torch wants writable memory; nothing cannot be mapped
    with parsing("an .npy array"):
        return _tensor_of(np.load(file, mmap_mode=mode, allow_pickle=False), header)


def _kinds_of_npz(file: Path) -> dict[str | None, Kind]:
    with parsing("an .npz archive"), zipfile.ZipFile(file) as archive:
        found: dict[str | None, Kind] = {}
        for member in archive.infolist():
            with archive.open(member) as stream:
                found[member.filename.removesuffix(".npy")] = _header(stream, member.file_size).kind
        return found


def _load_npz(file: Path, name: str | None) -> Tensor:
    with parsing("an .npz archive"), zipfile.ZipFile(file) as archive:
        member = archive.getinfo(f"{name}.npy")
        with archive.open(member) as stream:
            header = _header(stream, member.file_size)
            values = np.empty(math.prod(header.shape), header.dtype)
            left = values.view(np.uint8).data
            while chunk := stream.read(CHUNK):  # to the end, where zipfile compares the checksum
                left[: len(chunk)] = chunk
                left = left[len(chunk) :]
        if len(left):
            raise DefectError(f"{name} ends {len(left)} bytes early: it is cut short")
        return _tensor_of(values.reshape(header.shape, order="F" if header.fortran else "C"), header)


def numpy_dtype(dtype: str) -> str:
    """The type in which numpy holds all values of a torch type: the same, or float32 where numpy has none."""
    return dtype if hasattr(np, dtype) else "float32"


def write_npy(file: Path, tensor: Tensor) -> None:
    """Write a new file, not yet synced to the disk; types that numpy lacks become float32."""
    with create(file) as stream:
        _write_array(stream, tensor)


@contextmanager
def npz_writer(file: Path) -> Iterator[Callable[[str, Tensor], None]]:
    """Yields `add(name, tensor)` of a new compressed archive. The same tensors give the same bytes at any time."""
    with create(file) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, tensor: Tensor) -> None:
            member = zipfile.ZipInfo(f"{name}.npy")  # without a time of its own
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
    """What a .pt file holds: tensors and plain values only, tensors mapped where the file allows it."""
    with parsing("a .pt file of tensors and plain values"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mapped = zipfile.is_zipfile(file)  # files of old versions of torch cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _pt_tensors(file: Path) -> dict[str | None, Tensor]:
    found = load_plain(file)
    tensors: dict[str | None, Tensor] = {None: found}
    if isinstance(found, Mapping):
        tensors = {name: one for name, one in found.items() if isinstance(name, str) and _is_dense(one)}
        if not tensors:
            keys = first_few([str(key) for key in found]) or "nothing"
            raise DefectError(f"is not a tensor but a dict of {keys}, none of which is one")
    elif not isinstance(found, Tensor):
        raise DefectError(f"is not a tensor but a {type(found).__name__}")
    elif not _is_dense(found):
        raise DefectError(f"holds a tensor that is {found.layout} on {found.device}. Expected a dense one")
    return tensors


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _kinds_of_pt(file: Path) -> dict[str | None, Kind]:
    return {name: kind_of(tensor) for name, tensor in _pt_tensors(file).items()}


def _load_pt(file: Path, name: str | None) -> Tensor:
    tensors = _pt_tensors(file)
    if name not in tensors:
        if name is not None:
            raise DefectError(f"has no tensor {name!r}")
        raise DefectError(f"is not a tensor but a dict of {first_few([str(one) for one in tensors])}")
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
