"""Tensors named on a command line: files, one tensor of a file, folders, layers of recordings.

    x.pt  x.npy                       one tensor
    x.npz  x.safetensors              every tensor in it; x.safetensors:name, and x.pt:name of a dict, is one of them
    folder                            all of these in it, and in the folders in it
    recording                         every layer of every recipe; recording:recipe, recording:layer_0 and
                                      recording:recipe:layer_0.output choose, with * and ? as in file names

Nothing is unpickled. Names are listed at once; a tensor is loaded by `TensorSource.load`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from torch import Tensor

from probe.files.defects import reading
from probe.files.paths import safe_name
from probe.files.tensors import load_tensor, tensors_in
from probe.recordings.manifest import MANIFEST
from probe.recordings.reading import read_recording
from probe.words import first_few

_reading = partial(reading, error=ValueError, remedy="Save it again, as plain numbers.")
SUFFIXES = (".pt", ".npy", ".npz", ".safetensors")


@dataclass(frozen=True)
class TensorSource:
    """A tensor that can be loaded, or an argument that names no tensor (`defect`)."""

    text: str
    """The path and the name in it, for messages."""
    name: str
    """The name for output files: letters, digits, '.', '_' and '-'."""
    path: Path
    key: str = ""
    """The name in the file; recipe:tensor in a recording."""
    defect: str = ""
    """Why there is no tensor."""
    values: int = 0
    """How many values it has."""

    @property
    def identity(self) -> str:
        """The same for the same tensor, however the arguments name it."""
        return f"{self.path.absolute()}:{self.key}"

    def load(self) -> Tensor:
        """The tensor, or a ValueError that says why there is none."""
        if self.defect:
            raise ValueError(self.defect)
        if self.path.is_dir():
            recipe, _, name = self.key.partition(":")
            return read_recording(self.path, verify=False).tensor(recipe, name)  # verified when it was listed
        with _reading(self.path):
            return load_tensor(self.path, self.key or None)


def tensor_sources(given: list[str]) -> list[TensorSource]:
    """Every tensor that the arguments name, in order. A wrong argument is a source that raises when it is loaded."""
    return [source for text in given for source in _expanded(text)]


def _expanded(text: str) -> list[TensorSource]:
    try:
        path, chosen = _split(text)
        return list(_folder(path, chosen) if path.is_dir() else _file(path, chosen))
    except (ValueError, OSError) as problem:
        return [TensorSource(text, safe_name(Path(text).stem), Path(text), defect=str(problem))]


def _split(text: str) -> tuple[Path, str]:
    """The path, and the text after it: they are split at the first ':' that follows an existing path."""
    colons = [place for place, character in enumerate(text) if character == ":"]
    if Path(text).exists() or not colons:
        return Path(text), ""
    end = next((place for place in colons if Path(text[:place]).exists()), colons[0])
    return Path(text[:end]), text[end + 1 :]


def _folder(folder: Path, chosen: str) -> Iterator[TensorSource]:
    if (folder / MANIFEST).is_file():
        yield from _recording(folder, chosen)
        return
    if chosen:
        raise ValueError(f"{folder} is a folder without {MANIFEST}, so no recording: it has no {chosen!r}.")
    wanted = [path for path in sorted(folder.iterdir()) if _has_tensors(path) and not path.name.startswith(".")]
    if not wanted:
        raise ValueError(f"{folder} has no tensor in it. Expected files that end in {', '.join(SUFFIXES)}.")
    for path in wanted:
        yield from _expanded(str(path))


def _has_tensors(path: Path) -> bool:
    return any(file.suffix in SUFFIXES for file in (path.rglob("*") if path.is_dir() else [path]))


def _file(path: Path, chosen: str) -> Iterator[TensorSource]:
    if not path.exists():
        raise ValueError(f"there is no file {path}. Give a .pt, .npy, .npz or .safetensors file, or a folder of them.")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} does not end in {', '.join(SUFFIXES)}. Save the tensor as one of these.")
    with _reading(path):
        found = tensors_in(path)
    names = [name for name in found if name is not None]
    if not found:
        raise ValueError(f"{path} has no tensors in it. Save some.")
    if chosen and chosen not in names:
        has = f"It has: {first_few(names)}." if names else "It is one tensor: leave the name out."
        raise ValueError(f"{path} has no tensor {chosen!r}. {has}")
    if path.suffix == ".pt" and names and not chosen:  # often a whole checkpoint, which was not meant
        raise ValueError(f"{path} is not a tensor but a dict of {first_few(names)}. Name one: {path}:{names[0]}")
    for name in [chosen] if chosen or not names else names:
        shown = f"{path}:{name}" if name else str(path)
        label = safe_name(f"{path.stem}.{name}" if name else path.stem)
        yield TensorSource(shown, label, path, name, values=math.prod(found[name or None].shape))


# -------------------------------------------------------------------------------------------------- recordings


def _recording(folder: Path, chosen: str) -> Iterator[TensorSource]:
    recording = read_recording(folder)
    has = [(recipe, name) for recipe in recording.recipes for name in recording.names(recipe)]
    wanted = [pair for pair in has if _chosen(chosen, *pair)]
    if not wanted:
        raise ValueError(
            f"recording {folder} has nothing that {chosen!r} chooses. It has: "
            f"{first_few([f'{recipe}:{name}' for recipe, name in has])}."
        )
    for recipe, name in wanted:
        label = safe_name(f"{folder.name}.{recipe}.{name}")
        values = math.prod(recording.shape(recipe, name))
        yield TensorSource(f"{folder}:{recipe}:{name}", label, folder, f"{recipe}:{name}", values=values)


def _chosen(text: str, recipe: str, name: str) -> bool:
    """Whether `text` chooses a tensor: an empty text or a recipe chooses all outputs, a layer its output."""
    first, colon, second = text.partition(":")
    if colon:
        return fnmatchcase(recipe, first) and _named(second, name)
    return (fnmatchcase(recipe, text or "*") and name.endswith(".output")) or _named(text, name)


def _named(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.output")
