"""The tensors that are to be analysed, by name: files, one tensor of a file, folders, layers of recordings.

    x.pt  x.npy                       one tensor
    x.npz  x.safetensors              every tensor in it; x.safetensors:name is one of them, so is x.pt:name of a dict
    folder                            all of these in it, and in the folders in it
    recording                         every layer of every recipe; recording:recipe, recording:layer_0 and
                                      recording:recipe:layer_0.output choose, with * and ? as in file names

Nothing is unpickled. Names and sizes are known at once, a tensor is loaded when it is asked for.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SUFFIXES = (".pt", ".npy", ".npz", ".safetensors")


@dataclass(frozen=True)
class Source:
    """A tensor that may be loaded, or what was given in the place of one and why there is none."""

    text: str
    """As it is shown: the path, and the name in it."""
    name: str
    """Of its outputs: letters, digits, '.', '_' and '-'."""
    path: Path
    key: str = ""
    """The name in the file; of a recording recipe:tensor."""
    defect: str = ""
    """Why there is no tensor."""

    @property
    def identity(self) -> str:
        """Which tensor this is, wherever it was named from."""
        return f"{self.path.absolute()}:{self.key}"

    def load(self) -> Tensor:
        """The tensor, or a ValueError that says why there is none."""
        if self.defect:
            raise ValueError(self.defect)
        if self.path.is_dir():
            return _load_recorded(self.path, self.key)
        return READERS[self.path.suffix].load(self.path, self.key)


def sources(given: list[str]) -> list[Source]:
    """Everything that the arguments name, in order. What is wrong with one of them is told when it is loaded."""
    return [source for text in given for source in _expanded(text)]


def _expanded(text: str) -> list[Source]:
    try:
        path, chosen = _parted(text)
        if path.is_dir():
            return list(_folder(path, chosen))
        return list(_file(path, chosen))
    except (ValueError, OSError) as problem:
        return [Source(text, safe_name(Path(text).stem), Path(text), defect=str(problem))]


def _parted(text: str) -> tuple[Path, str]:
    """The path, and what stands behind the first ':' after a path that exists."""
    whole = Path(text)
    if whole.exists() or ":" not in text:
        return whole, ""
    for place in [found.start() for found in re.finditer(":", text)]:
        if Path(text[:place]).exists():
            return Path(text[:place]), text[place + 1 :]
    return Path(text.partition(":")[0]), text.partition(":")[2]


def safe_name(name: str) -> str:
    """`name` as part of a path: never empty, never hidden, never a way out of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).strip(".") or "tensor"


def _folder(folder: Path, chosen: str) -> Iterator[Source]:
    if (folder / "manifest.json").is_file():
        yield from _recording(folder, chosen)
        return
    if chosen:
        raise ValueError(f"{folder} is a folder without manifest.json, so no recording: it has no {chosen!r}.")
    found = 0
    for path in sorted(folder.iterdir()):
        wanted = _has_tensors(path) if path.is_dir() else path.suffix in SUFFIXES
        if wanted and not path.name.startswith("."):
            for source in _expanded(str(path)):
                found += 1
                yield source
    if not found:
        raise ValueError(f"{folder} has no tensor in it. Expected files that end in {', '.join(SUFFIXES)}.")


def _has_tensors(folder: Path) -> bool:
    return any(path.suffix in SUFFIXES for path in folder.rglob("*"))


def _file(path: Path, chosen: str) -> Iterator[Source]:
    if not path.exists():
        raise ValueError(f"there is no file {path}. Give a .pt, .npy, .npz or .safetensors file, or a folder of them.")
    reader = READERS.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path} does not end in {', '.join(SUFFIXES)}. Save the tensor as one of these.")
    names = reader.names(path)
    if chosen and names and chosen not in names:
        raise ValueError(f"{path} has no tensor {chosen!r}. It has: {_listed(names)}.")
    for name in [chosen] if chosen or not names else names:
        shown = f"{path}:{name}" if name else str(path)
        label = safe_name(f"{path.stem}.{name}" if name else path.stem)
        yield Source(shown, label, path, name)


def _listed(names: list[str], *, most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# --------------------------------------------------------------------------------------------------- by suffix


@dataclass(frozen=True)
class Reader:
    """How files of one suffix are read; `names` gives those of the tensors in a file, none where it is one tensor."""

    names: Callable[[Path], list[str]]
    load: Callable[[Path, str], Tensor]


def _load_pt(path: Path, name: str) -> Tensor:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:  # torch raises many kinds for what is no file of its own
        if isinstance(problem, OSError):
            raise
        reason = " ".join(str(problem).split())[:120]
        raise ValueError(f"{path} cannot be loaded without unpickling ({reason}). Save a plain tensor.") from None
    if name:
        if not isinstance(found, dict) or name not in found:
            has = f"It has: {_listed([str(key) for key in found])}." if isinstance(found, dict) else "It is no dict."
            raise ValueError(f"{path} has no tensor {name!r}. {has}")
        found = found[name]
    if isinstance(found, Tensor):
        return found
    where = f"{path}:{name}" if name else str(path)
    if isinstance(found, dict) and found:
        keys = [str(key) for key in found]
        raise ValueError(f"{where} is not a tensor but a dict of {_listed(keys)}. Name one: {where}:{keys[0]}")
    raise ValueError(f"{where} is not a tensor but a {type(found).__name__}. Save one with torch.save(tensor, path).")


def _numpy(array: object, where: str) -> Tensor:
    import numpy as np

    if not isinstance(array, np.ndarray) or array.dtype == object or array.dtype.kind not in "fiub":
        kind = getattr(array, "dtype", type(array).__name__)
        raise ValueError(f"{where} is {kind}, not numbers that torch knows. Save floats.")
    if array.dtype == np.longdouble and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))


def _load_npy(path: Path, name: str) -> Tensor:
    import numpy as np

    if name:
        raise ValueError(f"{path} is one array and has no {name!r}. Leave the name out.")
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as problem:
        raise ValueError(f"{path} is not an .npy file that can be read ({problem}). Save it again.") from None
    return _numpy(found, str(path))


def _npz_names(path: Path) -> list[str]:
    with _npz(path) as found:
        return list(found.files)


def _npz(path: Path) -> Any:
    import zipfile

    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as problem:
        raise ValueError(f"{path} is not an .npz file that can be read ({problem}). Save it again.") from None
    if not isinstance(found, np.lib.npyio.NpzFile) or not found.files:
        raise ValueError(f"{path} has no arrays in it. Save some with numpy.savez.")
    return found


def _load_npz(path: Path, name: str) -> Tensor:
    try:
        with _npz(path) as archive:
            found = archive[name]
    except ValueError as problem:
        raise ValueError(f"{path}:{name} cannot be read ({problem}). Save it again.") from None
    return _numpy(found, f"{path}:{name}")


def _safetensors_names(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as opened:
            names = sorted(opened.keys())
    except SafetensorError as problem:
        raise ValueError(f"{path} is not safetensors that can be read ({problem}). Save it again.") from None
    if not names:
        raise ValueError(f"{path} has no tensors in it. Save some with safetensors.")
    return names


def _load_safetensors(path: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        found: Tensor = opened.get_tensor(name)
        return found


#: A new kind of file is a new row, and a suffix of SUFFIXES.
READERS: dict[str, Reader] = {
    ".pt": Reader(lambda path: [], _load_pt),
    ".npy": Reader(lambda path: [], _load_npy),
    ".npz": Reader(_npz_names, _load_npz),
    ".safetensors": Reader(_safetensors_names, _load_safetensors),
}


# -------------------------------------------------------------------------------------------------- recordings


def _recording(folder: Path, chosen: str) -> Iterator[Source]:
    from probe.recordings import read_recording

    recording = read_recording(folder)
    has = [(recipe, name) for recipe in recording.recipes for name in recording.names(recipe)]
    wanted = [pair for pair in has if _chosen(chosen, *pair)]
    if not wanted:
        raise ValueError(
            f"recording {folder} has nothing that {chosen!r} chooses. It has: "
            f"{_listed([f'{recipe}:{name}' for recipe, name in has])}."
        )
    for recipe, name in wanted:
        label = safe_name(f"{folder.name}.{recipe}.{name}")
        yield Source(f"{folder}:{recipe}:{name}", label, folder, f"{recipe}:{name}")


def _load_recorded(folder: Path, key: str) -> Tensor:
    from probe.recordings import read_recording

    recipe, _, name = key.partition(":")
    return read_recording(folder, verify=False).tensor(recipe, name)  # its bytes were verified when it was listed


def _chosen(text: str, recipe: str, name: str) -> bool:
    """Without a choice the outputs of layers; a layer stands for its output."""
    first, colon, second = text.partition(":")
    if colon:
        return fnmatchcase(recipe, first) and _named(second, name)
    if not text:
        return name.endswith(".output")
    return (fnmatchcase(recipe, text) and name.endswith(".output")) or _named(text, name)


def _named(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.output")
