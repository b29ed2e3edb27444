"""What every worker process has, whichever engine started it: threads, the project's folder, and the job it opened."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from probe.engines.interface import Job, Setup


def set_up(setup: Setup) -> None:
    """What a worker does before its first unit. A unit that needs a missing library reports it; this does not."""
    with suppress(ImportError):
        setup()


def own_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(threads: int) -> None:
    """Let torch use so many threads in this process, whether it is loaded already or will be."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class ProjectFolder:
    """Where the project of a run lies: workers import its modules and resolve relative paths from there."""

    path: str
    search: tuple[str, ...]

    @classmethod
    def here(cls) -> Self:
        """That of this process."""
        return cls(os.getcwd(), tuple(os.path.abspath(path) for path in sys.path))

    def enter(self) -> None:
        """Make it the current folder of a worker, if this machine has it."""
        if os.path.isdir(self.path):
            os.chdir(self.path)
        sys.path += [path for path in self.search if path not in sys.path and os.path.isdir(path)]


class OpenJob:
    """The job that a worker opened last, and the last kept result that it read: units in a row share both."""

    def __init__(self) -> None:
        self._opened: tuple[str, Any] = ("", None)
        self._unpacked: tuple[tuple[str, int], Any] = (("", 0), None)

    def state(self, key: str, job: Job[Any, Any]) -> Any:
        """The state of a job, opened once."""
        if self._opened[0] != key:
            self._opened = ("", None)  # the old one goes before the new one comes
            self._opened = (key, job.open())
        return self._opened[1]

    def kept(self, key: str, job: Job[Any, Any], number: int, data: Callable[[], Any]) -> Any:
        """A kept result, unpacked once for units in a row that need it."""
        if self._unpacked[0] != (key, number):
            self._unpacked = (("", 0), None)
            self._unpacked = ((key, number), job.unpack(data()))
        return self._unpacked[1]
