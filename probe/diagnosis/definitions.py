"""The parts of a Mamba block as plain formulas, to check the real ones against; only the Hadamard matrix is shared."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from probe.numerics.hadamard import hadamard_matrix


def rotated(x: Tensor) -> Tensor:
    """x H / sqrt(n) along the last axis, as a plain matrix product in float64."""
    n = x.shape[-1]
    return x.double() @ (hadamard_matrix(n, torch.float64) / math.sqrt(n)).to(x.device)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), the identity above 20."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    state: torch.dtype | None = None,
    every: int | None = None,
) -> Tensor:
    """h = exp(delta A) h + delta B u, y = C h, token by token; `state` rounds h, `every` forgets it."""
    h = torch.zeros(u.shape[0], u.shape[2], A.shape[1], dtype=u.dtype, device=u.device)
    outputs = []
    for t in range(u.shape[1]):
        if every and t % every == 0:
            h = torch.zeros_like(h)
        h = torch.exp(delta[:, t, :, None] * A) * h + (delta[:, t] * u[:, t])[:, :, None] * B[:, t, None, :]
        if state is not None:
            h = h.to(state).to(u.dtype)
        outputs.append((h * C[:, t, None, :]).sum(-1))
    return torch.stack(outputs, 1)


def convolved(x: Tensor, taps: Tensor, bias: Tensor | None, *, shift: int = 0) -> Tensor:
    """Causal depthwise convolution over time, taps [channel, tap]; `shift` is how many tokens late it is."""
    size, length, ahead = taps.shape[1], x.shape[1], max(-shift, 0)
    padded = functional.pad(x, (0, 0, size - 1 + max(shift, 0), ahead))
    out = torch.zeros_like(x)
    for k in range(size):
        out = out + padded[:, ahead + k : ahead + k + length] * taps[:, k]
    return out if bias is None else out + bias
