"""Made-up streams: what a layer was given and what it adds, as numpy arrays."""

import numpy as np
import torch

from probe.comparisons.devices.differences import Array, measure_structure
from probe.comparisons.devices.patterns import SampledRows, sample_tensor


def stream(seed: int = 0, samples: int = 4, tokens: int = 32, width: int = 48) -> tuple[Array, Array]:
    """What a layer was given and what it adds; tokens of very different sizes."""
    draw = np.random.default_rng(seed)
    sizes = np.exp(draw.normal(0, 0.7, (samples, tokens, 1)))
    return draw.normal(0, 1, (samples, tokens, width)) * sizes, draw.normal(0, 0.4, (samples, tokens, width))


def sampled(given: Array, adds: Array, other: Array, *, residual: bool = True, unit: float = 2.0**-24) -> SampledRows:
    """A look at a layer that adds `adds` on A and `other` on B."""
    g, a, b = (torch.from_numpy(np.float32(x)) for x in (given, given + adds, given + other))
    if not residual:
        a, b = torch.from_numpy(np.float32(adds)), torch.from_numpy(np.float32(other))
    structure = measure_structure(a, b, (g, g) if residual else None)
    return sample_tensor(a, b, (g, g), residual=residual, unit=unit, structure=structure)
