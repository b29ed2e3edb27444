"""Linear layers of every kind on a grid, in place: what the linear modes do to a copy of the model."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from probe.models.grid_modules import GridConvolution, GridEmbedding, GridExperts, GridInput, GridLinear, sited
from probe.models.linear import LinearLayer, check_included, has_gate, linear_key, linear_layers, stores_inputs_first
from probe.models.mamba import Site
from probe.numerics.grids import activation_grid


@torch.no_grad()
def grid_linears(
    model: nn.Module,
    format: str,
    amax_of: Callable[[str], float | None],
    *,
    inputs: bool,
    include: Collection[str] = (),
) -> nn.Module:
    """`model` with its linear layers on the grid, in place; `amax_of` gives the calibrated amax of an input.

    `include` names the parts of INCLUDABLE that are put on the grid too. No weight is shared any more: the head of
    tied weights is on the grid and the embedding is not, if only the head is asked for.
    """
    found = linear_layers(model, include)
    if any(layer.has_sites for layer in found.values()):
        raise ValueError("this model is already a copy made by a mode. Pass the float model that it was made from.")
    check_included(model, include, model_name=type(model).__name__)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to quantize: no nn.Linear, no Conv1D, no convolution, no "
            "experts. Register a mode of your own for it."
        )
    for name, layer in found.items():
        module = _with_sites(model, name, layer)
        for parameter in layer.weights:
            weight = module.get_parameter(parameter)
            weight.copy_(layer.on_grid(weight, format))
        for site in layer.inputs if inputs else ():
            place = module.get_submodule(site)
            assert isinstance(place, Site)
            place.grid = activation_grid(format, amax_of(linear_key(name, site)))
    return model


def _with_sites(model: nn.Module, name: str, layer: LinearLayer) -> nn.Module:
    """The module of a linear layer with sites for its inputs and a weight of its own, in the place of the plain one."""
    module = layer.module
    if layer.is_experts:
        _put_expert_sites(layer)
        return module
    is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward  # a router may be derived
    if is_plain or stores_inputs_first(module):
        replaced = GridLinear(module, inputs_first=layer.inputs_first)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced)
        return replaced
    is_embedding = isinstance(module, nn.Embedding)
    sited(module, GridConvolution if layer.is_convolution else GridEmbedding if is_embedding else GridInput)
    weight = module.get_parameter("weight")
    module.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    return module


def _put_expert_sites(layer: LinearLayer) -> None:
    """Give experts their sites, in place. Their parameters keep their names."""
    experts = layer.module
    sited(experts, GridExperts)
    experts.middle, vars(experts)["reached"] = Site(), layer.inputs
    if "middle" in layer.inputs and not has_gate(experts):
        experts.act_fn = nn.Sequential(experts.get_submodule("act_fn"), experts.middle)


def put_expert_sites(model: nn.Module) -> None:
    """Give all experts of a float model the sites `input` and `middle`, which hooks can see, in place."""
    for layer in _plain_experts(model):
        _put_expert_sites(layer)


def _plain_experts(model: nn.Module) -> list[LinearLayer]:
    return [layer for layer in linear_layers(model).values() if layer.is_experts and not layer.has_sites]


@contextmanager
def expert_sites(model: nn.Module) -> Iterator[None]:
    """As put_expert_sites, while the block runs."""
    experts = [layer.module for layer in _plain_experts(model)]
    before = [(module, type(module), module._modules.get("act_fn")) for module in experts]
    put_expert_sites(model)
    try:
        yield
    finally:
        for module, kind, activation in before:
            module.__class__ = kind
            if activation is not None:
                module.act_fn = activation
            del module.input, module.middle, module.reached
