"""Paths of outputs: safe names, a check before the work starts, and the files of an earlier run in the same folder."""

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from probe.files.atomic import write

#: The file that lists what runs wrote to a folder, with the sha256 of each file.
LIST = ".analysis_files.json"


def safe_name(name: str) -> str:
    """`name` as one part of a path: letters, digits, '.', '_' and '-'; never empty, hidden, '.' or '..'.

    Different names can give the same part.
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).strip(".") or "_"


def user_cache() -> Path:
    """The folder for what this user's runs may find again; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "probe"


def content_digest(path: str | Path) -> str:
    """The first 16 hex digits of the sha256 of a file, or of all files in a folder with their names."""
    place, found = Path(path), hashlib.sha256()
    for file in sorted(one for one in place.rglob("*") if one.is_file()) if place.is_dir() else [place]:
        with file.open("rb") as stream:
            found.update(f"{file.relative_to(place)} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()[:16]


def is_private(folder: Path) -> bool:
    """Whether nobody else can have put files here. What is cached is run, and anyone can make a folder in /tmp."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and (
        not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o077)
    )


def check_outputs(*, files: Iterable[str | Path | None] = (), folders: Iterable[str | Path | None] = ()) -> None:
    """Refuse outputs that cannot be written, before the work starts; None and the file `-` (standard output) are fine.

    Missing folders are made, a file is made in each, and both are removed again.
    """
    for file in files:
        if file not in (None, "-"):
            if Path(str(file)).is_dir():
                raise ValueError(f"cannot write {file}: it is a folder. Give the name of a file.")
            _try_folder(Path(str(file)).parent, f"cannot write {file}", "Give a file in a folder")
    for folder in folders:
        if folder is not None:
            _try_folder(Path(folder), f"cannot write to {folder}", "Give a folder")


def _try_folder(folder: Path, cannot: str, instead: str) -> None:
    made: list[Path] = []
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.is_dir():
                path.mkdir()
                made.append(path)
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=folder):
            pass
    except FileExistsError as problem:
        raise ValueError(f"{cannot}: {problem.filename} is a file, not a folder. {instead} that can be made.") from None
    except OSError as problem:
        why = (problem.strerror or str(problem)).lower()
        raise ValueError(f"{cannot}: {why}. {instead} that can be written.") from None
    finally:
        for path in reversed(made):
            path.rmdir()


@contextmanager
def replacing_earlier_files(folder: Path, *, progress: Callable[[str], Any]) -> Iterator[list[Path]]:
    """Yields a list, to which the block adds the paths that it writes; the files of earlier runs are then deleted.

    A file that was changed after its run stays, with a note to `progress`. A block that fails deletes nothing.
    """
    earlier = _read_list(folder)
    written: list[Path] = []
    try:
        yield written
        names = {path.name for path in written}
        for name, digest in earlier.items():
            old = folder / name
            if name not in names and old.is_file() and not old.is_symlink():
                if _digest(old) == digest:
                    old.unlink()
                else:
                    progress(f"note: {old} is of an earlier run, and stays since it was changed after that")
        earlier = {}
    finally:
        if digests := earlier | {path.name: _digest(path) for path in written}:
            write(folder / LIST, json.dumps(digests, indent=1, sort_keys=True) + "\n")


def _read_list(folder: Path) -> dict[str, str]:
    """The digests by name. The list may have been edited: names outside the folder and unreadable lists are ignored."""
    try:
        content = json.loads((folder / LIST).read_text())
    except (OSError, ValueError):
        return {}
    names = [name for name in content if name == Path(name).name != LIST] if isinstance(content, dict) else []
    return {name: str(content[name]) for name in names}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
