"""Ray clusters of one-CPU nodes on loopback."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from probe.engines.cluster import RayEngine, load_ray  # noqa: E402

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the address of this machine in its network
STORE = 100 * 2**20


def start_cluster(nodes: int, *, store: int = STORE, head_cpus: int = 0, **head: Any) -> Any:
    """A head without CPUs, so that it can stay while the others are killed, and so many nodes of one CPU."""
    load_ray()
    first = {
        "num_cpus": head_cpus,
        "object_store_memory": store,
        "node_ip_address": LOOPBACK,
        "include_dashboard": False,
        **head,
    }
    cluster = Cluster(initialize_head=True, head_node_args=first)
    for _ in range(nodes):
        cluster.add_node(num_cpus=1, object_store_memory=store, node_ip_address=LOOPBACK)
    return cluster


def connect(cluster: Any) -> None:
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", _node_ip_address=LOOPBACK)


def disconnect(cluster: Any) -> None:
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Any]:
    cluster = start_cluster(2)
    connect(cluster)
    yield cluster
    disconnect(cluster)


@pytest.fixture
def on_ray(two_nodes: Any, caches: Path) -> Iterator[RayEngine]:
    """An engine on the two nodes, which the tests of a session share."""
    if not ray.is_initialized():
        connect(two_nodes)
    with RayEngine() as engine:
        yield engine


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Journals of a test are its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture
def new_cluster(two_nodes: Any) -> Iterator[Callable[..., Any]]:
    """Start a cluster that a test may damage, and connect to it; afterwards the shared one is there again."""
    made: list[Any] = []

    def start(nodes: int, **options: Any) -> Any:
        ray.shutdown()
        made.append(start_cluster(nodes, **options))
        connect(made[-1])
        return made[-1]

    yield start
    for cluster in made:
        disconnect(cluster)
