"""Tensors to analyse, named on a command line: files, one tensor of a file, folders, layers of recordings.

    x.pt  x.npy                       one tensor
    x.npz  x.safetensors              every tensor in it; x.safetensors:name is one of them, so is x.pt:name of a dict
    folder                            all of these in it, and in the folders in it
    recording                         every layer of every recipe; recording:recipe, recording:layer_0 and
                                      recording:recipe:layer_0.output choose, with * and ? as in file names

Nothing is unpickled. Names and sizes are known at once, a tensor is loaded when it is asked for.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor

from probe.files.defects import reading
from probe.files.paths import safe_name
from probe.files.tensors import load_tensor, tensors_in
from probe.recordings.manifest import MANIFEST
from probe.recordings.reading import read_recording
from probe.words import first_few

SUFFIXES = (".pt", ".npy", ".npz", ".safetensors")


@dataclass(frozen=True)
class TensorSource:
    """A tensor that can be loaded, or a text that names none and the reason."""

    text: str
    """The path and the name in it, as they are shown."""
    name: str
    """The name of its outputs: letters, digits, '.', '_' and '-'."""
    path: Path
    key: str = ""
    """The name in the file; recipe:tensor in a recording."""
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
        with _reading(self.path):
            return load_tensor(self.path, self.key or None)


def tensor_sources(given: list[str]) -> list[TensorSource]:
    """Every tensor that the arguments name, in order. A wrong argument is a source that raises when it is loaded."""
    return [source for text in given for source in _expanded(text)]


def _expanded(text: str) -> list[TensorSource]:
    try:
        path, chosen = _split(text)
        if path.is_dir():
            return list(_folder(path, chosen))
        return list(_file(path, chosen))
    except (ValueError, OSError) as problem:
        return [TensorSource(text, safe_name(Path(text).stem), Path(text), defect=str(problem))]


def _split(text: str) -> tuple[Path, str]:
    """The path, and the text after the first ':' that follows a path which exists."""
    whole = Path(text)
    if whole.exists() or ":" not in text:
        return whole, ""
    for place in [found.start() for found in re.finditer(":", text)]:
        if Path(text[:place]).exists():
            return Path(text[:place]), text[place + 1 :]
    return Path(text.partition(":")[0]), text.partition(":")[2]


def _folder(folder: Path, chosen: str) -> Iterator[TensorSource]:
    if (folder / MANIFEST).is_file():
        yield from _recording(folder, chosen)
        return
    if chosen:
        raise ValueError(f"{folder} is a folder without {MANIFEST}, so no recording: it has no {chosen!r}.")
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
        yield TensorSource(shown, label, path, name)


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(path, ValueError, remedy="Save it again, as plain numbers.")


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
        yield TensorSource(f"{folder}:{recipe}:{name}", label, folder, f"{recipe}:{name}")


def _load_recorded(folder: Path, key: str) -> Tensor:
    recipe, _, name = key.partition(":")
    return read_recording(folder, verify=False).tensor(recipe, name)  # its bytes were verified when it was listed


def _chosen(text: str, recipe: str, name: str) -> bool:
    """Whether `text` chooses a tensor: an empty one chooses outputs, and the name of a layer its output."""
    first, colon, second = text.partition(":")
    if colon:
        return fnmatchcase(recipe, first) and _named(second, name)
    if not text:
        return name.endswith(".output")
    return (fnmatchcase(recipe, text) and name.endswith(".output")) or _named(text, name)


def _named(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.output")
