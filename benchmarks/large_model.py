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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from probe.data.library_logs import quietly  # noqa: E402
from probe.gate.baselines.store import Store  # noqa: E402
from probe.gate.cases import Case  # noqa: E402
from probe.gate.configuration import CalibrationSettings, Settings  # noqa: E402
from probe.gate.engine import Gate  # noqa: E402

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


def resident() -> float:
    """Resident memory now, in GB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e9


def peak() -> float:
    """Resident memory at its peak so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def settings_of(root: Path) -> Settings:
    return Settings(
        model=str(root / "model"),
        modes=tuple(dict.fromkeys(mode for mode, _ in RECIPES)),
        formats=tuple(dict.fromkeys(format for _, format in RECIPES)),
        samples=2,
        seqlen=128,
        batch_size=2,
        calibration=CalibrationSettings(samples=2, seqlen=128),
    )


def cases_of(gate: Gate, settings: Settings) -> list[Case]:
    """One case of each recipe."""
    cases = gate.bench(settings).cases
    return [next(case for case in cases if case.recipe == f"{mode}-{format}") for mode, format in RECIPES]


def prepare(root: Path, layers: int) -> None:
    """Save the model and its baselines."""
    save_model(root / "model", layers)
    gate, settings, entries = Gate(root, update=True), settings_of(root), {}
    with mock.patch("probe.gate.engine.variations", return_value=()):  # the spread is not what is measured
        for case in cases_of(gate, settings):
            judged = gate.judge_recipe(settings, case)
            entries |= {judged.outcomes[layer].case: entry for layer, entry in judged.entries.items()}
    bench = gate.bench(settings)
    assert bench.anchors is not None
    store = Store(root / settings.baselines)
    store.write(settings.model, entries, environment=bench.facts, anchors=bench.anchors.to_bytes())


def measure(root: Path) -> None:
    """Judge every recipe, and after each run the same forwards bare."""
    gate, settings, outcomes, shapes = Gate(root), settings_of(root), [], list[tuple[int, ...]]()
    model = gate.bench(settings).loaded.model
    size = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    print(f"resident before the first recipe: {resident():.2f} GB, of which the model is {size:.2f} GB")
    real = type(model).forward

    @wraps(real)  # with its signature: paths depend on what it takes
    def counted(self: object, *args: object, **kwargs: object) -> object:
        shapes.append(tuple(next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)).shape))
        return real(self, *args, **kwargs)  # type: ignore[arg-type]

    def bare() -> None:
        for shape in done:
            model(torch.zeros(shape, dtype=torch.int64), use_cache=False)

    spent = plain = 0.0
    with torch.no_grad():
        model(torch.zeros(2, 128, dtype=torch.int64), use_cache=False)
        for case in cases_of(gate, settings):
            shapes.clear()
            with mock.patch.object(type(model), "forward", counted):
                spent += cpu(lambda case=case: outcomes.append(gate.judge_recipe(settings, case)))
            done = list(shapes)
            plain += cpu(bare)
            print(
                f"{case.recipe}: {len(done)} forwards, {sum(a * b for a, b in done)} tokens; so far {spent / plain:.2f}"
            )
    every = [one for judged in outcomes for one in judged.outcomes.values()]
    failed = [str(one.case) for one in every if one.status != "passed"]
    print(f"cases: {len(every)}, failed: {failed}")
    print(f"ratio: {spent / plain:.2f} ({spent:.1f} s of CPU over {plain:.1f} s; at most 2.2)")
    print(f"memory: peak {peak():.2f} GB, over the model: {peak() - size:.2f} GB (at most 1.5)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stage", choices=("prepare", "measure"), help="used by the benchmark itself")
    parser.add_argument("--root", type=Path, help="used by the benchmark itself")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.stage == "prepare":
        prepare(options.root, options.layers)
    elif options.stage == "measure":
        measure(options.root)
    else:
        with tempfile.TemporaryDirectory() as place:  # the peak of one stage is not that of the other
            for stage in ("prepare", "measure"):
                sizes = ["--layers", str(options.layers), "--threads", str(options.threads)]
                subprocess.run([sys.executable, __file__, "--stage", stage, "--root", place, *sizes], check=True)


if __name__ == "__main__":
    main()
