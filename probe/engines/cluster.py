"""The engine of a Ray cluster: a worker, which is an actor, on every node, and units that move when a node is lost.

Ray places the actors, carries the results, and keeps what units share in its object store. A Ray cluster trusts its
clients: whoever can reach it can run code on it.
"""

import os
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from probe.engines.connection import Connection, load_ray
from probe.engines.dispatch import Dispatch, Worker
from probe.engines.journal import Journal
from probe.engines.nodes import Inspection, cpus_of, host_of, on_node
from probe.engines.remote import Actor, look
from probe.engines.work import (
    Engine,
    Job,
    Kept,
    Place,
    Progress,
    Result,
    Setup,
    State,
    Take,
    Unit,
    UnitFailedError,
    Workshop,
    silent,
)
from probe.files.atomic import make_folder
from probe.words import first_few, format_bytes, require_positive

#: The part of the cluster's object store that kept results may take; larger ones go to the shared folder, if any.
STORE_SHARE = 0.25
#: The memory of a worker that is started before its job is known. A job that needs more gets another worker.
EARLY_BYTES = 2**30


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
        require_positive("the CPUs of a worker", cpus)
        self.ray = load_ray()
        self.pool: list[Worker] = []
        self._cpus, self._part = cpus, part
        self._shared = None if shared is None else _shared_folder(shared)
        self._numbers = count(1)
        self._jobs: dict[str, Any] = {}  # by key: the job in the object store
        self._inspection = Inspection(self.ray, self.nodes)
        self._setup: Setup | None = None
        self._kept: dict[int, tuple[Job[Any, Any], Unit, Stored]] = {}
        self._journals: list[Journal] = []
        self._workshop = Workshop()
        try:
            self._connection = Connection(self.ray, address)
        except BaseException:
            self._delete_shared()
            raise
        self.workers = self._own_slots().total()
        # the same on all nodes, of whatever size: sums on more threads are added in another order
        self._threads = cpus or min((cpus_of(node) for node in self.nodes() if self._slots(node)), default=1)
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
        return f"{self._connection}; workers: {self.workers}, threads of each: {self._threads}"

    @property
    def address(self) -> str:
        """Where other processes reach the cluster."""
        return self._connection.address

    def prepare(self, setup: Setup) -> None:
        """Start workers and inspect their nodes; see `Engine.prepare`."""
        self._setup = setup
        nodes = [node for node in self.nodes() if self._slots(node)]
        self._start([node for node in nodes if _memory(node) >= EARLY_BYTES], self.workers, memory=EARLY_BYTES, gpus=0)
        self._inspection.begin(nodes)  # after the workers, which take longer: a small node starts one process at a time

    def settle(self, job: Job[Any, Any], name: str, value: Any) -> Any:
        """What the journal has of the run before, see `Engine.settle`."""
        journal, unit = self._journal(job), Unit(name, None)
        if journal is None:
            return value
        if (stored := journal.read(unit)) is not None:
            return pickle.loads(stored)
        journal.add(unit, pickle.dumps(value))
        return value

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
                answer = UnitFailedError(f"{units[index].name}: {answer}")
                if not keep_going:
                    raise answer
            for item in items:
                if take is not None:
                    take(index, item)
            yield answer

    def keep(
        self, job: Job[State, Any], units: Sequence[Unit], *, state: State | None = None, progress: Progress = silent
    ) -> list[Kept]:
        """Kept results stay in the object store of the node that made them, or go to the shared folder."""
        self.inspect(job)
        found = []
        for index, (_, answer) in Dispatch(self, job, units, progress=progress, keeps=len(units)):
            if isinstance(answer, UnitFailedError):
                raise UnitFailedError(f"{units[index].name}: {answer}")
            found.append(Kept(next(self._numbers), units[index], None))
            self.store(job, found[-1], answer)
        return found

    def fetch(self, job: Job[State, Any], kept: Kept) -> Any:
        """A kept result, in this process; one that was lost with its node is made again."""

        def data() -> Any:
            try:
                return self._data(self.stored(kept))
            except self.ray.exceptions.ObjectLostError:
                owner, unit, _ = self._kept[kept.number]
                for _, (_, answer) in Dispatch(self, owner, [unit], keeps=1):
                    self.store(owner, kept, answer)
                return self._data(self.stored(kept))

        return self._workshop.given(job.key, job, kept.number, data)

    def finish(self) -> None:
        """Delete the journals of all jobs so far."""
        while self._journals:
            self._journals.pop().delete()

    def close(self) -> None:
        """Kill the workers, which ends what they do, and leave the cluster; one that was started here ends."""
        self.stop()
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

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def fill(self, job: Job[Any, Any], most: int, avoided: set[str]) -> None:
        """Start a worker in every free slot of the nodes, but for those to be avoided and no more than `most`."""
        for worker in [one for one in self.pool if one.memory < job.memory or one.gpus != job.gpus]:
            self._kill(worker)
        if len(self.pool) >= most:
            return
        nodes = [node for node in self.nodes() if node["NodeID"] not in avoided and _memory(node) >= job.memory]
        self._start(
            [node for node in nodes if self._inspection.is_fit(node, self._paths(job))],
            most,
            memory=job.memory,
            gpus=job.gpus,
        )

    def _start(self, nodes: Sequence[dict[str, Any]], most: int, *, memory: int, gpus: int) -> None:
        taken, own = Counter(worker.node for worker in self.pool), self._own_slots()
        for node in nodes:
            name = node["NodeID"]
            for _ in range(own[name] - taken[name]):
                if len(self.pool) >= most:
                    return
                wanted = {"num_cpus": self._cpus or cpus_of(node), "num_gpus": gpus, "memory": memory or None}
                actor = on_node(self.ray.remote(Actor), name, **wanted, max_restarts=0)
                worker = Worker(name, host_of(node), actor.remote(self._threads), memory, gpus)
                worker.enter(Place.here())
                if self._setup is not None:
                    worker.actor.set_up.remote(self._setup)
                self.pool.append(worker)

    def ping(self, node: str) -> Any:
        """A reference that is there once the node answers."""
        return on_node(self.ray.remote(look), node, num_cpus=0).remote(())

    def stop(self) -> None:
        """Kill all workers."""
        while self.pool:
            self._kill(self.pool[-1])

    def _kill(self, worker: Worker) -> None:
        self.pool.remove(worker)
        with suppress(Exception):  # it may be dead already, or the cluster gone
            self.ray.kill(worker.actor)

    # -------------------------------------------------------------------------------------------- before any work

    def check_nodes(self, paths: Mapping[str, str]) -> None:
        """Refuse a cluster whose nodes run other versions, or lack files; see `Job.paths`."""
        self._inspection.check([node for node in self.nodes() if self._slots(node)], paths)

    def inspect(self, job: Job[Any, Any]) -> None:
        """Refuse a cluster whose nodes are not fit for a job, or too small; see `Engine.inspect`."""
        self.check_nodes(self._paths(job))
        room = max((_memory(node) for node in self.nodes() if self._slots(node)), default=0)
        if room < job.memory:
            raise ValueError(
                f"a worker needs {format_bytes(job.memory)} of memory, and the largest node offers "
                f"{format_bytes(room)}. Use larger nodes or a smaller model."
            )

    def _journal(self, job: Job[Any, Any]) -> Journal | None:
        """That of a job, if it has one."""
        if not job.is_journaled:
            return None
        journal = Journal(f"{job.key}-{self._threads}")  # sums on more threads are other results
        self._journals.append(journal)
        self.resumes = True
        return journal

    def _paths(self, job: Job[Any, Any]) -> Mapping[str, str]:
        """What every node must find: the files of the job, and the folder of this run in the shared one."""
        return job.paths if self._shared is None else {**job.paths, str(self._shared): ""}

    def _slots(self, node: dict[str, Any]) -> int:
        """How many workers a node has room for."""
        return cpus_of(node) // self._cpus if self._cpus else min(1, cpus_of(node))

    def _own_slots(self) -> Counter[str]:
        """By node: how many of its workers belong to this part."""
        every = [node["NodeID"] for node in self.nodes() for _ in range(self._slots(node))]
        return Counter(sorted(every)[self._part[0] :: self._part[1]])

    def _data(self, stored: Stored) -> Any:
        return stored.file if stored.file is not None else self.ray.get(stored.reference)


def _shared_folder(shared: Path) -> Path:
    """A new folder of this run in the one that all nodes see."""
    if not shared.is_dir():
        wrong = "is not a folder" if shared.exists() else "does not exist"
        raise ValueError(f"the shared folder {shared} {wrong}. Name one that every node sees.")
    made = Path(os.path.abspath(shared)) / f"probe-{uuid4().hex[:12]}"
    make_folder(made)
    return made


def _memory(node: dict[str, Any]) -> int:
    return int(node["Resources"].get("memory", 0))
