"""How a recording gets into its folder: made in `<out>.partial`, built beside its place, renamed in one step.

`<out>.partial` is itself a recording in the default layout, whose manifest says what is missing. A recipe is listed
only when its file is whole and on the disk, so a kill at any moment costs one recipe at most. The same request finds
the folder and continues; another one is refused. At the end the folder `<out>` is built beside its place, in its
layout, and renamed: a folder is a whole recording or not there.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from probe.files.atomic import link_or_copy, link_tree, locked, make_folder, move, replace_folder, sync_tree, write
from probe.recordings.manifest import (
    MANIFEST,
    Layout,
    Manifest,
    RecordedRecipe,
    RecordingError,
    StoredFile,
    manifest_to_json,
    writing,
)
from probe.recordings.other_layouts import WRITERS, AllFigures, Export
from probe.recordings.reading import PARTIAL, PREVIOUS, Recording, check_files, read_manifest, read_recording
from probe.recordings.script_formats import ScriptFacts, figures_of
from probe.running.environment import comparable, differences

# ------------------------------------------------------------------------------------------------ the final place


def holds_recording(folder: Path) -> bool:
    """Whether a recording is there; anything else in its place is an error."""
    with writing(folder):
        if not os.path.lexists(folder):
            return False
        if not folder.is_dir():
            raise RecordingError(f"{folder} is a file. Expected the name of a folder to make.")
        names = set(os.listdir(folder))
    if names and MANIFEST not in names:
        raise RecordingError(f"{folder} is not empty and is no recording. Give another folder.")
    return bool(names)


def is_to_be_replaced(folder: Path, *, overwrite: bool) -> bool:
    """Whether a recording will be replaced: an error without `overwrite`, and if the folder holds anything else."""
    if not holds_recording(folder):
        return False
    if not overwrite:
        raise RecordingError(f"{folder} holds a recording already. Give another folder, or overwrite=True.")
    try:
        own = {MANIFEST, *read_manifest(folder).files}
    except RecordingError as problem:
        raise RecordingError(f"{folder} is not overwritten, since it is no sound recording. {problem}") from None
    with writing(folder):
        there = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}
    for name in sorted(there - own):
        raise RecordingError(f"{folder} is not overwritten: {name!r} in it is no part of the recording. Move it away.")
    return True


def shared_facts(manifest: Manifest, layout: Layout) -> dict[str, str]:
    """What two recordings must have in common to be in one folder."""
    return {
        "model": manifest.model,
        "weights": str(manifest.fingerprint),
        "tokens": f"{manifest.tokens.samples} x {manifest.tokens.seqlen}, {manifest.tokens.fingerprint}",
        "device": manifest.device,
        "layout": layout,
        **comparable(manifest.versions),
    }


def existing_recording(
    folder: Path, begun: Manifest, new: Sequence[str], layout: Layout, *, overwrite: bool
) -> Recording | None:
    """The recording that is there already, if the `new` recipes can be added to it."""
    if not holds_recording(folder):
        return None
    existing = read_recording(folder, verify=False)
    there = existing.manifest
    if other := differences(shared_facts(there, there.layout), shared_facts(begun, layout)):
        raise RecordingError(f"{folder} holds a recording of something else: {'; '.join(other)}. Give another folder.")
    clash = [recipe for recipe in new if recipe in there.recipes]
    if clash and not overwrite:
        raise RecordingError(
            f"{folder} has {', '.join(clash)} already. Leave them out, give another folder, or overwrite them "
            "(--overwrite)."
        )
    files = [one.file for recorded in there.recipes.values() for one in recorded.tensors.values()]
    if layout == "pt" and set(there.recipes) != set(new) and any("/" not in file for file in files):
        raise RecordingError(
            f"{folder} holds {', '.join(existing.recipes)}, and the layout pt has one mode in a folder. Give another "
            "folder, or record all modes in one call, which makes a folder for each."
        )
    return existing


def _previous(folder: Path) -> Path:
    return folder.with_name(PREVIOUS.format(folder.name))


def recover(folder: Path) -> None:
    """Put back what a kill in the middle of `put_in_place` left beside its place."""
    with writing(folder):
        if _previous(folder).is_dir() and not os.path.lexists(folder):
            move(_previous(folder), folder)


def put_in_place(fresh: Path, folder: Path, *, replaces: bool) -> None:
    """Rename `fresh` to `folder`. If a kill comes while an older recording is replaced, `recover` puts it back."""
    with writing(folder):
        if replaces:
            replace_folder(fresh, folder, aside=_previous(folder))
        else:
            move(fresh, folder)


# -------------------------------------------------------------------------------------------- while it is made


@dataclass
class PartialRecording:
    """The folder `<out>.partial`, and its manifest as it stands."""

    folder: Path
    manifest: Manifest
    reused: tuple[str, ...] = ()  # the recipes of an interrupted recording that is continued

    @property
    def missing(self) -> tuple[str, ...]:
        """The recipes that are not recorded yet."""
        assert self.manifest.unfinished is not None
        return self.manifest.unfinished.missing

    def add(self, recipe: str, recorded: RecordedRecipe, file: str, facts: StoredFile) -> None:
        """List a recipe whose file is whole."""
        assert self.manifest.unfinished is not None
        left = tuple(one for one in self.missing if one != recipe)
        self.manifest = replace(
            self.manifest,
            recipes={**self.manifest.recipes, recipe: recorded},
            files={**self.manifest.files, file: facts},
            unfinished=replace(self.manifest.unfinished, missing=left),
        )
        self.save()

    def save(self) -> None:
        """Write the manifest, in one step."""
        with writing(self.folder / MANIFEST):
            write(self.folder / MANIFEST, manifest_to_json(self.manifest))


@contextmanager
def partial_recording(out: Path, begun: Manifest, *, restart: bool) -> Iterator[PartialRecording]:
    """Begin a recording, or continue the one that was interrupted; `begun` is its manifest without a recipe.

    If the block fails, whole recipes are kept; a folder without one is removed.
    """
    folder = out.with_name(PARTIAL.format(out.name))
    with ExitStack() as lock:
        with writing(folder):
            make_folder(folder)
            try:
                lock.enter_context(locked(folder, wait=False))
            except BlockingIOError:
                raise RecordingError(f"{folder} is being written by another process. Wait for it, or end it.") from None
        partial = PartialRecording(folder, begun)
        is_interrupted = os.path.lexists(folder / MANIFEST)
        if not is_interrupted and any(folder.iterdir()):
            raise RecordingError(f"{folder} is in the way and is no interrupted recording. Move it away.")
        if restart:
            with writing(folder):
                for path in folder.iterdir():
                    path.unlink()
        elif is_interrupted:
            assert begun.unfinished is not None
            partial.manifest = _continued(folder, begun.unfinished.asked)
            partial.reused = tuple(partial.manifest.recipes)
        try:
            yield partial
        except BaseException:
            if not partial.manifest.recipes:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _continued(folder: Path, asked: Mapping[str, str]) -> Manifest:
    again = "Run the command that began it, or delete it with --restart."
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest, verify=True)
    except RecordingError as problem:
        raise RecordingError(f"{folder} is an interrupted recording that cannot be used. {problem}. {again}") from None
    if manifest.unfinished is None:
        raise RecordingError(f"{folder} is a whole recording, not an interrupted one. Rename it.")
    if other := differences(manifest.unfinished.asked, asked):
        raise RecordingError(f"{folder} is an interrupted recording of something else: {'; '.join(other)}. {again}")
    return manifest


# ------------------------------------------------------------------------------------------------- the layouts


def publish(
    folder: Path, partial: PartialRecording, existing: Recording | None, facts: ScriptFacts, layout: Layout
) -> Recording:
    """Build the folder beside its place, rename it, and delete the partial one."""
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        source = Recording(partial.folder, partial.manifest)
        manifest = _build(Export(fresh, source, existing, facts), layout)
        if holds_recording(folder) != (existing is not None):
            raise RecordingError(f"{folder} has changed while it was recorded. Run the same command again.")
        put_in_place(fresh, folder, replaces=existing is not None)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(partial.folder, ignore_errors=True)
    return Recording(folder, manifest)


def _build(export: Export, layout: Layout) -> Manifest:
    """Fill the folder, read it back, and return its manifest. Everything is on the disk afterwards.

    All four layouts are made of the same safetensors files, tensor by tensor, so they hold the same values.
    """
    folder, writer = export.folder, WRITERS[layout]
    with writing(folder):
        _link_kept(export)
        tensors = writer.tensors(export)
    new = {recipe: replace(recorded, tensors=tensors[recipe]) for recipe, recorded in export.recipes.items()}
    recipes = {**export.staying, **new}
    manifest = replace(export.source.manifest, recipes=recipes, layout=layout, files={}, unfinished=None)
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
        made |= set(writer.statistics(export, built, figures))
        manifest = replace(manifest, files=_files(export, made))
        write(folder / MANIFEST, manifest_to_json(manifest))
        sync_tree(folder)
    check_files(folder, manifest, verify=False)
    return manifest


def _link_kept(export: Export) -> None:
    """Link the older recording except for the recipes that are recorded anew, and the tokens."""
    folder, kept, source = export.folder, export.kept, export.source
    if kept is None:
        folder.mkdir()
    else:
        link_tree(kept.folder, folder)
        (folder / MANIFEST).unlink()
        for recipe in kept.manifest.recipes.keys() - export.staying.keys():
            for one in kept.manifest.recipes[recipe].tensors.values():
                (folder / one.file).unlink(missing_ok=True)
    tokens = source.manifest.tokens.file
    if tokens is not None and not (folder / tokens).exists():
        link_or_copy(source.folder / tokens, folder / tokens)


def _files(export: Export, made: Iterable[str]) -> dict[str, StoredFile]:
    """Every file of the recording. The facts of linked files are known; any other file in the folder is the user's."""
    found = dict(export.kept.manifest.files) if export.kept else {}
    found = {name: facts for name, facts in found.items() if (export.folder / name).is_file()}
    tokens = export.source.manifest.tokens.file
    for name in (*made, *([tokens] if tokens and tokens not in found else [])):
        known = export.source.manifest.files.get(name) if _is_linked(export, name) else None
        found[name] = known or StoredFile.of(export.folder / name)
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
