"""Nodes before any work: what is compared, where it is asked, and which of them are fit."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from probe.engines import nodes
from probe.engines.cluster import RayEngine
from probe.engines.connection import Connection
from probe.engines.nodes import Inspection, on_node
from probe.engines.pool import Needs
from probe.engines.process import ProjectFolder
from probe.engines.versions import installed
from tests.engines.jobs import Sums, import_tabnanny
from tests.engines.test_engines import units
from tests.engines.test_pool import GB, node


@pytest.mark.parametrize(
    ("part", "said"),
    [((0, 1), "no node of the cluster offers all of it"), ((2, 3), "room for 1 of them, but -n asks for 3")],
)
def test_why_there_is_no_room(
    part: tuple[int, int], said: str, on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, both = (
        node("a", CPU=1.0, memory=8.0 * GB),
        node("b", CPU=1.0, memory=1.0 * GB, GPU=1.0),
        node("c", CPU=1.0, memory=8.0 * GB, GPU=1.0),
    )
    monkeypatch.setattr(on_ray, "nodes", lambda: [one, other] if part[1] == 1 else [one, other, both])
    monkeypatch.setattr(on_ray.pool, "part", part)
    assert said in on_ray._no_room(on_ray.nodes(), Needs(4 * GB, 1))


def test_the_head_is_inspected_too_where_all_goes_through_it(
    on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(on_ray._inspection, "check", lambda every, paths: asked.append(len(every)))
    on_ray.check_nodes({})
    monkeypatch.setattr(Connection, "is_client", True)
    on_ray.check_nodes({})
    assert asked == [2, 3]


@pytest.mark.parametrize("name", installed())
def test_another_version_of_anything_is_refused(name: str) -> None:
    there = {"installed": {**installed(), name: "9.9"}, "folder": "", "missing": [], "other": []}
    with pytest.raises(ValueError, match=rf"node host runs other versions: {name} 9.9, here "):
        nodes._check_answer("host", there)


def test_what_is_for_a_node_runs_nowhere_else() -> None:
    strategy = on_node(SimpleNamespace(options=lambda **options: options), "0" * 56)["scheduling_strategy"]
    assert not strategy.soft


def test_a_node_that_is_lost_while_it_is_inspected_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(*_: Any, **__: Any) -> Any:
        raise ray.exceptions.NodeDiedError("gone")  # type: ignore[no-untyped-call]

    fake: Any = SimpleNamespace(get=get, exceptions=ray.exceptions)
    one = node("a", CPU=1.0)
    made = Inspection(fake, list)
    monkeypatch.setattr(made, "_ask", lambda *_: None)
    made.check([one], {})
    assert not made.is_fit(one, {})


def test_the_paths_of_modules_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "lib"])
    assert ProjectFolder.here().search == (os.getcwd(), os.path.join(os.getcwd(), "lib"))


@pytest.fixture
def prepared(on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch) -> RayEngine:
    """As after the start of a command: nothing is known of the nodes, and workers start."""
    on_ray.pool.stop()
    monkeypatch.setattr(on_ray, "_inspection", Inspection(on_ray.ray, on_ray.nodes))
    on_ray.prepare(import_tabnanny)
    return on_ray


def test_workers_that_start_answer_for_their_nodes(prepared: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process on each node would take a second of its CPU."""
    monkeypatch.setattr(nodes, "on_node", lambda *arguments, **options: pytest.fail("another process was asked"))
    prepared.check_nodes({})
    assert list(prepared.run(Sums("after"), units(("plain", 1)))) == [1]


def test_a_worker_of_another_version_is_refused(prepared: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "installed", lambda: {**installed(), "torch": "9.9"})
    with pytest.raises(ValueError, match=r"runs other versions: torch [\d.]+, here 9\.9"):
        prepared.check_nodes({})


@pytest.mark.parametrize("problem", ["late", "dead"])
def test_another_process_answers_for_a_node_where_no_worker_starts_in_time(
    problem: str, prepared: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem == "late":
        monkeypatch.setattr(nodes, "WORKER_TIMEOUT", 0.0)
    else:
        prepared.pool.stop()
    asked: list[Any] = []

    def on_node(remote: Any, name: str, **options: Any) -> Any:
        asked.append(name)
        return usual(remote, name, **options)

    usual = nodes.on_node
    monkeypatch.setattr(nodes, "on_node", on_node)
    prepared.check_nodes({})
    assert len(set(asked)) == len(asked) == 2
