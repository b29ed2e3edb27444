"""Quantizers against a copy, torchao and ml_dtypes: one process, one thread, interleaved, median of ratios.

python benchmarks/quantizers.py [--repeats 15] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch

import probe
from probe.numerics import compiled

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


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Every contender once per round, so that a slow second of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        for _ in range(1 + repeats // 20):
            work()
    for done in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work))
        if repeats < 100:  # printing would disturb what takes microseconds
            print(f"\r  round {done + 1}/{repeats}", end="", file=sys.stderr)
    print("\r" + " " * 30 + "\r", end="", file=sys.stderr)
    return times


def ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))


def by_torchao(x: torch.Tensor, name: str) -> torch.Tensor:
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


def large(repeats: int) -> list[dict[str, object]]:
    x = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0))
    array, out = x.numpy(), torch.empty_like(x)
    rows: list[dict[str, object]] = []
    for name in MX:
        works: dict[str, Callable[[], object]] = {
            "copy": lambda: out.copy_(x),
            "compiled": lambda name=name: probe.fake_quantize(x, name, out=out, implementation="compiled"),
            "eager": lambda name=name: probe.fake_quantize(x, name, out=out, implementation="eager"),
        }
        times = interleaved(works, repeats)
        row: dict[str, object] = {
            "format": name,
            "copy ms": round(1e3 * statistics.median(times["copy"]), 2),
            "compiled/copy": round(ratio(times, "compiled", "copy"), 2),
            "eager/copy": round(ratio(times, "eager", "copy"), 2),
        }
        if name in TORCHAO:
            assert torch.equal(by_torchao(x, name), probe.fake_quantize(x, name))
            assert np.array_equal(by_ml_dtypes(array, name), probe.fake_quantize(x, name).numpy())
            peers = interleaved(
                {
                    "torchao": lambda name=name: by_torchao(x, name),
                    "ml_dtypes": lambda name=name: by_ml_dtypes(array, name),
                    "compiled": works["compiled"],
                    "eager": works["eager"],
                },
                3,
            )
            row |= {
                "torchao/eager": round(ratio(peers, "torchao", "eager"), 1),
                "torchao/compiled": round(ratio(peers, "torchao", "compiled"), 1),
                "ml_dtypes/eager": round(ratio(peers, "ml_dtypes", "eager"), 1),
                "ml_dtypes/compiled": round(ratio(peers, "ml_dtypes", "compiled"), 1),
            }
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def small() -> dict[str, float]:
    x = torch.randn(1, 512, 128, generator=torch.Generator().manual_seed(0))
    works = {name: (lambda name=name: probe.fake_quantize(x, name)) for name in MX}
    times = interleaved(works, 400)
    return {name: round(1e6 * statistics.median(taken), 1) for name, taken in times.items()}


def first_call() -> dict[str, float]:
    """What a caller waits for: the first eager call, and building a kernel (torch's caches may be warm)."""
    x = torch.randn(64, 32)
    eager = seconds(lambda: probe.fake_quantize(x, "fp8_e4m3", rounding="half_away"))
    build = seconds(lambda: probe.fake_quantize(x, "fp8_e4m3", implementation="compiled"))
    return {"eager ms": round(1e3 * eager, 2), "compile s": round(build, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    small_figures = small()  # first: for some seconds after a compilation torch's workers take the cores
    figures = {"first call": first_call(), "1 x 512 x 128, us a call, eager": small_figures}
    print(figures)
    assert not any(isinstance(kernel, Exception) for kernel in compiled._kernels.values())
    figures |= {"4096 x 4096 float32": large(options.repeats)}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
