"""Recording all 24 layers of mamba-130m-random against the bare forward: time and memory, ratios, one process each.

python benchmarks/record.py [--repeats 5] [--json FILE]

time     record (all layers, 4 x 512 tokens, mode fp32, to the finished folder) over (the bare forward + plain writes of
         the same bytes), contenders interleaved; the bar is 1.2
memory   peak resident memory of the recording process less that of the bare forward, in outputs of one layer; the bar
         is 3. Median of three processes each.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import probe
from probe.data.library_logs import quietly

SAMPLES, SEQLEN, LAYERS, WIDTH = 4, 512, 24, 768
LAYER_BYTES = SAMPLES * SEQLEN * WIDTH * 4


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def times(repeats: int, folder: Path) -> dict[str, float]:
    loaded = probe.load_model("mamba-130m-random")
    text = probe.text_of("evaluation")
    batches = probe.token_batches(text, loaded.tokenizer, samples=SAMPLES, seqlen=SEQLEN, batch_size=SAMPLES)
    layer = torch.randn(SAMPLES, SEQLEN, WIDTH).numpy().data

    def bare() -> None:
        twin = probe.apply(loaded.model, probe.Recipe("fp32"))  # recording makes this copy too
        for batch in batches:
            twin(batch, use_cache=False)

    def plain_writes() -> None:
        with open(folder / "plain", "wb", buffering=0) as file:
            for _ in range(LAYERS):
                file.write(layer)

    def record() -> None:
        shutil.rmtree(folder / "r", ignore_errors=True)
        probe.record(folder / "r", model=loaded, modes=["fp32"], layers=["all"], batches=batches)

    works = {"bare": bare, "writes": plain_writes, "record": record}
    taken: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(repeats):
        for name, work in works.items():
            taken[name].append(seconds(work))
    ratios = [r / (b + w) for r, b, w in zip(taken["record"], taken["bare"], taken["writes"], strict=True)]
    size = sum(path.stat().st_size for path in (folder / "r").iterdir())
    return {
        **{f"{name} s": round(statistics.median(some), 3) for name, some in taken.items()},
        "recorded MB": round(size / 1e6, 1),
        "record/(bare + writes)": round(statistics.median(ratios), 3),
        "worst": round(max(ratios), 3),
    }


PEAK = """
import sys, torch
torch.set_num_threads(1); torch.set_grad_enabled(False)
import probe, probe.recordings.recorder
loaded = probe.load_model("mamba-130m-random")
batches = probe.token_batches(probe.text_of("evaluation"), loaded.tokenizer, samples=4, seqlen=512, batch_size=4)
open("/proc/self/clear_refs", "w").write("5")  # from here on the peak is that of the run
if sys.argv[1] == "bare":
    twin = probe.apply(loaded.model, probe.Recipe("fp32"))
    for batch in batches:
        twin(batch, use_cache=False)
else:
    probe.record(sys.argv[2], model=loaded, modes=["fp32"], layers=["all"], batches=batches)
lines = open("/proc/self/status").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


def memory(folder: Path) -> dict[str, float]:
    peaks: dict[str, list[int]] = {"bare": [], "record": []}
    for repeat in range(3):
        for what, some in peaks.items():
            command = [sys.executable, "-c", PEAK, what, str(folder / f"{what}{repeat}")]
            some.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024)
    bare, record = (statistics.median(some) for some in peaks.values())
    return {
        "bare MiB": round(bare / 2**20, 1),
        "record MiB": round(record / 2**20, 1),
        "difference in layers": round((record - bare) / LAYER_BYTES, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    figures = {}
    with quietly(), tempfile.TemporaryDirectory() as folder:
        figures["time"] = times(options.repeats, Path(folder))
        print("time", figures["time"], flush=True)
        figures["memory"] = memory(Path(folder))
        print("memory", figures["memory"], flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
