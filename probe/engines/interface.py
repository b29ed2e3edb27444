"""Jobs, their units, and the interface of the engines that run them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

from probe.engines.identity import identity_of
from probe.engines.versions import installed

State = TypeVar("State")
Result = TypeVar("Result")
#: Called with the number of finished units, the number of all units, and a text.
Progress = Callable[[int, int, str], Any]
#: Called with the index of a unit and something that it emitted while it ran.
Take = Callable[[int, Any], None]
Emit = Callable[[Any], None]
#: Imports what units will need; a function of a module that workers can import.
Setup = Callable[[], None]

#: How often a unit is tried again after its worker died, on another worker if there is one.
RETRIES = 2
#: Of a process that was killed; the operating system does not tell.
LIKELY_CAUSE = "perhaps because memory ran out"
#: Errors about the input; any other one is a bug, whose traceback is worth having.
INPUT_ERRORS = (ValueError, TypeError, OSError, MemoryError)


def silent(done: int, total: int, what: str) -> None:
    """No progress."""


def reason_of(problem: BaseException) -> str:
    """The message of an error, on one line."""
    return " ".join(str(problem).split()) or type(problem).__name__


class UnitFailedError(ValueError):
    """A unit that failed, with its name. Trying it again would not help, or did not.

    `bug` is the error of a unit that is not about its input: whoever does not keep going gets it as it is.
    """

    def __init__(self, message: str, bug: BaseException | None = None) -> None:
        super().__init__(message)
        self.bug = bug
        self.__cause__ = bug

    def of(self, unit: str) -> "UnitFailedError":
        """The same with the name of the unit."""
        return UnitFailedError(f"{unit}: {self}", self.bug)


def failure(problem: BaseException) -> UnitFailedError:
    """What an error of a unit becomes: its message, and for one that is not about the input the error itself."""
    if isinstance(problem, INPUT_ERRORS):
        return UnitFailedError(reason_of(problem))
    return UnitFailedError(f"{type(problem).__name__}: {reason_of(problem)}", problem)


@dataclass(frozen=True, eq=False)
class Kept:
    """The result of a unit that stays where other units can read it; `place` is for its engine only."""

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
        """What distinguishes the units of a job."""
        return identity_of(self.name, self.work)


class Job(ABC, Generic[State, Result]):
    """What the units of a run share. It is pickled to every worker, so it holds plain values and no model.

    open      what a worker makes once for all units of the job, such as the loaded model
    run       one unit; `given` is the kept result that it `needs`, and `emit` sends what should not wait for the end
    pack      a kept result as bytes, and `unpack`, its inverse, of bytes in memory or of a file

    A job is a frozen dataclass. Its `key` is a digest of all its fields: a job with the same key continues one that
    was interrupted. So everything that its results depend on must be a field.
    """

    @property
    def is_journaled(self) -> bool:
        """Whether finished units are kept on disk until the run has ended: only if the fields determine the results."""
        return False

    def is_final(self, result: Result) -> bool:
        """Whether a second run may use this result; False for a failure whose cause may be gone by then."""
        return True

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
        """A digest of the job and of the installed versions."""
        return identity_of(self, installed())


class Engine(ABC):
    """Runs the units of jobs. Results are in the order of the units, whatever worker finishes first.

    A unit whose worker dies is tried again, RETRIES times; then it is a UnitFailedError with its name. A unit that
    raises is not tried again. A closed engine has stopped everything that it began.
    """

    #: How many units run at a time.
    workers: int = 1
    #: Whether units run in this process, which then takes what they emit at once.
    is_here: bool = False
    #: Whether every worker sees the files of this machine.
    shares_disk: bool = True
    #: Called with what a person should know who sees no progress.
    notice: Callable[[str], Any] = staticmethod(lambda text: None)
    #: Whether the same run, begun again, continues from what is done by now.
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
        """Refuse a job before any work if workers run other versions, or lack its files, memory or accelerators."""
        return

    def remember(self, job: Job[Any, Any], name: str, value: Any) -> Any:
        """The value that the interrupted run stored under this name; in a new run, `value`, which is stored.

        For a number that depends on the workers and divides the work: with another division into units, none of the
        finished ones would be found.
        """
        return value

    def discard(self, job: Job[Any, Any], unit: Unit) -> None:
        """Let a second run compute a finished unit again: its result is not to be used."""
        return

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
        """The results of the units. Only a few for each worker are in memory at a time.

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
        """Run units whose results are for other units, and leave the results where those can read them."""

    def finish(self) -> None:
        """Delete what a second run would continue from: the results of all jobs so far are safe."""
        return

    def close(self) -> None:
        """Stop everything that runs."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()
