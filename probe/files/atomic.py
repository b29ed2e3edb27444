"""Writing so that a reader, or a kill at any moment, finds the old file or the new one, never half of one.

This package is the only one that opens files for writing. `write` and `write_all` are for everything that fits in
memory. `create` and `move` are for a folder that is built under another name and then published by one rename.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def write(path: str | Path, data: str | bytes) -> Path:
    """Replace the file, text as UTF-8, and make its folder. An OSError names `path`, and the old file is whole."""
    target = Path(path)
    write_all({target: data})
    return target


def write_all(files: Mapping[Path, str | bytes]) -> None:
    """Replace several files, each as `write` does; a disk that has no room for all of them keeps every old file.

    All are written under temporary names before the first is renamed. A kill between two renames leaves some files
    old and some new, each of them whole.
    """
    temporaries = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    path = Path()
    try:
        for path, data in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporaries[path].open("wb") as file:
                file.write(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
        for folder in dict.fromkeys(path.parent for path in files):
            sync(folder)
    except BaseException as problem:
        for temporary in temporaries.values():
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        if isinstance(problem, OSError) and problem.errno is not None:  # it names the temporary file
            raise OSError(problem.errno, problem.strerror, str(path)) from None
        raise


def remove_unfinished(folder: Path, process: int | None = None) -> None:
    """Delete the temporary files that a killed `write` left in `folder`: of one process, or of any (None).

    A folder that is then empty is deleted too where a process is given: it was made for that write.
    """
    for temporary in folder.glob(f".*.{'*' if process is None else process}.tmp"):
        temporary.unlink(missing_ok=True)
    if process is not None and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def create(path: Path) -> BinaryIO:
    """A new file, open for reading and writing. It replaces a link of that name; it does not write through it."""
    path.unlink(missing_ok=True)
    return path.open("w+b")


def move(source: Path, target: Path) -> None:
    """Rename, and wait until the rename is on disk."""
    source.rename(target)
    sync(target.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """A second name for a file that is never changed in place; a copy where the file system has no hard links."""
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until everything below the folder, and the folder itself, is on disk."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)
