"""Statistics of all linear layers against the bare forward: one process, one thread, CPU time; and peak memory.

python benchmarks/activations.py [--repeats 3] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from probe.activations.collecting import Collector
from probe.activations.plan import Plan
from probe.data.library_logs import quietly
from probe.data.samples import TokenBatch as Batch, token_batches
from probe.data.texts import text_of
from probe.models.loading import load_model
from probe.models.mamba_blocks import with_sites

LINEAR = ("in_proj", "x_proj", "out_proj", "lm_head")  # dt_proj is read and not called: its site stands for it


def plan_of(model: torch.nn.Module) -> Plan:
    """Input and output of every linear layer."""
    names = tuple(name for name, _ in model.named_modules() if name)
    linear = tuple(name for name in names if name.endswith(LINEAR) and ".sites." not in name)
    steps = tuple(name for name in names if name.endswith("sites.dt_proj.output"))
    magnitude = {"input": linear, "output": (*linear, *steps)}
    return Plan(magnitude, ("input", ()), (), ("output", ()), ("output", ()), 0, names)  # type: ignore[arg-type]


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()  # of one thread: what else the machine does counts less
    work()
    return time.process_time() - start


def batch_of(tokenizer: object, samples: int, seqlen: int) -> Batch:
    (tokens,) = token_batches(text_of("evaluation"), tokenizer, samples=samples, seqlen=seqlen, batch_size=samples)  # type: ignore[arg-type]
    return Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), 0)


def speed(repeats: int, samples: int) -> dict[str, float]:
    """Median of the ratios: forward with statistics over the bare forward."""
    loaded = load_model("mamba-130m-random")
    model = with_sites(loaded.model, scan="fast")
    batch, plan = batch_of(loaded.tokenizer, samples, 512), plan_of(model)
    elements = 0

    def bare() -> None:
        model(batch.tokens, use_cache=False)

    def measured() -> None:
        nonlocal elements
        collector = Collector(plan, threshold=64.0, heat_sample=0)
        with collector.hooked(model):
            collector.begin(batch)
            bare()
        elements = sum(one.count for one in collector.statistics.values())
        assert len(collector.statistics) == sum(len(names) for names in plan.magnitude.values())

    small = batch_of(loaded.tokenizer, 1, 16)
    warm = Collector(plan, threshold=64.0, heat_sample=0)
    with warm.hooked(model):  # compiles, or loads what was compiled
        warm.begin(small)
        model(small.tokens, use_cache=False)
    times = [(seconds(bare), seconds(measured)) for _ in range(repeats)]
    return {
        "bare s": round(statistics.median(a for a, _ in times), 2),
        "with statistics/bare": round(statistics.median(b / a for a, b in times), 3),
        "ns an element": round(statistics.median(b - a for a, b in times) / elements * 1e9, 2),
        "elements": elements,
    }


PEAK = """
import sys, torch
torch.set_num_threads(1); torch.set_grad_enabled(False)
sys.path.insert(0, "benchmarks")
from activations import batch_of, plan_of
from probe.activations.collecting import Collector
from probe.models.loading import load_model
from probe.data.library_logs import quietly
from probe.models.mamba_blocks import with_sites
with quietly():
    loaded = load_model("mamba-130m-random")
    model = with_sites(loaded.model, scan="fast")
    batch, small, plan = batch_of(loaded.tokenizer, 8, 512), batch_of(loaded.tokenizer, 1, 16), plan_of(model)
    del loaded
    collector = Collector(plan, threshold=64.0, heat_sample=0)
    with collector.hooked(model):  # libraries and compiled loops are loaded before the peak is taken
        collector.begin(small)
        model(small.tokens, use_cache=False)
    collector = Collector(plan, threshold=64.0, heat_sample=0)
    open("/proc/self/clear_refs", "w").write("5")  # from here on the peak is that of the forward
    if sys.argv[1] == "bare":
        model(batch.tokens, use_cache=False)
    else:
        with collector.hooked(model):
            collector.begin(batch)
            model(batch.tokens, use_cache=False)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def memory() -> dict[str, float]:
    """Peak resident memory of the forward alone (Linux), with and without statistics, in layers' outputs."""
    peaks = {
        what: statistics.median(
            int(subprocess.run([sys.executable, "-c", PEAK, what], capture_output=True, text=True, check=True).stdout)
            for _ in range(2)
        )
        for what in ("bare", "measured")
    }
    layer = 8 * 512 * 768 * 4 / 1024
    return {
        **{f"{what} MiB": round(peak / 1024, 1) for what, peak in peaks.items()},
        "measured - bare in layers": round((peaks["measured"] - peaks["bare"]) / layer, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    with quietly():
        figures = {"speed": speed(options.repeats, options.samples)}
        print("speed", figures["speed"], flush=True)
        figures["memory"] = memory()
        print("memory", figures["memory"], flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
