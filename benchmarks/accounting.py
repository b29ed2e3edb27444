"""What the accounting costs: its share of a gate run, and a project of 20,000 stored cases.

python benchmarks/accounting.py

share     seconds in the accounting (following cases, reading what is stored, counting) over those of the whole run
collect   `pytest --collect-only` of 20,000 cases: seconds and peak memory, with the line at the end (-k selects none)
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.plugin.project import files  # noqa: E402

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
FORMATS = '["int8", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "mxint8", "nvfp4"]'
MODES = ("linear_w", "linear_wa", "coarse")
LAYERS = 833
#: A plugin that adds up the time of the accounting and prints it at the end.
WATCH = """
import time
from probe.gate.session import Session

spent = [0.0]


def timed(name):
    real = getattr(Session, name)

    def call(self, *given, **named):
        start = time.perf_counter()
        try:
            return real(self, *given, **named)
        finally:
            spent[0] += time.perf_counter() - start

    setattr(Session, name, call)


timed("advance")
timed("finish")


def pytest_unconfigure(config):
    print(f"accounting {spent[0]:.4f} s")
"""


def store_all(folder: Path) -> int:
    """Store made-up baselines of every case; how many."""
    from probe.formats import GATE_FORMATS
    from probe.gate.baselines.format import Entry, Stored
    from probe.gate.baselines.store import Store
    from probe.gate.cases import Case

    names = [f"{group}.{name}" for group in ("injected", "propagated") for name in ("mse", "mae", "correlation")]
    entry = Entry({name: Stored(0.5, 1e-6) for name in names}, tuple(float(i) for i in range(100)))
    layers = [*(f"layer_{index}" for index in range(LAYERS)), "logits"]
    cases = [Case(mode, layer, "cpu", format) for mode in MODES for format in GATE_FORMATS for layer in layers]
    tests = dict.fromkeys(cases, ("test_gate.py::test_matches_baseline",))
    Store(folder / "baselines").write("network:make", dict.fromkeys(cases, entry), tests=tests)
    return len(cases)


def timed(command: list[str], folder: Path) -> tuple[float, float, str]:
    """Seconds, peak memory in MB and output of a command."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        _, _, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        output.seek(0)
        return seconds, usage.ru_maxrss / 1024, output.read()


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as name:
        watch = Path(name) / "watch_accounting.py"
        watch.write_text(WATCH)
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {name!r}); import pytest; sys.exit(pytest.main())",
        ]
        seconds, _, text = timed(
            [*command, "-q", "-p", "no:cacheprovider", "-p", "watch_accounting", "tests/regression"], ROOT
        )
        found = re.search(r"accounting ([\d.]+) s", text)
        if found is None:
            sys.exit(f"the run printed no time:\n{text}")
        spent = float(found[1])
        print(f"share: {spent:.3f} s of {seconds:.1f} s, {100 * spent / seconds:.2f} % (at most 1 %)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in files(depth=LAYERS, formats=FORMATS, modes=str(list(MODES)).replace("'", '"')).items():
            (folder / file).write_text(text)
        count = store_all(folder)
        seconds, peak, text = timed([*PYTEST, "--collect-only", "-k", "none_of_them"], folder)
        print(f"collect: {count} cases in {seconds:.1f} s, {peak:.0f} MB; {text.splitlines()[-1]}")
        seconds, peak, text = timed([*PYTEST, "-k", "none_of_them"], folder)
        line = next((line for line in text.splitlines() if "stored cases compared" in line), text)
        print(f"with accounting: {seconds:.1f} s (at most 8 s), {peak:.0f} MB (at most 500 MB); {line}")


if __name__ == "__main__":
    main()
