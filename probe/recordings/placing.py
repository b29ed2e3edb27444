"""Putting a finished folder in its place: in one rename, so that a folder is a whole recording or not there."""

import os
import shutil
from pathlib import Path

from probe.recordings.checked import RecordingError
from probe.recordings.disk import sync, writing
from probe.recordings.format import MANIFEST
from probe.recordings.reading import PREVIOUS, read_manifest


def is_taken(folder: Path) -> bool:
    """Whether a recording is there; anything else that is in the way is an error."""
    with writing(folder):
        if not os.path.lexists(folder):
            return False
        if not folder.is_dir():
            raise RecordingError(f"{folder} is a file. Expected the name of a folder to make.")
        names = set(os.listdir(folder))
    if names and MANIFEST not in names:
        raise RecordingError(f"{folder} is not empty and is no recording. Give another folder.")
    return bool(names)


def may_be_overwritten(folder: Path, *, overwrite: bool) -> bool:
    """Whether a whole recording has to make room, which it does only if asked and if nothing else is with it."""
    if not is_taken(folder):
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


def recover(folder: Path) -> None:
    """Put back what a kill in the middle of `put` left beside its place."""
    old = aside(folder)
    with writing(folder):
        if old.is_dir() and not os.path.lexists(folder):
            old.rename(folder)


def aside(folder: Path) -> Path:
    """Where an older recording is for the moment between two renames; hidden, so that it is nobody's own."""
    return folder.with_name(PREVIOUS.format(folder.name))


def put(fresh: Path, folder: Path, *, in_place_of_another: bool) -> None:
    """Rename into place. The old recording is set aside first, and put back if that fails.

    A folder cannot take the place of another in one step: a kill between the two leaves the old one `aside`.
    """
    old = aside(folder)
    with writing(folder):
        if in_place_of_another:
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        try:
            fresh.rename(folder)
        except BaseException:
            if in_place_of_another:
                old.rename(folder)
            raise
        sync(folder.parent)
    if in_place_of_another:
        shutil.rmtree(old, ignore_errors=True)
