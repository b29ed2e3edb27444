"""Defects of files from elsewhere: one message with the file, the defect, and what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from probe.words import printable, single_line


class DefectError(Exception):
    """A defect of a file. `reading` adds the name of the file and, unless `remedy` says it, what to do."""

    def __init__(self, problem: str, *, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


@contextmanager
def reading(file: Path, error: Callable[[str], Exception], *, remedy: str) -> Iterator[None]:
    """Raise a DefectError or OSError of the block as `error`, with the file and the remedy.

    A defect may quote the file, so control characters in it are spelled out.
    """
    try:
        yield
    except DefectError as problem:
        raise error(f"{file}: {printable(str(problem))}. {problem.remedy or remedy}") from None
    except OSError as problem:
        raise error(f"{file}: cannot be read: {problem.strerror or problem}. {remedy}") from None


@contextmanager
def parsing(kind: str) -> Iterator[None]:
    """Raise whatever a parser raises in the block, except OSError, as a DefectError: the file is not `kind`."""
    try:
        yield
    except (DefectError, OSError):
        raise
    except Exception as problem:
        words = single_line(" ".join(str(problem).split()), most=160) or type(problem).__name__
        raise DefectError(f"is not {kind} that can be read ({words})") from None


def file_inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder from elsewhere. A missing file, or a link out of the folder, is a DefectError."""
    file = folder / name
    if not file.is_file():
        raise DefectError("is missing, so the folder is not whole")
    if file.resolve() != folder.resolve() / name:
        raise DefectError(f"is a link to {file.resolve()}, which is not in the folder")
    return file
