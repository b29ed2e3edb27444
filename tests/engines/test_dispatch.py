"""Which unit a worker is given, and what a death or a loss costs it; without a cluster."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from probe.engines import Kept, Unit
from probe.engines.cluster import Stored
from probe.engines.dispatch import Dispatch, _Task
from probe.engines.pool import Needs, Worker
from tests.engines.jobs import Sums
from tests.engines.test_engines import units


class Engine:
    """As much of an engine as a dispatch asks for; nothing runs."""

    def __init__(self) -> None:
        self.ray, self.pool, self.workers, self.lost = SimpleNamespace(exceptions=ray.exceptions), self, 2, list[Any]()
        self.ready: list[Worker] = []
        self.is_starting = False
        self.where: dict[int, Stored] = {}

    def lose(self, worker: Worker) -> bool:
        self.lost.append(worker)
        return True

    def fill(self, *_: Any) -> None:
        """Nothing."""

    def notice(self, text: str) -> None:
        """Nothing."""

    def stored(self, kept: Kept) -> Stored:
        return self.where[kept.number]

    def job_reference(self, job: Any) -> Any:
        return job


class Actor:
    """Notes what it is to run."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.run = SimpleNamespace(remote=self._run)
        self.enter = SimpleNamespace(remote=lambda folder: None)

    def _run(self, key: str, job: object, work: Any, needs: object) -> object:
        self.ran.append(work)
        return object()


def dispatch(engine: Any, every: list[Unit]) -> Dispatch:
    return Dispatch(engine, Sums(), every)


DIED = ray.exceptions.ActorDiedError()


@pytest.mark.parametrize("first", [0, 1])
def test_of_the_units_of_a_dead_worker_only_the_one_that_ran_has_died_whichever_is_heard_of_first(first: int) -> None:
    made = dispatch(Engine(), units(("plain", 0), ("plain", 1)))
    worker = Worker("node", "host", None, Needs())
    made._running.update({n: _Task(worker, n, n) for n in range(2)})
    made._lost(made._running.pop(first), DIED)
    while made._running:
        made._lost(made._running.popitem()[1], DIED)
    assert made._deaths == {0: 1}
    assert sorted(made._retries) == [0, 1]


def test_every_kept_result_has_its_own_tries() -> None:
    made = dispatch(Engine(), units(("plain", 0)))
    for number in (7, 8):
        for _ in range(2):
            made._try_again(
                _Task(Worker("node", "host", None, Needs()), -1, 0, repaired=Kept(number, made._units[0], None)), DIED
            )
    assert made._deaths == {-7: 2, -8: 2}


def test_a_unit_waits_for_what_it_needs_while_that_is_made_again() -> None:
    kept = Kept(1, Unit("kept", 0), None)
    engine = Engine()
    made = dispatch(engine, [Unit("needing", ("plain", 0), kept)])
    engine.where[1] = Stored(None, None, "node")
    made._waiting[1] = []
    made._begin(Worker("node", "host", actor := Actor(), Needs()), 0)
    assert made._waiting == {1: [0]}
    assert not actor.ran


def test_what_died_is_the_only_unit_of_its_worker_and_the_last_units_wait_for_no_other() -> None:
    engine = Engine()
    engine.ready = [Worker(name, name, Actor(), Needs()) for name in "ab"]
    made = dispatch(engine, units(*[("plain", n) for n in range(9)]))
    made._retries.append(made._todo.popleft())
    made._hand_out()
    assert [one.actor.ran for one in engine.ready] == [[("plain", 0)], [("plain", 1), ("plain", 2)]]
    engine = Engine()
    engine.ready = [Worker(name, name, Actor(), Needs()) for name in "ab"]
    made = dispatch(engine, units(*[("plain", n) for n in range(4)]))
    made._hand_out()
    assert [one.actor.ran for one in engine.ready] == [[("plain", 0)], [("plain", 1)]]
    told: list[str] = []
    made._progress = lambda done, total, text: told.append(text)
    made._running["more"] = _Task(engine.ready[0], 2, 2)
    made._report()
    assert told == ["2 in flight"]


def test_what_died_on_the_only_node_is_tried_there() -> None:
    engine = Engine()
    engine.ready = [Worker("node", "host", Actor(), Needs())]
    made = dispatch(engine, units(("plain", 0)))
    made._try_again(_Task(engine.ready[0], made._todo.popleft(), 0), DIED)
    made._hand_out()
    assert engine.ready[0].actor.ran == [("plain", 0)]


def test_a_unit_near_its_worker_is_none_beyond_the_window() -> None:
    engine = Engine()
    kept = [Kept(n, Unit(f"kept {n}", 0), None) for n in range(2)]
    engine.where = {n: Stored(None, None, f"node {n}") for n in range(2)}
    made = dispatch(engine, [Unit(f"{n}", ("plain", n), kept[n == 9]) for n in range(10)])
    there = Worker("node 1", "host", Actor(), Needs())
    assert made._take_near(there, 9) == 0
    assert made._take_near(there, 10) == 9


def test_an_answer_that_was_lost_with_its_node_costs_no_worker() -> None:
    engine = Engine()

    def get(reference: Any) -> Any:
        raise ray.exceptions.ObjectLostError("00" * 28, None, "")

    engine.ray.get = get
    made = dispatch(engine, units(("plain", 0)))
    made._todo.clear()
    made._finish("reference", _Task(Worker("node", "host", None, Needs()), 0, 0))
    assert not engine.lost
    assert list(made._retries) == [0]


def test_what_died_is_begun_on_another_node_if_there_is_one() -> None:
    engine = Engine()
    engine.ready = [Worker(name, name, Actor(), Needs()) for name in "ab"]
    made = dispatch(engine, units(("plain", 0), ("plain", 1)))
    made._try_again(_Task(engine.ready[0], made._todo.popleft(), 0), DIED)
    made._hand_out()
    assert [one.actor.ran for one in engine.ready] == [[("plain", 1)], [("plain", 0)]]
