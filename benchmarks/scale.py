"""Ray against this process: overhead on one node, speed-up on two nodes of one core, memory, and costs of a unit.

python benchmarks/scale.py [--samples 512] [--repeats 3] [--json FILE]

Clusters are of this machine, on loopback. Every part runs in a process of its own. The work is `probe errors` of
tiny-mamba with 24 recipes, in shards: more than 60 s of it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

LOOPBACK = "127.0.0.2"
MODES, FORMATS = ["0", "2-1", "2-4", "3"], ["int8", "fp8_e4m3", "fp4_e2m1", "fp8_e5m2", "fp6_e3m2", "mxint8"]
#: Samples of a unit.
SHARD = 64
#: This process on two threads, a node of two cores, a node of one, and two of one.
ENGINES = ("here 2", "ray 1 2", "ray 1 1", "ray 2 1")


def cluster(nodes: int, cpus: int) -> Any:
    from probe.engines.connection import load_ray

    ray = load_ray()
    from ray.cluster_utils import Cluster

    size = {"num_cpus": cpus, "object_store_memory": 2**30, "node_ip_address": LOOPBACK}
    made = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **size})  # the first of the nodes
    for _ in range(nodes - 1):
        made.add_node(**size)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR", _node_ip_address=LOOPBACK)
    return made


def errors(engine: Any, samples: int) -> tuple[float, str]:
    """Seconds, and the results."""
    from probe.running.measurement_job import measure_all

    start = time.perf_counter()
    data, calibration = ("evaluation", samples, 128, 8), ("calibration", 4, 128, 4)
    found = measure_all(
        "tiny-mamba",
        modes=MODES,
        formats=FORMATS,
        data=data,
        calibration_data=calibration,
        engine=engine,
        shard_size=SHARD,
    )
    return time.perf_counter() - start, json.dumps([one.as_dict() for one in found])


def timed(engine: str, samples: int) -> dict[str, Any]:
    """One run: `here N` on N threads; or `ray NODES CPUS`, where the start of the cluster does not count."""
    import torch

    from probe.engines.local import LocalEngine

    words = engine.split()
    if words[0] == "here":
        torch.set_num_threads(int(words[1]))
        with LocalEngine() as local:
            seconds, found = errors(local, samples)
    else:
        from probe.engines.cluster import RayEngine

        cluster(int(words[1]), int(words[2]))
        start = time.perf_counter()
        with RayEngine() as made:
            _, found = errors(made, samples)
            seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 2), "found": found}


def anonymous() -> float:
    """MB of this process's own memory, without what it has mapped of the object store."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def units(count: int) -> dict[str, Any]:
    """Many units of 1 MB: time of each, and the memory of the driver."""
    from probe.engines import Unit
    from probe.engines.cluster import RayEngine
    from tests.engines.jobs import Sums

    cluster(2, 1)
    with RayEngine() as engine:
        while len(engine.pool.ready) < 2:
            list(engine.run(Sums("warm"), [Unit(f"{n}", ("wait", 0.2)) for n in range(2)]))
        start = time.perf_counter()
        list(engine.run(Sums("empty"), [Unit(f"{n}", ("plain", n)) for n in range(200)]))
        empty = (time.perf_counter() - start) / 200
        before, peak = anonymous(), 0.0
        start = time.perf_counter()
        for one in engine.run(Sums("large"), [Unit(f"{n}", ("zeros", 2**20)) for n in range(count)]):
            assert len(one) == 2**20
            peak = max(peak, anonymous())
        large = (time.perf_counter() - start) / count
        job = Sums("kept")
        start = time.perf_counter()
        kept = engine.keep(job, [Unit("kept", ("zeros", 2**26))])[0]
        list(engine.run(job, [Unit(f"{n}", ("length", 0), kept) for n in range(8)]))
        store = time.perf_counter() - start
    return {
        "empty unit ms": round(1e3 * empty, 2),
        "unit of 1 MB ms": round(1e3 * large, 2),
        "64 MB kept and read by 2 workers s": round(store, 2),
        "driver MB before": round(before),
        "driver MB at most": round(peak),
    }


def in_process(*arguments: str) -> Any:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "units": lambda: units(int(options.part[1])),
            "timed": lambda: timed(options.part[1], options.samples),
        }
        print(json.dumps(parts[options.part[0]]()))
        return
    times: dict[str, list[float]] = {}
    found = set()
    for _ in range(options.repeats):
        for engine in ENGINES:
            one = in_process("--part", "timed", engine, "--samples", str(options.samples))
            times.setdefault(engine, []).append(one["seconds"])
            if engine in ENGINES[2:]:  # sums on two threads are added in another order
                found.add(one["found"])
            print(f"  {engine}: {one['seconds']} s", flush=True)
    figures: dict[str, Any] = {
        "one node / this process": [round(a / b, 3) for a, b in zip(times["ray 1 2"], times["here 2"], strict=True)],
        "one node / two nodes": [round(a / b, 3) for a, b in zip(times["ray 1 1"], times["ray 2 1"], strict=True)],
        "same results on one node and on two": len(found) == 1,
        "seconds": times,
    }
    figures["median overhead"] = statistics.median(figures["one node / this process"])
    figures["median speed-up"] = statistics.median(figures["one node / two nodes"])
    for count in (100, 1000):
        figures[f"{count} units"] = in_process("--part", "units", str(count))
    print(json.dumps(figures, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
