"""Harmless variations of a run (threads, batch size, one-ulp jitter), which show how far figures move by noise."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Variation:
    """One way to run the same arithmetic in another order, or from inputs that differ in the last bit."""

    name: str
    threads: int = 1
    batch_size: int | None = None  # None: as configured
    jitter: int = 0  # seed of a one-ulp jitter of the embedding and of what layers are fed; 0: none
    onednn: bool = True


#: The run whose figures are stored; always on one thread, so that serial and parallel updates give the same bits.
BASE = Variation("base")


def variations() -> tuple[Variation, ...]:
    """The runs whose distance from the base is the spread."""
    return (
        Variation("all threads, other batch size, oneDNN off", os.cpu_count() or 1, batch_size=3, onednn=False),
        Variation("jitter 1", jitter=1),
        Variation("jitter 2", jitter=2),
    )


@contextmanager
def under(variation: Variation, model: nn.Module) -> Iterator[None]:
    """While the block runs, torch and every copy made of `model` behave as the variation says."""
    threads = torch.get_num_threads()
    onednn = bool(torch.backends.mkldnn.enabled)
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    handle = None
    if variation.jitter and embedding is not None:
        handle = embedding.register_forward_hook(_jitter(variation.jitter))
    try:
        torch.set_num_threads(variation.threads)
        torch.backends.mkldnn.set_flags(variation.onednn)  # type: ignore[no-untyped-call]
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.set_flags(onednn)  # type: ignore[no-untyped-call]
        if handle is not None:
            handle.remove()


def jittered(x: Tensor, seed: int) -> Tensor:
    """Every element moved by one ulp of float32, up or down by chance; narrower floats would not notice."""
    generator = torch.Generator().manual_seed(seed)
    up = torch.rand(x.shape, generator=generator).to(x.device) < 0.5
    limit = torch.full(x.shape, torch.inf, device=x.device)
    return torch.nextafter(x.float(), torch.where(up, limit, -limit)).to(x.dtype)


def _jitter(seed: int) -> Callable[[nn.Module, object, Tensor], Tensor]:
    return lambda module, args, output: jittered(output, seed)
