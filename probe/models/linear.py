"""Quantizing linear layers but the output head: on a grid (the linear modes), or by torchao (its int8 modes).

`linear_layers` is the list of them that everything shares: modes, calibration, sensitivity, predictions, the counts.

    nn.Linear            weight [out, in]
    Conv1D (GPT-2)       weight [in, out], of transformers
    experts              gate_up_proj (or up_proj) and down_proj, [expert, out, in] or [expert, in, out]. Every matrix
                         has scales of its own, as if it were an nn.Linear. Their inputs are two tensors for all
                         experts of a layer: `input`, the hidden states, and `middle`, what down_proj reads

How experts store their weights is never guessed. They say so themselves (`is_transposed`, which transformers'
`use_experts_implementation` sets), or their shapes tell: gate_up_proj [expert, 2 m, h] with down_proj [expert, h, m]
can only be [out, in], and [expert, h, 2 m] with [expert, m, h] only [in, out]. All other parameters of three
dimensions stay float, and the counts name them.
"""

import inspect
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from probe.models.layers import blocks_of
from probe.models.mamba import Site, SiteMixer
from probe.numerics.grids import activation_grid, weight_on_grid

#: Linear layers whose weight is read without a call.
NEVER_CALLED = (".dt_proj",)
#: The first matrix of an expert, with or without a gate, and the second.
UP, DOWN = ("gate_up_proj", "up_proj"), "down_proj"
#: The first argument of experts, in transformers.
HIDDEN = "hidden_states"


class GridLinear(nn.Module):
    """A linear layer whose input is a site. Made from a Conv1D, it keeps the shape [in, out] of the weight."""

    def __init__(self, linear: nn.Module, *, inputs_first: bool = False) -> None:
        super().__init__()
        weight, bias = linear.get_parameter("weight").detach(), cast(Tensor | None, linear.bias)
        self.inputs_first = inputs_first
        # in memory always [out, in], so that the product of a Conv1D has the bits of an nn.Linear
        weight = weight.T.contiguous().T if inputs_first else weight
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.input = Site()

    @property
    def matrix(self) -> Tensor:
        """The weight as [out, in]."""
        return self.weight.T if self.inputs_first else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b, with x and W on their grids."""
        return nn.functional.linear(self.input(x), self.matrix, self.bias)


class GridExperts(nn.Module):
    """Experts whose inputs are sites; the class of such a module is this one before its own (see `_sited`)."""

    input: Site
    middle: Site
    reached: tuple[str, ...]  # those of the two that its forward passes by

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the experts make of hidden states on the grid."""
        run: Callable[..., Any] = super().forward
        if "middle" in self.reached and getattr(self.config, "_experts_implementation", None) in ("eager", None):
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # of these only eager skips _apply_gate

            run = partial(ALL_EXPERTS_FUNCTIONS["grouped_mm"], self)
        if "input" not in self.reached:
            return run(*args, **kwargs)
        if args:
            return run(self.input(args[0]), *args[1:], **kwargs)
        return run(**{**kwargs, HIDDEN: self.input(kwargs[HIDDEN])})

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        """act(gate) * up of the experts, on the grid."""
        gated: Tensor = super()._apply_gate(gate_up_out)  # type: ignore[misc]
        return cast(Tensor, self.middle(gated))


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """A module with one or more matrices that linear modes put on a grid."""

    module: nn.Module
    weights: tuple[str, ...] = ("weight",)
    inputs_first: bool = False  # stored [..., in, out]
    inputs: tuple[str, ...] = ("input",)
    """The inputs that can be put on a grid, as sites of the quantized module."""
    float_inputs: tuple[str, ...] = ()
    """Those that cannot, because no module is called with them."""

    @property
    def has_sites(self) -> bool:
        """Whether the inputs are sites, as in every module that a linear mode made."""
        return isinstance(self.module, GridLinear | GridExperts)

    def matrices(self, weight: Tensor) -> list[Tensor]:
        """A weight of the module, or a tensor of its shape, as matrices [out, in]: one, or one an expert."""
        oriented = weight.mT if self.inputs_first else weight
        return list(oriented) if oriented.dim() == 3 else [oriented]

    def weight_of(self, site: str) -> str:
        """The weight that reads an input: the second one reads `middle`."""
        return self.weights[1 if site == "middle" else 0]

    def width(self, site: str) -> int:
        """The channels of an input."""
        weight = self.module.get_parameter(self.weight_of(site))
        return weight.shape[-2 if self.inputs_first else -1]

    @torch.no_grad()
    def on_grid(self, weight: Tensor, format: str) -> Tensor:
        """The weight with every matrix on the grid: one scale for its integers, else blocks along its inputs."""
        matrices = [weight_on_grid(matrix.contiguous(), format) for matrix in self.matrices(weight)]
        whole = torch.stack(matrices) if weight.dim() == 3 else matrices[0]
        return whole.mT if self.inputs_first else whole


def linear_key(name: str, site: str = "input") -> str:
    """The name, in a calibration, of the input of a linear layer in the plain float model."""
    return f"linear {name}.{site}"


def linear_layers(model: nn.Module) -> dict[str, LinearLayer]:
    """Every linear layer by the name of its module, float or on a grid; not the output head, which stays float."""
    head = output_head(model)
    found = {name: _described(name, module) for name, module in model.named_modules() if module is not head}
    return {name: layer for name, layer in found.items() if layer is not None}


def linear_weights(model: nn.Module) -> dict[str, LinearLayer]:
    """By the name of every parameter that linear modes put on a grid, the layer it belongs to."""
    layers = linear_layers(model).items()
    return {f"{name}.{parameter}".lstrip("."): layer for name, layer in layers for parameter in layer.weights}


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes the logits: the one that the model names.

    For other models, the last nn.Linear outside of the stack of layers with as many outputs as there are tokens.
    """
    if callable(getattr(model, "get_output_embeddings", None)):
        return _named_by(model, "get_output_embeddings")
    tokens = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    stack = tuple(f"{name}." for name in blocks_of(model))
    outside = [module for name, module in model.named_modules() if name and not f"{name}.".startswith(stack)]
    heads = [module for module in outside if isinstance(module, nn.Linear) and module.out_features in tokens]
    return heads[-1] if heads else None


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The module that makes vectors of tokens, where the model names one."""
    return _named_by(model, "get_input_embeddings")


def _named_by(model: nn.Module, method: str) -> nn.Module | None:
    get = getattr(model, method, None)
    try:
        found = get() if callable(get) else None
    except (AttributeError, NotImplementedError):  # of transformers' models without one
        return None
    return found if isinstance(found, nn.Module) else None


def stores_inputs_first(module: nn.Module) -> bool:
    """Whether it is transformers.pytorch_utils.Conv1D or derived from it, by name so that nothing is imported."""
    weight = cast(object, getattr(module, "weight", None))
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return False
    named = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    return named and getattr(module, "nf", None) == weight.shape[1]


def _described(name: str, module: nn.Module) -> LinearLayer | None:
    inputs_first = module.inputs_first if isinstance(module, GridLinear) else stores_inputs_first(module)
    if isinstance(module, nn.Linear | GridLinear) or inputs_first:
        read = name.endswith(NEVER_CALLED)  # as the dt_proj of a Mamba block, so that its input has no site
        inputs, rest = ((), ("input",)) if read else (("input",), ())
        return LinearLayer(module, inputs_first=inputs_first, inputs=inputs, float_inputs=rest)
    return _experts(module)


def _experts(module: nn.Module) -> LinearLayer | None:
    """A set of experts, if it is certain how it stores its weights."""
    own = dict(module.named_parameters(recurse=False))
    first = next((name for name in UP if name in own), None)
    if first is None or DOWN not in own or {own[first].dim(), own[DOWN].dim()} != {3}:
        return None
    fit = partial(_fits, own[first], own[DOWN], has_gate=has_gate(module))
    fitting = [order for order in (False, True) if fit(inputs_first=order)]
    said = getattr(module, "is_transposed", None)
    orders = [order for order in fitting if order == said] if isinstance(said, bool) else fitting
    if len(orders) != 1:
        return None
    reached = module.reached if isinstance(module, GridExperts) else _reached(module)
    rest = tuple(site for site in ("input", "middle") if site not in reached)
    return LinearLayer(module, (first, DOWN), orders[0], reached, rest)


def _fits(first: Tensor, second: Tensor, *, has_gate: bool, inputs_first: bool) -> bool:
    """Whether the shapes are those of h -> m (with a gate: 2 m) and m -> h, each [expert, out, in] or transposed."""
    up, down = (first.mT, second.mT) if inputs_first else (first, second)
    experts, hidden, middle = down.shape
    return up.shape == (experts, middle * (2 if has_gate else 1), hidden)


def _reached(experts: nn.Module) -> tuple[str, ...]:
    """The inputs of experts that a site can stand for.

    The functions by which transformers runs experts call `_apply_gate`, or `act_fn` of those without a gate.
    """
    given = next(iter(inspect.signature(experts.forward).parameters), "")
    is_run_by_transformers = isinstance(getattr(experts, "is_transposed", None), bool) and hasattr(experts, "config")
    activation = experts._modules.get("act_fn")
    middle = hasattr(experts, "_apply_gate") if has_gate(experts) else activation is not None
    return (*(["input"] if given == HIDDEN else []), *(["middle"] if is_run_by_transformers and middle else []))


def has_gate(experts: nn.Module) -> bool:
    """Whether the first matrix of the experts is a gate and an up projection in one."""
    return UP[0] in dict(experts.named_parameters(recurse=False))


@cache
def _sited(kind: Hashable) -> type[nn.Module]:
    """The class of experts of a kind whose inputs are sites."""
    assert isinstance(kind, type)
    return type(f"Grid{kind.__name__}", (GridExperts, kind), {})


def _put_expert_sites(layer: LinearLayer) -> None:
    """Give experts their sites, in place. Their parameters keep their names."""
    experts = layer.module
    kind: Any = type(experts)
    experts.__class__ = _sited(kind)
    experts.input, experts.middle, vars(experts)["reached"] = Site(), Site(), layer.inputs
    if "middle" in layer.inputs and not has_gate(experts):
        experts.act_fn = nn.Sequential(experts.get_submodule("act_fn"), experts.middle)


def put_expert_sites(model: nn.Module) -> None:
    """Give all experts of a float model the sites `input` and `middle`, which hooks can see, in place."""
    for layer in _plain_experts(model):
        _put_expert_sites(layer)


def _plain_experts(model: nn.Module) -> list[LinearLayer]:
    return [layer for layer in linear_layers(model).values() if len(layer.weights) > 1 and not layer.has_sites]


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


@torch.no_grad()
def grid_linears(model: nn.Module, format: str, amax_of: Callable[[str], float | None], *, inputs: bool) -> nn.Module:
    """`model` with its linear layers on the grid, in place; `amax_of` gives the calibrated amax of an input."""
    found = linear_layers(model)
    if any(layer.has_sites for layer in found.values()):
        raise ValueError("this model is already a copy made by a mode. Pass the float model that it was made from.")
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to quantize: no nn.Linear, no Conv1D, no experts. "
            "Register a mode of your own for it."
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
    """The module of a linear layer with sites for its inputs, in the place of the plain one."""
    if len(layer.weights) > 1:
        _put_expert_sites(layer)
        return layer.module
    replaced = GridLinear(layer.module, inputs_first=layer.inputs_first)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, replaced)
    return replaced


def torchao_int8(model: nn.Module, format: str, *, dynamic: bool) -> nn.Module:
    """torchao's int8 quantization of every nn.Linear that is called, but the head, in place; it knows no other layer.

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
        # the product of a weight that is read without a call needs more of its tensors than they have
        mixers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, SiteMixer))
        chosen = {
            name
            for name, layer in linear_layers(model).items()
            if isinstance(layer.module, nn.Linear) and (layer.inputs or name.startswith(mixers))
        }
        config: Any = Int8DynamicActivationInt8WeightConfig() if dynamic else Int8WeightOnlyConfig()
        quantize_(model, config, filter_fn=lambda module, name: name in chosen)
    return model
