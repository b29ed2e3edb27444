"""Devices that this machine can be: the same model run in other ways, every one as tensors by name."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from probe.models.grid_modules import GridLinear
from tests.comparisons.devices.models import embedding_of, final_norm_of, fresh, layers_of

Tensors = dict[str, Tensor]


@torch.no_grad()
def run(model: nn.Module, ids: Tensor, *, batch: int | None = None) -> Tensors:
    """embedding, every layer, final norm and logits: [samples, tokens, ...], in the dtype in which they came."""
    places = {"embedding.output": embedding_of(model), "final_norm.output": final_norm_of(model)}
    places |= {f"layer_{index}.output": layer for index, layer in enumerate(layers_of(model))}
    kept: dict[str, list[Tensor]] = {name: [] for name in (*places, "logits")}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, output: kept[name].append(
            (output if isinstance(output, Tensor) else output[0]).detach().clone()
        )

    with ExitStack() as hooks:
        for name, module in places.items():
            hooks.callback(module.register_forward_hook(keep(name)).remove)
        for some in torch.split(ids, batch or len(ids)):
            output = model(some, use_cache=False) if hasattr(model, "config") else model(some)
            kept["logits"].append(getattr(output, "logits", output).detach().clone())
    last = f"layer_{len(layers_of(model)) - 1}.output"
    order = ["embedding.output", *(name for name in kept if name.startswith("layer_")), "final_norm.output", "logits"]
    assert kept[last], "hooks did not fire"
    return {name: torch.cat(kept[name]) for name in order}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def two_threads(name: str, ids: Tensor) -> Tensors:
    with threads(2):
        return run(fresh(name), ids)


def one_by_one(name: str, ids: Tensor) -> Tensors:
    return run(fresh(name), ids, batch=1)


def without_onednn(name: str, ids: Tensor) -> Tensors:
    with torch.backends.mkldnn.flags(enabled=False):
        return run(fresh(name), ids, batch=3)


def in_dtype(dtype: torch.dtype) -> Callable[[str, Tensor], Tensors]:
    return lambda name, ids: run(fresh(name).to(dtype), ids)


def in_dtype_kept_as_float32(dtype: torch.dtype) -> Callable[[str, Tensor], Tensors]:
    """As .npy files have it: numpy has no bfloat16."""
    return lambda name, ids: {key: value.float() for key, value in run(fresh(name).to(dtype), ids).items()}


def autocast(name: str, ids: Tensor) -> Tensors:
    """Matrices multiplied in bfloat16, the rest in float32: what compilers for accelerators do by default."""
    with torch.autocast("cpu", torch.bfloat16):
        return {key: value.float() for key, value in run(fresh(name), ids).items()}


def jittered(model: nn.Module, seed: int = 7) -> nn.Module:
    """Every matrix product is off by an ulp or so, as if its sums ran in another order."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | GridLinear):
            module.register_forward_hook(
                lambda module, args, output: (
                    output * (1 + torch.finfo(output.dtype).eps * torch.randn(output.shape, generator=generator))
                ).to(output.dtype)
            )
    return model


def jitter(name: str, ids: Tensor) -> Tensors:
    return run(jittered(fresh(name)), ids)
