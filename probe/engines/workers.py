"""The workers of a Ray engine: actors that are started where nodes have room, and started again when they die."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from probe.engines.nodes import Node, cpus_of, error_in, gpus_of, host_of, memory_of, on_node
from probe.engines.remote import Actor, look
from probe.engines.work import RETRIES, Setup, UnitFailedError
from probe.engines.worker import ProjectFolder

#: Seconds until a node that does not answer is asked again.
PAUSE = 1.0
TOKEN_REFUSED = (
    "If this machine has a token (~/.ray/auth_token) and the cluster asks for none, Ray refuses it: export "
    "RAY_AUTH_MODE=disabled"
)
#: Where to look for what Ray knows of a dead worker.
LOGS = "On that node, ray status and /tmp/ray/session_latest/logs say more"


@dataclass(eq=False)
class Worker:
    """An actor on a node, with the memory and the accelerators that it asked for."""

    node: str
    host: str
    actor: Any
    memory: int = 0
    gpus: int = 0
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
    `pending` are the references that tell of both, for `settle`.

    cpus      of a worker; None: all of its node, so that a node has one worker
    part      of several engines that divide the cluster among them: the number of this one, and how many there are
    threads   of a worker
    """

    ray: ModuleType
    alive: Callable[[], list[Node]]
    cpus: int | None
    part: tuple[int, int]
    threads: int = 1
    setup: Setup | None = None
    ready: list[Worker] = field(default_factory=list)
    _starting: dict[Any, Worker] = field(default_factory=dict)
    _pings: dict[Any, str] = field(default_factory=dict)
    _unanswered: dict[str, float] = field(default_factory=dict)  # nodes to be asked again, and when
    _failures: dict[str, _Failures] = field(default_factory=dict)

    @property
    def pending(self) -> list[Any]:
        """References of workers that start, and of nodes that were asked whether they are there."""
        return [*self._starting, *self._pings]

    @property
    def is_starting(self) -> bool:
        """Whether a worker was asked for that has not answered yet."""
        return bool(self._starting)

    def room(self, node: Node, memory: int = 0, gpus: int = 0) -> int:
        """How many workers fit on a node that has nothing else to do."""
        fitting = [cpus_of(node) // self.cpus if self.cpus else min(1, cpus_of(node))]
        fitting += [memory_of(node) // memory] if memory else []
        fitting += [gpus_of(node) // gpus] if gpus else []
        return min(fitting)

    def share(self, memory: int = 0, gpus: int = 0) -> Counter[str]:
        """By node: how many of the workers that fit on the cluster belong to this engine."""
        every = [node["NodeID"] for node in self.alive() for _ in range(self.room(node, memory, gpus))]
        return Counter(sorted(every)[self.part[0] :: self.part[1]])

    def is_full(self, most: int, memory: int, gpus: int) -> bool:
        """Whether there are `most` workers, which asked for enough memory and accelerators."""
        every = self._every()
        return len(every) >= most and all(one.memory >= memory and one.gpus == gpus for one in every)

    def fill(self, nodes: Iterable[Node], most: int, memory: int, gpus: int) -> None:
        """Start workers on these nodes until there are `most`, or no room is left for another one of this engine.

        Workers that asked for less memory, or for other accelerators, are killed.
        """
        for worker in [one for one in self._every() if one.memory < memory or one.gpus != gpus]:
            self.kill(worker)
        share, taken = self.share(memory, gpus), Counter(worker.node for worker in self._every())
        self._ask_again()
        avoided = {*self._pings.values(), *self._unanswered, *self._given_up()}
        for node in nodes:
            name = node["NodeID"]
            for _ in range(0 if name in avoided else share[name] - taken[name]):
                if len(self._every()) >= most:
                    return
                self._start(node, memory, gpus)

    def _start(self, node: Node, memory: int, gpus: int) -> None:
        wanted = {"num_cpus": self.cpus or cpus_of(node), "num_gpus": gpus, "memory": memory or None}
        actor = on_node(self.ray.remote(Actor), node["NodeID"], **wanted, max_restarts=0)
        worker = Worker(node["NodeID"], host_of(node), actor.remote(self.threads), memory, gpus)
        self._starting[worker.enter(ProjectFolder.here())] = worker
        if self.setup is not None:
            worker.actor.set_up.remote(self.setup)

    def settle(self, reference: Any) -> None:
        """What a reference of `pending` tells: a worker is ready, or a node is there."""
        if reference in self._pings:
            self._hear(self._pings.pop(reference), reference)
            return
        worker = self._starting.pop(reference)
        try:
            self.ray.get(reference)
        except self.ray.exceptions.RayError as problem:
            failures = self._failures.setdefault(worker.node, _Failures())
            failures.count, failures.reason = failures.count + 1, error_in(problem)
            self._end(worker)
            self._ping(worker.node)
        else:
            self._failures.pop(worker.node, None)
            self.ready.append(worker)

    def _hear(self, node: str, reference: Any) -> None:
        """The answer of a node to a ping; one that does not answer may be gone without being known to be."""
        errors = self.ray.exceptions
        try:
            self.ray.get(reference)
        except errors.RayTaskError:
            return  # it answered
        except errors.RayError:
            self._unanswered[node] = time.monotonic() + PAUSE

    def _ask_again(self) -> None:
        if not self._unanswered:
            return
        alive, now = {node["NodeID"] for node in self.alive()}, time.monotonic()
        for node, then in list(self._unanswered.items()):
            if now >= then or node not in alive:
                del self._unanswered[node]
                if node in alive:
                    self._ping(node)

    def _ping(self, node: str) -> None:
        self._pings[on_node(self.ray.remote(look), node, num_cpus=0).remote(())] = node

    def lose(self, worker: Worker) -> None:
        """Take out a worker that died, or does not answer any more."""
        if worker in self.ready:
            self.kill(worker)
            self._ping(worker.node)

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
        for worker in self._every():
            self.kill(worker)
        for waiting in (self._pings, self._unanswered, self._failures):
            waiting.clear()

    def _every(self) -> list[Worker]:
        return [*self.ready, *self._starting.values()]

    def _given_up(self) -> list[str]:
        return [node for node, failures in self._failures.items() if failures.count > RETRIES]

    def check_startable(self, nodes: Sequence[Node]) -> None:
        """Raise an error if no worker is there or to come, because none could be started on any of these nodes."""
        given_up = self._given_up()
        hosts = {node["NodeID"]: host_of(node) for node in nodes}
        if self._every() or self._pings or not given_up or not set(hosts) <= set(given_up):
            return
        node = given_up[-1]
        raise UnitFailedError(
            f"no worker could be started on {hosts.get(node, node)}: {self._failures[node].reason}. {TOKEN_REFUSED}. "
            f"{LOGS}"
        )
