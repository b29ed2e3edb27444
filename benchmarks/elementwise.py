"""The element-wise work beside the quantizers, each beside a copy of the same tensor, in one process, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/elementwise.py [--repeats 9] [--threads 1] [--json FILE]

A copy is `out.copy_(x)` into a warm buffer: one read and one write, the least that memory allows. Every figure is the
median of the ratios of pairs. `twin` is the same work by torch and numpy alone, where that is still there.

Bars: Hadamard of 4096 x 4096 along the last axis at most 4 copies, and a tenth of the matrix product.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch

import probe
from probe.metrics import Comparison, comparison, tally
from probe.models.scans import SCANS, sequential
from probe.numerics import hadamard, histogram, observers, sketches, underflow
from probe.numerics.hadamard import hadamard_matrix, hadamard_transform
from probe.numerics.observers import PercentileObserver
from probe.scaling import blockwise

#: A large tensor, and an output of a layer of tiny-mamba in the gate.
SHAPES = {"4096 x 4096": (4096, 4096), "8 x 256 x 128": (8, 256, 128)}
SHIFTS, RULES = range(-10, 11), ("floor", "ceil", "even", "rceil", "mse")

Work = Callable[[], object]


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_copies(work: Work, copy: Work, repeats: int) -> float:
    """The median of the ratios of `work` to a copy, each beside its own copy; copies of small tensors are repeated."""
    work()
    times = max(1, round(1e-3 / max(seconds(copy), 1e-9)))
    ratios = []
    for _ in range(repeats):
        base = seconds(lambda: [copy() for _ in range(times)]) / times
        ratios.append(seconds(work) / base)
    return statistics.median(ratios)


def without_loops() -> ExitStack:
    """While it is open, torch and numpy do all the work."""
    stack = ExitStack()
    for module in (hadamard, histogram, underflow):
        stack.enter_context(mock.patch.object(module, "is_native", return_value=False))
    for module in (comparison, tally, observers, sketches):
        stack.enter_context(mock.patch.object(module, "numba_twin", return_value=None))
    return stack


def observe(x: torch.Tensor) -> object:
    observer = PercentileObserver()
    observer.update(x)
    return observer.amax


def compare(x: torch.Tensor, y: torch.Tensor, *, percentiles: bool) -> object:
    compared = Comparison(percentiles=percentiles)
    compared.update(x, y)
    return compared.metrics()


def works(x: torch.Tensor) -> Iterator[tuple[str, Work, bool]]:
    """Name, work, and whether it has a twin without loops."""
    y, out, fmt = x + 0.01 * torch.randn_like(x), torch.empty_like(x).zero_(), probe.FORMATS["fp8_e4m3"]
    flat = x.reshape(-1).numpy()
    yield "Hadamard, into a warm buffer", lambda: hadamard_transform(x, out=out), True
    yield "Hadamard, into a new tensor", lambda: hadamard_transform(x), True
    yield "percentile observer", lambda: observe(x), True
    yield "analyze_underflow, fp8_e4m3", lambda: probe.analyze_underflow(x, "fp8_e4m3"), True
    yield "Comparison", lambda: compare(x, y, percentiles=False), True
    yield "Comparison with percentiles", lambda: compare(x, y, percentiles=True), True
    yield "sketch", lambda: sketches.sketched(flat), True
    some = x.reshape(-1, x.shape[-1])[:512]

    def sweep() -> object:
        return blockwise.block_levels(some, list(SHIFTS), RULES, fmt, axis=-1, size=32, limit=127)

    yield f"sweep of {some.shape[0]} rows, {len(SHIFTS)} levels x {len(RULES)} rules", sweep, False


def scans(repeats: int) -> Iterator[dict[str, Any]]:
    """The scan of the reference beside its definition, on a layer of tiny-mamba."""
    g = torch.Generator().manual_seed(0)
    for batch, length in ((8, 256), (1, 93)):
        u, delta = (torch.rand(batch, length, 256, generator=g) for _ in range(2))
        rates = -torch.rand(256, 16, generator=g) * 16
        into, out = (torch.randn(batch, length, 16, generator=g) for _ in range(2))
        given = (u, 0.1 * delta, rates, into, out, None)
        ratio = in_copies(partial(SCANS["sequential"], *given), partial(sequential, *given), repeats)
        yield {"work": f"scan, {batch} x {length} tokens", "against its definition": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        room = torch.empty_like(x).copy_(x)
        for what, work, has_twin in works(x):
            row: dict[str, Any] = {"shape": name, "work": what}
            row["copies"] = in_copies(work, partial(room.copy_, x), options.repeats)
            if has_twin:
                with without_loops():
                    row["twin"] = in_copies(work, partial(room.copy_, x), 3)
            beside = f"   twin {row['twin']:8.1f}" if has_twin else ""
            print(f"{name:14} {what:48} {row['copies']:8.2f} copies{beside}")
            found.append(row)
        if x.dim() == 2:
            matrix = hadamard_matrix(x.shape[-1])
            ratio = in_copies(partial(torch.matmul, x, matrix), partial(hadamard_transform, x, out=room), 3)
            found.append({"shape": name, "work": "matrix product", "against Hadamard": ratio})
            print(f"{name:14} the matrix product takes {ratio:.1f} times as long as Hadamard")
    for row in scans(options.repeats):
        print(f"{row['work']}: {row['against its definition']:.2f} of the definition")
        found.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
