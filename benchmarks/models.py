"""The scan, the forward and the capture against the stock model: one process, one thread, interleaved, ratios.

python benchmarks/models.py [--repeats 5] [--json FILE]
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from probe.data.library_logs import quietly
from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.metrics import Comparison
from probe.models.loading import load_model
from probe.models.mamba_blocks import with_sites
from probe.models.scans import fast, sequential
from probe.running.capture import capture
from probe.running.measurement_job import measure_all


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratios(works: dict[str, Callable[[], object]], repeats: int, over: str) -> dict[str, float]:
    """Seconds of `over`, and the median of the ratios of all others to it, contenders interleaved."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work))
    found = {f"{over} s": round(statistics.median(times[over]), 4)}
    for name, taken in times.items():
        if name != over:
            pairs = zip(taken, times[over], strict=True)
            found[f"{name}/{over}"] = round(statistics.median(a / b for a, b in pairs), 3)
    return found


def scan(repeats: int) -> dict[str, float]:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    g = torch.Generator().manual_seed(0)
    u = torch.randn(1, 512, 1536, generator=g)
    delta = torch.rand(1, 512, 1536, generator=g) * 0.1
    rates = -torch.exp(torch.randn(1536, 16, generator=g))
    b, c = torch.randn(1, 512, 16, generator=g), torch.randn(1, 512, 16, generator=g)
    turned = [t.transpose(1, 2) for t in (u, delta)]
    sides = [t.transpose(1, 2) for t in (b, c)]
    return ratios(
        {
            "stock": lambda: mamba_selective_scan(*turned, rates, *sides),
            "sequential": lambda: sequential(u, delta, rates, b, c),
            "fast": lambda: fast(u, delta, rates, b, c),
        },
        repeats,
        "fast",
    )


def forward(repeats: int) -> dict[str, float]:
    loaded = load_model("mamba-130m-random")
    (batch,) = token_batches(text_of("evaluation"), loaded.tokenizer, samples=1, seqlen=512, batch_size=1)
    twin = with_sites(loaded.model, scan="fast")
    with capture(twin) as reference:
        twin(batch, use_cache=False)

    def captured(percentiles: bool) -> None:
        layers = {name: Comparison(percentiles=percentiles) for name in reference.tensors}
        with capture(twin, consumer=lambda n, t: layers[n].update(t, reference.tensors[n][0])):
            twin(batch, use_cache=False)
        if percentiles:
            assert all(layer.metrics().identical for layer in layers.values())

    return ratios(
        {
            "stock": lambda: loaded.model(batch, use_cache=False),
            "bare": lambda: twin(batch, use_cache=False),
            "captured": lambda: captured(False),
            "captured with percentiles": lambda: captured(True),
        },
        repeats,
        "bare",
    )


PEAK = """
import sys, torch
torch.set_num_threads(1); torch.set_grad_enabled(False)
from probe.running.capture import capture
from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.metrics import Comparison
from probe.models.loading import load_model
from probe.data.library_logs import quietly
from probe.models.mamba_blocks import with_sites
with quietly():
    loaded = load_model("mamba-130m-random")
    (batch,) = token_batches(text_of("evaluation"), loaded.tokenizer, samples=4, seqlen=512, batch_size=4)
    twin = with_sites(loaded.model, scan="fast")
    del loaded
    reference = torch.zeros(4, 512, 768)
    open("/proc/self/clear_refs", "w").write("5")  # from here on the peak is that of the forward
    if sys.argv[1] == "bare":
        twin(batch, use_cache=False)
    else:
        layers = {}
        def compare(name, tensor):
            layers.setdefault(name, Comparison(percentiles=False)).update(tensor, reference)
        with capture(twin, consumer=compare):
            twin(batch, use_cache=False)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def memory() -> dict[str, float]:
    """Peak resident memory of the forward alone (Linux), with and without capture, in layers' outputs."""
    peaks = {
        what: statistics.median(
            int(subprocess.run([sys.executable, "-c", PEAK, what], capture_output=True, text=True, check=True).stdout)
            for _ in range(2)
        )
        for what in ("bare", "captured")
    }
    layer = 4 * 512 * 768 * 4 / 1024
    return {
        "bare MiB": round(peaks["bare"] / 1024, 1),
        "captured MiB": round(peaks["captured"] / 1024, 1),
        "difference in layers": round((peaks["captured"] - peaks["bare"]) / layer, 2),
    }


def everything() -> dict[str, float]:
    """All modes x all formats on tiny-mamba, 8 x 256 tokens, this process, all cores."""
    start = time.perf_counter()
    measured = measure_all("tiny-mamba", modes=["fp16", "bf16", "all"])
    return {"recipes": len(measured), "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    threads = torch.get_num_threads()
    figures: dict[str, dict[str, float]] = {}
    with quietly():
        torch.set_num_threads(1)
        for name, work in (("scan", scan), ("forward", forward)):
            figures[name] = work(options.repeats)
            print(name, figures[name], flush=True)
        figures["memory"] = memory()
        print("memory", figures["memory"], flush=True)
        torch.set_num_threads(threads)
        figures["all modes x formats"] = everything()
        print("all modes x formats", figures["all modes x formats"], flush=True)
    print("peak MiB of this process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
