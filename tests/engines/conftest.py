"""Ray clusters of one-CPU nodes on loopback."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from probe.engines.cluster import RayEngine, load_ray

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the address of this machine in its network
STORE = 100 * 2**20
#: That a node is gone is known after a second or two; by default Ray takes half a minute.
HEALTH = {"health_check_period_ms": 300, "health_check_timeout_ms": 500, "health_check_failure_threshold": 3}


def start_cluster(nodes: int, *, store: int = STORE, system: dict[str, Any] | None = None) -> Any:
    """A head without CPUs, so that it can stay while the others are killed, and so many nodes of one CPU."""
    load_ray()
    from ray.cluster_utils import Cluster

    first = {
        "num_cpus": 0,
        "object_store_memory": store,
        "node_ip_address": LOOPBACK,
        "include_dashboard": False,
        "_system_config": {**HEALTH, **(system or {})},
    }
    cluster = Cluster(initialize_head=True, head_node_args=first)
    for _ in range(nodes):
        cluster.add_node(num_cpus=1, object_store_memory=store, node_ip_address=LOOPBACK)
    return cluster


def connect(cluster: Any) -> None:
    load_ray().init(address=cluster.address, log_to_driver=False, logging_level="ERROR", _node_ip_address=LOOPBACK)


def disconnect(cluster: Any) -> None:
    load_ray().shutdown()
    cluster.shutdown()


class Shared:
    """A cluster of two nodes, and an engine on it whose workers stay from test to test.

    A process has one connection: a test with a cluster of its own takes it away for a while.
    """

    def __init__(self) -> None:
        self.cluster = start_cluster(2)
        self._engine: RayEngine | None = None

    def engine(self) -> RayEngine:
        if self._engine is None:
            connect(self.cluster)
            self._engine = RayEngine()
        return self._engine

    def leave(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            load_ray().shutdown()


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


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Journals of a test are its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture
def new_cluster(shared: Shared) -> Iterator[Callable[..., Any]]:
    """Start a cluster that a test may damage, and connect to it."""
    made: list[Any] = []

    def start(nodes: int, **options: Any) -> Any:
        shared.leave()
        made.append(start_cluster(nodes, **options))
        connect(made[-1])
        return made[-1]

    yield start
    for cluster in made:
        disconnect(cluster)
