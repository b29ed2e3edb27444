"""The workers of a Ray engine: actors that are started where nodes have room, and started again when they die."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from probe.engines.actor import Actor, describe_node
from probe.engines.interface import RETRIES, Setup, UnitFailedError
from probe.engines.nodes import Node, cpus_of, error_in, gpus_of, host_of, memory_of, on_node
from probe.engines.process import ProjectFolder

#: What Ray says of a worker that was never there.
NEVER_RAN = "The actor never ran"
#: Seconds until a node that does not answer is asked again.
PAUSE = 1.0
TOKEN_REFUSED = (
    "Ray refuses it. If this machine has a token (~/.ray/auth_token) and the cluster asks for none, export "
    "RAY_AUTH_MODE=disabled"
)
#: Where to look for what Ray knows of a dead worker.
LOGS = "On that node, ray status and /tmp/ray/session_latest/logs say more"


@dataclass(frozen=True)
class Needs:
    """What a worker asks Ray for, beside CPUs."""

    memory: int = 0
    gpus: int = 0

    def __le__(self, other: "Needs") -> bool:
        return self.memory <= other.memory and self.gpus <= other.gpus


@dataclass(eq=False)
class Worker:
    """An actor on a node, with what it asked for."""

    node: str
    host: str
    actor: Any
    needs: Needs
    folder: ProjectFolder | None = None

    def enter(self, folder: ProjectFolder) -> Any:
        """Let it work in this folder from its next call on; the reference of the answer, None if it is there already.

        Ray runs the calls of an actor in their order.
        """
        if self.folder == folder:
            return None
        self.folder = folder
        return self.actor.enter.remote(folder)


@dataclass
class _Failures:
    """Workers of a node that could not be started, one after the other."""

    count: int = 0
    reason: str = ""


@dataclass
class Pool:
    """The workers of one engine.

    A worker is `ready` once it has answered: Ray may let it wait for CPUs or memory that others have, and no unit
    waits with it. A node whose worker died gets another one when it has answered a ping, because it may be gone too.
    `pending` are the references of both; pass a finished one to `settle`.

    cpus      of a worker; None: all of its node, so that a node has one worker
    part      of several engines that divide the cluster among them: the number of this one, and how many there are
    threads   of a worker
    """

    ray: ModuleType
    cpus: int | None
    part: tuple[int, int]
    threads: int = 1
    setup: Setup | None = None
    ready: list[Worker] = field(default_factory=list)
    changed: bool = True  # since somebody last set it to False: a worker or a node came or went
    _starting: dict[Any, Worker] = field(default_factory=dict)
    _pings: dict[Any, str] = field(default_factory=dict)
    _unanswered: dict[str, float] = field(default_factory=dict)  # nodes to be asked again, and when
    _failures: dict[str, _Failures] = field(default_factory=dict)

    @property
    def pending(self) -> list[Any]:
        """References of workers that start, and of nodes that were asked whether they are there."""
        return [*self._starting, *self._pings]

    @property
    def descriptions(self) -> dict[str, Any]:
        """By node: the reference of a description of it, which a worker that starts there gives."""
        return {worker.node: reference for reference, worker in self._starting.items()}

    @property
    def is_starting(self) -> bool:
        """Whether a worker was asked for that has not answered yet."""
        return bool(self._starting)

    def room(self, node: Node, needs: Needs) -> int:
        """How many workers fit on a node that has nothing else to do."""
        fitting = [cpus_of(node) // self.cpus if self.cpus else min(1, cpus_of(node))]
        fitting += [memory_of(node) // needs.memory] if needs.memory else []
        fitting += [gpus_of(node) // needs.gpus] if needs.gpus else []
        return min(fitting)

    def share(self, nodes: Iterable[Node], needs: Needs) -> Counter[str]:
        """By node: how many of the workers that fit on these nodes belong to this engine."""
        every = [node["NodeID"] for node in nodes for _ in range(self.room(node, needs))]
        return Counter(sorted(every)[self.part[0] :: self.part[1]])

    def suits(self, needs: Needs) -> bool:
        """Whether every worker asked for what is needed."""
        return all(needs <= one.needs for one in self._workers())

    def fill(self, nodes: Sequence[Node], share: Mapping[str, int], most: int, needs: Needs) -> None:
        """Start a worker in every free place of these nodes that belongs to this engine, until `most` are ready.

        So one that waits for its place does not keep another from being started. Workers that asked for less are
        killed. If none could be started on any of the nodes, that is an error.
        """
        for worker in [one for one in self._workers() if not needs <= one.needs]:
            self.kill(worker)
        self._ask_again(nodes)
        taken = Counter(worker.node for worker in self._workers())
        unusable = [node for node, failures in self._failures.items() if failures.count > RETRIES]
        for node in nodes:
            name = node["NodeID"]
            if name not in (*self._pings.values(), *self._unanswered, *unusable) and len(self.ready) < most:
                for _ in range(share.get(name, 0) - taken[name]):
                    self._start(node, needs)
        own = [node for node in nodes if share.get(node["NodeID"])]
        if own and not (self._workers() or self._pings) and all(node["NodeID"] in unusable for node in own):
            reason = self._failures[own[-1]["NodeID"]].reason
            raise UnitFailedError(f"no worker could be started on {host_of(own[-1])}: {reason}. {LOGS}.")

    def _start(self, node: Node, needs: Needs) -> None:
        wanted = {"num_cpus": self.cpus or cpus_of(node), "num_gpus": needs.gpus, "memory": needs.memory or None}
        actor = on_node(self.ray.remote(Actor), node["NodeID"], **wanted, max_restarts=0)
        worker = Worker(node["NodeID"], host_of(node), actor.remote(self.threads), needs)
        self._starting[worker.enter(ProjectFolder.here())] = worker
        if self.setup is not None:
            worker.actor.set_up.remote(self.setup)

    def settle(self, reference: Any) -> None:
        """Process a finished reference: a worker started, or could not be, or a node answered."""
        self.changed = True
        if reference in self._pings:
            self._handle_ping(self._pings.pop(reference), reference)
            return
        worker = self._starting.pop(reference)
        try:
            self.ray.get(reference)
        except self.ray.exceptions.RayError as problem:
            self._end(worker)
            if worker.node not in self._pings.values():  # of several that start at the same time one counts
                failures = self._failures.setdefault(worker.node, _Failures())
                refused = NEVER_RAN in str(problem)
                failures.count, failures.reason = failures.count + 1, TOKEN_REFUSED if refused else error_in(problem)
                self._ping(worker.node)
        else:
            self._failures.pop(worker.node, None)
            self.ready.append(worker)

    def _handle_ping(self, node: str, reference: Any) -> None:
        """The answer of a node to a ping; one that does not answer may be gone without being known to be."""
        errors = self.ray.exceptions
        try:
            self.ray.get(reference)
        except errors.RayTaskError:
            return  # it answered
        except errors.RayError:
            self._unanswered[node] = time.monotonic() + PAUSE

    def _ask_again(self, nodes: Sequence[Node]) -> None:
        alive, now = {node["NodeID"] for node in nodes}, time.monotonic()
        for node, then in list(self._unanswered.items()):
            if now >= then or node not in alive:
                del self._unanswered[node]
                if node in alive:
                    self._ping(node)

    def _ping(self, node: str) -> None:
        self._pings[on_node(self.ray.remote(describe_node), node, num_cpus=0).remote(())] = node

    def lose(self, worker: Worker) -> bool:
        """Take out a worker that died, or does not answer any more; False if it is out already."""
        if worker not in self.ready:
            return False
        self.changed = True
        self.kill(worker)
        self._ping(worker.node)
        return True

    def kill(self, worker: Worker) -> None:
        """End a worker, whatever it does."""
        if worker in self.ready:
            self.ready.remove(worker)
        self._starting = {reference: one for reference, one in self._starting.items() if one is not worker}
        self._end(worker)

    def _end(self, worker: Worker) -> None:
        with suppress(Exception):  # it may be dead already, or the cluster gone
            self.ray.kill(worker.actor)

    def stop(self) -> None:
        """Kill all workers."""
        for worker in self._workers():
            self.kill(worker)
        for waiting in (self._pings, self._unanswered, self._failures):
            waiting.clear()

    def forget_failures(self) -> None:
        """Try all nodes again: what kept workers from starting may be mended."""
        self._failures.clear()
        self.changed = True

    def _workers(self) -> list[Worker]:
        return [*self.ready, *self._starting.values()]
