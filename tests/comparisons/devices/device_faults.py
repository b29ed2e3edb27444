"""Faults that a device may have in one layer, planted into a copy of a model; each is a row of FAULTS."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.models.mamba import SiteMixer
from tests.comparisons.devices.models import layers_of

Plant = Callable[[nn.Module, int, int], None]  # model, layer, seed


def _layer(model: nn.Module, index: int) -> Any:
    return layers_of(model)[index]


def _last_projection(layer: Any) -> Any:
    """The one that writes to the stream."""
    found = [
        m for n, m in layer.named_modules() if n.endswith(("out_proj", "down_proj", "down")) and hasattr(m, "weight")
    ]
    return found[-1]


def _norms(layer: Any) -> list[Any]:
    return [module for name, module in layer.named_modules() if "norm" in name.lower()]


def _rewrite(layer: nn.Module, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The output of the layer is change(what it was given, what it would give)."""

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        given = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if isinstance(output, Tensor):
            return change(given, output)
        return (change(given, output[0]), *output[1:])

    layer.register_forward_hook(hook, with_kwargs=True, prepend=True)


def _adds(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    _rewrite(layer, lambda given, output: given + change(output - given))


def epsilon(model: nn.Module, index: int, seed: int) -> None:
    for norm in _norms(_layer(model, index))[:1]:
        name = "eps" if isinstance(norm, nn.LayerNorm) else "variance_epsilon"
        setattr(norm, name, (1e-3, 3e-3)[seed % 2])


def permuted(model: nn.Module, index: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def change(x: Tensor) -> Tensor:
        width = x.shape[-1]
        order = torch.arange(width)
        if seed % 3 == 0:
            order = torch.randperm(width, generator=generator)
        elif seed % 3 == 1:
            order = order.roll(1)
        else:
            order[3], order[17] = 17, 3
        return x[..., order]

    _adds(_layer(model, index), change)


def half(model: nn.Module, index: int, seed: int) -> None:
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    layer = _layer(model, index).to(dtype)

    def cast(x: Any, to: torch.dtype) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.to(to)
        return type(x)(cast(one, to) for one in x) if isinstance(x, tuple | list) else x

    layer.register_forward_pre_hook(
        lambda module, args, kwargs: (cast(args, dtype), {name: cast(x, dtype) for name, x in kwargs.items()}),
        with_kwargs=True,
    )
    layer.register_forward_hook(lambda module, args, output: cast(output, torch.float32), prepend=True)


def half_inside(model: nn.Module, index: int, seed: int) -> None:
    """Only the matrices of the layer, as in autocast."""
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    for module in _layer(model, index).modules():
        if isinstance(module, nn.Linear):
            module.forward = lambda x, m=module: functional.linear(  # type: ignore[method-assign, misc]
                x.to(dtype), m.weight.to(dtype), None if m.bias is None else m.bias.to(dtype)
            ).float()


def clipped(model: nn.Module, index: int, seed: int) -> None:
    share = (0.999, 0.99)[seed % 2]
    _rewrite(
        _layer(model, index),
        lambda given, x: x.clamp(-float(x.abs().quantile(share)), float(x.abs().quantile(share))),
    )


def overflows(model: nn.Module, index: int, seed: int) -> None:
    """On both devices: the largest values of the layer are beyond the range."""
    kind = (torch.inf, torch.nan)[seed % 2]
    _rewrite(_layer(model, index), lambda given, x: torch.where(x.abs() > x.abs().quantile(0.9995), kind, x))


def saturates(model: nn.Module, index: int, seed: int) -> None:
    """... and this one puts the largest number there."""
    top = (65504.0, 3.3895313892515355e38)[seed // 2 % 2]
    _rewrite(_layer(model, index), lambda given, x: torch.where(x.abs() > x.abs().quantile(0.9995), top, x))


def dropped_bias(model: nn.Module, index: int, seed: int) -> None:
    layer = _layer(model, index)
    biases = [m.bias for m in layer.modules() if isinstance(m, nn.Linear | nn.Conv1d) and m.bias is not None]
    if biases:
        biases[-1 if seed % 2 else 0].zero_()
    else:
        for norm in _norms(layer)[:1]:
            norm.weight.fill_(1.0)


def unscaled(model: nn.Module, index: int, seed: int) -> None:
    """A scale of the weights that was rounded to a power of two, or to eight bits."""
    _last_projection(_layer(model, index)).weight.mul_((2.0, 1 + 2**-8, 0.75)[seed % 3])


def scaled_channels(model: nn.Module, index: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = _last_projection(_layer(model, index)).weight
    weight.mul_(1 + 0.02 * torch.randn(weight.shape[0], 1, generator=generator))


def transposed(model: nn.Module, index: int, seed: int) -> None:
    layer = _layer(model, index)
    square = [m for m in layer.modules() if isinstance(m, nn.Linear) and m.in_features == m.out_features]
    if square:
        square[-1].weight.copy_(square[-1].weight.t().clone())
    else:  # Mamba has none: the halves of its first projection change places
        first = next(m for m in layer.modules() if isinstance(m, nn.Linear))
        first.weight.copy_(first.weight.roll(first.out_features // 2, 0))


def swapped_samples(model: nn.Module, index: int, seed: int) -> None:
    def change(x: Tensor) -> Tensor:
        order = torch.arange(len(x))
        order[0], order[1 + seed % 2] = 1 + seed % 2, 0
        return x[order]

    _adds(_layer(model, index), change)


def stale(model: nn.Module, index: int, seed: int) -> None:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[1 + seed % 3] = x[seed % 3]
        return x

    _adds(_layer(model, index), change)


def other_activation(model: nn.Module, index: int, seed: int) -> None:
    rough: Callable[[Tensor], Tensor] = (
        (lambda x: functional.gelu(x, approximate="tanh"))
        if any(isinstance(m, nn.GELU) for m in model.modules())
        else (functional.hardswish, lambda x: x * (0.5 + 0.5 * torch.tanh(0.49 * x)))[seed % 2]
    )

    class Rough(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return rough(x)

    layer = _layer(model, index)
    if hasattr(layer, "mixer"):  # the stock one never calls its activation
        layer.mixer = SiteMixer(layer.mixer)
        layer.mixer.activation = Rough()
        return
    for module in list(layer.modules()):
        for name, _ in list(module.named_children()):
            if name in ("act", "act_fn"):
                setattr(module, name, Rough())


def skipped(model: nn.Module, index: int, seed: int) -> None:
    _rewrite(_layer(model, index), lambda given, x: given.clone())


def stuck_channel(model: nn.Module, index: int, seed: int) -> None:
    def change(given: Tensor, x: Tensor) -> Tensor:
        x = x.clone()
        x[..., 5 + seed] = 0.0
        return x

    _rewrite(_layer(model, index), change)


def one_nan(model: nn.Module, index: int, seed: int) -> None:
    def change(given: Tensor, x: Tensor) -> Tensor:
        x = x.clone()
        x[0, 3, 7 + seed] = torch.nan
        return x

    _rewrite(_layer(model, index), change)


def late_token(model: nn.Module, index: int, seed: int) -> None:
    _adds(_layer(model, index), lambda x: x.roll(1, 1))


def other_weights(model: nn.Module, index: int, seed: int) -> None:
    layers = layers_of(model)
    other = (index + 1 + seed % 2) % len(layers)
    for mine, theirs in zip(_layer(model, index).parameters(), layers[other].parameters(), strict=True):
        mine.copy_(theirs.clone())


def eight_bits(model: nn.Module, index: int, seed: int) -> None:
    for module in _layer(model, index).modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(module.weight.to(torch.float8_e4m3fn).float())


def turned(model: nn.Module, index: int, seed: int) -> None:
    _adds(_layer(model, index), torch.neg)


@dataclass(frozen=True)
class Fault:
    """`says` is a part of the cause that has to be named, where it can be."""

    plant: Plant
    says: str = ""
    on_both: Plant | None = None  # planted into A too, before


FAULTS: dict[str, Fault] = {
    "epsilon": Fault(epsilon, "epsilon"),
    "permuted channels": Fault(permuted, "channels are permuted"),
    "half layer": Fault(half, "half precision"),
    "half matrices": Fault(half_inside, "half precision"),
    "clipped": Fault(clipped, "saturates"),
    "saturates instead of NaN": Fault(saturates, "saturates instead of NaN", overflows),
    "dropped bias": Fault(dropped_bias),
    "scale": Fault(unscaled),
    "scales of channels": Fault(scaled_channels),
    "transposed": Fault(transposed),
    "swapped samples": Fault(swapped_samples, "samples are swapped"),
    "stale sample": Fault(stale, "stale buffer"),
    "activation": Fault(other_activation),
    "skipped": Fault(skipped, "skipped"),
    "stuck channel": Fault(stuck_channel, "in one channel"),
    "one NaN": Fault(one_nan, "NaN on B where A is finite, in one value"),
    "late token": Fault(late_token),
    "other weights": Fault(other_weights),
    "eight bits": Fault(eight_bits),
    "turned sign": Fault(turned, "the sign is flipped"),
}
