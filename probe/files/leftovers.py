"""The files that an earlier run left in a folder: deleted once those of the new run are there, and nothing else."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from probe.files.atomic import write

#: Lists the files that runs wrote to the folder, with the sha256 of each.
LIST = ".analysis_files.json"


@contextmanager
def replacing_earlier_files(folder: Path, *, progress: Callable[[str], Any]) -> Iterator[list[Path]]:
    """A list for the paths that the block writes. After it, the files of earlier runs that were not written again are
    deleted, so that the folder holds one run; those that somebody has changed since stay, with a note to `progress`.

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
