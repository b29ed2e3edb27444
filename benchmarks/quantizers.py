"""Quantizers against a copy, torchao and ml_dtypes: one process, interleaved, medians of ratios.

python benchmarks/quantizers.py [--repeats 15] [--json FILE]

A copy is `out.copy_(x)` into a warm buffer; quantizers write into one too, except codes, whose memory is new. Ratios
are taken within a round, so that a slow second of the machine hits all contenders.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

import probe

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

MX = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "mxint8")
TORCHAO = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp6_e3m2": DTYPE_FP6_E3M2,
    "fp6_e2m3": DTYPE_FP6_E2M3,
    "fp4_e2m1": torch.float4_e2m1fn_x2,
}
ML_DTYPES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}
FIRST_CALL = """
import time, torch, probe
x = torch.randn(64, 32)
start = time.perf_counter()
import numba
loaded = time.perf_counter()
probe.fake_quantize(x, "fp8_e4m3")
print(loaded - start, time.perf_counter() - loaded)
"""

Work = Callable[[], object]
Figures = dict[str, object]


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(works: dict[str, Work], repeats: int, *, rest: float = 0.0) -> dict[str, list[float]]:
    """Every contender once per round, after a warm-up of each, and each after so many seconds of rest."""
    for work in works.values():
        for _ in range(1 + repeats // 20):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            time.sleep(rest)
            times[name].append(seconds(work))
    return times


def ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    return round(statistics.median(a / b for a, b in zip(times[over], times[under], strict=True)), 2)


def by_torchao(x: Tensor, name: str) -> Tensor:
    scale, data = to_mx(x, TORCHAO[name], 32)
    return to_dtype(data, scale, TORCHAO[name], 32, torch.float32)


def by_ml_dtypes(x: np.ndarray, name: str) -> np.ndarray:
    """The obvious numpy program: frexp for the scale, a cast to the element dtype and back."""
    blocks = x.reshape(-1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    top = float(ml_dtypes.finfo(ML_DTYPES[name]).max)
    scale = np.ldexp(np.float32(1), np.frexp(amax)[1] - 1 - (np.frexp(top)[1] - 1))
    elements = np.clip(blocks / scale, -top, top).astype(ML_DTYPES[name])
    return (elements.astype(np.float32) * scale).reshape(x.shape)


def against_copy(x: Tensor, work: Callable[[Tensor], object], repeats: int) -> Figures:
    """The time of quantizing `x` into a buffer over that of a copy."""
    out = torch.zeros_like(x)
    times = interleaved({"copy": lambda: out.copy_(x), "work": lambda: work(out)}, repeats)
    copy = statistics.median(times["copy"])
    return {"copy us": round(1e6 * copy, 1), "over copy": ratio(times, "work", "copy")}


def large(repeats: int) -> Figures:
    """4096 x 4096, one thread: the default call of every format, then options of one of them."""
    x = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0))
    grid = probe.integer_parameters(torch.tensor(-5.0), torch.tensor(5.0))
    figures: Figures = {}

    def measure(name: str, work: Callable[[Tensor], object], given: Tensor = x) -> None:
        figures[name] = against_copy(given, work, repeats)
        print(f"  {name}: {figures[name]}", flush=True)

    for name in MX:
        measure(name, lambda out, name=name: probe.fake_quantize(x, name, out=out))
    for rule in ("ceil", "mse"):
        options = {"scale_rule": rule}
        measure(f"fp8_e4m3, {rule}", lambda out, given=options: probe.fake_quantize(x, "fp8_e4m3", out=out, **given))
    measure("fp8_e4m3, half_away", lambda out: probe.fake_quantize(x, "fp8_e4m3", rounding="half_away", out=out))
    measure("fp8_e4m3, axis 0", lambda out: probe.fake_quantize(x, "fp8_e4m3", axis=0, out=out))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        given = x.to(dtype)
        measure(f"fp8_e4m3, {dtype}", lambda out, y=given: probe.fake_quantize(y, "fp8_e4m3", out=out), given)
    measure("fp8_e4m3, codes and scales", lambda out: probe.quantize(x, "fp8_e4m3"))
    measure("nvfp4", lambda out: probe.fake_quantize(x, "nvfp4", out=out))
    measure("int8", lambda out: probe.fake_quantize(x, "int8", out=out))
    measure("int8, scale given", lambda out: probe.fake_quantize_integer(x, parameters=grid, out=out))
    measure(
        "fp8_e4m3, implementation torch",
        lambda out: probe.fake_quantize(x, "fp8_e4m3", out=out, implementation="torch"),
    )
    return figures


def two_threads(repeats: int) -> Figures:
    """How much faster two threads are than one, in alternation: of the default call, and of what limits it.

    The copy shows what the memory gives, the rule mse on a part that the caches hold what the cores give. Before a call
    that is `rested`, the threads have had time to fall asleep.
    """
    x = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0))
    short, out = x.to(torch.bfloat16), torch.zeros_like(x)
    short_out, part, part_out = torch.zeros_like(short), short[:128].clone(), torch.zeros_like(short[:128])

    def on(threads: int, work: Work) -> Work:
        def run() -> None:
            torch.set_num_threads(threads)
            work()

        return run

    jobs: dict[str, Work] = {
        "copy": lambda: out.copy_(x),
        "in the cache": lambda: probe.fake_quantize(part, "fp8_e4m3", scale_rule="mse", out=part_out),
        "fp8_e4m3": lambda: probe.fake_quantize(x, "fp8_e4m3", out=out),
        "fp8_e4m3, bfloat16": lambda: probe.fake_quantize(short, "fp8_e4m3", out=short_out),
    }
    works = {f"{name} {count}": on(count, work) for name, work in jobs.items() for count in (1, 2)}
    figures: Figures = {}
    for manner, rest in (("", 0.0), (", rested", 0.02)):
        times = interleaved(works, repeats, rest=rest)
        figures |= {f"{name}{manner}": ratio(times, f"{name} 1", f"{name} 2") for name in jobs}
    torch.set_num_threads(1)
    return figures


def peers(repeats: int) -> Figures:
    """How many times slower the others are; their results are the same."""
    x = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0))
    array, out = x.numpy(), torch.zeros_like(x)
    figures: Figures = {}
    for name in TORCHAO:
        assert torch.equal(by_torchao(x, name), probe.fake_quantize(x, name))
        assert np.array_equal(by_ml_dtypes(array, name), probe.fake_quantize(x, name).numpy())
        works: dict[str, Work] = {
            "torchao": lambda name=name: by_torchao(x, name),
            "ml_dtypes": lambda name=name: by_ml_dtypes(array, name),
            "probe": lambda name=name: probe.fake_quantize(x, name, out=out),
        }
        times = interleaved(works, repeats)
        figures[name] = {other: ratio(times, other, "probe") for other in ("torchao", "ml_dtypes")}
        print(f"  {name}: {figures[name]}", flush=True)
    return figures


def small() -> Figures:
    """1 x 512 x 128, with a new result."""
    x = torch.randn(1, 512, 128, generator=torch.Generator().manual_seed(0))
    grid = probe.integer_parameters(torch.tensor(-5.0), torch.tensor(5.0))
    figures: Figures = {
        name: against_copy(x, lambda out, name=name: probe.fake_quantize(x, name), 1000) for name in (*MX, "int8")
    }
    return figures | {
        "int8, scale given": against_copy(x, lambda out: probe.fake_quantize_integer(x, parameters=grid), 1000)
    }


def first_call(repeats: int) -> Figures:
    """The first call of a process whose kernels are on disk, beside the import of numba; milliseconds."""
    times = []
    installed = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALL], env=installed, capture_output=True, text=True, check=True
        )
        times.append([1e3 * float(part) for part in done.stdout.split()])
    loading, calling = (round(statistics.median(column), 1) for column in zip(*times[1:], strict=True))
    return {"import numba ms": loading, "first call ms": calling}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Figures]] = {
        "first call": lambda: first_call(6),
        "1 x 512 x 128": small,
        "4096 x 4096, one thread": lambda: large(options.repeats),
        "4096 x 4096, one thread / two": lambda: two_threads(options.repeats),
        "4096 x 4096, times slower": lambda: peers(3),
    }
    figures = {}
    for name, part in parts.items():
        print(name, flush=True)
        figures[name] = part()
        print(f"  {figures[name]}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
