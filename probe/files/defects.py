"""Defects of files from elsewhere: one message with the file, what is wrong in it, and what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from probe.words import printable

#: The longest message of a parser that is quoted.
QUOTED = 160


class DefectError(Exception):
    """What is wrong inside a file. `reading` adds which file and, unless `remedy` says it, what to do."""

    def __init__(self, problem: str, *, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


@contextmanager
def reading(file: Path, error: Callable[[str], Exception], *, remedy: str) -> Iterator[None]:
    """A defect of `file` in the block, or a refusal of the system to read it, is raised as `error` with the remedy.

    The defect may quote the file: nothing of it reaches a terminal as a command.
    """
    try:
        yield
    except DefectError as problem:
        raise error(f"{file}: {printable(str(problem))}. {problem.remedy or remedy}") from None
    except OSError as problem:
        raise error(f"{file}: cannot be read: {problem.strerror or problem}. {remedy}") from None


@contextmanager
def parsing(kind: str) -> Iterator[None]:
    """Whatever a parser raises in the block, other than an OSError, is a defect: the file is not `kind`."""
    try:
        yield
    except (DefectError, OSError):
        raise
    except Exception as problem:
        words = " ".join(str(problem).split()) or type(problem).__name__
        words = words if len(words) <= QUOTED else words[: QUOTED - 3] + "..."
        raise DefectError(f"is not {kind} that can be read ({words})") from None
