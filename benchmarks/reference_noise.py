"""How far harmless changes move the golden reference: the largest distance of any of its rows, a line for each change.

    python benchmarks/reference_noise.py
    ATEN_CPU_CAPABILITY=default python benchmarks/reference_noise.py --against /tmp/rows

The second run compares with what the first one saved in the folder (--save FOLDER): instruction sets are chosen when
torch is loaded, so that each needs a process of its own.
"""

import argparse
from pathlib import Path

from probe.gate.bench import Bench
from probe.gate.configuration import Settings
from probe.running.golden_reference import MOVED, reference_rows, row_distance
from probe.running.noise import BASE, Anchors, Variation

CHANGES = (
    BASE,
    Variation("2 threads", threads=2),
    Variation("batches of 1", batch_size=1),
    Variation("batches of 3", batch_size=3),
    Variation("oneDNN off", onednn=False),
    Variation("2 threads, batches of 3, oneDNN off", threads=2, batch_size=3, onednn=False),
    *(Variation(f"jitter {seed}", jitter=seed) for seed in (1, 2, 3)),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    for model in ("tiny-mamba", "tiny-llama"):
        bench = Bench(Settings(model=model))
        if options.against:
            bench.anchors = Anchors.from_bytes((options.against / model).read_bytes())
        else:
            bench.make_anchors(BASE)
        assert bench.anchors is not None
        if options.save:
            options.save.mkdir(exist_ok=True)
            (options.save / model).write_bytes(bench.anchors.to_bytes())
        for change in CHANGES:
            rows = reference_rows(bench._run_reference(change))
            distances = {name: row_distance(row, bench.anchors.rows[name]) for name, row in rows.items()}
            worst = max(distances, key=distances.__getitem__)
            share = distances[worst] / MOVED
            print(f"{model}  {change.name:<36} {distances[worst]:.2e} at {worst:<18} {share:.3f} of the tolerance")


if __name__ == "__main__":
    main()
