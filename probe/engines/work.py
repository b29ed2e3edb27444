"""What an engine runs: a job, which every worker opens once, and its units, whose results come back in order."""

import hashlib
import os
import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from probe.engines.identity import identity_of
from probe.version import VERSION

State = TypeVar("State")
Result = TypeVar("Result")
#: Called with the units that are done, how many there are, and what else is going on.
Progress = Callable[[int, int, str], Any]
#: Called with the index of a unit and something that it emitted while it ran.
Take = Callable[[int, Any], None]
Emit = Callable[[Any], None]
#: Imports what units will need; a function of a module, which workers import.
Setup = Callable[[], None]

#: Times that a unit is tried again after its worker died, on another worker if there is one.
RETRIES = 2
#: Why processes are killed, as far as anybody can tell.
PERHAPS = "perhaps for want of memory"
#: Errors that are about the input; any other one is a bug, and its traceback is worth having.
USUAL = (ValueError, TypeError, OSError, MemoryError)
#: Where the sources of this package are.
FOLDER = str(Path(__file__).parents[1])
#: The packages whose versions the numbers depend on: they must be the same wherever units run.
PACKAGES = ("torch", "numpy", "numba", "transformers", "safetensors")
#: Packages that some modes call: theirs must be the same where they are installed.
OPTIONAL = ("torchao", "compressed-tensors", "optimum-quanto", "gguf", "accelerate")


def silent(done: int, total: int, what: str) -> None:
    """No progress."""


def reason_of(problem: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(problem).split()) or type(problem).__name__


class UnitFailedError(ValueError):
    """A unit that failed, by its name; on another worker it would fail again, or it did."""


@dataclass(frozen=True, eq=False)
class Kept:
    """The result of a unit that stays where units can read it; `place` is known to the engine that made it."""

    number: int
    unit: "Unit"
    place: Any


@dataclass(frozen=True, eq=False)
class Unit:
    """A piece of a job. `name` is for people; `work` is what `Job.run` gets."""

    name: str
    work: Any
    needs: Kept | None = None

    @cached_property
    def key(self) -> str:
        """What tells the units of a job apart."""
        return identity_of(self.name, self.work)


class Job(ABC, Generic[State, Result]):
    """What the units of a run share. It is pickled to every worker, so it holds plain values and no model.

    open      what a worker makes once for all units of the job: the loaded model, for one
    run       one unit; `given` is what its `needs` kept, and `emit` hands on what should not wait for the result
    pack      a kept result as bytes, and `unpack`, its inverse, of bytes in memory or of a file

    A job is a frozen dataclass. Its `key` is a digest of all its fields: a job with the same key continues one that
    failed, so what its results depend on must be in a field, and what must not change is.
    """

    @property
    def is_journaled(self) -> bool:
        """Whether finished units are kept on disk until the run has ended: only if the fields say all of the job."""
        return False

    @property
    def memory(self) -> int:
        """The bytes that a worker of this job needs."""
        return 0

    @property
    def gpus(self) -> int:
        """The accelerators that a worker of this job needs."""
        return 0

    @abstractmethod
    def open(self) -> State:
        """What a worker keeps for all its units."""

    @abstractmethod
    def run(self, state: State, work: Any, given: Any, emit: Emit) -> Result:
        """The result of one unit."""

    @property
    def paths(self) -> Mapping[str, str]:
        """Files and folders that every worker must find under the same name; with a digest, of that content."""
        return {}

    def pack(self, value: Any) -> bytes:
        """A kept result as bytes."""
        raise NotImplementedError(f"{type(self).__name__} keeps no results")

    def unpack(self, data: Any) -> Any:
        """The inverse of `pack`, of a buffer or of the path of a file."""
        raise NotImplementedError(f"{type(self).__name__} keeps no results")

    @cached_property
    def key(self) -> str:
        """A digest of the job and of what runs here."""
        return identity_of(self, installed())


class Engine(ABC):
    """Runs the units of jobs. Results are those of the units in their order, whatever worker finishes first.

    A unit whose worker dies is tried again, RETRIES times; then it is a UnitFailedError that names it. A unit that
    raises is not tried again. A closed engine has stopped all that it began.
    """

    #: How many units run at a time.
    workers: int = 1
    #: Whether units run in this process, and what they emit is taken at once.
    is_here: bool = False
    #: Whether every worker sees the files of this machine.
    shares_disk: bool = True
    #: Whether the same run, begun again, goes on from what is done by now.
    resumes: bool = False

    @property
    def about(self) -> str:
        """Where units run, for people; empty for processes of this machine."""
        return ""

    @property
    def address(self) -> str:
        """Where other processes reach the cluster; empty for processes of this machine."""
        return ""

    def prepare(self, setup: Setup) -> None:
        """Start workers, which call `setup`, while this process does something else, such as loading a model."""
        return

    def inspect(self, job: Job[Any, Any]) -> None:
        """Refuse a job before any work if workers run other versions, or lack its files or memory for it."""
        return

    def settle(self, job: Job[Any, Any], name: str, value: Any) -> Any:
        """What was settled under this name by the run that this one goes on from; without one, `value`.

        For what divides the work into units but depends on the workers: the other units would be unknown.
        """
        return value

    @abstractmethod
    def run(
        self,
        job: Job[State, Result],
        units: Sequence[Unit],
        *,
        state: State | None = None,
        take: Take | None = None,
        progress: Progress = silent,
        keep_going: bool = False,
    ) -> Iterator[Any]:
        """The results of the units. No more of them are held at a time than a few for each worker.

        state        what `job.open` would return, where this process has it already
        take         receives what units emit: that of a unit all at once or as it runs, before its result
        keep_going   a unit that fails is a UnitFailedError among the results, and the others go on
        """

    @abstractmethod
    def keep(
        self,
        job: Job[State, Any],
        units: Sequence[Unit],
        *,
        state: State | None = None,
        progress: Progress = silent,
    ) -> list[Kept]:
        """Run units whose results are for other units, and leave those where units can read them."""

    @abstractmethod
    def fetch(self, job: Job[State, Any], kept: Kept) -> Any:
        """A kept result, in this process."""

    def finish(self) -> None:
        """The results of all jobs so far are safe: forget what a second run would have continued."""
        return

    def close(self) -> None:
        """Stop everything that runs."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def set_up(setup: Setup) -> None:
    """What a worker does before its first unit; a library that is missing is told by the unit that needs it."""
    with suppress(ImportError):
        setup()


def own_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(threads: int) -> None:
    """Let torch use so many threads in this process; where it is not loaded yet, it reads the number when it is."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)


class Workshop:
    """A worker's side of an engine: opens the job that its next unit belongs to, and keeps what it opened last."""

    def __init__(self) -> None:
        self._opened: tuple[str, Any] = ("", None)
        self._unpacked: tuple[tuple[str, int], Any] = (("", 0), None)

    def open(self, key: str, job: Job[Any, Any]) -> Any:
        """The state of a job, opened once."""
        if self._opened[0] != key:
            self._opened = ("", None)  # the old one goes before the new one comes
            self._opened = (key, job.open())
        return self._opened[1]

    def given(self, key: str, job: Job[Any, Any], number: int, data: Callable[[], Any]) -> Any:
        """What a unit needs, unpacked once for units in a row that need the same."""
        if self._unpacked[0] != (key, number):
            self._unpacked = (("", 0), None)
            self._unpacked = ((key, number), job.unpack(data()))
        return self._unpacked[1]


@cache
def installed() -> dict[str, str]:
    """The versions of what computes: Python, packages, also optional ones, and a digest of the sources of this one."""
    found = hashlib.sha256()
    for file in sorted(Path(FOLDER).rglob("*.py")):
        found.update(str(file.relative_to(FOLDER)).encode() + b"\0" + file.read_bytes() + b"\0")
    there = [name for name in OPTIONAL if any(metadata.distributions(name=name))]
    versions = {name: metadata.version(name).partition("+")[0] for name in (*PACKAGES, *there)}
    return {"probe": f"{VERSION} ({found.hexdigest()[:12]})", "python": platform.python_version(), **versions}


@dataclass(frozen=True)
class Place:
    """Where the project of a run lies: workers import its modules and read its relative paths from there."""

    folder: str
    search: tuple[str, ...]

    @classmethod
    def here(cls) -> Self:
        """That of this process."""
        return cls(os.getcwd(), tuple(os.path.abspath(path) for path in sys.path))

    def enter(self) -> None:
        """Make it that of a worker, where it exists on this machine."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        sys.path += [path for path in self.search if path not in sys.path and os.path.isdir(path)]
