"""Steps that every quantized model has: a tensor put on a grid, a matrix product, a weight kept as it is."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from probe.diagnosis.plain_grids import PlainGrid, suspects
from probe.diagnosis.signatures import AXES_OF_WEIGHTS, GRIDS, Replay, Step
from probe.formats import FORMATS, Format
from probe.models.linear import linears
from probe.running.corners import linear_amax
from probe.running.traces import LayerTrace, Parts

Suspects = Mapping[str, Replay]


def sums_step(name: str, actual: Tensor, expected: Tensor, replays: Suspects) -> Step:
    """A step of float arithmetic, exact up to the order of its sums; `replays` are the faults to try."""
    return Step(name, actual, expected.to(actual.dtype), suspects=lambda: iter(replays.items()))


def linear_step(name: str, module: Any, given: Tensor, made: Tensor) -> Step:
    """x W^T + b with the weight that the module really has."""
    weight = module.weight.detach().double()
    bias = 0.0 if module.bias is None else module.bias.detach().double()
    product = given.double() @ weight.T
    replays: dict[str, Replay] = {"the bias is left out": lambda: product}
    if weight.shape[0] == weight.shape[1]:
        replays["the weight is transposed"] = lambda: given.double() @ weight + bias
    return sums_step(name, made, product + bias, replays)


def grid_step(
    name: str,
    grid: PlainGrid | None,
    given: Tensor,
    made: Tensor,
    *,
    largest: float | None = None,
    more: Suspects | None = None,
) -> Step:
    """A tensor that should be put on a grid or, without a grid, pass unchanged."""
    if grid is None:
        return Step(name, made, given, suspects=lambda: iter((more or {}).items()), noise=GRIDS)

    def replays() -> Iterator[tuple[str, Replay]]:
        yield from (more or {}).items()
        yield "not quantized", lambda: given
        for sentence, other in suspects(grid, given, largest=largest):
            yield sentence, partial(other, given)

    return Step(name, made, grid(given), given, grid.unit(given), replays, GRIDS)


def weight_step(name: str, fmt: Format, plain: Tensor, actual: Tensor, more: Suspects | None = None) -> Step:
    """A weight that should be on the grid of a format, with scales from the weight itself."""
    grid = PlainGrid(fmt)
    others: dict[str, Replay] = {"zero": lambda: torch.zeros_like(plain), **(more or {})}
    if plain.dim() == 2 and plain.shape[0] == plain.shape[1]:
        others["transposed"] = lambda: grid(plain).T
    step = grid_step(f"weight {name}", grid, plain, actual, more=others)
    return replace(step, axes=AXES_OF_WEIGHTS.get(plain.dim(), ()))


def kept_weights(stock: nn.Module, twin: nn.Module, dtype: torch.dtype | None = None) -> Iterator[Step]:
    """Parameters that should be those of the float model, in `dtype` or their own."""
    found = dict(twin.named_parameters())
    for name, parameter in stock.named_parameters():
        if name in found:
            plain = parameter.detach().to(dtype or parameter.dtype)
            yield Step(f"weight {name}", found[name].detach(), plain, noise=GRIDS)


def linear_steps(trace: LayerTrace, parts: Parts) -> Iterator[Step]:
    """Weight, input and product of every linear inside the layer; all other parameters stay as they are."""
    model, twin, mode, layer = trace.model, trace.twin, trace.mode, trace.module
    fmt = FORMATS[str(trace.recipe.format)]
    inside = {name: linear for name, linear in linears(model).items() if f"{name}.".startswith(f"{layer}.")}
    for name, linear in inside.items():
        short = name.removeprefix(layer).removeprefix(".")
        module: Any = twin.get_submodule(name)
        weight = linear.weight.detach()
        yield weight_step(f"{short}.weight", fmt, weight, module.weight.detach())
        tensors = parts.get(short, {})
        if "input.made" not in tensors:
            continue
        grid = PlainGrid(fmt, linear_amax(trace.calibration, fmt, name)) if mode.inputs else None
        yield grid_step(f"site {short}.input", grid, tensors["input.given"], tensors["input.made"])
        yield linear_step(short, module, tensors["input.made"], tensors["linear.made"])
    names = {f"{name}.weight" for name in inside}
    for step in kept_weights(model.get_submodule(layer), twin.get_submodule(layer)):
        if f"{layer}.{step.name.removeprefix('weight ')}" not in names:
            yield step
