"""Writing so that a reader, or a kill at any moment, finds the old file or the new one, never half of one.

This package is the only one that opens files for writing. `write` and `write_all` are for everything that fits in
memory. `create` and `move` are for a folder that is built under another name and then published by one rename.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def writing(path: Path, error: Callable[[str], Exception]) -> Iterator[None]:
    """A refusal of the system in the block (a full disk, no permission) is raised as `error`, in one message."""
    try:
        yield
    except OSError as problem:
        raise error(f"cannot write {path}: {problem.strerror or problem}. What was there before is whole.") from None


def write(path: str | Path, data: str | bytes) -> Path:
    """Replace the file, text as UTF-8, and make its folder. An OSError names `path`, and the old file is whole.

    A link is followed. What is no regular file, such as /dev/null or a pipe, is written to and stays.
    """
    if Path(path).exists() and not Path(path).is_file():
        Path(path).write_bytes(_encoded(data))
    else:
        write_all({Path(path): data})
    return Path(path)


def write_all(files: Mapping[Path, str | bytes]) -> None:
    """Replace several files, each as `write` does; a disk that has no room for all of them keeps every old file.

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
        if isinstance(problem, OSError) and problem.errno is not None:  # it names the temporary file
            raise OSError(problem.errno, problem.strerror, str(path)) from None
        raise


def _encoded(data: str | bytes) -> bytes:
    return data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data


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


def replace_folder(source: Path, target: Path, *, aside: Path) -> None:
    """Put a folder in the place of another, which is deleted.

    No system call does that in one step: a kill between the two renames leaves the old folder as `aside`. If the
    second rename fails, the old folder is put back.
    """
    shutil.rmtree(aside, ignore_errors=True)
    target.rename(aside)
    try:
        source.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


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


def link_tree(source: Path, target: Path) -> None:
    """A new folder `target` with everything that is in `source`, its files by `link_or_copy`, links as links."""
    shutil.copytree(source, target, copy_function=link_or_copy, symlinks=True)


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
