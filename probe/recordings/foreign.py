"""Folders that the users' own scripts wrote, in the layouts npy, npz and pt but without a manifest.

They hold what they hold: recipes and layers come from names of files, tokens from metadata.pt if there is one. What
nobody can verify is told in notes.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from probe.data import token_fingerprint
from probe.recordings.checked import RecordingError, defect
from probe.recordings.disk import inside, reading
from probe.recordings.format import DTYPES, Layout, Manifest, Recorded, Stored, Tokens
from probe.recordings.loading import READERS, Kind, load_plain
from probe.recordings.spelling import METADATA, NPY_FILE, NPZ, NPZ_KEY, PT_FILE, tensor_name, understood

UNKNOWN = "unknown"
Found = dict[tuple[str, str | None], dict[str, Stored]]  # mode and format -> tensors

NO_MANIFEST = "no manifest: the model, its weights and the device are not known, and no file can be verified"
NO_MODE = f"no manifest: which mode ran is not known; it is called {UNKNOWN!r}"
NO_TOKENS = "no manifest: the inputs cannot be verified"


def foreign_manifest(folder: Path) -> tuple[Manifest, tuple[str, ...]] | None:
    """What can be said about a folder, or an .npz file, that nobody described, and notes on what cannot."""
    with reading(folder):
        names = [folder.name] if folder.is_file() else sorted(path.name for path in folder.iterdir())
    base = folder.parent if folder.is_file() else folder
    layout: Layout
    if any(PT_FILE.fullmatch(name) for name in names):
        layout, found = "pt", _files(base, names, PT_FILE, "pt")
    elif any(NPY_FILE.fullmatch(name) for name in names):
        layout, found = "npy", _files(base, names, NPY_FILE, "npy")
    elif archives := [name for name in names if name.endswith(".npz")]:
        layout, found = "npz", _archive(base, NPZ if NPZ in archives else _only(folder, archives))
    else:
        return None
    notes = [NO_MANIFEST, *([NO_MODE] if layout == "pt" else [])]
    recipes = {"-".join(filter(None, key)): _recorded(base, key, tensors) for key, tensors in found.items()}
    tokens, more = _tokens(base, recipes.values(), has_metadata=layout == "pt" and METADATA in names)
    return Manifest(UNKNOWN, None, UNKNOWN, tokens, recipes, {}, layout), (*notes, *more)


def foreign_token_ids(file: Path) -> Tensor | None:
    """The ids in a metadata.pt, int64 [samples, tokens]; None if it has none that make sense."""
    held = load_plain(file)
    given = held.get("input_ids") if isinstance(held, Mapping) else None
    if given is None:
        return None
    with reading(file, "a metadata.pt with input_ids of whole numbers"):
        ids = torch.as_tensor(given)
    if ids.is_floating_point() or ids.is_complex() or ids.dim() not in (1, 2) or not ids.numel():
        raise defect(file, f"its input_ids are {ids.dtype} {list(ids.shape)}. Expected whole numbers [samples, tokens]")
    return ids.detach().to(torch.int64).reshape(-1, ids.shape[-1])


def _files(base: Path, names: Iterable[str], pattern: re.Pattern[str], layout: Layout) -> Found:
    found: Found = {}
    for name in names:
        if match := pattern.fullmatch(name):
            (kind,) = READERS[layout].kinds(inside(base, name)).values()
            mode = match.groupdict().get("mode")
            key = (UNKNOWN, None) if mode is None else understood(mode)
            _add(base, found, key, tensor_name(match), kind, name, None)
    return found


def _archive(base: Path, name: str) -> Found:
    found: Found = {}
    for key, kind in READERS["npz"].kinds(inside(base, name)).items():
        match = NPZ_KEY.fullmatch(str(key))
        if not match:
            raise defect(base / name, f"the key {key} is not as in mode_2-1_output, mode_2-1_layer_0_input")
        _add(base, found, understood(match["mode"]), tensor_name(match), kind, name, key)
    return found


def _only(folder: Path, archives: list[str]) -> str:
    if len(archives) != 1:
        raise RecordingError(f"{folder} has {len(archives)} .npz files: {', '.join(archives)}. Give one of them.")
    return archives[0]


def _add(
    base: Path, found: Found, key: tuple[str, str | None], name: str, kind: Kind, file: str, place: str | None
) -> None:
    dtype, shape = kind
    if dtype not in DTYPES or not shape or 0 in shape:
        raise defect(base / file, f"{name} is {dtype} {list(shape)}. Expected floats, samples along the first axis")
    tensors = found.setdefault(key, {})
    if name in tensors:
        raise defect(base / file, f"is a second {name}, beside {tensors[name].file}")
    tensors[name] = Stored(dtype, shape, file, place)


def _recorded(base: Path, key: tuple[str, str | None], tensors: dict[str, Stored]) -> Recorded:
    labels = {name.removesuffix(".output") for name in tensors if re.fullmatch(r"layer_\d+\.output", name)}
    layers = tuple(sorted(labels, key=lambda label: int(label.removeprefix("layer_"))))
    if not layers:
        raise RecordingError(f"{base} has not one layer of {key[0]}. Expected files such as layer_0_output.pt.")
    return Recorded(*key, layers, tensors)


def _tokens(base: Path, recipes: Iterable[Recorded], *, has_metadata: bool) -> tuple[Tokens, tuple[str, ...]]:
    """From metadata.pt; else as many as the first layer has rows."""
    first = next(iter(recipes))
    shape = first.tensors[f"{first.layers[0]}.output"].shape
    rows = (shape[0], shape[1] if len(shape) > 1 else 1)
    ids = foreign_token_ids(inside(base, METADATA)) if has_metadata else None
    if ids is None:
        return Tokens(rows[0] * rows[1], *rows, None), (NO_TOKENS,)
    given = (ids.shape[0], ids.shape[1])
    other = f"{METADATA} has {given[0]} x {given[1]} tokens, {first.layers[0]} is {list(shape)}: padded, or another run"
    tokens = Tokens(ids.numel(), *given, token_fingerprint([ids]), METADATA)
    return tokens, () if given == rows else (other,)
