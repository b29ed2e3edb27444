"""The scaling sweep beside as many plain fake_quantize calls, in one process, and its memory in a process of its own.

    python benchmarks/scaling.py [--json FILE]

Bars: 21 levels x 5 formats over 4096 x 4096 bfloat16 in at most 2.5 times the time of 105 fake_quantize calls, memory
at most 4 times the tensor in float32.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import probe

FORMATS = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1")
LEVELS, SIDE = 21, 4096


def tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)).to(dtype)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def sweep(x: torch.Tensor, granularity: str = "tensor") -> None:
    for name in FORMATS:
        probe.scaling_sweep(x, name, num_levels=LEVELS, granularity=granularity)


def plain(x: torch.Tensor) -> None:
    out = torch.empty_like(x)
    for name in FORMATS:
        for _ in range(LEVELS):
            probe.fake_quantize(x, name, out=out, implementation="torch")


def ratios(repeats: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for dtype in (torch.bfloat16, torch.float32):
        x = tensor(dtype)
        probe.scaling_sweep(x[:64], "fp8_e4m3")
        times = [(seconds(lambda x=x: sweep(x)), seconds(lambda x=x: plain(x))) for _ in range(repeats)]
        name = str(dtype).removeprefix("torch.")
        found[f"{name}: 105 calls, s"] = round(statistics.median(calls for _, calls in times), 2)
        found[f"{name}: sweep / 105 calls"] = round(statistics.median(a / b for a, b in times), 3)
    x = tensor(torch.bfloat16)
    calls = seconds(lambda: plain(x))
    found["bfloat16, blocks, 5 rules: sweep / 105 calls"] = round(seconds(lambda: sweep(x, "block")) / calls, 2)
    return found


def status(name: str) -> float:
    """VmRSS or VmHWM of this process, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def memory(dtype: str, granularity: str) -> None:
    """In a process of its own: how far the sweep lifts the memory above what is there, in tensors of float32."""
    x = tensor(getattr(torch, dtype))
    sweep(torch.randn(64, 64).to(x.dtype), granularity)  # what is loaded once is no part of it
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = status("VmRSS")
    sweep(x, granularity)
    print(round((status("VmHWM") - before) / (4 * x.numel() / 2**20), 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    parser.add_argument("--memory", nargs=2, metavar=("DTYPE", "GRANULARITY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        memory(*options.memory)
        return
    figures = ratios(options.repeats)
    for dtype, granularity in (("bfloat16", "tensor"), ("float32", "tensor"), ("bfloat16", "block")):
        command = [sys.executable, str(Path(__file__)), "--memory", dtype, granularity]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures[f"{dtype}, {granularity}: memory / tensor in float32"] = float(done.stdout)
    for name, figure in figures.items():
        print(f"{name:55} {figure}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
