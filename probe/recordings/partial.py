"""A recording while it is made: `<out>.partial`, itself in the default layout, whose manifest says what is missing.

A recipe is listed only when its file is whole and on the disk, so a kill at any moment costs one recipe at most. The
same command finds the folder and goes on; another one is refused. At the end the folder `<out>` is built beside, of
links or exported files, and renamed into place.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from probe.recordings.checked import RecordingError
from probe.recordings.disk import replace_file, writing
from probe.recordings.format import MANIFEST, File, Manifest, Recorded, manifest_to_json
from probe.recordings.reading import PARTIAL, check_files, read_manifest
from probe.running.environment import differences


@dataclass
class Partial:
    """The folder and its manifest as it stands."""

    folder: Path
    manifest: Manifest
    reused: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The recipes that are not there yet."""
        assert self.manifest.unfinished is not None
        return self.manifest.unfinished.missing

    def add(self, recipe: str, recorded: Recorded, file: str, facts: File) -> None:
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
            replace_file(self.folder / MANIFEST, manifest_to_json(self.manifest))


def partial_of(out: Path) -> Path:
    """The folder in which a recording is made."""
    return out.with_name(PARTIAL.format(out.name))


@contextmanager
def partial_recording(out: Path, begun: Manifest, *, restart: bool) -> Iterator[Partial]:
    """Begin a recording, or go on with the one that was interrupted; `begun` is its manifest without a recipe.

    If the block fails, what is whole is kept; a folder without one whole recipe is removed.
    """
    folder = partial_of(out)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
    with _locked(folder):
        partial = Partial(folder, begun)
        if restart:
            _clear(folder)
        elif os.path.lexists(folder / MANIFEST):
            assert begun.unfinished is not None
            partial.manifest = _continued(folder, begun.unfinished.asked)
            partial.reused = tuple(partial.manifest.recipes)
        elif any(folder.iterdir()):
            raise RecordingError(f"{folder} is in the way and is no interrupted recording. Move it away.")
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


def _clear(folder: Path) -> None:
    """Delete what an interrupted recording left, and nothing else."""
    if any(folder.iterdir()) and not os.path.lexists(folder / MANIFEST):
        raise RecordingError(f"{folder} is in the way and is no interrupted recording. Move it away.")
    with writing(folder):
        for path in folder.iterdir():
            path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process."""
    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RecordingError(f"{folder} is being written by another process. Wait for it, or end it.") from None
        yield
    finally:
        os.close(descriptor)
