"""The gate beside the bare runs that it consists of, each in a process of its own, interleaved; ratios.

python benchmarks/gate.py [--repeats 3] [--json FILE]

bare    load tiny-mamba, calibrate, run the float reference, then every recipe of the default matrix once: apply it and
        run its two forwards, the whole model and every layer on the reference's input; nothing is measured
gate    pytest over the same matrix, one process: the same, measured, compared and reported in the terminal
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
MAMBA = "tests/gate/test_gate.py::test_matches_baseline"


def bare() -> None:
    from probe.gate.bench import Bench, needs_calibration
    from probe.gate.configuration import read_settings
    from probe.modes import apply
    from probe.runner import replay

    bench = Bench(read_settings(ROOT))
    reference, calibration = bench.reference(), bench.calibration()
    for recipe in bench.recipes:
        twin = apply(bench.loaded.model, recipe, calibration if needs_calibration(recipe) else None)
        for injected in (False, True):
            replay(twin, reference, lambda label, output, expected: None, injected=injected)


def seconds(command: list[str], **environment: str) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, **environment})
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare()
        return
    times: dict[str, list[float]] = {"bare": [], "gate": []}
    for _ in range(options.repeats):
        times["bare"].append(seconds([sys.executable, __file__, "--bare"]))
        times["gate"].append(seconds([*PYTEST, MAMBA]))
    found = {
        "bare s": round(statistics.median(times["bare"]), 1),
        "gate/bare": round(statistics.median(g / b for g, b in zip(times["gate"], times["bare"], strict=True)), 3),
        "-k mode_2_1 s": round(seconds([*PYTEST, "-k", "mode_2_1"]), 1),
        "whole gate -n 2 s": round(seconds([*PYTEST, "tests/gate", "-n", "2"]), 1),
        "with report -n 2 s": round(
            seconds([*PYTEST, "tests/gate", "-n", "2", "--html=/tmp/report.html", "--self-contained-html"]), 1
        ),
        "report MB": round(Path("/tmp/report.html").stat().st_size / 1e6, 2),
        "baselines kB": round(sum(f.stat().st_size for f in (ROOT / "baselines").rglob("*") if f.is_file()) / 1e3),
    }
    for name, value in found.items():
        print(f"{name:20s} {value}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
