"""Worker processes of this machine: what they inherit, what a death costs, and how they end."""

import gc
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from probe.engines import UnitFailedError, local
from probe.engines.local import LocalEngine
from tests.engines.jobs import Sums, import_tabnanny
from tests.engines.test_engines import units


@pytest.mark.parametrize(("asked", "threads"), [("1", 1), ("64", 2), (None, 2)])
def test_workers_have_no_more_threads_than_the_user_allows(
    asked: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "own_cpus", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", asked) if asked else monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with LocalEngine(2) as made:
        assert list(made.run(Sums("threads"), units(("threads", 0)))) == [threads]


def test_what_is_finished_when_another_worker_dies_is_not_computed_again(tmp_path: Path) -> None:
    mark, died = tmp_path / "mark", tmp_path / "died"
    with LocalEngine(2) as made:
        list(made.run(Sums(), units(("wait", 0.5), ("wait", 0.5))))  # both are started
        slow = made.run(
            Sums(), units(("mark", str(mark)), ("die late", str(died))), progress=lambda *_: time.sleep(1.5)
        )
        assert list(slow) == [str(mark), str(died)]
    assert len(mark.read_bytes()) == 1


def test_an_interrupt_does_not_wait_for_units() -> None:
    with LocalEngine(2) as made:
        found = made.run(Sums(), units(("plain", 0), ("wait", 20), ("wait", 20)))
        next(found)
        assert isinstance(found, Generator)
        time.sleep(1.0)
        before = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            found.throw(KeyboardInterrupt())
        assert time.monotonic() - before < 5


def test_a_process_that_died_before_there_were_units_is_replaced() -> None:
    with LocalEngine(2) as made:
        made.prepare(import_tabnanny)
        assert made._pool is not None
        for process in list(made._pool._processes.values()):
            process.kill()
        time.sleep(1.0)
        assert list(made.run(Sums(), units(("plain", 1), ("plain", 2)))) == [1, 2]


def test_a_closed_engine_leaves_the_collection_of_garbage_as_it_was() -> None:
    before = gc.get_freeze_count()
    with LocalEngine() as made:
        list(made.run(Sums(), units(("plain", 1))))
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0


def test_units_that_ran_beside_one_that_kills_its_worker_do_not_fail_with_it(tmp_path: Path) -> None:
    """With keep_going: long ones, which run whenever it dies."""
    works: list[tuple[str, Any]] = [("wait", 1.0), ("die", 0), *[("wait", 1.0)] * 3]
    with LocalEngine(2) as made:
        found = list(made.run(Sums(), units(*works), keep_going=True))
    assert isinstance(found.pop(1), UnitFailedError)
    assert found == [1.0] * 4


def test_the_progress_counts_what_is_finished_before_its_turn() -> None:
    told: list[int] = []
    with LocalEngine(2) as made:
        list(
            made.run(
                Sums(), units(("wait", 3), ("plain", 1), ("plain", 2)), progress=lambda done, *_: told.append(done)
            )
        )
    assert {1, 2} <= set(told[:-2])
    assert 2 in told[:-3]


def test_workers_of_this_machine_take_no_notice_of_ctrl_c(capfd: pytest.CaptureFixture[str]) -> None:
    with LocalEngine(2) as made:
        found = made.run(Sums(), units(("plain", 0), ("wait", 1), ("wait", 1)))
        next(found)
        assert made._pool is not None
        for process in list(made._pool._processes.values()):
            os.kill(process.pid or 0, signal.SIGINT)
        assert list(found) == [1, 1]
    assert capfd.readouterr().err == ""
