"""The gate beside the bare runs that it consists of, each in a process of its own, interleaved; ratios.

python benchmarks/gate.py [--repeats 3] [--json FILE]

bare    load tiny-mamba, calibrate, run the float reference, then every recipe of the default matrix: apply it and run
        its two forwards, the whole model and every layer on the reference's input; nothing is measured
once    the same with one forward of the whole model: no figure of a layer by itself could be had from it
gate    pytest over the same matrix, one process: the same, measured, compared and reported in the terminal
"""

import argparse
import json
import operator
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
MAMBA = "tests/regression/test_gate.py::test_matches_baseline"


def bare(*sides: bool) -> None:
    """Every recipe, injected or not as `sides` say."""
    from probe.gate.bench import Bench
    from probe.gate.configuration import read_settings
    from probe.running.recipes import apply
    from probe.running.reference import replay

    bench = Bench(read_settings(ROOT))
    reference, calibration = bench.reference(), bench.calibration()
    for recipe in bench.recipes:
        twin = apply(bench.loaded.model, recipe, calibration if recipe.needs_calibration else None)
        for injected in sides:
            replay(twin, reference, lambda label, output, expected: None, injected=injected)


def seconds(command: list[str], **environment: str) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, **environment})
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", choices=["bare", "once"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        bare(*([False] if options.only == "once" else [False, True]))
        return
    times: dict[str, list[float]] = {"bare": [], "once": [], "gate": []}
    for _ in range(options.repeats):
        for only in ("bare", "once"):
            times[only].append(seconds([sys.executable, __file__, "--only", only]))
        times["gate"].append(seconds([*PYTEST, MAMBA]))
    found = {
        "bare s": round(statistics.median(times["bare"]), 1),
        **{
            f"gate/{only}": round(statistics.median(map(operator.truediv, times["gate"], times[only])), 3)
            for only in ("bare", "once")
        },
        "-k mode_2_1 s": round(seconds([*PYTEST, "-k", "mode_2_1"]), 1),
        "whole gate -n 2 s": round(seconds([*PYTEST, "tests/regression", "-n", "2"]), 1),
        "with report -n 2 s": round(
            seconds([*PYTEST, "tests/regression", "-n", "2", "--html=/tmp/report.html", "--self-contained-html"]), 1
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
