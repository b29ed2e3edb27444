"""An update of 600 cases by many workers, again and again, and what the plugin costs a run that does not use it.

python benchmarks/stress.py [--runs 10] [--workers 8] [--starts 15]

update   24 recipes of a network of 24 layers by `-n WORKERS`; every run must be byte-identical with a serial one
start    pytest on one empty test, with the plugin and with `-p no:probe.plugin`, alternating; median of the differences
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.plugin.project import files  # noqa: E402

#: Without plugins that take longer to load than all that is measured here.
UNUSED = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio"]
PYTEST = [sys.executable, "-m", "pytest", "-q", *UNUSED]
MATRIX = {
    "modes": '["linear_w", "linear_wa", "coarse"]',
    "formats": '["int8", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "mxint8", "nvfp4"]',
}
CASES = 600
BAR_MS = 50.0


def run(folder: Path, *arguments: str) -> tuple[float, str]:
    """Seconds, and the last line that pytest printed."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    start = time.perf_counter()
    done = subprocess.run([*PYTEST, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"pytest {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return seconds, done.stdout.splitlines()[-1]


def taken(folder: Path) -> dict[str, bytes]:
    """The baselines, which are then gone."""
    found = {}
    for file in sorted(path for path in (folder / "baselines").rglob("*") if path.is_file()):
        found[str(file.relative_to(folder))] = file.read_bytes()
        file.unlink()
    return found


def update(folder: Path, *, runs: int, workers: int) -> bool:
    for name, text in files(depth=24, **MATRIX).items():
        (folder / name).write_text(text)
    seconds, said = run(folder, "--update-baselines")
    serial = taken(folder)
    print(
        f"serial        {seconds:6.1f} s  {said}  {len(serial)} files, {sum(map(len, serial.values()))} bytes",
        flush=True,
    )
    identical = 0
    for index in range(1, runs + 1):
        seconds, said = run(folder, "--update-baselines", "-n", str(workers))
        found = taken(folder)
        other = sorted(name for name in serial.keys() | found.keys() if serial.get(name) != found.get(name))
        identical += not other
        verdict = f"not as serial: {', '.join(other)}" if other else "identical with serial"
        print(f"run {index:2} -n {workers:<2}  {seconds:6.1f} s  {said}  {verdict}", flush=True)
    good = identical == runs and said.startswith(f"{CASES} passed")
    print(f"update: {identical} of {runs} runs of {CASES} cases identical with serial: {'ok' if good else 'NOT OK'}")
    return good


def start(folder: Path, *, starts: int) -> bool:
    (folder / "test_empty.py").write_text("def test_nothing():\n    pass\n")
    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(starts + 1):  # the first fills the caches
        times["with"].append(run(folder, "test_empty.py")[0])
        times["without"].append(run(folder, "-p", "no:probe.plugin", "test_empty.py")[0])
    medians = {name: 1e3 * statistics.median(values[1:]) for name, values in times.items()}
    pairs = zip(times["with"][1:], times["without"][1:], strict=True)
    added = 1e3 * statistics.median(one - other for one, other in pairs)
    verdict = "ok" if added < BAR_MS else "NOT OK"
    print(
        f"start: {medians['with']:.0f} ms with the plugin, {medians['without']:.0f} ms without, "
        f"added {added:.0f} ms of at most {BAR_MS:.0f}: {verdict}",
        flush=True,
    )
    return added < BAR_MS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--starts", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as plain:
        good = [
            start(Path(plain), starts=options.starts),
            update(Path(folder), runs=options.runs, workers=options.workers),
        ]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
