"""Ray clusters of one-CPU nodes on loopback."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from probe.engines import cluster
from probe.engines.cluster import RayEngine
from probe.engines.connection import load_ray

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the address of this machine in its network
NODE = {"node_ip_address": LOOPBACK, "object_store_memory": 100 * 2**20}
SYSTEM = {
    # that a node is gone is known after a second or two; by default Ray takes 30 s, and 10 s for the objects there
    **{"health_check_period_ms": 300, "health_check_timeout_ms": 500, "health_check_failure_threshold": 3},
    "object_manager_pull_timeout_ms": 500,
    # processes of tasks stay, as on nodes with more CPUs: a new one takes a second
    **{"num_workers_soft_limit": 4, "idle_worker_killing_time_threshold_ms": 600_000},
    "local_fs_capacity_threshold": 0.001,  # the disk is as full as it may be, so that nothing of the store goes there
}


def start_cluster(nodes: int) -> Any:
    """A head without CPUs, so that it can stay while the others are killed, and so many nodes of one CPU."""
    load_ray()
    from ray.cluster_utils import Cluster

    first = {"num_cpus": 0, "include_dashboard": False, "_system_config": SYSTEM, **NODE}
    made = Cluster(initialize_head=True, head_node_args=first)
    for _ in range(nodes):
        add_node(made)
    return made


def add_node(to: Any) -> None:
    to.add_node(num_cpus=1, **NODE)


class Shared:
    """A cluster of two nodes, and an engine on it whose workers stay from test to test.

    A test that kills nodes asks for as many as it needs; the next one finds two again.
    """

    def __init__(self) -> None:
        self.cluster = start_cluster(2)
        self._engine: RayEngine | None = None
        self._is_connected = False

    def engine(self) -> RayEngine:
        if self._engine is None:
            self.nodes(2)
            self._engine = RayEngine()
        return self._engine

    def nodes(self, count: int) -> Any:
        """The cluster, connected, with so many nodes and no engine on it."""
        self.release()
        while len(self.cluster.worker_nodes) > count:
            self.cluster.remove_node(next(iter(self.cluster.worker_nodes)), allow_graceful=False)
        while len(self.cluster.worker_nodes) < count:
            add_node(self.cluster)
        if not self._is_connected:
            address, quiet = self.cluster.address, {"log_to_driver": False, "logging_level": "ERROR"}
            load_ray().init(address=address, _node_ip_address=LOOPBACK, **quiet)
            self._is_connected = True
        wait_until(lambda: len([one for one in load_ray().nodes() if one["Alive"]]) == count + 1)
        return self.cluster

    def release(self) -> None:
        """Kill the workers of the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def leave(self) -> None:
        """Give up the connection too, so that a command makes its own."""
        self.release()
        if self._is_connected:
            load_ray().shutdown()
            self._is_connected = False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="package")  # so that no cluster stands beside all tests that come after
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    made.leave()
    made.cluster.shutdown()


@pytest.fixture
def on_ray(shared: Shared, caches: Path) -> RayEngine:
    """The shared engine."""
    return shared.engine()


@pytest.fixture
def reused(on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch) -> RayEngine:
    """The shared engine, which commands and the gate take for theirs: its workers have loaded the libraries."""
    monkeypatch.setattr(cluster, "RayEngine", lambda address=None, **options: on_ray)
    monkeypatch.setattr(on_ray, "prepare", lambda setup: None)
    monkeypatch.setattr(on_ray, "close", lambda: None)
    return on_ray


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had no connection; what the other tests have stays."""
    monkeypatch.setattr(load_ray(), "is_initialized", lambda: False)
    monkeypatch.setattr(load_ray(), "shutdown", lambda: None)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Journals of a test are its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"
