"""Hands the units of a job to the workers of a cluster, and their answers on in the order of the units."""

import pickle
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from probe.engines.journal import Journal
from probe.engines.remote import LOST
from probe.engines.work import (
    PERHAPS,
    RETRIES,
    USUAL,
    Job,
    Kept,
    Place,
    Progress,
    Unit,
    UnitFailedError,
    reason_of,
    silent,
)

if TYPE_CHECKING:
    from probe.engines.cluster import RayEngine

#: What Ray says of a worker that was never there, and a reason of which it says nothing.
NEVER_RAN = "The actor never ran"
REFUSED = (
    "If this machine has a token (~/.ray/auth_token) and the cluster asks for none, Ray refuses it: export "
    "RAY_AUTH_MODE=disabled"
)
#: Seconds between two looks at what is going on while nothing is finished.
TICK = 1.0
#: Seconds without any worker, after all were lost, until a run gives up.
ABANDONED = 60.0
#: Answers that may wait for their turn, for each worker.
WAITING = 4
#: Units that a worker has at a time: the one that it runs, and the next, so that it does not wait for this process.
QUEUED = 2


@dataclass(eq=False)
class Worker:
    """An actor on a node, with the memory and the accelerators that it asked for."""

    node: str
    host: str
    actor: Any
    memory: int = 0
    gpus: int = 0
    place: Place | None = None  # where it works

    def enter(self, place: Place) -> None:
        """Let it work there from its next call on."""
        if self.place != place:
            self.place = place
            self.actor.enter.remote(place)


@dataclass(frozen=True, eq=False)
class _Task:
    """A unit on a worker, or the making again of what units need.

    order      that in which tasks were begun
    is_alone   nothing else is given to its worker meanwhile
    """

    worker: Worker
    index: int
    order: int
    is_alone: bool = False
    repaired: Kept | None = None
    made: Any = None  # the reference of a kept result


class Dispatch:
    """An iterator over (index, (what the unit emitted, its result)). The result of a kept one: (reference, file, node).

    A worker runs one unit at a time, in the order in which it got them: the first without an answer is the one that
    killed it. What is tried again is the only unit of its worker. A unit that failed has a UnitFailedError as its
    result. Whatever ends the iteration early kills the workers.
    """

    def __init__(
        self,
        engine: "RayEngine",
        job: Job[Any, Any],
        units: Sequence[Unit],
        *,
        progress: Progress = silent,
        journal: Journal | None = None,
        keeps: int = 0,
    ) -> None:
        self._engine, self._job, self._units, self._progress = engine, job, units, progress
        self._journal, self._keeps, self._ray = journal, keeps, engine.ray
        self._place, self._orders = Place.here(), count()
        self._on_disk = set[int]() if journal is None else {i for i, unit in enumerate(units) if unit in journal}
        self._todo = deque(i for i in range(len(units)) if i not in self._on_disk)
        self._again: deque[int] = deque()
        self._running: dict[Any, _Task] = {}
        self._answers: dict[int, Any] = {}
        self._tries: Counter[int] = Counter()
        self._waiting: dict[int, list[int]] = {}  # by the number of what was lost: the units that need it
        self._repairs: deque[Kept] = deque()
        self._pings: dict[Any, str] = {}
        self._idle_since = time.monotonic()
        self._done = self._known = len(self._on_disk)
        self._turn = 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        whole = False
        try:
            while self._turn < len(self._units):
                self._hand_out()
                while self._turn < len(self._units) and (answer := self._take_turn()) is not None:
                    yield self._turn - 1, answer
                self._report()
                if self._running or self._pings:
                    self._wait()
                elif self._turn < len(self._units) and not self._engine.pool:
                    self._check_abandoned()
            whole = True
        except ConnectionError as problem:  # that of ray://
            lost = f"the connection to the Ray cluster was lost: {reason_of(problem).rstrip('.')}"
            raise UnitFailedError(f"{lost}.{self._keeps_what_is_done}") from None
        finally:
            if not whole:
                self._engine.stop()

    def _take_turn(self) -> Any:
        """The answer whose turn it is, if it is there."""
        index = self._turn
        if self._journal is not None and index in self._on_disk:
            self._on_disk.discard(index)
            answer = self._journal.read(self._units[index])
            if answer is None:
                self._todo.appendleft(index)
                self._done -= 1
            else:
                self._answers[index] = answer
        if index not in self._answers:
            return None
        self._turn += 1
        return _opened(self._answers.pop(index))

    def _report(self) -> None:
        more = f", {self._tries.total()} tried again" if self._tries else ""
        more += f", {self._known} known from the run before" if self._known else ""
        waiting = "" if self._engine.pool else ", waiting for a worker"
        running = len({id(task.worker) for task in self._running.values()})
        self._progress(self._done, len(self._units), f"{running} in flight{more}{waiting}")

    @property
    def _keeps_what_is_done(self) -> str:
        return "" if self._journal is None else " What is done is kept: the same command goes on from there."

    # ---------------------------------------------------------------------------------------------- handing out

    def _hand_out(self) -> None:
        """Give every free worker a unit, those that were lost first; then, while there are many, a second one."""
        left = len(self._todo) + len(self._again) + len(self._repairs) + len(self._running)
        self._engine.fill(self._job, min(self._engine.workers, left), set(self._pings.values()))
        load = Counter(id(task.worker) for task in self._running.values())
        alone = {id(task.worker) for task in self._running.values() if task.is_alone}
        most = self._turn + WAITING * max(1, self._engine.workers)
        for queued in range(QUEUED):
            for worker in [one for one in self._engine.pool if load[id(one)] == queued and id(one) not in alone]:
                if not queued and (self._repairs or self._again):
                    alone.add(id(worker))
                    if self._repairs:
                        self._begin_keeping(worker, -1, self._repairs.popleft(), is_alone=True)
                    else:
                        self._begin(worker, self._again.popleft(), is_alone=True)
                elif self._todo and self._todo[0] < most and (not queued or len(self._todo) > self._engine.workers):
                    self._begin(worker, self._take_near(worker, most))
                else:
                    return
                load[id(worker)] += 1

    def _take_near(self, worker: Worker, most: int) -> int:
        """The first unit below `most` whose needs lie on the worker's node; without one, the first of all."""
        for place, index in enumerate(self._todo):
            needs = self._units[index].needs
            if index < most and (needs is None or self._engine.stored(needs).node == worker.node):
                del self._todo[place]
                return index
        return self._todo.popleft()

    def _begin(self, worker: Worker, index: int, *, is_alone: bool = False) -> None:
        unit = self._units[index]
        if self._keeps:
            self._begin_keeping(worker, index, None, is_alone=is_alone)
            return
        needs = None
        if unit.needs is not None:
            if unit.needs.number in self._waiting:
                self._waiting[unit.needs.number].append(index)
                return
            stored = self._engine.stored(unit.needs)
            file = None if stored.file is None else str(stored.file)
            needs = (unit.needs.number, [stored.reference], file)
        worker.enter(self._place)
        job = [self._engine.job_reference(self._job)]
        reference = worker.actor.run.remote(self._job.key, job, unit.work, needs)
        self._running[reference] = _Task(worker, index, next(self._orders), is_alone)

    def _begin_keeping(self, worker: Worker, index: int, repaired: Kept | None, *, is_alone: bool) -> None:
        unit = self._units[index] if repaired is None else repaired.unit
        job = self._job if repaired is None else self._engine.owner(repaired)
        file = (*self._engine.store_limit(max(1, self._keeps)), uuid4().hex)
        worker.enter(self._place)
        call = worker.actor.keep.options(num_returns=2)
        made, facts = call.remote(job.key, [self._engine.job_reference(job)], unit.work, file)
        self._running[facts] = _Task(worker, index, next(self._orders), is_alone, repaired, made)

    # -------------------------------------------------------------------------------------------------- answers

    def _wait(self) -> None:
        """Until something is finished, or a second is over."""
        done, _ = self._ray.wait([*self._running, *self._pings], num_returns=1, timeout=TICK, fetch_local=False)
        for reference in done:
            if reference in self._pings:
                self._pinged(reference)
            else:
                self._finish(reference, self._running.pop(reference))

    def _finish(self, reference: Any, task: _Task) -> None:
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(reference)
        except errors.RayTaskError as problem:
            self._answer(task, ([], _failure(errors, problem)))
        except errors.ObjectLostError as problem:  # the answer was lost with its node
            self._try_again(task, problem)
        except errors.RayError as problem:
            self._lost(task, problem)
        else:
            if isinstance(answer, str) and answer == LOST:
                self._repair(task)
            elif self._keeps or task.repaired:
                self._answer(task, ([], (task.made, answer, task.worker.node)))
            else:
                self._answer(task, answer)

    def _answer(self, task: _Task, answer: Any) -> None:
        if task.repaired is not None:
            kept = task.repaired
            if isinstance(answer[1], UnitFailedError):
                raise UnitFailedError(f"{kept.unit.name}: {answer[1]}")
            self._engine.store(self._engine.owner(kept), kept, answer[1])
            self._again.extend(self._waiting.pop(kept.number))
            return
        self._done += 1
        self._answers[task.index] = answer
        if self._journal is not None and isinstance(answer, bytes):
            self._journal.add(self._units[task.index], answer)

    def _repair(self, task: _Task) -> None:
        """What the unit needs was lost: make it again, and then the unit."""
        kept = self._units[task.index].needs
        assert kept is not None
        self._tries[task.index] += 1
        if self._tries[task.index] > RETRIES:
            lost = (
                f"{kept.unit.name}, which it needs, was lost {self._tries[task.index]} times, each time with its node"
            )
            self._answer(task, ([], UnitFailedError(f"{lost} or with the shared folder.{self._keeps_what_is_done}")))
            return
        if kept.number not in self._waiting:
            self._waiting[kept.number] = []
            self._repairs.append(kept)
        self._waiting[kept.number].append(task.index)

    def _lost(self, task: _Task, problem: Exception) -> None:
        """A worker died. Its node gets another one once it answers: it may be gone too."""
        worker = task.worker
        if worker in self._engine.pool:
            self._engine.pool.remove(worker)
            self._pings[self._engine.ping(worker.node)] = worker.node
        self._idle_since = time.monotonic()
        beside = {other.order: reference for reference, other in self._running.items() if other.worker is worker}
        for order, reference in beside.items():
            if order > task.order:  # it had not begun
                self._put_back(self._running.pop(reference))
        if min(beside, default=task.order) < task.order:  # this one had perhaps not begun either
            self._put_back(task)
        else:
            self._try_again(task, problem)

    def _put_back(self, task: _Task) -> None:
        """What a dead worker had besides, to be tried before all others."""
        if task.repaired is not None:
            self._repairs.append(task.repaired)
        else:
            self._again.append(task.index)

    def _try_again(self, task: _Task, problem: Exception) -> None:
        known = task.index if task.repaired is None else -task.repaired.number  # numbers begin at 1
        self._tries[known] += 1
        if self._tries[known] > RETRIES:
            died = f"its worker died {self._tries[known]} times, last on {task.worker.host}, {PERHAPS}"
            if NEVER_RAN in str(problem):
                died = f"its worker could not be started on {task.worker.host}. {REFUSED}"
            died += ". What Ray says of it: ray status, and /tmp/ray/session_latest/logs there"
            self._answer(task, ([], UnitFailedError(f"{died}.{self._keeps_what_is_done}")))
        else:
            self._put_back(task)

    def _pinged(self, reference: Any) -> None:
        node = self._pings.pop(reference)
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayError:
            if any(one["NodeID"] == node for one in self._engine.nodes()):  # not known to be gone yet
                time.sleep(TICK)
                self._pings[self._engine.ping(node)] = node

    def _check_abandoned(self) -> None:
        if time.monotonic() - self._idle_since > ABANDONED:
            raise UnitFailedError(
                f"no node is left to run {self._units[self._turn].name}: all workers died.{self._keeps_what_is_done}"
            )
        time.sleep(TICK)


def _opened(answer: Any) -> Any:
    """An answer of a worker comes pickled, and waits so."""
    return pickle.loads(answer) if isinstance(answer, bytes) else answer


def _failure(errors: Any, problem: Any) -> UnitFailedError:
    """An exception of a unit; one that is not about its input is a bug, and is raised with its traceback."""
    cause = getattr(problem, "cause", None) or problem
    if isinstance(cause, (errors.ObjectStoreFullError, errors.OutOfDiskError)):
        return UnitFailedError(
            "the object store of the cluster is full, and its disk too. Give smaller shards, or a folder that all "
            "nodes see for what they share."
        )
    if not isinstance(cause, USUAL):
        raise problem
    return UnitFailedError(reason_of(cause))
