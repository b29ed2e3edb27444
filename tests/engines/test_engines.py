"""What every engine promises: order, what is emitted, what is kept, errors by name, retries."""

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from probe.engines import Engine, Unit, UnitFailedError
from probe.engines.cluster import RayEngine
from probe.engines.local import LocalEngine
from probe.engines.process import own_cpus
from tests.engines.conftest import Shared, wait_until
from tests.engines.jobs import Sums, import_tabnanny

ENGINES = ("here", "processes", "ray")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "ray":
        yield request.getfixturevalue("on_ray")
    else:
        with LocalEngine(1 if request.param == "here" else 2) as made:
            yield made


@pytest.fixture(params=ENGINES[1:])
def other(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Engines whose workers can die."""
    if request.param == "ray":
        yield request.getfixturevalue("on_ray")
    else:
        with LocalEngine(2) as made:
            yield made


def units(*works: tuple[str, Any]) -> list[Unit]:
    return [Unit(f"unit {index}", work) for index, work in enumerate(works)]


def test_results_are_in_the_order_of_the_units_whichever_is_finished_first(engine: Engine) -> None:
    works = [("wait", 0.3), *(("plain", value) for value in range(1, 20))]
    assert list(engine.run(Sums(), units(*works))) == [0.3, *range(1, 20)]


def test_what_units_emit_is_taken_in_order_before_their_results(engine: Engine) -> None:
    seen: list[Any] = []
    for result in engine.run(
        Sums(), units(*(("plain", value) for value in range(5))), take=lambda i, x: seen.append((i, x))
    ):
        seen.append(result)
    assert seen == [one for value in range(5) for one in ((value, ("began", value)), value)]


def test_a_kept_result_reaches_the_units_that_need_it(engine: Engine) -> None:
    job = Sums()
    kept = engine.keep(job, [Unit(f"kept {n}", ("plain", [n, n])) for n in (1, 2, 3)])
    works = [Unit(f"{n} plus {one.number}", ("plus", n), one) for n in (10, 20) for one in kept]
    assert list(engine.run(job, works)) == [12, 14, 16, 22, 24, 26]
    (single,) = engine.keep(job, [Unit("single", ("plain", [7]))])
    assert list(engine.run(job, [Unit("length", ("length", 0), single)])) == [1]


def test_the_state_of_a_job_is_opened_once_and_that_of_this_process_used(engine: Engine) -> None:
    state: list[int] = []
    list(engine.run(Sums(), units(("plain", 1), ("plain", 2)), state=state))
    assert len(state) == (2 if engine.is_here else 0)


def test_a_unit_that_raises_ends_the_run_with_its_message(engine: Engine) -> None:
    found = engine.run(Sums(), units(("plain", 1), ("fail", "tensor"), ("plain", 3)))
    assert next(found) == 1
    with pytest.raises(ValueError, match="there is no tensor") as problem:
        next(found)
    if not engine.is_here:
        assert str(problem.value) == "unit 1: there is no tensor"


def test_with_keep_going_a_failure_is_a_result_and_the_others_go_on(engine: Engine) -> None:
    found = list(engine.run(Sums(), units(("fail", "tensor"), ("plain", 2)), keep_going=True))
    assert isinstance(found[0], UnitFailedError)
    assert "there is no tensor" in str(found[0])
    assert found[1] == 2


def test_a_bug_is_not_told_as_a_mistake_of_the_user(engine: Engine) -> None:
    with pytest.raises(KeyError):
        list(engine.run(Sums(), units(("bug", "x"))))


def test_a_bug_comes_in_its_turn_and_with_keep_going_among_the_results(engine: Engine) -> None:
    found = engine.run(Sums(), units(("wait", 0.3), ("bug", "x")))
    assert next(found) == 0.3
    with pytest.raises(KeyError) as problem:
        next(found)
    if isinstance(engine, RayEngine):
        (note,) = problem.value.__notes__
        assert "jobs.py" in note, "where it was on the node"
        assert "\x1b" not in note
    failed, other = engine.run(Sums(), units(("bug", "x"), ("plain", 2)), keep_going=True)
    assert isinstance(failed, UnitFailedError)
    assert isinstance(failed.bug, KeyError)
    assert "KeyError: 'x'" in str(failed)
    assert other == 2


def test_a_unit_whose_worker_died_is_tried_again(other: Engine, tmp_path: Path) -> None:
    works = [("die once", str(tmp_path / "died")), ("plain", 1), ("plain", 2)]
    told: list[str] = []
    found = list(other.run(Sums(), units(*works), progress=lambda done, total, text: told.append(text)))
    assert found == [str(tmp_path / "died"), 1, 2]
    assert any("tried again" in text for text in told)


def test_a_unit_that_always_kills_its_worker_is_named_after_three_tries(other: Engine) -> None:
    with pytest.raises(UnitFailedError, match=r"^unit 1: its (process was killed|worker died) 3 times.*memory ran out"):
        list(other.run(Sums(), units(("plain", 1), ("die", 0), ("plain", 3), ("plain", 4))))
    assert list(other.run(Sums(), units(("plain", 5)))) == [5]  # the engine is as good as new


def test_one_that_kills_its_worker_fails_itself_only_with_keep_going(other: Engine) -> None:
    works = [("plain", 0), ("die", 0), *(("plain", value) for value in range(2, 9))]
    found = list(other.run(Sums(), units(*works), keep_going=True))
    assert isinstance(found.pop(1), UnitFailedError)
    assert found == [0, *range(2, 9)]


def test_units_do_not_run_far_ahead_of_the_reader(other: Engine, tmp_path: Path) -> None:
    """Memory stays flat: results wait for nobody by the hundred."""
    file = tmp_path / "marks"
    found = other.run(Sums(), units(*(("mark", str(file)) for _ in range(200))))
    next(found)
    ran = len(file.read_bytes())
    assert ran <= 4 * other.workers + 2
    assert len(list(found)) == 199
    assert len(file.read_bytes()) == 200


def test_an_interrupt_stops_what_runs(other: Engine, tmp_path: Path) -> None:
    file = tmp_path / "marks"
    works = [("plain", 0), *(("wait", 0.2), ("mark", str(file))) * 40]
    found = other.run(Sums(), units(*works))
    next(found)
    assert isinstance(found, Generator)
    with pytest.raises(KeyboardInterrupt):
        found.throw(KeyboardInterrupt())
    time.sleep(1)
    assert len(file.read_bytes() if file.exists() else b"") < 40


def test_workers_import_ahead_what_lies_where_the_project_is(shared: Shared, tmp_path: Path) -> None:
    """Ray's own search path is that of the moment of the connection."""
    shared.leave()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        engine = shared.engine()
    engine.prepare(import_tabnanny)
    works = [("wait", 0.3), ("wait", 0.3), ("imported", "tabnanny"), ("imported", "tabnanny")]
    assert list(engine.run(Sums("ahead"), units(*works))) == [0.3, 0.3, True, True]
    shared.leave()


def test_workers_import_ahead_of_their_units_what_is_there(other: Engine) -> None:
    end_workers = other.pool.stop if isinstance(other, RayEngine) else other.close
    end_workers()
    assert list(other.run(Sums("before"), units(("imported", "tabnanny")))) == [False]
    end_workers()
    other.prepare(import_tabnanny)
    works = [("wait", 0.3), ("wait", 0.3), ("imported", "tabnanny"), ("imported", "tabnanny")]
    assert list(other.run(Sums("ahead"), units(*works))) == [0.3, 0.3, True, True]
    end_workers()


def test_workers_of_this_machine_divide_the_cpus_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with LocalEngine(2) as made:
        assert list(made.run(Sums("threads"), units(("threads", 0)))) == [max(1, own_cpus() // 2)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7})
    assert own_cpus() == 3


def test_what_is_kept_is_deleted_with_the_engine_closed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = [Unit(f"{n}", ("zeros", 10)) for n in range(2)]
    engine = LocalEngine()
    engine.keep(Sums(), kept)
    assert list(tmp_path.iterdir())
    del engine
    gc.collect()
    assert not list(tmp_path.iterdir())
    with LocalEngine() as closed:
        closed.keep(Sums(), kept)
    assert not list(tmp_path.iterdir())


def test_more_workers_than_the_cpus_have_use_for_are_refused() -> None:
    most = 8 * own_cpus()
    assert LocalEngine(most).workers == most
    with pytest.raises(ValueError, match=rf"jobs is 1000, and this process may use \d+ CPUs. Give {most} or less"):
        LocalEngine(1000)


def test_worker_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """However it ends: by SIGKILL."""
    code = (
        "from probe.engines import Unit\nfrom probe.engines.local import LocalEngine\n"
        "from tests.engines.jobs import Sums\n"
        "print(*LocalEngine(2).run(Sums(), [Unit(f'{n}', ('wait', 60 * n)) for n in range(3)]))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as running:
        started = psutil.Process(running.pid)
        wait_until(lambda: len(started.children()) >= 2)
        children = started.children()
        time.sleep(0.5)
        running.kill()
    wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children))


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_workers_are_refused(jobs: int) -> None:
    with pytest.raises(ValueError, match=f"jobs is {jobs}; expected 1 or more"):
        LocalEngine(jobs)


def test_results_that_are_kept_one_after_the_other_are_told_apart(engine: Engine) -> None:
    job = Sums()
    for length in (1, 2):
        kept, _ = engine.keep(job, [Unit(f"kept {n}", ("plain", [7] * length)) for n in range(2)])
        assert list(engine.run(job, [Unit(f"length {n}", ("length", 0), kept) for n in range(4)])) == [length] * 4
