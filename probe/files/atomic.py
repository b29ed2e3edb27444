"""Atomic writes, and locks: a reader, or a kill at any moment, finds the old file or the new one, never half of one.

This package is the only one that opens files for writing. `write` and `write_all` are for everything that fits in
memory. `create` and `move` are for a folder that is built under another name and then published by one rename.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def writing(path: Path, error: Callable[[str], Exception]) -> Iterator[None]:
    """Raise an OSError of the block (a full disk, no permission) as `error`, in one message."""
    try:
        yield
    except OSError as problem:
        raise error(f"cannot write {path}: {problem.strerror or problem}. What was there before is whole.") from None


def write(path: str | Path, data: str | bytes) -> Path:
    """Replace the file, text as UTF-8, and make its folder. An OSError names `path`, and the old file is whole.

    Links are followed. Anything but a regular file, such as /dev/null or a pipe, is written to in place.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_bytes(_encoded(data))
    else:
        write_all({path: data})
    return path


def write_all(files: Mapping[Path, str | bytes]) -> None:
    """Replace several files, each as `write` does. If the disk has no room for all of them, every old file is kept.

    All are written under temporary names before the first is renamed. A kill between two renames leaves some files
    old and some new, each of them whole.
    """
    targets = {path: Path(os.path.realpath(path)) for path in files}
    temporaries = {path: target.with_name(f".{target.name}.{os.getpid()}.tmp") for path, target in targets.items()}
    path = Path()
    try:
        for path, data in files.items():
            targets[path].parent.mkdir(parents=True, exist_ok=True)
            with temporaries[path].open("wb") as file:
                file.write(_encoded(data))
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            os.replace(temporary, targets[path])
        for folder in dict.fromkeys(target.parent for target in targets.values()):
            sync(folder)
    except BaseException as problem:
        for temporary in temporaries.values():
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        if isinstance(problem, OSError) and problem.errno is not None:  # its message names the temporary file
            raise OSError(problem.errno, problem.strerror, str(path)) from None
        raise


def _encoded(data: str | bytes) -> bytes:
    return data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data


def remove_unfinished(folder: Path, process: int | None = None) -> None:
    """Delete the temporary files that a killed `write` left in `folder`: those of one process, or of any (None).

    If a process is given and the folder is empty afterwards, it is deleted too: it was made for that write.
    """
    for temporary in folder.glob(f".*.{'*' if process is None else process}.tmp"):
        temporary.unlink(missing_ok=True)
    if process is not None and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def create(path: Path) -> BinaryIO:
    """A new file, open for reading and writing. A link of that name is replaced, not written through."""
    path.unlink(missing_ok=True)
    return path.open("w+b")


def move(source: Path, target: Path) -> None:
    """Rename, and wait until the rename is on disk."""
    source.rename(target)
    sync(target.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and wait until they are on disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Hard-link a file that is never changed in place; copy it where the file system has no hard links."""
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


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder, or of a file that is made if missing: alone, or with other readers (`shared`).

    Without `wait`, a lock that another process holds is a BlockingIOError. The system releases a lock when its process
    ends. Some network file systems have no locks; there the block runs without one.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass  # no locks here
        yield
    finally:
        os.close(descriptor)
