"""The gate of a model of the size of SmolLM2-135M (random weights), over its bare forwards; and its peak memory.

python benchmarks/large_model.py

30 layers, 3 recipes, 2 x 128 tokens, one process, one thread of torch unless --threads says more. Every forward of the
gate (references, recipes, propagated and injected, and the paths) is counted with the shape of its tokens. The bare
forwards are as many of the float model on tokens of those shapes, without hooks, run right after each recipe.

ratio     CPU seconds of judging all recipes, with the references, over those of the bare forwards (at most 2.2)
memory    peak resident memory of the process less that of the loaded model (at most 1.5 GB)
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from probe.data.library_logs import quietly  # noqa: E402
from probe.gate.baselines.store import Store  # noqa: E402
from probe.gate.configuration import CalibrationSettings, Settings  # noqa: E402
from probe.gate.engine import Gate  # noqa: E402
from probe.models.loading import load_model  # noqa: E402

RECIPES = (("linear_w", "fp8_e4m3"), ("linear_wa", "fp8_e4m3"), ("linear_wa", "fp4_e2m1"))


def save_model(folder: Path, layers: int) -> None:
    """SmolLM2-135M with a vocabulary of bytes beside its own size of the table, so that text is read as bytes."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    with quietly():
        transformers.LlamaForCausalLM(config).save_pretrained(folder)


def cpu(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def peak() -> float:
    """Resident memory at its peak so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        save_model(root / "model", options.layers)
        measure(root)


def measure(root: Path) -> None:
    settings = Settings(
        model=str(root / "model"),
        modes=tuple(dict.fromkeys(mode for mode, _ in RECIPES)),
        formats=tuple(dict.fromkeys(format for _, format in RECIPES)),
        samples=2,
        seqlen=128,
        batch_size=2,
        calibration=CalibrationSettings(samples=2, seqlen=128),
    )
    wanted = {f"{mode}-{format}" for mode, format in RECIPES}
    update = Gate(root, update=True)
    cases = [next(c for c in update.bench(settings).cases if c.recipe == recipe) for recipe in sorted(wanted)]
    entries = {}
    for case in cases:
        judged = update.judge_recipe(settings, case)
        entries |= {judged.outcomes[layer].case: entry for layer, entry in judged.entries.items()}
    bench = update.bench(settings)
    assert bench.anchors is not None
    Store(root / settings.baselines).write(
        settings.model, entries, environment=bench.facts, anchors=bench.anchors.to_bytes()
    )
    del update, bench
    loaded = load_model(settings.model)
    size = sum(parameter.nbytes for parameter in loaded.model.parameters()) / 1e9
    shapes: list[tuple[int, ...]] = []
    forward = type(loaded.model).forward

    def counted(self: object, *args: object, **kwargs: object) -> object:
        tokens = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        shapes.append(tuple(tokens.shape))
        return forward(self, *args, **kwargs)  # type: ignore[arg-type]

    gate, spent, bare, outcomes = Gate(root), 0.0, 0.0, []
    with torch.no_grad():
        loaded.model(torch.zeros(2, 128, dtype=torch.int64), use_cache=False)
        for case in cases:
            shapes.clear()
            with mock.patch.object(type(loaded.model), "forward", counted):
                spent += cpu(lambda case=case: outcomes.append(gate.judge_recipe(settings, case)))
            done = list(shapes)
            bare += cpu(
                lambda done=done: [loaded.model(torch.zeros(one, dtype=torch.int64), use_cache=False) for one in done]
            )
            print(f"{case.recipe}: {len(done)} forwards, {sum(a * b for a, b in done)} tokens", flush=True)
    failed = [one for judged in outcomes for one in judged.outcomes.values() if one.status != "passed"]
    print(f"cases: {sum(len(judged.outcomes) for judged in outcomes)}, of which {len(failed)} fail")
    print(f"ratio: {spent / bare:.2f} ({spent:.1f} s of CPU over {bare:.1f} s; at most 2.2)")
    print(f"memory: peak {peak():.2f} GB, the model {size:.2f} GB, more: {peak() - size:.2f} GB (at most 1.5)")


if __name__ == "__main__":
    main()
