"""`--probe-engine ray`: where the recipes of the gate are observed. The process of the tests judges and writes."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from probe.engines import Engine

#: Options, with the word for the value and the help of each.
OPTIONS = {
    "--probe-ray-address": (
        "ADDRESS",
        "the Ray cluster: auto, HOST:PORT, ray://HOST:PORT (default: one of this machine)",
    ),
    "--probe-ray-cpus": ("N", "CPUs of a worker (default: all of a node)"),
}


def add_options(group: Any) -> None:
    """The options of engines."""
    where = "where recipes run: local (default), or ray, on a cluster (docs/scale.md)"
    group.addoption("--probe-engine", choices=("local", "ray"), default="local", help=where)
    for name, (metavar, what) in OPTIONS.items():
        group.addoption(name, metavar=metavar, help=what)


def open_engine(config: pytest.Config, worker: dict[str, Any] | None) -> Engine | None:
    """The engine of this process; None: recipes run in it. Mistakes are a ValueError, and nodes with other versions.

    Under xdist the controller holds the cluster, and every worker has its part of it.
    """
    given = [name for name in OPTIONS if config.getoption(name) is not None]
    if config.getoption("--probe-engine") == "local":
        if given:
            raise ValueError(f"{given[0]} is for --probe-engine ray. Add that, or leave it out.")
        return None
    if config.getoption("collectonly"):
        return None
    from probe.engines.cluster import RayEngine

    cpus: str | None = config.getoption("--probe-ray-cpus")
    if cpus is not None and not cpus.isdecimal():
        raise ValueError(f"--probe-ray-cpus is {cpus!r}. Expected a whole number, such as 2.")
    address, part = config.getoption("--probe-ray-address"), (0, 1)
    if worker is not None:
        address = worker["probe_ray_address"]
        part = worker["probe_ray_part"], worker["workercount"]
    engine = RayEngine(address, cpus=None if cpus is None else int(cpus), part=part)
    count = config.getoption("numprocesses", None) or 0
    if worker is None and isinstance(count, int) and count > engine.workers:
        there = engine.workers
        engine.close()
        raise ValueError(
            f"-n {count} is more than the workers that the cluster has room for ({there}). Give -n {there} or less, "
            f"{'or none' if cpus == '1' else 'none at all, or --probe-ray-cpus 1 for more workers on a node'}."
        )
    engine.notice = lambda text: _write_line(config, text)
    if worker is None:
        try:
            engine.check_nodes({})
        except ValueError:
            engine.close()
            raise
    if worker is not None or not count:  # recipes are observed for this process
        from probe.gate.observation_job import ObservationJob

        ObservationJob.prepare(engine)
    return engine


def _write_line(config: pytest.Config, text: str) -> None:
    """A line in the terminal, past the capture of output. A worker of xdist has none."""
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):
        reporter.ensure_newline()
        reporter.write_line(f"probe: {text}")


def tell_worker(node: Any, engine: Engine | None, parts: dict[str, int]) -> None:
    """Tell a worker of xdist where the cluster is, and which part of it is its own: the first that no other one has."""
    if engine is not None:
        parts[node.gateway.id] = next(part for part in count() if part not in parts.values())
        node.workerinput["probe_ray_part"] = parts[node.gateway.id]
        node.workerinput["probe_ray_address"] = node.config.getoption("--probe-ray-address") or engine.address
