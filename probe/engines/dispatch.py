"""Gives units to the workers of a cluster, and yields their answers in the order of the units."""

import pickle
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from probe.engines.actor import LOST
from probe.engines.interface import (
    LIKELY_CAUSE,
    RETRIES,
    Job,
    Kept,
    Progress,
    Unit,
    UnitFailedError,
    failure,
    reason_of,
    silent,
)
from probe.engines.journal import Journal
from probe.engines.nodes import plain_text
from probe.engines.pool import LOGS, Worker
from probe.engines.process import ProjectFolder

if TYPE_CHECKING:
    from probe.engines.cluster import RayEngine, Stored

STORE_FULL = (
    "the object store of the cluster is full, and its disk too. Give smaller shards, or a folder that all nodes see "
    "for what they share."
)
#: Seconds between two looks at what is going on while nothing is finished.
TICK = 1.0
#: Seconds without any worker, after all were lost, until a run gives up.
ABANDONED = 60.0
#: Seconds after which workers that have not started seem to wait for their places.
NOTICE = 20.0
#: Answers that may wait for their turn, for each worker.
WAITING = 4
#: Units that a worker has at a time: the one that it runs, and the next, so that it does not wait for this process.
QUEUED = 2


@dataclass(frozen=True, eq=False)
class _Task:
    """A unit on a worker, or the recomputation of a lost result.

    order      that in which tasks were begun
    is_alone   nothing else is given to its worker meanwhile
    """

    worker: Worker
    index: int
    order: int
    is_alone: bool = False
    needs: "Stored | None" = None  # the kept result that it was sent with
    repaired: Kept | None = None
    made: Any = None  # the reference of a kept result


class Dispatch:
    """An iterator over (index, (what the unit emitted, its result)). The result of a kept one: (reference, file, node).

    A worker runs one unit at a time, in the order in which it got them: the first without an answer is the one that
    killed it. What is tried again is the only unit of its worker, on another node than before if there is one. A unit
    that failed has a UnitFailedError as its result. Whatever ends the iteration early kills the workers.
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
        self._journal, self._keeps, self._ray, self._pool = journal, keeps, engine.ray, engine.pool
        self._folder, self._orders = ProjectFolder.here(), count()
        self._on_disk = set[int]() if journal is None else {i for i, unit in enumerate(units) if unit in journal}
        self._todo = deque(i for i in range(len(units)) if i not in self._on_disk)
        self._retries: deque[int] = deque()
        self._running: dict[Any, _Task] = {}
        self._answers: dict[int, Any] = {}
        self._deaths: Counter[int] = Counter()  # by unit, or minus the number of a kept result
        self._died_on: dict[int, str] = {}  # likewise: the node of the last death
        self._losses: Counter[int] = Counter()  # by unit: how often what it needs was lost
        self._waiting: dict[int, list[int]] = {}  # by the number of what was lost: the units that need it
        self._repairs: deque[Kept] = deque()
        self._idle_since, self._is_noticed = time.monotonic(), False
        self._done = self._known = len(self._on_disk)
        self._turn = 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        errors, whole = self._ray.exceptions, False
        try:
            while self._turn < len(self._units):
                self._hand_out()
                while self._turn < len(self._units) and (answer := self._take_turn()) is not None:
                    yield self._turn - 1, answer
                self._report()
                if self._turn < len(self._units):
                    self._wait()
                    self._check_abandoned()
            whole = True
        except BrokenPipeError:  # whoever reads the progress has gone
            raise
        except ConnectionError as problem:  # that of ray://
            raise self._run_failed(f"the connection to the Ray cluster was lost: {reason_of(problem)}") from None
        except (errors.ObjectStoreFullError, errors.OutOfDiskError):
            raise self._run_failed(STORE_FULL) from None
        except errors.RayError as problem:
            raise self._run_failed(f"the Ray cluster failed: {reason_of(problem)}") from None
        finally:
            if not whole:
                self._pool.stop()

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
        return _unpickled(self._answers.pop(index))

    def _report(self) -> None:
        retried = self._deaths.total() + self._losses.total()
        more = f", {retried} tried again" if retried else ""
        more += f", {self._known} known from the run before" if self._known else ""
        if not self._pool.ready and self._done < len(self._units):
            more += f", {self._waiting_for_workers}"
        running = len({id(task.worker) for task in self._running.values()})
        self._progress(self._done, len(self._units), f"{running} in flight{more}")

    @property
    def _waiting_for_workers(self) -> str:
        if not self._pool.is_starting:
            return "waiting for a node"
        waited = time.monotonic() - self._idle_since > NOTICE
        return "waiting for CPUs or memory of the cluster, which may be taken" if waited else "starting workers"

    def _run_failed(self, why: str) -> UnitFailedError:
        kept = "" if self._journal is None else " What is done is kept: the same command goes on from there."
        return UnitFailedError(f"{why.rstrip('.')}.{kept}")

    # ---------------------------------------------------------------------------------------------- handing out

    def _hand_out(self) -> None:
        """Give every free worker a unit, those that were lost first; then, while there are many, a second one."""
        load = Counter(id(task.worker) for task in self._running.values())
        left = len(self._todo) + len(self._retries) + len(self._repairs) + len(self._running)
        self._engine.fill(self._job, left)
        most = self._turn + WAITING * max(1, self._engine.workers)
        for worker in [one for one in self._pool.ready if not load[id(one)]]:
            if not self._begin_retry(worker) and self._todo and self._todo[0] < most:
                self._begin(worker, self._take_near(worker, most))
        if self._retries or self._repairs:  # a second unit would keep workers from them
            return
        load = Counter(id(task.worker) for task in self._running.values())
        alone = {id(task.worker) for task in self._running.values() if task.is_alone}
        for worker in [one for one in self._pool.ready if load[id(one)] < QUEUED and id(one) not in alone]:
            if len(self._todo) > self._engine.workers and self._todo[0] < most:
                self._begin(worker, self._take_near(worker, most))

    def _begin_retry(self, worker: Worker) -> bool:
        """Give a worker a lost result or a unit to try again, but no unit that died on its node if there are others.

        Such a unit may wait until another node has finished what it has.
        """
        elsewhere = any(one.node != worker.node for one in self._pool.ready)
        avoided = {key for key, node in self._died_on.items() if elsewhere and node == worker.node}
        for kept in self._repairs:
            if -kept.number not in avoided:
                self._repairs.remove(kept)
                self._begin_keeping(worker, -1, kept, is_alone=True)
                return True
        for index in self._retries:
            if index not in avoided:
                self._retries.remove(index)
                self._begin(worker, index, is_alone=True)
                return True
        return False

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
        stored = needs = None
        if unit.needs is not None:
            if unit.needs.number in self._waiting:
                self._waiting[unit.needs.number].append(index)
                return
            stored = self._engine.stored(unit.needs)
            needs = (unit.needs.number, [stored.reference], None if stored.file is None else str(stored.file))
        worker.enter(self._folder)
        job = [self._engine.job_reference(self._job)]
        reference = worker.actor.run.remote(self._job.key, job, unit.work, needs)
        self._running[reference] = _Task(worker, index, next(self._orders), is_alone, stored)

    def _begin_keeping(self, worker: Worker, index: int, repaired: Kept | None, *, is_alone: bool) -> None:
        unit = self._units[index] if repaired is None else repaired.unit
        job = self._job if repaired is None else self._engine.owner(repaired)
        file = (*self._engine.store_limit(max(1, self._keeps)), uuid4().hex)
        worker.enter(self._folder)
        call = worker.actor.keep.options(num_returns=2)
        made, facts = call.remote(job.key, [self._engine.job_reference(job)], unit.work, file)
        self._running[facts] = _Task(worker, index, next(self._orders), is_alone, None, repaired, made)

    # -------------------------------------------------------------------------------------------------- answers

    def _wait(self) -> None:
        """Until something is finished, or a second is over."""
        waited = [*self._running, *self._pool.pending]
        if not waited:
            return
        done, _ = self._ray.wait(waited, num_returns=1, timeout=TICK, fetch_local=False)
        for reference in done:
            if reference in self._running:
                self._finish(reference, self._running.pop(reference))
            else:
                self._pool.settle(reference)

    def _finish(self, reference: Any, task: _Task) -> None:
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(reference)
        except errors.RayTaskError as problem:
            self._answer(task, ([], self._failure_of(problem)))
        except errors.ObjectLostError as problem:  # the answer was lost with its node
            self._try_again(task, problem)
        except (errors.ObjectStoreFullError, errors.OutOfDiskError):  # of this machine
            raise
        except errors.RayError as problem:
            self._lost(task, problem)
        else:
            if isinstance(answer, str) and answer == LOST:
                self._repair(task)
            elif self._keeps or task.repaired:
                self._answer(task, ([], (task.made, answer, task.worker.node)))
            else:
                self._answer(task, answer)

    def _failure_of(self, problem: Any) -> UnitFailedError:
        """The error of a unit; a bug has the traceback of the worker as a note."""
        errors, cause = self._ray.exceptions, getattr(problem, "cause", None) or problem
        if isinstance(cause, (errors.ObjectStoreFullError, errors.OutOfDiskError)):
            return UnitFailedError(STORE_FULL)
        found = failure(cause)
        if found.bug is not None:
            found.bug.add_note(f"on a node:\n{plain_text(problem)}")
        return found

    def _answer(self, task: _Task, answer: Any) -> None:
        if task.repaired is not None:
            kept = task.repaired
            if isinstance(answer[1], UnitFailedError):
                raise answer[1].of(kept.unit.name)
            self._engine.store(self._engine.owner(kept), kept, answer[1])
            self._retries.extend(self._waiting.pop(kept.number))
            return
        self._done += 1
        self._answers[task.index] = answer
        if self._journal is not None and isinstance(answer, bytes):
            self._journal.add(self._units[task.index], answer)

    def _repair(self, task: _Task) -> None:
        """What the unit needs was lost: make it again, and then the unit."""
        kept = self._units[task.index].needs
        assert kept is not None
        if self._engine.stored(kept) is not task.needs:  # made again since the unit was sent
            self._retries.append(task.index)
            return
        self._losses[task.index] += 1
        if self._losses[task.index] > RETRIES:
            times = self._losses[task.index]
            lost = f"{kept.unit.name}, which it needs, was lost {times} times, each time with its node or with the"
            self._answer(task, ([], self._run_failed(f"{lost} shared folder")))
            return
        if kept.number not in self._waiting:
            self._waiting[kept.number] = []
            self._repairs.append(kept)
        self._waiting[kept.number].append(task.index)

    def _lost(self, task: _Task, problem: Exception) -> None:
        """A worker died, or cannot be reached, with all that it had."""
        if self._pool.lose(task.worker):
            self._engine.notice(f"a worker on {task.worker.host} died: its units are tried again")
        self._idle_since = time.monotonic()
        beside = {other.order: reference for reference, other in self._running.items() if other.worker is task.worker}
        for order, reference in beside.items():
            if order > task.order:  # it had not begun
                self._put_back(self._running.pop(reference))
        if min(beside, default=task.order) < task.order:  # this one had perhaps not begun either
            self._put_back(task)
        else:
            self._try_again(task, problem)

    def _put_back(self, task: _Task) -> None:
        """Queue a task of a dead worker again, before new units."""
        if task.repaired is not None:
            self._repairs.append(task.repaired)
        else:
            self._retries.append(task.index)

    def _try_again(self, task: _Task, problem: Exception) -> None:
        key = task.index if task.repaired is None else -task.repaired.number  # numbers begin at 1
        self._deaths[key] += 1
        self._died_on[key] = task.worker.node
        if self._deaths[key] > RETRIES:
            died = f"its worker died {self._deaths[key]} times, last on {task.worker.host}, {LIKELY_CAUSE}. {LOGS}"
            self._answer(task, ([], self._run_failed(died)))
        else:
            self._put_back(task)

    def _check_abandoned(self) -> None:
        """End a run that has had no worker for too long and starts none; mention it if all wait for their places."""
        if self._running or self._pool.ready:
            self._idle_since, self._is_noticed = time.monotonic(), False
        elif self._pool.is_starting:
            if time.monotonic() - self._idle_since > NOTICE and not self._is_noticed:
                self._is_noticed = True
                self._engine.notice(self._waiting_for_workers)
        elif time.monotonic() - self._idle_since > ABANDONED:
            raise self._run_failed(f"no node is left to run {self._units[self._turn].name}: all workers died")
        elif not self._pool.pending:
            time.sleep(TICK)


def _unpickled(answer: Any) -> Any:
    """An answer. It stays pickled until its turn, which takes less memory."""
    return pickle.loads(answer) if isinstance(answer, bytes) else answer
