"""Writing a file so that whoever reads it sees the old one or the new one, never half of one."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

Given = str | Path | None


def check_outputs(*, files: Iterable[Given] = (), folders: Iterable[Given] = ()) -> None:
    """Refuse, before the work starts, what could not be written after it; None and `-` (standard output) are fine.

    Folders that are missing are made, a file is made in each, and both are taken away again.
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


def write(path: str | Path, data: str | bytes) -> Path:
    """Put `data` in the file, text as UTF-8, and make its folder. An OSError names it and leaves what was there."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as problem:
        temporary.unlink(missing_ok=True)
        if isinstance(problem, OSError) and problem.errno is not None:  # it names a file that nobody has heard of
            raise OSError(problem.errno, problem.strerror, str(path)) from None
        raise
    return target


def remove_unfinished(folder: Path, process: int) -> None:
    """Take away what `write` had begun in `folder` when that process was killed, and the folder if it was for that."""
    for temporary in folder.glob(f".*.{process}.tmp"):
        temporary.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
