"""Small recordings with known values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probe.recordings import Recording, write_recording
from probe.running.recipes import Recipe

SAMPLES, TOKENS, FEATURES = 2, 6, 8
IDS = torch.arange(SAMPLES * TOKENS).reshape(SAMPLES, TOKENS)
SHAPE = (SAMPLES, TOKENS, FEATURES)


def plain(*, layers: int = 3, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> dict[str, Tensor]:
    """What a float model gave: each layer adds a little to the one before."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    found = {}
    for layer in range(layers):
        x = x + 0.1 * torch.randn(shape, generator=g)
        found[f"layer_{layer}.output"] = x
    return found


def noisy(tensors: Mapping[str, Tensor], noise: float, *, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: x + noise * torch.randn(x.shape, generator=g) for name, x in tensors.items()}


def recorded(folder: Path, recipes: Mapping[str, Mapping[str, Tensor]], **options: Any) -> Recording:
    """`2-1-int8`, `fp32` and so on, with their tensors."""

    def recipe(name: str) -> Recipe:
        mode, _, format = name.rpartition("-") if name.split("-")[-1] in ("int8", "fp8_e4m3") else (name, "", None)
        return Recipe(mode, format)

    parts = [(recipe(name), {key: [x] for key, x in tensors.items()}) for name, tensors in recipes.items()]
    return write_recording(folder, parts, model="small", device="cpu", **{"batches": [IDS], **options})
