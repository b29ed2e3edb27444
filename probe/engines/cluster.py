"""The engine of a Ray cluster: a worker, which is an actor, on every node, and units that move when a node is lost.

Ray places the actors, carries the results, and keeps what units share in its object store. A Ray cluster trusts its
clients: whoever can reach it can run code on it.
"""

import os
import pickle
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from probe.engines.connection import Connection, load_ray
from probe.engines.dispatch import Dispatch
from probe.engines.interface import (
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
    silent,
)
from probe.engines.journal import Journal
from probe.engines.nodes import Inspection, Node, cpus_of, error_in, gpus_of, host_of, is_head, memory_of
from probe.engines.pool import Needs, Pool
from probe.files.atomic import make_folder
from probe.interrupts import interrupt_later
from probe.words import first_few, format_bytes, require_positive

#: The part of the cluster's object store that kept results may take; larger ones go to the shared folder, if any.
STORE_SHARE = 0.25
#: The memory that a worker asks for at least, so that one that is started before its job is known fits most of them.
LEAST_BYTES = 2**30
#: Seconds between two looks at which nodes there are, where some are missing and where not.
LOOK, LOOK_WHEN_FULL = 1.0, 5.0


@dataclass(frozen=True, eq=False)
class Stored:
    """Where a kept result is: an object of Ray's, or a file that all nodes see; and the node that made it."""

    reference: Any
    file: Path | None
    node: str


class RayEngine(Engine):
    """Units on the nodes of a cluster: the one at `address`, or without one, a cluster of this machine alone.

    cpus      what a worker is given of a node; None: all of them, so that a node has one worker
    shared    a folder that all nodes see, for kept results that would fill the object store
    part      of several engines that divide the cluster among them: the number of this one, and how many there are
    """

    shares_disk = False

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus: int | None = None,
        shared: Path | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        require_positive("the number of CPUs of a worker", cpus)
        self.ray = load_ray()
        self.pool = Pool(self.ray, cpus, part)
        self._shared = None if shared is None else _shared_folder(shared)
        self._numbers = count(1)
        self._jobs: dict[str, Any] = {}  # by key: the job in the object store
        self._inspection = Inspection(self.ray, self.nodes)
        self._kept: dict[int, tuple[Job[Any, Any], Unit, Stored]] = {}
        self._journals: list[Journal] = []
        self._looked = 0.0
        try:
            self._connection = Connection(self.ray, address)
        except BaseException:
            self._delete_shared()
            raise
        self.workers = self.pool.share(self.nodes(), Needs()).total()
        # the same on all nodes, of whatever size: sums on more threads are added in another order
        self.pool.threads = cpus or min(map(cpus_of, self._nodes_with_cpus()), default=1)
        if not self.workers:
            have = first_few([f"{host_of(node)} {cpus_of(node)}" for node in self.nodes()])
            self.close()
            raise ValueError(
                f"the cluster has no room for workers ({part[1]}) of {cpus or 1} CPUs; the CPUs of its nodes are: "
                f"{have or 'none'}. Ask for fewer, or add a node."
            )

    @property
    def about(self) -> str:
        """The cluster and its workers."""
        return f"{self._connection}; workers: {self.workers}, threads of each: {self.pool.threads}"

    @property
    def address(self) -> str:
        """Where other processes reach the cluster."""
        return self._connection.address

    def prepare(self, setup: Setup) -> None:
        """Start workers and inspect their nodes; see `Engine.prepare`."""
        self.pool.setup = setup
        nodes, needs = self._nodes_with_cpus(), Needs(LEAST_BYTES)
        with self._explaining_missing_probe():
            self.pool.fill(nodes, self.pool.share(nodes, needs), self.workers, needs)
        self._inspection.expect(self.pool.descriptions)
        self._inspection.begin(nodes)

    def remember(self, job: Job[Any, Any], name: str, value: Any) -> Any:
        """What the journal has of the interrupted run, see `Engine.remember`."""
        journal, unit = self._journal(job), Unit(name, None)
        if journal is None:
            return value
        if (stored := journal.read(unit)) is not None:
            return pickle.loads(stored)
        journal.add(unit, pickle.dumps(value))
        return value

    def discard(self, job: Job[Any, Any], unit: Unit) -> None:
        """Delete a finished unit from the journal; see `Engine.discard`."""
        if (journal := self._journal(job)) is not None:
            journal.remove(unit)

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
        """The results of the units, in order; see `Engine.run`. `state` is of this process, so it is of no use here."""
        self.inspect(job)
        journal = self._journal(job)
        for index, (items, answer) in Dispatch(self, job, units, progress=progress, journal=journal):
            if isinstance(answer, UnitFailedError):
                answer = answer.of(units[index].name)
                if not keep_going:
                    raise answer.bug or answer
            for item in items:
                if take is not None:
                    take(index, item)
            yield answer

    def keep(
        self, job: Job[State, Any], units: Sequence[Unit], *, state: State | None = None, progress: Progress = silent
    ) -> list[Kept]:
        """Kept results stay in the object store of the node that made them, or go to the shared folder."""
        self.inspect(job)
        self._journal(job)  # of the units that need them; a cache that cannot be written to is refused now
        found = []
        for index, (_, answer) in Dispatch(self, job, units, progress=progress, keeps=len(units)):
            if isinstance(answer, UnitFailedError):
                raise answer.bug or answer.of(units[index].name)
            found.append(Kept(next(self._numbers), units[index], None))
            self.store(job, found[-1], answer)
        return found

    def finish(self) -> None:
        """Delete the journals of all jobs so far."""
        while self._journals:
            self._journals.pop().delete()

    def close(self) -> None:
        """Kill the workers, which ends what they do, and leave the cluster; one that was started here ends."""
        with interrupt_later():  # Ray, left half way, would end the process with a code of its own
            self.pool.stop()
            self._kept.clear()
            self._jobs.clear()
            self._delete_shared()
            self._connection.close()

    def _delete_shared(self) -> None:
        if self._shared is not None:
            shutil.rmtree(self._shared, ignore_errors=True)

    # -------------------------------------------------------------------------------------- for the dispatch of units

    def store(self, job: Job[Any, Any], kept: Kept, answer: Any) -> None:
        """Remember where a kept result is: (reference, file, node) of the worker that made it."""
        reference, file, node = answer
        self._kept[kept.number] = (job, kept.unit, Stored(reference, None if file is None else Path(file), node))

    def stored(self, kept: Kept) -> Stored:
        """Where a kept result is."""
        return self._kept[kept.number][2]

    def owner(self, kept: Kept) -> Job[Any, Any]:
        """The job that makes a kept result."""
        return self._kept[kept.number][0]

    def job_reference(self, job: Job[Any, Any]) -> Any:
        """The job in the object store, where every worker gets it once."""
        if job.key not in self._jobs:
            self._jobs[job.key] = self.ray.put(job)
        return self._jobs[job.key]

    def store_limit(self, count: int) -> tuple[int, str | None]:
        """The bytes from which on a kept result, one of `count`, goes to a file; and the folder for it."""
        total = sum(int(node["Resources"].get("object_store_memory", 0)) for node in self.nodes())
        return int(STORE_SHARE * total / max(1, count)), None if self._shared is None else str(self._shared)

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def _nodes_with_cpus(self) -> list[Node]:
        return [node for node in self.nodes() if self.pool.room(node, Needs())]

    def fill(self, job: Job[Any, Any], most: int) -> None:
        """Start workers for a job on all nodes that are fit for it, unless `most` are ready; now and then."""
        needs, now = _needs(job), time.monotonic()
        is_full = self.pool.suits(needs) and len(self.pool.ready) >= min(most, self.workers)
        if not self.pool.changed and now < self._looked + (LOOK_WHEN_FULL if is_full else LOOK):
            return
        self.pool.changed, self._looked = False, now
        nodes, paths = [node for node in self.nodes() if self.pool.room(node, needs)], self._paths(job)
        nodes = [node for node in nodes if self._inspection.is_fit(node, paths)]
        share = self.pool.share(nodes, needs)
        self.workers = share.total() or self.workers
        self.pool.fill(nodes, share, most, needs)

    # -------------------------------------------------------------------------------------------- before any work

    def check_nodes(self, paths: Mapping[str, str]) -> None:
        """Refuse a cluster whose nodes run other versions, or lack files; see `Job.paths`."""
        nodes = self._nodes_with_cpus()
        if self._connection.is_client:  # what goes to and from the workers is unpickled there
            nodes += [node for node in self.nodes() if is_head(node) and node not in nodes]
        with self._explaining_missing_probe():
            self._inspection.check(nodes, paths)

    def inspect(self, job: Job[Any, Any]) -> None:
        """Refuse a cluster whose nodes are not fit for a job, or too small; see `Engine.inspect`."""
        self.check_nodes(self._paths(job))
        self.pool.forget_failures()
        nodes, needs = self._nodes_with_cpus(), _needs(job)
        if not nodes:  # all were lost: others may come
            return
        self.workers = self.pool.share(nodes, needs).total()
        if not self.workers:
            raise ValueError(self._no_room(nodes, needs))

    def _no_room(self, nodes: Sequence[Node], needs: Needs) -> str:
        """Why no worker of this engine fits on the cluster."""
        memory = max(map(memory_of, nodes))
        if memory < needs.memory:
            return (
                f"a worker needs {format_bytes(needs.memory)} of memory, and the largest node offers "
                f"{format_bytes(memory)}. Use larger nodes, or a smaller model or tensor."
            )
        if max(map(gpus_of, nodes)) < needs.gpus:
            return (
                f"a worker needs {needs.gpus} GPU, and no node of the cluster offers one. Start nodes that have one "
                "with ray start --num-gpus, or name another device."
            )
        count, own = sum(self.pool.room(node, needs) for node in nodes), self.pool.part[1]
        wanted = format_bytes(needs.memory) + (f" and {needs.gpus} GPU" if needs.gpus else "")
        if not count:
            return f"a worker needs {wanted}, and no node of the cluster offers all of it. Add one that does."
        return (
            f"a worker needs {wanted}, and the cluster has room for {count} of them, but -n asks for {own}. Give a "
            "smaller -n, or add nodes."
        )

    @contextmanager
    def _explaining_missing_probe(self) -> Iterator[None]:
        """Through ray:// the head itself loads what is sent; where it cannot, that is one message."""
        try:
            yield
        except (ImportError, AttributeError) as problem:
            if not self._connection.is_client:
                raise
            raise ValueError(
                f"the head of the cluster cannot run probe: {error_in(problem)}. Install the same "
                "version as here on the head too."
            ) from None

    def _journal(self, job: Job[Any, Any]) -> Journal | None:
        """That of a job, if it has one."""
        if not job.is_journaled:
            return None
        journal = Journal(f"{job.key}-{self.pool.threads}")  # sums on more threads are other results
        self._journals.append(journal)
        self.resumes = True
        return journal

    def _paths(self, job: Job[Any, Any]) -> Mapping[str, str]:
        """What every node must find: the files of the job, and the folder of this run in the shared one."""
        return job.paths if self._shared is None else {**job.paths, str(self._shared): ""}


def _shared_folder(shared: Path) -> Path:
    """A new folder of this run in the one that all nodes see."""
    if not shared.is_dir():
        wrong = "is not a folder" if shared.exists() else "does not exist"
        raise ValueError(f"the shared folder {shared} {wrong}. Name one that every node sees.")
    made = Path(os.path.abspath(shared)) / f"probe-{uuid4().hex[:12]}"
    make_folder(made)
    return made


def _needs(job: Job[Any, Any]) -> Needs:
    return Needs(max(job.memory, LEAST_BYTES), job.gpus)
