"""The engine of one machine: units in this process, or in worker processes."""

import gc
import os
import shutil
import signal
import tempfile
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Self, TypeVar

from probe.engines.interface import (
    LIKELY_CAUSE,
    RETRIES,
    Engine,
    Job,
    Kept,
    Progress,
    Result,
    Setup,
    State,
    Take,
    Unit,
    UnitFailedError,
    failure,
    silent,
)
from probe.engines.process import OpenJob, ProjectFolder, own_cpus, set_up, use_threads
from probe.files.atomic import write
from probe.words import require_positive

Item = TypeVar("Item")
#: The most worker processes for each CPU; more are no faster.
MAX_PER_CPU = 8


class LocalEngine(Engine):
    """Units one after the other in this process; with several `jobs`, in as many worker processes.

    In this process what units emit is taken at once, and an error is raised as it is. Kept results lie in memory if
    there is one of them, else in files of a temporary folder, which units map.
    """

    def __init__(self, jobs: int = 1) -> None:
        require_positive("jobs", jobs)
        if jobs > (most := MAX_PER_CPU * own_cpus()):
            raise ValueError(
                f"jobs is {jobs}, and this process may use {own_cpus()} CPUs. Give {most} or less: more workers "
                "take memory and are no faster."
            )
        self.workers, self.is_here = jobs, jobs == 1
        self._numbers = count(1)
        self._folder: Path | None = None
        self._pool: ProcessPoolExecutor | None = None
        self._setup: Setup | None = None
        self._open_job = OpenJob()
        self._is_entered = False

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def prepare(self, setup: Setup) -> None:
        """Start the worker processes; see `Engine.prepare`."""
        self._setup = setup
        for _ in range(0 if self.is_here else min(self.workers, own_cpus())):
            self._call(_started)  # a process is started for each; others when there are units for them

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
        """The results of the units, in order; see `Engine.run`."""
        if not self.is_here:
            yield from self._in_processes(job, units, take, progress, keep_going)
            return
        if state is None:
            state = self._open_job.state(job.key, job)
        if self._is_entered:
            gc.freeze()  # libraries and the model: collections that walk over them take a tenth of the time
        for index, unit in enumerate(units):
            progress(index, len(units), unit.name)
            given = None if unit.needs is None else self._value(job, unit.needs)
            try:
                yield job.run(state, unit.work, given, partial(take, index) if take else _forget)
            except Exception as problem:
                if not keep_going:
                    raise
                yield failure(problem)
        progress(len(units), len(units), "done")

    def keep(
        self, job: Job[State, Any], units: Sequence[Unit], *, state: State | None = None, progress: Progress = silent
    ) -> list[Kept]:
        """Kept results; see `Engine.keep`."""
        numbers = [next(self._numbers) for _ in units]
        if not self.is_here:
            files = [self._file(number) for number in numbers]
            marked = [Unit(unit.name, _Keeping(unit.work, file)) for unit, file in zip(units, files, strict=True)]
            for _ in self.run(job, marked, progress=progress):
                pass
            return [Kept(number, unit, file) for number, unit, file in zip(numbers, units, files, strict=True)]
        found = []
        for number, unit, value in zip(
            numbers, units, self.run(job, units, state=state, progress=progress), strict=True
        ):
            place: Any = value
            if len(units) > 1:
                place = write(self._file(number), job.pack(value))
            found.append(Kept(number, unit, place))
        return found

    def _value(self, job: Job[State, Any], kept: Kept) -> Any:
        """A kept result."""
        if not isinstance(kept.place, Path):
            return kept.place
        return self._open_job.kept(job.key, job, kept.number, lambda: kept.place)

    def close(self) -> None:
        """Kill the worker processes, and delete what was kept."""
        self._kill()
        if self._is_entered:
            gc.unfreeze()
        if self._folder is not None:
            self._delete()
            self._folder = None

    def _file(self, number: int) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="probe-"))
            # at the latest when the engine is gone: that of a library call is not closed
            self._delete = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder / f"{number}"

    def _in_processes(
        self, job: Job[Any, Any], units: Sequence[Unit], take: Take | None, progress: Progress, keep_going: bool
    ) -> Iterator[Any]:
        """As many units at a time as there are workers. When a worker dies, all processes of the pool are gone.

        Which unit it was is not known then, so those that ran are tried again one by one.
        """
        left, alone, tries = deque(range(len(units))), deque[int](), Counter[int]()
        running: dict[Future[Any], int] = {}
        found: dict[int, tuple[list[Any], Any]] = {}
        window, turn = 4 * self.workers, 0
        key = job.key

        def report() -> None:
            text = f"{len(running)} in flight" + (f", {tries.total()} tried again" if tries else "")
            progress(len(found) + turn, len(units), text)

        try:
            while turn < len(units):
                while len(running) < (1 if alone else self.workers) and (alone or left):
                    if not alone and left[0] >= turn + window:
                        break
                    index = alone.popleft() if alone else left.popleft()
                    running[self._submit(key, job, units[index])] = index
                    if tries[index]:
                        break
                report()
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                if any(isinstance(future.exception(), BrokenProcessPool) for future in done):
                    self._kill()
                    for future in list(running):
                        index = running.pop(future)
                        if future.done() and not future.exception():
                            found[index] = future.result()
                            continue
                        tries[index] += 1
                        if tries[index] > RETRIES:
                            found[index] = (
                                [],
                                UnitFailedError(f"its process was killed {tries[index]} times, {LIKELY_CAUSE}"),
                            )
                        else:
                            alone.append(index)
                else:
                    for future in done:
                        found[running.pop(future)] = _answer(future)
                while turn in found:
                    items, result = found.pop(turn)
                    if isinstance(result, UnitFailedError):
                        result = result.of(units[turn].name)
                        if not keep_going:
                            raise result.bug or result
                    for item in items:
                        if take is not None:
                            take(turn, item)
                    turn += 1
                    report()
                    yield result
        except BaseException:
            self._kill()
            raise

    def _submit(self, key: str, job: Job[Any, Any], unit: Unit) -> Future[Any]:
        needs = None if unit.needs is None else (unit.needs.number, unit.needs.place)
        try:
            return self._call(_run, key, job, unit.work, needs)
        except BrokenProcessPool:  # a process died while it was prepared
            self._kill()
            return self._call(_run, key, job, unit.work, needs)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._pool is None:
            threads = max(1, own_cpus() // self.workers)
            start = (ProjectFolder.here(), threads, self._setup)
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_begin, initargs=start)
        with _no_interrupt():  # workers inherit the mask from their first moment on
            return self._pool.submit(function, *arguments)

    def _kill(self) -> None:
        """End the worker processes at once; Ctrl-C goes to all processes of a terminal, and only this one decides."""
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        workers = list((pool._processes or {}).values())
        for worker in workers:
            worker.kill()
        with suppress(BrokenProcessPool):
            pool.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.join()


def _forget(item: Any) -> None:
    """What units emit, where nobody takes it."""


def _answer(future: "Future[Any]") -> tuple[list[Any], Any]:
    """(what the unit emitted, its result); an error of the unit is a UnitFailedError in place of the result."""
    problem = future.exception()
    if problem is None:
        answer: tuple[list[Any], Any] = future.result()
        return answer
    return [], failure(problem)


class _Keeping:
    """The work of a unit whose result goes to a file."""

    def __init__(self, work: Any, file: Path) -> None:
        self.work, self.file = work, file


_open_job = OpenJob()


def _begin(folder: ProjectFolder, threads: int, setup: Setup | None) -> None:
    """Set up a worker process, which ends with the one that started it, however that ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    folder.enter()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    use_threads(min(threads, int(asked)) if asked.isdecimal() else threads)
    if setup is not None:
        set_up(setup)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _started() -> None:
    """What a worker process answers once it is set up."""


def _run(key: str, job: Job[Any, Any], work: Any, needs: tuple[int, Path] | None) -> tuple[list[Any], Any]:
    """One unit, in a worker process: what it emitted, and its result."""
    state = _open_job.state(key, job)
    given = None if needs is None else _open_job.kept(key, job, needs[0], lambda: needs[1])
    items: list[Any] = []
    if isinstance(work, _Keeping):
        write(work.file, job.pack(job.run(state, work.work, given, items.append)))
        return [], None
    return items, job.run(state, work, given, items.append)


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C waits until the block is over, here and in the processes that it starts, which never see it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
