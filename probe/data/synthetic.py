"""Synthetic samples for a first look at a model: noise of several sizes of grain, the same on every machine."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: The grains: the noise of each is constant over this many neighbours along every axis but the first.
GRAINS = (1, 4, 16)
#: Steps of the noise, a power of two, so that sums of it are exact.
STEPS = 64


def synthetic(samples: int, shape: Sequence[int], *, seed: int, first: int = 0) -> Tensor:
    """Noise [samples, *shape] of mean 0 and standard deviation 1, nearly; sample i is the same however many there are.

        x = sum over the grains of u,  u uniform on the multiples of 1 / STEPS in [-1, 1)

    The sum of three has the variance 1, and every value is a multiple of 1 / STEPS, so no machine rounds it.
    """
    return torch.stack([_sample(shape, seed * 100_003 + index) for index in range(first, first + samples)])


def _sample(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(tuple(shape))
    for grain in GRAINS:
        coarse = [shape[0], *(math.ceil(size / grain) for size in shape[1:])] if len(shape) > 1 else None
        sizes = coarse or [math.ceil(shape[0] / grain)]
        noise = torch.randint(-STEPS, STEPS, sizes, generator=generator).float() / STEPS
        for axis in range(1 if coarse else 0, len(shape)):
            noise = noise.repeat_interleave(grain, axis).narrow(axis, 0, shape[axis])
        total += noise
    return total
