"""The gate under changes that must fail nothing: 60 runs, each under another combination.

python benchmarks/harmless.py [--runs 60] [--after N] [--whole 2] [--share 0.12] [--seed 0] [--baselines DIR] [--json F]

threads 1 and 2; workers 0, 2 and 4; order of recipes as collected or shuffled; oneDNN on and off; instruction set
(ATEN_CPU_CAPABILITY) of the machine, avx2 and default; batches of 8 and 3; the numba twins, or torch and numpy alone.
A whole run takes all cases, a slice a share of the recipes, chosen by its seed: together the slices take
every recipe several times. Prints a line for each run and a table by change; exits with 1 if a single case fails.
"""

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = "tests/regression/test_gate.py"
#: Everything a run may change; an empty value leaves what is there.
AXES = {
    "threads": ("1", "2"),
    "workers": ("0", "2", "4"),
    "shuffled": ("", "yes"),
    "onednn": ("", "off"),
    "capability": ("", "avx2", "default"),
    "batch": ("8", "3"),
    "numba": ("", "off"),
}


def pytest_configure(config: Any) -> None:
    """This file is also the pytest plugin of its runs: `-p benchmarks.harmless`."""
    numba = os.environ.get("HARMLESS_NUMBA")
    if numba == "off":
        sys.modules["numba"] = None  # type: ignore[assignment]  # an import of it fails, as where it is not installed
        config.addinivalue_line("filterwarnings", "ignore:numba cannot be loaded:RuntimeWarning")
    if os.environ.get("HARMLESS_ONEDNN") == "off":
        import torch

        torch.backends.mkldnn.set_flags(False)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Shuffle recipes."""
    if not os.environ.get("HARMLESS_SHUFFLED"):
        return
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(selection_of(item.nodeid), []).append(item)
    names = list(groups)
    random.Random(int(os.environ["HARMLESS_SEED"])).shuffle(names)
    items[:] = [item for name in names for item in groups[name]]


def selection_of(nodeid: str) -> str:
    """The expression of `-k` that selects the recipe of a test, with all its cases; empty if the test has none."""
    found = re.search(r"\[(\w+)-.+-cpu(?:-(\w+))?\]", nodeid)
    return "" if found is None else f"({found[1]}-" + (f" and cpu-{found[2]})" if found[2] else ")")


def recipes() -> list[str]:
    """The expressions of all recipes of the gate, in the order of collection."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return list(dict.fromkeys(one for line in done.stdout.splitlines() if (one := selection_of(line))))


def run(change: dict[str, str], seed: int, chosen: Sequence[str], baselines: Path) -> dict[str, Any]:
    """Exit code, cases, failures and seconds of one run of some recipes, or all, in a copy of what the gate needs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("conftest.py", "tests", "benchmarks"):
            (folder / part).symlink_to(ROOT / part)
        (folder / "baselines").symlink_to(baselines.absolute())
        text = (ROOT / "pyproject.toml").read_text()
        (folder / "pyproject.toml").write_text(
            text.replace("[tool.probe]\n", f"[tool.probe]\nbatch_size = {change['batch']}\n", 1)
        )
        environment = {key: value for key, value in os.environ.items() if key != "CI"} | {
            "OMP_NUM_THREADS": change["threads"],
            "HARMLESS_SEED": str(seed),
            "HARMLESS_SHUFFLED": change["shuffled"],
            "HARMLESS_ONEDNN": change["onednn"],
            "HARMLESS_NUMBA": change["numba"],
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        if change["capability"]:
            environment["ATEN_CPU_CAPABILITY"] = change["capability"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.harmless"]
        command += [TESTS, *(["-n", change["workers"]] if change["workers"] != "0" else [])]
        command += ["-k", " or ".join(chosen)] if chosen else []
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - start
    lines = done.stdout.strip().splitlines()
    last = lines[-1] if lines else done.stderr.strip()
    failed = [line.split()[1].rpartition("::")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    passed = re.search(r"(\d+) passed", last)
    if done.returncode:
        print(done.stdout[-20000:], done.stderr[-5000:], flush=True)
    return {
        "exit": done.returncode,
        "passed": int(passed[1]) if passed else 0,
        "failed": failed,
        "last": last,
        "seconds": round(seconds, 1),
    }


def table(found: list[dict[str, Any]]) -> list[str]:
    """Runs, cases and failures under every value of every change."""
    rows = ["| change | value | runs | cases | failures |", "|---|---|---|---|---|"]
    for axis, values in AXES.items():
        for value in values:
            some = [one for one in found if one[axis] == value]
            cases, failures = sum(one["passed"] for one in some), sum(len(one["failed"]) for one in some)
            rows.append(f"| {axis} | {value or 'as it is'} | {len(some)} | {cases + failures} | {failures} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--after", type=int, default=0, metavar="N", help="leave out the first N runs, made before")
    parser.add_argument("--whole", type=int, default=2, help="of the runs, those over all cases")
    parser.add_argument("--share", type=float, default=0.12, help="of the recipes, in all other runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--baselines", type=Path, default=ROOT / "baselines", metavar="DIR")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    combinations = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    random.Random(options.seed).shuffle(combinations)
    found: list[dict[str, Any]] = []
    names = recipes()
    for index in range(options.after, options.runs):
        change = combinations[index % len(combinations)]
        chance, is_whole = random.Random(options.seed + index), index < options.whole
        chosen = [] if is_whole else chance.sample(names, max(1, round(len(names) * options.share)))
        seen = run(change, options.seed + index, chosen, options.baselines)
        is_good = seen["exit"] == 0 and seen["passed"] > 0
        told = " ".join(f"{name}={value}" for name, value in change.items() if value)
        kind, good = "whole" if is_whole else "slice", "good" if is_good else "BAD "
        print(f"{index + 1:3} {kind}  {good}  {seen['seconds']:6.1f} s  {told}  {seen['last']}", flush=True)
        found.append({**change, "recipes": len(chosen or names), "good": is_good, **seen})
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(["", *table(found), ""]))
    bad = sum(not one["good"] for one in found)
    minutes = sum(one["seconds"] for one in found) / 60
    cases = sum(one["passed"] + len(one["failed"]) for one in found)
    print(f"{len(found)} runs, {cases} cases, {bad} runs with a failure, {minutes:.1f} minutes")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
