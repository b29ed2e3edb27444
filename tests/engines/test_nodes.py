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
