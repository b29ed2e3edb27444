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
from probe.models.linear import GridLinear, linear_layers
from probe.running.corners import linear_amax
from probe.running.kept_float import keeps
from probe.running.traces import LayerTrace, Parts

Suspects = Mapping[str, Replay]


def sums_step(name: str, actual: Tensor, expected: Tensor, replays: Suspects) -> Step:
    """A step of float arithmetic, exact up to the order of its sums; `replays` are the faults to try."""
    return Step(name, actual, expected.to(actual.dtype), suspects=lambda: iter(replays.items()))


def linear_step(name: str, module: Any, given: Tensor, made: Tensor) -> Step:
    """x W^T + b with the weight that the module really has."""
    weight = (module.matrix if isinstance(module, GridLinear) else module.weight).detach().double()
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
    """Weights, inputs and product of every linear layer inside; all other parameters stay as they are.

    Of experts every matrix is a weight; their product depends on the router and is not a step.
    """
    model, twin, mode, layer = trace.model, trace.twin, trace.mode, trace.module
    fmt = FORMATS[str(trace.recipe.format)]
    kept, found = keeps(mode), linear_layers(model).items()
    inside = {name: linear for name, linear in found if f"{name}.".startswith(f"{layer}.") and not kept(name)}
    for name, linear in inside.items():
        short = name.removeprefix(layer).removeprefix(".")
        module: Any = twin.get_submodule(name)
        for parameter in linear.weights:
            own, actual = (linear.matrices(side.get_parameter(parameter).detach()) for side in (linear.module, module))
            for expert, matrices in enumerate(zip(own, actual, strict=True)):
                index = f"[{expert}]" if len(own) > 1 else ""
                yield weight_step(f"{short}.{parameter}{index}", fmt, *matrices)
        tensors = parts.get(short, {})
        for site in linear.inputs:
            if f"{site}.made" in tensors:
                amax = linear_amax(trace.calibration, fmt, name, site)
                grid = PlainGrid(fmt, amax) if mode.inputs else None
                yield grid_step(f"site {short}.{site}", grid, tensors[f"{site}.given"], tensors[f"{site}.made"])
        if "linear.made" in tensors and "input.made" in tensors:
            yield linear_step(short, module, tensors["input.made"], tensors["linear.made"])
    names = {f"{name}.{parameter}" for name, linear in inside.items() for parameter in linear.weights}
    for step in kept_weights(model.get_submodule(layer), twin.get_submodule(layer)):
        if f"{layer}.{step.name.removeprefix('weight ')}" not in names:
            yield step
