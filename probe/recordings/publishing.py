"""Publishing a recording: its files are built in their layout in `<out>/.new` and then moved to `<out>`, one by one.

`.new` is whole once it has a manifest. From then on `finish_publishing`, which every later call begins with, completes
the work after a kill; before, it deletes `.new`. `<out>` itself is never renamed: it may be where a shell stands.
While tensors are recorded they are in `<out>/.partial` (recorder.py), which is a recording in the layout safetensors;
all other layouts are made from it.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from probe.files.atomic import link_or_copy, locked, make_folder, move, sync_tree, write
from probe.files.defects import DefectError
from probe.files.tensors import npz_writer, write_npy, write_pt
from probe.recordings import script_formats as scripts
from probe.recordings.manifest import (
    FILE_NAME,
    MANIFEST,
    Layout,
    Manifest,
    RecordedRecipe,
    RecordingError,
    StoredFile,
    StoredTensor,
    manifest_from_json,
    manifest_to_json,
    reading,
    writing,
)
from probe.recordings.reading import FINISHED, NEW, PARTIAL, Recording, check_files, read_manifest, read_recording
from probe.recordings.script_formats import AllFigures, ScriptFacts, figures_of
from probe.running.environment import comparable, differences

#: Our own names in a folder, beside those of the recording.
UNDER_WAY = frozenset((PARTIAL, NEW, FINISHED))

# ------------------------------------------------------------------------------------------------ the final place


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, in which what a kill interrupted is finished first.

    The folder and its parents are made; those that are new and empty at the end are removed again.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise RecordingError(f"{folder} is a file. Expected the name of a folder to make.")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with ExitStack() as stack:
        stack.callback(_remove_empty, made)
        with writing(folder):
            make_folder(folder)
            try:
                stack.enter_context(locked(folder, wait=False))
            except BlockingIOError:
                raise RecordingError(f"{folder} is being written by another process. Wait for it, or end it.") from None
            finish_publishing(folder)
            holds_recording(folder)
        yield


def _remove_empty(folders: Iterable[Path]) -> None:
    with suppress(OSError):  # one that is not empty ends it
        for folder in folders:
            folder.rmdir()


def holds_recording(folder: Path) -> bool:
    """Whether `folder` holds a recording; anything but a recording or an empty folder is an error."""
    names = set(os.listdir(folder)) - UNDER_WAY
    if names and MANIFEST not in names:
        raise RecordingError(f"{folder} is not empty and is no recording. Give another folder.")
    return bool(names)


def is_to_be_replaced(folder: Path, *, overwrite: bool) -> bool:
    """Whether a recording will be replaced: an error without `overwrite`, and if the folder holds anything else."""
    if (folder / PARTIAL).exists():
        raise RecordingError(f"{folder} holds an interrupted recording. Finish or delete it, or give another folder.")
    if not holds_recording(folder):
        return False
    if not overwrite:
        raise RecordingError(f"{folder} holds a recording already. Give another folder, or overwrite=True.")
    try:
        own = {MANIFEST, *read_manifest(folder).files}
    except RecordingError as problem:
        raise RecordingError(f"{folder} is not overwritten, since it is no sound recording. {problem}") from None
    paths = (path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    there = {str(path) for path in (path.relative_to(folder) for path in paths) if path.parts[0] not in UNDER_WAY}
    for name in sorted(there - own):
        raise RecordingError(f"{folder} is not overwritten: {name!r} in it is no part of the recording. Move it away.")
    return True


def shared_facts(manifest: Manifest, layout: Layout) -> dict[str, str]:
    """The facts that two recordings in one folder must share."""
    return {
        "model": manifest.model,
        "weights": str(manifest.fingerprint),
        "tokens": f"{manifest.tokens.samples} x {manifest.tokens.seqlen}, {manifest.tokens.fingerprint}",
        "device": manifest.device,
        "layout": layout,
        **comparable(manifest.versions),
        **{f"config.{key}": value for key, value in manifest.configuration.items()},
    }


def existing_recording(
    folder: Path, begun: Manifest, new: Sequence[str], layout: Layout, *, overwrite: bool
) -> Recording | None:
    """The recording that `folder` holds already; an error if the `new` recipes cannot be added to it."""
    if not holds_recording(folder):
        return None
    existing = read_recording(folder, verify=False)
    there = existing.manifest
    known = there if there.configuration else replace(there, configuration=begun.configuration)
    if other := differences(shared_facts(known, there.layout), shared_facts(begun, layout)):
        only_layout = there.layout != layout and len(other) == 1
        same = f"Record in that layout (--layout {there.layout}), or give" if only_layout else "Give"
        raise RecordingError(
            f"{folder} holds a recording of something else: {'; '.join(other)}. {same} another folder."
        )
    clash = [recipe for recipe in new if recipe in there.recipes]
    if clash and not overwrite:
        advice = "Leave them out, give another folder, or overwrite them (--overwrite)."
        raise RecordingError(f"{folder} has {', '.join(clash)} already. {advice}")
    files = [one.file for recorded in there.recipes.values() for one in recorded.tensors.values()]
    if layout == "pt" and set(there.recipes) != set(new) and any("/" not in file for file in files):
        raise RecordingError(
            f"{folder} holds {', '.join(existing.recipes)}, and the layout pt has one mode in a folder. Give another "
            "folder, or record all modes in one call, which makes a folder for each."
        )
    return existing


@contextmanager
def new_files(folder: Path) -> Iterator[Path]:
    """The folder `.new`, empty, to be filled and then put in place; deleted if the block fails before that."""
    fresh = folder / NEW
    try:
        with writing(fresh):
            fresh.mkdir()
        yield fresh
    finally:
        if not (fresh / MANIFEST).exists():
            shutil.rmtree(fresh, ignore_errors=True)


def put_in_place(folder: Path, manifest: Manifest) -> None:
    """Move the files of `.new` to the folder, in which they replace those of an older recording."""
    fresh, old = folder / NEW, _files_listed(folder)
    for name in manifest.files:
        if name not in old and os.path.lexists(folder / name):
            raise RecordingError(f"{folder} already has a {name!r} that is no part of a recording. Move it away.")
    data = manifest_to_json(manifest)
    with reading(folder / MANIFEST):
        manifest_from_json(data)  # what is written must be readable
    with writing(folder):
        sync_tree(fresh)
        write(fresh / MANIFEST, data)
    finish_publishing(folder)


def finish_publishing(folder: Path) -> None:
    """If `.new` has its manifest, move its files to the folder, the manifest last; otherwise delete it.

    The manifest of `.partial` becomes `.finished.json` in between, so that the command that was killed can see that its
    work is done (`was_finished`).
    """
    fresh = folder / NEW
    if (fresh / MANIFEST).exists():
        try:
            files = _files_listed(fresh)
            for name in files:
                (folder / name).parent.mkdir(exist_ok=True)
                if (fresh / name).exists():
                    move(fresh / name, folder / name)
            for name in _files_listed(folder).keys() - files.keys():
                (folder / name).unlink(missing_ok=True)
                with suppress(OSError):  # not empty
                    if "/" in name:
                        (folder / name).parent.rmdir()
            if (folder / PARTIAL / MANIFEST).exists():
                move(folder / PARTIAL / MANIFEST, folder / FINISHED)
            move(fresh / MANIFEST, folder / MANIFEST)
        except OSError as problem:
            why = f"cannot write {folder}: {problem.strerror or problem}"
            raise RecordingError(f"{why}. The recording is whole; the same command puts it in its place.") from None
    shutil.rmtree(fresh, ignore_errors=True)
    if (folder / FINISHED).exists():
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)


def was_finished(folder: Path, asked: Mapping[str, str]) -> bool:
    """Whether a recording of exactly this was put in place by a call that was killed before it returned."""
    try:
        work = manifest_from_json((folder / FINISHED).read_bytes()).unfinished
    except (OSError, DefectError):
        work = None
    (folder / FINISHED).unlink(missing_ok=True)
    return work is not None and work.asked == asked


def _files_listed(folder: Path) -> dict[str, StoredFile]:
    """The files of the manifest in a folder; none if there is no sound manifest."""
    with suppress(RecordingError):
        return read_manifest(folder).files
    return {}


# ------------------------------------------------------------------------------------------------- the layouts


@dataclass(frozen=True)
class Export:
    """The folder to build: `source` has the new recipes, `kept` is an older recording that they are added to."""

    folder: Path
    source: Recording
    kept: Recording | None
    facts: ScriptFacts

    @property
    def recipes(self) -> dict[str, RecordedRecipe]:
        """The new recipes."""
        return self.source.manifest.recipes

    @property
    def staying(self) -> dict[str, RecordedRecipe]:
        """The recipes of the older recording that are not replaced."""
        old = self.kept.manifest.recipes if self.kept else {}
        return {name: one for name, one in old.items() if name not in self.recipes}

    def tensors(self) -> Iterator[tuple[str, RecordedRecipe, str, Tensor]]:
        """All new tensors, one at a time."""
        for recipe, recorded in self.recipes.items():
            for name in self.source.names(recipe):
                yield recipe, recorded, name, self.source.tensor(recipe, name)


AllTensors = dict[str, dict[str, StoredTensor]]  # by recipe and name


def _link_safetensors(export: Export) -> AllTensors:
    for file in {one.file for recorded in export.recipes.values() for one in recorded.tensors.values()}:
        (export.folder / file).unlink(missing_ok=True)
        link_or_copy(export.source.folder / file, export.folder / file)
    return {recipe: recorded.tensors for recipe, recorded in export.recipes.items()}


def _write_files(
    export: Export, file_of: Callable[[RecordedRecipe, str], str], write_tensor: Callable[[Path, Tensor], None]
) -> AllTensors:
    """Write a file for each tensor."""
    made: set[str] = set()
    stored: AllTensors = {recipe: {} for recipe in export.recipes}
    for recipe, recorded, name, tensor in export.tensors():
        file = file_of(recorded, name)
        if not FILE_NAME.fullmatch(file):
            raise RecordingError(f"{file!r} cannot be the name of a file. Use letters, digits, '_', '-' and '.'.")
        if file in made:
            raise RecordingError(f"two tensors would be {file}. Choose other layers.")
        made.add(file)
        stored[recipe][name] = replace(recorded.tensors[name], file=file, key=None)
        (export.folder / file).parent.mkdir(exist_ok=True)
        write_tensor(export.folder / file, tensor)
    return stored


def _write_pt(export: Export) -> AllTensors:
    alone = len(export.recipes) == 1 and not export.staying
    return _write_files(export, partial(scripts.pt_file, alone=alone), write_pt)


def _write_npz(export: Export) -> AllTensors:
    """Write all recipes to one archive, also those of the older recording."""
    made: set[str] = set()
    stored: AllTensors = {recipe: {} for recipe in export.recipes}
    file = export.facts.output_file
    with npz_writer(export.folder / file) as add:
        for recipe, recorded in export.staying.items():
            assert export.kept is not None
            for name, one in recorded.tensors.items():
                if one.file == file:
                    add(str(one.key), export.kept.tensor(recipe, name))
        for recipe, recorded, name, tensor in export.tensors():
            key = scripts.npz_key(recorded, name)
            if key in made:
                raise RecordingError(f"{name} would be a second {key} in {file}. Choose other layers.")
            made.add(key)
            stored[recipe][name] = replace(recorded.tensors[name], file=file, key=key)
            add(key, tensor)
    return stored


class LayoutWriter(NamedTuple):
    """How a layout writes its tensors, and the files of statistics beside them, whose names it returns."""

    tensors: Callable[[Export], AllTensors]
    statistics: Callable[[Recording, ScriptFacts, AllFigures], Iterable[str]]


#: A new layout is a row here and one in DEFAULTS (request.py).
WRITERS: dict[Layout, LayoutWriter] = {
    "safetensors": LayoutWriter(_link_safetensors, lambda built, facts, figures: ()),
    "npy": LayoutWriter(
        partial(_write_files, file_of=scripts.npy_file, write_tensor=write_npy), scripts.npy_statistics
    ),
    "npz": LayoutWriter(_write_npz, scripts.npz_statistics),
    "pt": LayoutWriter(_write_pt, scripts.pt_metadata),
}


def publish(
    folder: Path, source: Recording, existing: Recording | None, facts: ScriptFacts, layout: Layout
) -> Recording:
    """Build the files from the partial recording `source`, put them in place, and delete the partial recording."""
    with new_files(folder) as fresh:
        manifest = _build(Export(fresh, source, existing, facts), layout)
        if holds_recording(folder) != (existing is not None):
            raise RecordingError(f"{folder} has changed while it was recorded. Run the same command again.")
        put_in_place(folder, manifest)
    (folder / FINISHED).unlink(missing_ok=True)
    return Recording(folder, manifest)


def _build(export: Export, layout: Layout) -> Manifest:
    """Fill the folder, read it back, and return its manifest.

    All four layouts are made of the same safetensors files, tensor by tensor, so they hold the same values.
    """
    folder, writer = export.folder, WRITERS[layout]
    with writing(folder):
        _link_kept(export)
        tensors = writer.tensors(export)
    new = {recipe: replace(recorded, tensors=tensors[recipe]) for recipe, recorded in export.recipes.items()}
    recipes = {**export.staying, **new}
    manifest = replace(export.source.manifest, recipes=recipes, layout=layout, files={}, unfinished=None)
    if export.staying and export.kept and not export.kept.manifest.configuration:
        manifest = replace(manifest, configuration={})  # that of the older recipes is not known
    built = Recording(folder, manifest)
    figures: AllFigures = {}
    for recipe, _, name, tensor in export.tensors():
        if not _is_linked(export, tensors[recipe][name].file):
            found, dtype = built.tensor(recipe, name), built.dtype(recipe, name)
            _check_same(folder, recipe, name, found, tensor)
            if layout != "safetensors":
                figures.setdefault(recipe, {})[name] = figures_of(found, dtype, unbiased=layout == "pt")
    with writing(folder):
        made = {one.file for by_name in tensors.values() for one in by_name.values()}
        made |= set(writer.statistics(built, export.facts, figures))
        manifest = replace(manifest, files=_files(export, made))
    check_files(folder, manifest, verify=False)
    return manifest


def _link_kept(export: Export) -> None:
    """Link the older recording without the recipes that are replaced, and the tokens."""
    folder, kept, source = export.folder, export.kept, export.source
    if kept is not None:
        gone = kept.manifest.recipes.keys() - export.staying.keys()
        replaced = {one.file for recipe in gone for one in kept.manifest.recipes[recipe].tensors.values()}
        for name in kept.manifest.files.keys() - replaced:
            (folder / name).parent.mkdir(exist_ok=True)
            link_or_copy(kept.folder / name, folder / name)
    tokens = source.manifest.tokens.file
    if tokens is not None and not (folder / tokens).exists():
        link_or_copy(source.folder / tokens, folder / tokens)


def _files(export: Export, made: Iterable[str]) -> dict[str, StoredFile]:
    """The size and digest of every file; those of linked files are known."""
    found = dict(export.kept.manifest.files) if export.kept else {}
    found = {name: facts for name, facts in found.items() if (export.folder / name).is_file()}
    tokens = export.source.manifest.tokens.file
    for name in (*made, *([tokens] if tokens and tokens not in found else [])):
        known = export.source.manifest.files.get(name) if _is_linked(export, name) else None
        found[name] = known or StoredFile.of(export.folder / name)
    return found


def _is_linked(export: Export, name: str) -> bool:
    """Whether a file is a link to that of the partial recording, which was read back when it was written."""
    source = export.source.folder / name
    return source.exists() and source.samefile(export.folder / name)


def _check_same(folder: Path, recipe: str, name: str, found: Tensor, given: Tensor) -> None:
    for one, other in zip(found, given, strict=True):
        expected = other.to(one.dtype).reshape(-1).view(torch.uint8)
        if not torch.equal(one.reshape(-1).view(torch.uint8), expected):
            raise RecordingError(f"cannot write {folder}: {name} of {recipe} reads back differently.")
