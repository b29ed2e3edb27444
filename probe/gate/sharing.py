"""One process computes, the others read: references and calibrations as memory-mapped files in a folder of the run."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from probe.files.atomic import write
from probe.files.lock import locked
from probe.running.calibration import Calibration, load_calibration
from probe.running.reference import Reference

#: What a full disk raises: then every process has its own.
NO_ROOM = (OSError, SafetensorError)


def shared_reference(folder: Path | None, key: str, make: Callable[[], Reference]) -> Reference:
    """The reference of that key: read if another process has made it, else made, and left for the others."""
    if folder is None:
        return make()
    file, made = folder / f"{key}.safetensors", None
    try:
        with locked(folder / f"{key}.lock"):
            if not file.exists():
                made = make()
                _save(made, file)
    except NO_ROOM:
        return made or make()
    return _load(file)


def shared_calibration(folder: Path | None, key: str, make: Callable[[], Calibration]) -> Calibration:
    """The calibration of that key, likewise."""
    if folder is None:
        return make()
    base, made = folder / key, None
    try:
        with locked(folder / f"{key}.lock"):
            if not base.with_name(f"{key}.json").exists():
                made = make()
                made.save(base)
    except NO_ROOM:
        return made or make()
    model = json.loads(base.with_name(f"{key}.json").read_text())["model"]
    return load_calibration(base, model=model)


def _save(reference: Reference, file: Path) -> None:
    tensors = {
        **{f"tensor {name} {i}": x for name, parts in reference.tensors.items() for i, x in enumerate(parts)},
        **{f"batch {i}": x for i, x in enumerate(reference.batches)},
        **{f"logits {i}": x for i, x in enumerate(reference.logits)},
        **{f"places {label}": places for label, (places, _) in reference.ties.items()},
        **{f"values {label}": values for label, (_, values) in reference.ties.items()},
    }
    facts = {
        "model": reference.model,
        "layers": list(reference.layers),
        "wanted": list(reference.wanted),
        "modules": reference.modules,
        "tensors": {name: len(parts) for name, parts in reference.tensors.items()},
        "batches": len(reference.batches),
        "ties": list(reference.ties),
    }
    write(file, save({name: x.contiguous().clone() for name, x in tensors.items()}, {"facts": json.dumps(facts)}))


def _load(file: Path) -> Reference:
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["facts"])

        def get(name: str) -> torch.Tensor:
            found: torch.Tensor = opened.get_tensor(name)
            return found

        count = range(facts["batches"])
        return Reference(
            facts["model"],
            tuple(get(f"batch {i}") for i in count),
            tuple(facts["layers"]),
            tuple(facts["wanted"]),
            facts["modules"],
            {name: [get(f"tensor {name} {i}") for i in range(n)] for name, n in facts["tensors"].items()},
            tuple(get(f"logits {i}") for i in count),
            {label: (get(f"places {label}"), get(f"values {label}")) for label in facts["ties"]},
        )
