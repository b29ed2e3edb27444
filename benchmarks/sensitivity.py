"""Sensitivity of all layers against one whole run for each: wall time, the same figures asserted.

python benchmarks/sensitivity.py [--repeats 3] [--only mamba-130m-random] [--threads 2] [--json FILE]

whole      the whole model, twice for each layer: only it quantized, all but it quantized; torch's own threads
restarted  each run starts at the layer that differs; torch's own threads
ranked     the same, several forwards at a time: what `rank_layers` does
All three make the same two copies of the model first; `copies` is the time of that alone.
"""

import argparse
import json
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from probe.data.library_logs import quietly
from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.models.loading import load_model
from probe.running.recipes import Recipe
from probe.sensitivity import Sensitivity, rank_layers
from probe.sensitivity.units import make_twins

#: model, mode, format, samples, tokens of each
CASES = (
    ("tiny-llama", "linear_wa", "fp8_e4m3", 2, 32),
    ("llama of 24 layers", "linear_wa", "fp8_e4m3", 2, 32),
    ("tiny-mamba", "2-1", "fp8_e4m3", 2, 32),
    ("mamba-130m-random", "2-1", "fp8_e4m3", 2, 32),
    ("mamba-130m-random", "2-1", "fp8_e4m3", 4, 128),
)


def model_of(name: str) -> nn.Module:
    if name != "llama of 24 layers":
        return load_model(name).model
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    shallow: Any = load_model("tiny-llama").model
    config = shallow.config.__class__(**{**shallow.config.to_dict(), "num_hidden_layers": 24})
    return LlamaForCausalLM(config).eval()


def batches_of(samples: int, seqlen: int) -> list[Tensor]:
    tokenizer = load_model("tiny-llama").tokenizer
    return token_batches(text_of("evaluation"), tokenizer, samples=samples, seqlen=seqlen, batch_size=samples)


def timed(work: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def furthest(a: Sensitivity, b: Sensitivity) -> float:
    """The largest relative difference of any KL."""
    pairs = [(x.alone.kl, y.alone.kl) for x, y in zip(a.effects, b.effects, strict=True)]
    pairs += [(x.without.kl, y.without.kl) for x, y in zip(a.effects, b.effects, strict=True)]
    return max(abs((x or 0) - (y or 0)) / max(abs(y or 0), 1e-12) for x, y in pairs)


def compare(case: tuple[str, str, str, int, int], repeats: int) -> dict[str, Any]:
    name, mode, format, samples, seqlen = case
    model, recipe, batches = model_of(name), Recipe(mode, format), batches_of(samples, seqlen)
    ways: dict[str, dict[str, Any]] = {
        "whole": {"restart": False},
        "restarted": {"threads": 1},
        "ranked": {},
    }
    times: dict[str, list[float]] = {way: [] for way in (*ways, "copies")}
    results: dict[str, Sensitivity] = {}
    rank_layers(model, recipe, [batches[0][:1, :8]], advice=False, layers=["last"])
    for _ in range(repeats):
        times["copies"].append(timed(lambda: make_twins(model, recipe, None, sites=False))[0])
        for way, options in ways.items():
            work = partial(rank_layers, model, recipe, batches, advice=False, **options)
            seconds, results[way] = timed(work)
            times[way].append(seconds)
    middle = {way: statistics.median(taken) for way, taken in times.items()}
    found = {f"{way} s": round(value, 3) for way, value in middle.items()}
    for way in ("restarted", "ranked"):
        assert furthest(results[way], results["whole"]) < 1e-3, way
        pairs = zip(times[way], times["whole"], strict=True)
        found[f"{way}/whole"] = round(statistics.median(a / b for a, b in pairs), 3)
    found["furthest KL"] = furthest(results["ranked"], results["whole"])
    found["layers"] = len(results["whole"].effects)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", metavar="MODEL", help="one of the models")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    figures = {}
    with quietly():
        for case in CASES:
            if options.only in (None, case[0]):
                name = f"{case[0]}, {case[3]} x {case[4]} tokens, {torch.get_num_threads()} threads"
                figures[name] = compare(case, 1 if case[0] == "mamba-130m-random" else options.repeats)
                print(name, figures[name], flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
