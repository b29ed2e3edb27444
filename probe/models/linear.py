"""Quantizing every nn.Linear but the output head: on a grid (the linear modes), or by torchao (its int8 modes)."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from probe.models.mamba import Site
from probe.numerics.grids import activation_grid, weight_on_grid


class GridLinear(nn.Module):
    """A linear layer whose input is a site."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        self.input = Site()

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b, with x and W on their grids."""
        return nn.functional.linear(self.input(x), self.weight, self.bias)


#: Linear layers whose weight is read without a call.
NEVER_CALLED = (".dt_proj",)


def linear_key(name: str) -> str:
    """The name, in a calibration, of the input of a linear layer in the plain float model."""
    return f"linear {name}.input"


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every nn.Linear by name, without the output head, which stays float."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: linear for name, linear in found.items() if linear is not head}


@torch.no_grad()
def grid_linears(model: nn.Module, format: str, amax_of: Callable[[str], float | None], *, inputs: bool) -> nn.Module:
    """`model` with its linear layers on the grid, in place; `amax_of` gives the calibrated amax of a linear's input.

    The dt_proj of a Mamba block is never called (its weight is read), so its input has no site.
    """
    found = linears(model)
    if any(isinstance(module, GridLinear) for module in model.modules()):
        raise ValueError("this model is already a copy made by a mode. Pass the float model that it was made from.")
    if not found:
        raise ValueError(f"{type(model).__name__} has no nn.Linear to quantize. Register a mode of your own for it.")
    for name, linear in found.items():
        replaced = GridLinear(linear)
        replaced.weight.copy_(weight_on_grid(replaced.weight, format))
        if inputs and not name.endswith(NEVER_CALLED):
            replaced.input.grid = activation_grid(format, amax_of(linear_key(name)))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced)
    return model


def torchao_int8(model: nn.Module, format: str, *, dynamic: bool) -> nn.Module:
    """torchao's int8 quantization of every nn.Linear but the head, in place.

    Weight-only: int8 weights per output channel. Dynamic: int8 inputs per token as well.
    """
    if format != "int8":
        raise ValueError(f"torchao's int8 modes take the format int8, not {format}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own deprecations
        try:
            from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
        except ImportError:
            raise ValueError(
                "the torchao modes need torchao, which is not installed. "
                'Install it with: pip install "quant-probe[torchao]"'
            ) from None
        chosen = set(linears(model))
        config: Any = Int8DynamicActivationInt8WeightConfig() if dynamic else Int8WeightOnlyConfig()
        quantize_(model, config, filter_fn=lambda module, name: name in chosen)
    return model
