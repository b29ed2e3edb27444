"""Building the folder of a finished recording in its layout, tensor by tensor, out of the partial one.

All four layouts come from the same safetensors files, so they hold the same values. What an older recording in the
same place holds of other recipes is taken along by links.
"""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from probe.recordings.checked import RecordingError
from probe.recordings.disk import link_or_copy, sha256_of, sync_all, writing
from probe.recordings.format import MANIFEST, File, Layout, Manifest, Stored, manifest_to_json
from probe.recordings.layouts import DESCRIBED, PLACES, ByName, Export, Places
from probe.recordings.reading import Recording, check_files
from probe.recordings.statistics import figures_of


def build(export: Export, layout: Layout) -> Manifest:
    """Fill the folder, read it back, and tell what it holds. Everything is on the disk afterwards."""
    folder = export.folder
    with writing(folder):
        _take_along(export)
        places = PLACES[layout](export)
    manifest = _manifest(export, layout, places)
    built = Recording(folder, manifest)
    figures: ByName = {}
    for recipe, _, name, tensor in export.tensors():
        if _is_linked(export, places[recipe, name][0]):
            continue
        found = built.tensor(recipe, name)
        _check_same(folder, recipe, name, found, tensor)
        if layout != "safetensors":
            dtype = built.dtype(recipe, name)
            figures.setdefault(recipe, {})[name] = figures_of(found, dtype, unbiased=layout == "pt")
    with writing(folder):
        made = {file for file, _ in places.values()} | set(DESCRIBED[layout](export, built, figures))
        manifest = replace(manifest, files=_files(export, made))
        (folder / MANIFEST).write_bytes(manifest_to_json(manifest))
        sync_all(folder)
    check_files(folder, manifest, verify=False)
    return manifest


def _take_along(export: Export) -> None:
    """The older recording but for what is recorded anew, and the tokens."""
    folder, kept, source = export.folder, export.kept, export.source
    if kept is None:
        folder.mkdir()
    else:
        shutil.copytree(kept.folder, folder, copy_function=link_or_copy, symlinks=True)
        (folder / MANIFEST).unlink()
        for recipe in kept.manifest.recipes.keys() - export.staying.keys():
            for one in kept.manifest.recipes[recipe].tensors.values():
                (folder / one.file).unlink(missing_ok=True)
    tokens = source.manifest.tokens.file
    if tokens is not None and not (folder / tokens).exists():
        link_or_copy(str(source.folder / tokens), str(folder / tokens))


def _manifest(export: Export, layout: Layout, places: Places) -> Manifest:
    new = {
        recipe: replace(
            recorded,
            tensors={
                name: Stored(one.dtype, one.shape, *places[recipe, name]) for name, one in recorded.tensors.items()
            },
        )
        for recipe, recorded in export.recipes.items()
    }
    recipes = {**export.staying, **new}
    return replace(export.source.manifest, recipes=recipes, layout=layout, files={}, unfinished=None)


def _files(export: Export, made: Iterable[str]) -> dict[str, File]:
    """Every file of the recording. Those that came along are known; whatever else is in the folder is the user's."""
    found = dict(export.kept.manifest.files) if export.kept else {}
    found = {name: facts for name, facts in found.items() if (export.folder / name).is_file()}
    tokens = export.source.manifest.tokens.file
    for name in (*made, *([tokens] if tokens and tokens not in found else [])):
        file = export.folder / name
        known = export.source.manifest.files.get(name) if _is_linked(export, name) else None
        found[name] = known or File(file.stat().st_size, sha256_of(file))
    return found


def _is_linked(export: Export, name: str) -> bool:
    """Whether a file is the very one of the partial recording, which was read back when it was written."""
    source = export.source.folder / name
    return source.exists() and source.samefile(export.folder / name)


def _check_same(folder: Path, recipe: str, name: str, found: Tensor, given: Tensor) -> None:
    for one, other in zip(found, given, strict=True):
        expected = other.to(one.dtype).reshape(-1).view(torch.uint8)
        if not torch.equal(one.reshape(-1).view(torch.uint8), expected):
            raise RecordingError(f"cannot write {folder}: {name} of {recipe} reads back differently.")
