"""What an earlier analysis left in a folder is taken away once the new files are there; nothing else ever is."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from probe.files.atomic import write

#: The files that analyses wrote to a folder, with the sha256 of each.
LIST = ".analysis_files.json"


@contextmanager
def in_place_of_earlier(folder: Path, *, progress: Callable[[str], Any]) -> Iterator[list[Path]]:
    """Hands out a list for the paths that the block writes. After it, files of earlier runs that were not written
    again are deleted, so that a folder holds one run; those that somebody changed since then stay.

    A block that fails deletes nothing.
    """
    known = _read(folder)
    written: list[Path] = []
    try:
        yield written
        names = {path.name for path in written}
        for name, digest in known.items():
            old = folder / name
            if name not in names and old.is_file() and not old.is_symlink():
                if _digest(old) == digest:
                    old.unlink()
                else:
                    progress(f"note: {old} is of an earlier run, and stays since it was changed after that")
        known = {}
    finally:
        known |= {path.name: _digest(path) for path in written}
        if known:
            write(folder / LIST, json.dumps(known, indent=1, sort_keys=True) + "\n")


def _read(folder: Path) -> dict[str, str]:
    """Plain names in the folder only: the list may have been edited. One that cannot be read is no list."""
    try:
        found = json.loads((folder / LIST).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: str(digest) for name, digest in found.items() if name == Path(name).name and name != LIST}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
