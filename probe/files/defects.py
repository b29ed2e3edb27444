"""Defects of files from elsewhere: one message with the file, the defect, and what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from probe.words import format_bytes, printable, single_line

#: Bytes of a document (JSON, YAML, TOML). A larger file is something else and could fill the memory.
LARGEST = 64 * 10**6


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


def read_document(file: Path, *, most: int = LARGEST) -> bytes:
    """The bytes of a file that is parsed whole; one of more than `most` bytes is a DefectError."""
    if (size := file.stat().st_size) > most:
        raise DefectError(f"has {format_bytes(size)}; expected at most {format_bytes(most)}")
    return file.read_bytes()


def file_inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder from elsewhere. A missing file, or a link out of the folder, is a DefectError."""
    file = folder / name
    if not file.is_file():
        raise DefectError("is missing, so the folder is not whole")
    if file.resolve() != folder.resolve() / name:
        raise DefectError(f"is a link to {file.resolve()}, which is not in the folder")
    return file
