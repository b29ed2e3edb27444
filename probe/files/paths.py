"""Paths: names that are safe as one part of a path, and outputs that are checked before the work starts."""

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from probe.files.defects import DefectError

Given = str | Path | None


def safe_name(name: str) -> str:
    """`name` as one part of a path: letters, digits, '.', '_' and '-'; never empty, hidden, '.' or '..'.

    Different names can give the same part.
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).strip(".") or "_"


def file_inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder from elsewhere; a missing one, or a link out of the folder, is a DefectError."""
    file = folder / name
    if not file.is_file():
        raise DefectError("is missing, so the folder is not whole")
    if file.resolve() != folder.resolve() / name:
        raise DefectError(f"is a link to {file.resolve()}, which is not in the folder")
    return file


def check_outputs(*, files: Iterable[Given] = (), folders: Iterable[Given] = ()) -> None:
    """Refuse, before the work starts, what could not be written after it; None and `-` (standard output) are fine.

    Missing folders are made, a file is made in each, and both are removed again.
    """
    for given in files:
        if given not in (None, "-"):
            if Path(str(given)).is_dir():
                raise ValueError(f"cannot write {given}: it is a folder. Give the name of a file.")
            _try_folder(Path(str(given)).parent, f"cannot write {given}", "Give a file in a folder")
    for given in folders:
        if given is not None:
            _try_folder(Path(str(given)), f"cannot write to {given}", "Give a folder")


def _try_folder(folder: Path, cannot: str, instead: str) -> None:
    made: list[Path] = []
    try:
        for one in (*reversed(folder.parents), folder):
            if not one.is_dir():
                one.mkdir()
                made.append(one)
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=folder):
            pass
    except FileExistsError as problem:
        raise ValueError(f"{cannot}: {problem.filename} is a file, not a folder. {instead} that can be made.") from None
    except OSError as problem:
        why = (problem.strerror or str(problem)).lower()
        raise ValueError(f"{cannot}: {why}. {instead} that can be written.") from None
    finally:
        for one in reversed(made):
            one.rmdir()
