"""Workers of a Ray cluster: which nodes get some, which of them get units, and what happens when they die."""

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from probe.engines import Unit, UnitFailedError, cluster, connection, dispatch, pool
from probe.engines.actor import describe_node
from probe.engines.cluster import RayEngine
from probe.engines.interface import RETRIES
from probe.engines.journal import Journal
from probe.engines.pool import Needs, Pool, Worker
from tests.engines.conftest import NODE, Shared, add_node, wait_until
from tests.engines.jobs import Sums
from tests.engines.test_engines import units

GB = 2**30


def node(name: str, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerHostname": name, "Resources": resources}


@pytest.mark.parametrize(
    ("cpus", "memory", "gpus", "expected"),
    [
        (None, 0, 0, {"large": 1, "small": 1}),
        (None, 4 * GB, 0, {"large": 1}),
        (1, 0, 0, {"large": 16, "small": 2}),
        (2, 0, 0, {"large": 8, "small": 1}),
        (4, 0, 0, {"large": 4}),
        (1, GB, 0, {"large": 8, "small": 2}),
        (1, 3 * GB, 0, {"large": 2}),
        (1, 0, 1, {"large": 1}),
        (1, 9 * GB, 0, {}),
    ],
)
def test_a_node_has_the_workers_that_its_cpus_memory_and_accelerators_are_enough_for(
    cpus: int | None, memory: int, gpus: int, expected: dict[str, int]
) -> None:
    """Another one would wait for ever for its place."""
    nodes = [node("large", CPU=16.0, memory=8.0 * GB, GPU=1.0), node("small", CPU=2.0, memory=2.0 * GB)]
    needs = Needs(memory, gpus)
    assert Pool(ray, cpus, (0, 1)).share(nodes, needs) == expected
    parts = [Pool(ray, cpus, (part, 3)).share(nodes, needs) for part in range(3)]
    assert parts[0] + parts[1] + parts[2] == expected


@dataclass
class Occupied:
    """A node whose CPU something else has."""

    node: str
    other: Any

    def free(self) -> None:
        ray.kill(self.other)


@pytest.fixture
def occupied(shared: Shared, caches: Path) -> Iterator[Occupied]:
    """One of two nodes."""
    shared.nodes(2)

    @ray.remote(num_cpus=1)
    class Other:
        def node(self) -> str:
            found: str = ray.get_runtime_context().get_node_id()
            return found

    other = Other.remote()  # type: ignore[attr-defined]
    yield (made := Occupied(ray.get(other.node.remote()), other))
    made.free()


def test_a_worker_that_gets_no_place_gets_no_unit_until_it_has_one(occupied: Occupied) -> None:
    with RayEngine() as engine:
        assert engine.workers == 2
        found = engine.run(Sums("occupied"), units(*[("where", 0.02)] * 400))
        assert occupied.node not in {next(found) for _ in range(30)}
        assert engine.pool.is_starting
        occupied.free()
        assert occupied.node in set(found)


def test_a_single_unit_runs_on_the_node_that_is_free(occupied: Occupied) -> None:
    """Whichever of the two the engine asks for first."""
    with RayEngine() as engine:
        for turn in range(4):
            (found,) = engine.run(Sums("single", room=(turn + 2) * GB), units(("where", 0)))
            assert found != occupied.node


def test_a_run_that_waits_for_its_first_worker_says_so(
    occupied: Occupied, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "NOTICE", 0.0)
    told: list[str] = []
    noticed: list[str] = []

    def listen(done: int, total: int, text: str) -> None:
        told.append(text)
        if len(told) == 2:
            occupied.free()

    (free,) = [one for one in shared.cluster.worker_nodes if one.node_id != occupied.node]
    shared.cluster.remove_node(free, allow_graceful=False)
    with RayEngine() as engine:
        monkeypatch.setattr(engine, "notice", noticed.append)
        assert list(engine.run(Sums("full"), units(("plain", 1)), progress=listen)) == [1]
    assert noticed == ["waiting for CPUs or memory of the cluster, which may be taken"]
    assert told[1] == "0 in flight, waiting for CPUs or memory of the cluster, which may be taken"


def test_a_unit_whose_worker_died_is_tried_on_another_node(
    on_ray: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while there is other work enough to keep that node busy."""
    noticed: list[str] = []
    monkeypatch.setattr(on_ray, "notice", noticed.append)
    file = tmp_path / "node"
    works = [("wait", 0.05)] * 6 + [("die here", str(file))] + [("wait", 0.05)] * 40
    assert list(on_ray.run(Sums("elsewhere"), units(*works))) == [value for _, value in works]
    (line,) = noticed
    assert re.fullmatch(r"a worker on .* died: its units are tried again", line)


def test_what_was_lost_and_then_died_has_the_tries_of_each(
    on_ray: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost node costs a unit both its worker and what it needs."""
    lose_at_first(monkeypatch, times=2)
    job = Sums("both")
    (kept,) = on_ray.keep(job, [Unit("kept", ("zeros", 10))])
    unit = Unit("unit", ("die twice", str(tmp_path / "tries")), kept)
    assert list(on_ray.run(job, [unit])) == [str(tmp_path / "tries")]


def lose_at_first(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Kept results lie nowhere so many times, as when their nodes are gone."""
    store, count = RayEngine.store, iter(range(times))

    def stored(engine: RayEngine, job: Any, kept: Any, answer: Any) -> None:
        store(engine, job, kept, answer if next(count, None) is None else (None, "/nowhere", answer[2]))

    monkeypatch.setattr(RayEngine, "store", stored)


def test_what_was_lost_is_made_again_once_for_all_that_need_it(
    on_ray: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a unit that was sent before that, and waited behind another one."""
    lose_at_first(monkeypatch, times=1)
    job, marks = Sums("once"), tmp_path / "marks"
    (kept,) = on_ray.keep(job, [Unit("kept", ("mark zeros", str(marks)))])
    waits = [Unit(f"wait {n}", ("wait", 1.5 * n)) for n in range(2)]
    needing = [Unit(f"length {n}", ("length", 0), kept) for n in range(6)]
    assert list(on_ray.run(job, [*waits, *needing])) == [0, 1.5] + [10] * 6
    assert len(marks.read_bytes()) == 2


def test_an_accelerator_that_no_node_has_is_refused(on_ray: RayEngine) -> None:
    with pytest.raises(ValueError, match=r"a worker needs 1 GPU, and no node of the cluster offers one. Start nodes"):
        list(on_ray.run(Sums("gpu", accelerators=1), units(("plain", 1))))


def test_units_that_need_an_accelerator_run_where_there_is_one(shared: Shared, caches: Path) -> None:
    """Ray counts them and does not look."""
    made = shared.nodes(2)
    made.add_node(num_cpus=1, num_gpus=1, **NODE)
    wait_until(lambda: len([one for one in ray.nodes() if one["Alive"]]) == 4)  # type: ignore[no-untyped-call]
    with RayEngine() as engine:
        found = set(engine.run(Sums("gpus", accelerators=1), units(*[("where", 0)] * 4)))
        (one,) = [node["NodeID"] for node in engine.nodes() if node["Resources"].get("GPU")]
    assert found == {one}
    shared.nodes(2)


def test_no_room_for_all_parts_is_refused(on_ray: RayEngine) -> None:
    most = max(node["Resources"]["memory"] for node in on_ray.nodes())
    with (
        RayEngine(part=(1, 2)) as other,
        pytest.raises(ValueError, match=r"the largest node offers"),
    ):
        list(other.run(Sums("too large", room=int(2 * most)), units(("plain", 1))))


@pytest.mark.parametrize(
    ("actor", "said"),
    [("Unstartable", r"ValueError: no actor today\. On that node"), ("Refused", ".*export RAY_AUTH_MODE=disabled")],
)
def test_workers_that_cannot_be_started_are_one_message(
    actor: str, said: str, shared: Shared, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "Actor", {"Unstartable": Unstartable, "Refused": Refused}[actor])
    shared.nodes(1)
    with (
        RayEngine() as engine,
        pytest.raises(UnitFailedError, match=rf"^no worker could be started on .*: {said}"),
    ):
        list(engine.run(Sums("refused"), units(("plain", 1))))


class Unstartable:
    """An actor that ends as it starts."""

    reason = "no actor today"

    def __init__(self, threads: int) -> None:
        raise ValueError(self.reason)

    def enter(self, folder: object) -> None:
        """Never."""


class Refused(Unstartable):
    """As Ray says where this machine has a token and the cluster asks for none."""

    reason = pool.NEVER_RAN


def test_a_node_that_answers_no_ping_is_asked_again_and_in_the_end_given_up(
    shared: Shared, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one of the cluster: its processes cannot be started any more."""
    monkeypatch.setattr(dispatch, "ABANDONED", 3.0)
    pings: list[float] = []

    @ray.remote(num_cpus=0, max_retries=0)
    def dead() -> None:
        os._exit(1)

    def ping(pool: Pool, node: str) -> None:
        pings.append(time.monotonic())
        pool._pings[dead.remote()] = node

    shared.nodes(1)
    monkeypatch.setattr(Pool, "_ping", ping)
    with RayEngine() as engine, pytest.raises(UnitFailedError, match=r"^no node is left to run unit 0: all workers"):
        list(engine.run(Sums("silent"), units(("die", 0))))
    assert len(pings) > 1
    assert min(then - one for one, then in pairwise(pings)) >= pool.PAUSE


def test_a_node_that_joins_gets_a_worker(shared: Shared, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOOK_WHEN_FULL", 0.1)
    shared.nodes(1)
    with RayEngine() as engine:
        found = engine.run(Sums("joins"), units(*[("where", 0.02)] * 600))
        first = next(found)
        add_node(shared.cluster)
        assert set(found) > {first}
        assert engine.workers == 2


def test_a_cluster_whose_last_node_is_lost_between_two_runs_is_waited_for(
    shared: Shared, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "ABANDONED", 2.0)
    made = shared.nodes(1)
    with RayEngine() as engine:
        assert list(engine.run(Sums("before"), units(("plain", 1)))) == [1]
        (last,) = made.worker_nodes
        made.remove_node(last, allow_graceful=False)
        wait_until(lambda: len(engine.nodes()) == 1)
        with pytest.raises(UnitFailedError, match=r"^no node is left to run unit 0: all workers died"):
            list(engine.run(Sums("after"), units(("plain", 1))))
        add_node(made)
        assert list(engine.run(Sums("again"), units(("plain", 1)))) == [1]


def test_workers_of_a_node_that_fail_together_count_once(on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    @ray.remote(num_cpus=0)
    def failing() -> None:
        raise ValueError("no")

    made = Pool(on_ray.ray, 1, (0, 1))
    starting = {failing.remote(): Worker("node", "host", None, Needs()) for _ in range(3)}
    made._starting |= starting
    pinged: list[str] = []

    def ping(pool: Pool, node: str) -> None:
        pinged.append(node)
        pool._pings[node] = node

    monkeypatch.setattr(Pool, "_ping", ping)
    for reference in starting:
        ray.wait([reference])
        made.settle(reference)
    assert pinged == ["node"]
    assert made._failures["node"].count == 1


def test_a_node_whose_inspection_is_lost_is_asked_again(on_ray: RayEngine) -> None:
    @ray.remote(num_cpus=0, max_retries=0)
    def dead() -> None:
        os._exit(1)

    inspection, (node, *_) = on_ray._inspection, [one for one in on_ray.nodes() if one["Resources"].get("CPU")]
    path = {"/": ""}
    inspection._asked[node["NodeID"], (("/", ""),)] = lost = dead.remote()
    ray.wait([lost])
    assert not inspection.is_fit(node, path)
    wait_until(lambda: inspection.is_fit(node, path))


def test_a_ping_whose_task_raises_is_an_answer(on_ray: RayEngine) -> None:
    @ray.remote(num_cpus=0)
    def broken() -> None:
        raise KeyError

    on_ray.pool._pings[(reference := broken.remote())] = "node"
    ray.wait([reference])
    on_ray.pool.settle(reference)
    assert not on_ray.pool._unanswered


def test_a_full_object_store_of_this_machine_is_one_message(on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver puts the job there."""

    def put(value: Any) -> Any:
        raise ray.exceptions.ObjectStoreFullError("full")

    monkeypatch.setattr(on_ray.ray, "put", put)
    with pytest.raises(UnitFailedError, match=r"^the object store of the cluster is full, and its disk too"):
        list(on_ray.run(Sums("does not fit", ballast=b"x"), units(("plain", 1))))


def test_any_other_error_of_ray_is_one_message(on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*arguments: Any, **options: Any) -> Any:
        raise ray.exceptions.RaySystemError("the sky fell")  # type: ignore[no-untyped-call]

    with monkeypatch.context() as patch:
        patch.setattr(on_ray.ray, "wait", wait)
        with pytest.raises(UnitFailedError, match=r"^the Ray cluster failed: .*the sky fell"):
            list(on_ray.run(Sums("system"), units(("plain", 1))))


def test_a_reader_of_the_progress_that_has_gone_is_no_lost_connection(on_ray: RayEngine) -> None:
    def gone(done: int, total: int, text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        list(on_ray.run(Sums("pipe"), units(("plain", 1)), progress=gone))


@pytest.mark.usefixtures("unconnected")
def test_a_ray_that_cannot_be_started_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_name_token", lambda: None)

    def init(**options: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match=r"^Ray could not be started on this machine: The current node timed out"):
        RayEngine()


def test_a_second_interrupt_waits_until_the_engine_is_closed(
    on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray, left half way, ends the process with a code of its own."""
    engine, closed = RayEngine(), list[bool]()

    def close() -> None:
        signal.raise_signal(signal.SIGINT)
        closed.append(True)

    monkeypatch.setattr(engine._connection, "close", close)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert closed


def test_a_cache_that_cannot_be_written_to_is_refused_before_any_unit(
    on_ray: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    with pytest.raises(ValueError, match=r"^finished units cannot be kept in /proc/probe/runs: .* XDG_CACHE_HOME"):
        on_ray.keep(Sums("kept", journaled=True), [Unit("mark", ("mark zeros", str(tmp_path / "ran")))])
    assert not (tmp_path / "ran").exists()


def test_a_head_without_probe_is_one_message(on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through ray:// it loads what is sent."""

    def fill(*arguments: Any) -> None:
        raise ModuleNotFoundError("No module named 'probe'")

    monkeypatch.setattr(Pool, "fill", fill)
    with pytest.raises(ModuleNotFoundError):  # a bug, where there is no such head
        on_ray.prepare(lambda: None)
    monkeypatch.setattr(connection.Connection, "is_client", True)
    with pytest.raises(ValueError, match=r"^the head of the cluster cannot run probe: No module named 'probe'\. "):
        on_ray.prepare(lambda: None)


def test_a_failure_that_may_be_mended_is_not_kept_for_a_second_run(on_ray: RayEngine, caches: Path) -> None:
    job, works = Sums("mended", journaled=True), units(("plain", "failed"), ("plain", "well"), ("fail", "end"))
    with pytest.raises(UnitFailedError):
        list(on_ray.run(job, works))
    (folder,) = (caches / "probe" / "runs").iterdir()
    journal = Journal(folder.name)
    assert [unit in journal for unit in works] == [False, True, False]
    on_ray.discard(job, works[1])
    assert works[1] not in journal
    on_ray.finish()


class Fake:
    """Ray, as far as a pool of workers asks for it; no process starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self.killed: list[Any] = []
        self.problem: Exception | None = None  # of the start of a worker
        self.exceptions = ray.exceptions
        monkeypatch.setattr(pool, "on_node", self.on_node)

    def remote(self, made: Any) -> Any:
        return made

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def get(self, reference: Any) -> None:
        if self.problem:
            raise self.problem

    def on_node(self, made: Any, name: str, **options: Any) -> Any:
        def start(given: Any) -> Any:
            if made is describe_node:
                return object()
            self.asked.append({"node": name, "threads": given, **options})
            return SimpleNamespace(enter=SimpleNamespace(remote=lambda folder: object()))

        return SimpleNamespace(remote=start)


def fill(made: Pool, nodes: list[dict[str, Any]], needs: Needs | None = None) -> None:
    """As the engine does."""
    needs = needs or Needs()
    made.fill(nodes, made.share(nodes, needs), 9, needs)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    return Fake(monkeypatch)


TWO = [node("b", CPU=4.0, memory=8.0 * GB, GPU=1.0), node("a", CPU=4.0, memory=8.0 * GB, GPU=1.0)]


def test_a_worker_asks_for_its_cpus_memory_and_accelerators_and_has_its_threads(fake: Any) -> None:
    fill(Pool(fake, 2, (0, 1), threads=2), TWO[:1], Needs(GB, 1))
    assert fake.asked[0] == {"node": "b", "threads": 2, "num_cpus": 2, "num_gpus": 1, "memory": GB, "max_restarts": 0}


def test_a_job_with_an_accelerator_does_not_get_workers_of_one_without(fake: Any) -> None:
    made = Pool(fake, 4, (0, 1))
    fill(made, TWO, Needs(GB))
    assert made.suits(Needs(GB))
    assert not made.suits(Needs(GB, 1))
    fill(made, TWO, Needs(GB, 1))
    assert [one["num_gpus"] for one in fake.asked] == [0, 0, 1, 1]
    assert len(fake.killed) == 2


def test_workers_that_start_are_killed_with_the_others(fake: Any) -> None:
    made = Pool(fake, 4, (0, 1))
    fill(made, TWO)
    made.settle(made.pending[0])
    made.stop()
    assert len(fake.killed) == 2
    assert not made.pending


def test_parts_are_the_same_in_whatever_order_a_process_hears_of_nodes() -> None:
    one, other = (Pool(ray, None, (part, 2)).share(nodes, Needs()) for part, nodes in enumerate((TWO, TWO[::-1])))
    assert one + other == {"a": 1, "b": 1}


def test_failures_of_a_node_are_counted_one_after_the_other_and_forgotten_when_a_worker_starts(fake: Any) -> None:
    made = Pool(fake, 4, (0, 1))

    def start(problem: Exception | None) -> None:
        fill(made, TWO[:1])
        (reference,) = made.pending
        fake.problem = problem
        made.settle(reference)
        fake.problem = None  # the node answers
        for asked in made.pending:
            made.settle(asked)

    for _ in range(2):
        for _ in range(RETRIES):
            start(ray.exceptions.ActorDiedError())
        start(None)
        made.kill(made.ready[0])
    for _ in range(RETRIES + 1):
        start(ray.exceptions.ActorDiedError())
    with pytest.raises(UnitFailedError, match="no worker could be started on b"):
        fill(made, TWO[:1])
    fill(made, TWO)  # on the other one
    assert fake.asked[-1]["node"] == "a"
    made.stop()
    made.forget_failures()
    start(None)
    assert len(made.ready) == 1


def test_a_node_where_a_worker_could_not_be_started_is_asked_whether_it_is_there(fake: Any) -> None:
    made = Pool(fake, 4, (0, 1))
    fill(made, TWO[:1])
    fake.problem = ray.exceptions.ActorDiedError()
    made.settle(made.pending[0])
    fill(made, TWO[:1])
    assert len(fake.asked) == 1, "not before it has answered"
    assert len(made.pending) == 1


def test_all_workers_have_the_threads_of_the_smallest_node(on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayEngine, "nodes", lambda engine: [node("a", CPU=4.0), node("b", CPU=2.0), node("head")])
    with RayEngine() as engine:
        assert engine.pool.threads == 2
    with RayEngine(cpus=4) as engine:
        assert engine.pool.threads == 4
