"""`probe compare` of two recordings of 1 GB beside one reading of both files with numpy.

python benchmarks/compare.py [--gigabytes 1.0] [--layers 8] [--repeats 5] [--json FILE] [--folder DIR]

read      map both files with numpy and sum them, one thread: the bar is 3 times that
compare   probe.compare of the two in this process, threads as torch has them; then with one thread
command   the command line in a process of its own, start of Python and torch included; and what `probe --version` takes

Warm: files in the page cache; cold: dropped from it before each run (posix_fadvise DONTNEED). Memory is the peak of the
resident set above what it was before, of a fresh process that has compared two small recordings already.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import probe
from probe.recordings import read_recording, write_recording
from probe.running.recipes import Recipe

MODE, REFERENCE = Recipe("2-1", "int8"), Recipe("fp32")


def make(folder: Path, gigabytes: float, layers: int) -> None:
    """Two recipes in a folder each: normal values, and the same with an error of a hundredth."""
    samples, tokens = 8, 512
    features = round(gigabytes * 2**30 / 4 / layers / samples / tokens)
    ids = [torch.zeros(samples, tokens, dtype=torch.int64)]
    for recipe, noise in ((REFERENCE, 0.0), (MODE, 0.01)):

        def parts(noise: float = noise) -> Iterator[tuple[str, list[torch.Tensor]]]:
            for layer in range(layers):
                g = torch.Generator().manual_seed(layer)
                plain = torch.randn(samples, tokens, features, generator=g)
                moved = plain + noise * torch.randn(plain.shape, generator=g) if noise else plain
                yield f"layer_{layer}.output", [moved]

        where = folder / str(recipe)
        if not where.exists():
            write_recording(where, [(recipe, dict(parts()))], model="random", batches=ids, device="cpu")


def data_of(folder: Path) -> list[np.memmap]:
    """Both files as float32, headers left out."""
    found = []
    for recipe in (REFERENCE, MODE):
        file = folder / str(recipe) / f"{recipe}.safetensors"
        head = int.from_bytes(file.open("rb").read(8), "little") + 8
        found.append(np.memmap(file, np.float32, "r", offset=head))
    return found


def read(folder: Path) -> None:
    for values in data_of(folder):
        values.sum()


def compare(folder: Path) -> None:
    probe.compare(folder / str(MODE), "2-1", reference_recording=folder / str(REFERENCE))


def command(folder: Path) -> None:
    where = ["--dir", str(folder / str(MODE)), "--reference-dir", str(folder / str(REFERENCE))]
    run([sys.executable, "-m", "probe.commands", "compare", "2-1", *where, "--json", "-"])


def run(arguments: list[str]) -> None:
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)


def drop(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds(job: Callable[[Path], None], folder: Path, *, cold: bool) -> float:
    if cold:
        drop(folder)
    start = time.perf_counter()
    job(folder)
    return time.perf_counter() - start


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_of(folder: Path, small: Path) -> float:
    """MB above start, looked at every millisecond."""
    compare(small)
    before = peak = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    compare(folder)
    done.set()
    watcher.join()
    return (peak - before) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keep the recordings there")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--peak", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak_of(*options.peak))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)) / f"{options.gigabytes:g}-{options.layers}"
        small = Path(temporary) / "small"
        make(folder, options.gigabytes, options.layers)
        make(small, 0.05, 2)
        compare(small)  # the compiler's time is not ours
        found = measure(folder, small, options.repeats)
    for name, value in found.items():
        print(f"{name:32s} {value}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


def measure(folder: Path, small: Path, repeats: int) -> dict[str, float]:
    found: dict[str, float] = {}
    threads = torch.get_num_threads()
    for kind in ("warm", "cold"):
        jobs = {"read": (read, threads), "compare": (compare, threads), "compare, one thread": (compare, 1)}
        times: dict[str, list[float]] = {name: [] for name in jobs}
        read(folder)
        for _ in range(repeats):
            for name, (job, some) in jobs.items():
                torch.set_num_threads(some)
                times[name].append(seconds(job, folder, cold=kind == "cold"))
                torch.set_num_threads(threads)
        found[f"{kind}: read s"] = round(statistics.median(times["read"]), 3)
        for name in list(jobs)[1:]:
            found[f"{kind}: {name} s"] = round(statistics.median(times[name]), 3)
            ratios = [a / b for a, b in zip(times[name], times["read"], strict=True)]
            found[f"{kind}: {name} / read"] = round(statistics.median(ratios), 2)
        found[f"{kind}: command s"] = round(seconds(command, folder, cold=kind == "cold"), 2)
    start = time.perf_counter()
    run([sys.executable, "-c", "import torch, numba, probe.comparisons.modes"])
    found["of that, imports s"] = round(time.perf_counter() - start, 2)
    start = time.perf_counter()
    for recipe in (REFERENCE, MODE):
        read_recording(folder / str(recipe))
    found["sha256 of both s"] = round(time.perf_counter() - start, 2)
    peak = subprocess.run(
        [sys.executable, __file__, "--peak", str(folder), str(small)], check=True, capture_output=True, text=True
    )
    found["peak above start MB"] = round(float(peak.stdout), 1)
    return found


if __name__ == "__main__":
    main()
