"""Recordings of a made-up residual network, small enough to be made by the dozen."""

from pathlib import Path

import torch
from torch import Tensor

from probe.recordings import Recording, write_recording
from probe.running.recipes import Recipe

IDS = torch.arange(3 * 8).view(3, 8) % 19
WIDTH = 24


def network(*, layers: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """embedding, layers that add tanh(x W) to what they are given, and logits that are a matrix times the last."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        found: Tensor = torch.randn(rows, columns, generator=generator) / rows**0.5
        return found

    x = torch.randn(19, WIDTH, generator=generator)[IDS]
    found = {"embedding.output": x}
    for layer in range(layers):
        x = x + 0.5 * torch.tanh(x @ matrix(WIDTH, WIDTH))
        found[f"layer_{layer}.output"] = x
    return {**found, "logits": x @ matrix(WIDTH, 32)}


def noisy(tensors: dict[str, Tensor], size: float = 2.0**-23, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: x if name == "embedding.output" else x * (1 + size * torch.randn(x.shape, generator=generator))
        for name, x in tensors.items()
    }


def recorded(
    folder: Path,
    tensors: dict[str, Tensor],
    *,
    ids: Tensor = IDS,
    recipe: Recipe = Recipe("fp32"),  # noqa: B008
    device: str = "cpu",
    fingerprint: str | None = None,
) -> Recording:
    parts = {name: [tensor] for name, tensor in tensors.items()}
    return write_recording(
        folder, [(recipe, parts)], model="m", batches=[ids], device=device, model_fingerprint=fingerprint
    )


def as_scripts_leave_it(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Files of torch.save and nothing else."""
    folder.mkdir()
    for name, tensor in tensors.items():
        torch.save(tensor, folder / f"{name.replace('.', '_')}.pt")
    return folder
