"""Files of a recording: what the system refuses is told in one message, and nothing leads out of the folder."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from probe.recordings.checked import RecordingError, defect


@contextmanager
def reading(file: Path, kind: str = "a file") -> Iterator[None]:
    """Whatever a parser says of a file from elsewhere is a defect of that file."""
    try:
        yield
    except RecordingError:
        raise
    except OSError as problem:
        raise defect(file, f"cannot be read: {problem.strerror or problem}") from None
    except Exception as problem:
        words = " ".join(str(problem).split()) or type(problem).__name__
        words = words if len(words) <= 160 else words[:157] + "..."
        raise defect(file, f"is not {kind} that can be read ({words})") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk or a folder without permission is a RecordingError."""
    try:
        yield
    except OSError as problem:
        raise RecordingError(
            f"cannot write {path}: {problem.strerror or problem}. What was there before is whole."
        ) from None


def inside(folder: Path, name: str) -> Path:
    """A file of the recording: a real one, in its folder even when links are followed."""
    file = folder / name
    with reading(file):
        if not file.is_file():
            raise defect(file, "is missing, so this is no whole recording")
        if file.resolve() != folder.resolve() / name:
            raise defect(file, f"is a link to {file.resolve()}, which is not in the folder")
    return file


def sha256_of(file: Path) -> str:
    """In hexadecimal digits."""
    with reading(file), open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Every file and folder below, then the folder."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def link_or_copy(source: str, target: str) -> None:
    """A second name for a file that nobody changes in place; a copy where the file system has no links."""
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)


def replace_file(file: Path, data: bytes) -> None:
    """Put a small file in the place of another in one step."""
    fresh = file.with_name(f".{file.name}.new")
    with open(fresh, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(file)
    sync(file.parent)
