"""The gate under changes that must fail nothing: 50 runs, each under another combination.

python benchmarks/harmless.py [--whole 10] [--slices 40] [--seed 0] [--json FILE]

threads 1 and 2; workers 0, 2 and 4; order of recipes as collected or shuffled; oneDNN on and off; instruction set
(ATEN_CPU_CAPABILITY) of the machine, avx2 and default; batches of 8 and 3. A whole run takes all 370 cases, a slice a
fifth of the recipes, chosen by its seed. Exits with 1 if a single case fails.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Everything a run may change; an empty value leaves what is there.
AXES = {
    "threads": ("1", "2"),
    "workers": ("0", "2", "4"),
    "shuffled": ("", "yes"),
    "onednn": ("", "off"),
    "capability": ("", "avx2", "default"),
    "batch": ("8", "3"),
}
SLICE = 0.2


def pytest_configure(config: Any) -> None:
    """This file is also the pytest plugin of its runs: `-p benchmarks.harmless`."""
    if os.environ.get("HARMLESS_ONEDNN") == "off":
        import torch

        torch.backends.mkldnn.set_flags(False)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Shuffle recipes, and leave out most of them in a slice."""
    chance = random.Random(int(os.environ["HARMLESS_SEED"]))
    groups: dict[str, list[Any]] = {}
    for item in items:
        recipe = re.sub(r"-(layer_\d+|logits)-", "-", item.nodeid)
        groups.setdefault(recipe, []).append(item)
    names = list(groups)
    if os.environ.get("HARMLESS_SHARE"):
        names = chance.sample(names, max(1, round(len(names) * float(os.environ["HARMLESS_SHARE"]))))
        names.sort(key=list(groups).index)
    if os.environ.get("HARMLESS_SHUFFLED"):
        chance.shuffle(names)
    items[:] = [item for name in names for item in groups[name]]


def run(change: dict[str, str], seed: int, share: float | None) -> tuple[int, str, float]:
    """Exit code, pytest's last line and seconds of one run, in a copy of what the gate needs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("conftest.py", "tests", "baselines", "benchmarks"):
            (folder / part).symlink_to(ROOT / part)
        shutil.copy(ROOT / "pyproject.toml", folder)
        text = (folder / "pyproject.toml").read_text()
        (folder / "pyproject.toml").write_text(
            text.replace("[tool.probe]\n", f"[tool.probe]\nbatch_size = {change['batch']}\n", 1)
        )
        environment = {key: value for key, value in os.environ.items() if key != "CI"} | {
            "OMP_NUM_THREADS": change["threads"],
            "HARMLESS_SEED": str(seed),
            "HARMLESS_SHARE": str(share or ""),
            "HARMLESS_SHUFFLED": change["shuffled"],
            "HARMLESS_ONEDNN": change["onednn"],
        }
        if change["capability"]:
            environment["ATEN_CPU_CAPABILITY"] = change["capability"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.harmless"]
        command += ["tests/regression/test_gate.py", *(["-n", change["workers"]] if change["workers"] != "0" else [])]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout, done.stderr, flush=True)
        last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()
        return done.returncode, last, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", type=int, default=10)
    parser.add_argument("--slices", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    combinations = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    random.Random(options.seed).shuffle(combinations)
    found = []
    for index in range(options.whole + options.slices):
        change = combinations[index % len(combinations)]
        share = None if index < options.whole else SLICE
        code, last, seconds = run(change, options.seed + index, share)
        told = " ".join(f"{name}={value}" for name, value in change.items() if value)
        print(f"{index + 1:3} {'whole' if share is None else 'slice'}  {told:70s} exit {code}  {last}", flush=True)
        found.append({**change, "share": share, "exit": code, "last": last, "seconds": round(seconds, 1)})
    failed = sum(one["exit"] != 0 for one in found)
    print(f"{len(found)} runs, {failed} failed")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
