"""What linear modes put on a grid: every matrix of a model that is multiplied with an input.

`linear_layers` is the list of them that everything shares: modes, calibration, sensitivity, predictions, the counts.

    nn.Linear            weight [out, in]
    Conv1D (GPT-2)       weight [in, out], of transformers
    convolutions         weight [out, in / groups, ...], of one to three dimensions. Its matrix has a row for each
                         output channel, [out, in / groups * kernel], as im2col has it. A transposed convolution
                         stores [in, out / groups, ...] and has the same rows
    experts              gate_up_proj (or up_proj) and down_proj, [expert, out, in] or [expert, in, out]. Every matrix
                         has scales of its own, as if it were an nn.Linear. Their inputs are two tensors for all
                         experts of a layer: `input`, the hidden states, and `middle`, what down_proj reads

The parts of INCLUDABLE only if they are asked for: the routers of experts, [expert, in], the embedding of tokens,
[token, out], and the output head. The convolution of a Mamba mixer belongs to the SSM modes.

How experts store their weights is never guessed. They say so themselves (`is_transposed`, which transformers'
`use_experts_implementation` sets), or their shapes tell: gate_up_proj [expert, 2 m, h] with down_proj [expert, h, m]
can only be [out, in], and [expert, h, 2 m] with [expert, m, h] only [in, out]. All other parameters of three
dimensions stay float, and the counts name them.
"""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from probe.models.grid_modules import HIDDEN, SITED, GridExperts, GridInput, GridLinear
from probe.models.parts import CONVOLUTIONS, included_parts, ssm_convolutions
from probe.numerics.grids import weight_on_grid
from probe.words import INCLUDABLE

#: Linear layers whose weight is read without a call.
NEVER_CALLED = (".dt_proj",)
#: The first matrix of an expert, with or without a gate, and the second.
UP, DOWN = ("gate_up_proj", "up_proj"), "down_proj"


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
        """Whether a linear mode made the module."""
        return isinstance(self.module, SITED)

    @property
    def is_experts(self) -> bool:
        """Whether it is a set of experts, each with matrices of its own."""
        return len(self.weights) > 1

    @property
    def is_convolution(self) -> bool:
        """Whether its matrix is that of im2col."""
        return isinstance(self.module, CONVOLUTIONS)

    def matrices(self, weight: Tensor) -> list[Tensor]:
        """A weight of the module, or a tensor of its shape, as matrices [out, in]: one, or one an expert."""
        if self.is_convolution:
            return [convolution_rows(self.module, weight)]
        oriented = weight.mT if self.inputs_first else weight
        return list(oriented) if self.is_experts else [oriented]

    def joined(self, matrices: Sequence[Tensor], weight: Tensor) -> Tensor:
        """The inverse of `matrices`: a tensor of the shape of `weight`."""
        if self.is_convolution:
            return _weight_of_rows(self.module, matrices[0], weight)
        whole = torch.stack(list(matrices)) if self.is_experts else matrices[0]
        return whole.mT if self.inputs_first else whole

    def weight_of(self, site: str) -> str:
        """The weight that reads an input: the second one reads `middle`."""
        return self.weights[1 if site == "middle" else 0]

    def width(self, site: str) -> int:
        """The channels of an input."""
        if self.is_convolution:
            return cast(int, self.module.in_channels)
        weight = self.module.get_parameter(self.weight_of(site))
        return weight.shape[-2 if self.inputs_first else -1]

    @torch.no_grad()
    def on_grid(self, weight: Tensor, format: str) -> Tensor:
        """The weight with every matrix on the grid: one scale for its integers, else blocks along its inputs."""
        matrices = [weight_on_grid(matrix.contiguous(), format) for matrix in self.matrices(weight)]
        return self.joined(matrices, weight)


def convolution_rows(module: nn.Module, weight: Tensor) -> Tensor:
    """The weight of a convolution as [out, in / groups * kernel]: the row of an output channel is what it reads."""
    return (_swapped(module, weight) if _is_transposed(module) else weight).flatten(1)


def _weight_of_rows(module: nn.Module, rows: Tensor, weight: Tensor) -> Tensor:
    if not _is_transposed(module):
        return rows.reshape(weight.shape)
    return _swapped(module, rows.reshape(_swapped(module, weight).shape))


def _is_transposed(module: nn.Module) -> bool:
    return getattr(module, "transposed", False) is True


def _swapped(module: nn.Module, weight: Tensor) -> Tensor:
    """[out, in / groups, ...] of [in, out / groups, ...], and the other way round."""
    grouped = weight.reshape(cast(int, module.groups), -1, *weight.shape[1:])
    return grouped.transpose(1, 2).flatten(0, 1)


def linear_key(name: str, site: str = "input") -> str:
    """The name, in a calibration, of the input of a linear layer in the plain float model."""
    return f"linear {name}.{site}"


def linear_layers(model: nn.Module, include: Collection[str] = ()) -> dict[str, LinearLayer]:
    """Every linear layer by the name of its module, float or on a grid; those of INCLUDABLE as `include` says.

    Of a copy that a linear mode made, all that it put on a grid.
    """
    parts = included_parts(model)
    apart = {name: part for part, names in parts.items() for name in names}
    of_ssm = ssm_convolutions(model)
    found = {}
    for name, module in model.named_modules():
        part = apart.get(name)
        if isinstance(module, SITED) or (name not in of_ssm and (part is None or part in include)):
            found[name] = _described(name, module, part)
    return {name: layer for name, layer in found.items() if layer is not None}


def linear_weights(model: nn.Module, include: Collection[str] = ()) -> dict[str, LinearLayer]:
    """By the name of every parameter that linear modes put on a grid, the layer it belongs to."""
    layers = linear_layers(model, include).items()
    return {f"{name}.{parameter}".lstrip("."): layer for name, layer in layers for parameter in layer.weights}


def check_included(model: nn.Module, include: Collection[str], *, model_name: str) -> None:
    """Refuse parts that the model does not have, or that cannot be put on a grid."""
    parts, layers = included_parts(model), linear_layers(model, include)
    for part in include:
        if not parts[part]:
            there = ", ".join(one for one, names in parts.items() if names) or "none of them"
            raise ValueError(
                f"include has {part!r}, and {model_name} has no {part}. Of {', '.join(INCLUDABLE)} it has: {there}."
            )
        for name in parts[part]:
            if name not in layers:
                kind = type(model.get_submodule(name)).__name__
                raise ValueError(
                    f"include has {part!r}, and {name}, the {part} of {model_name}, is a {kind}, whose weight linear "
                    "modes do not know. Leave it out, or register a mode of your own for it."
                )


def _is_short_convolution(module: nn.Module) -> bool:
    """Whether it is the causal depthwise convolution of a token mixer: padding k - 1 at both ends, the end is cut off.

    Its mixer reads the weight without a call, in decode at least.
    """
    if not isinstance(module, nn.Conv1d):
        return False
    is_depthwise = module.groups == module.in_channels > 1
    return is_depthwise and module.padding == (module.kernel_size[0] - 1,) != (0,)


def stores_inputs_first(module: nn.Module) -> bool:
    """Whether it is transformers.pytorch_utils.Conv1D or derived from it, by name so that nothing is imported."""
    weight = cast(object, getattr(module, "weight", None))
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return False
    named = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    return named and getattr(module, "nf", None) == weight.shape[1]


def _described(name: str, module: nn.Module, part: str | None) -> LinearLayer | None:
    inputs_first = module.inputs_first if isinstance(module, GridLinear) else stores_inputs_first(module)
    if isinstance(module, nn.Embedding):
        return LinearLayer(module, inputs=()) if part == "embedding" or isinstance(module, SITED) else None
    is_router = part == "router" or isinstance(module, GridInput)
    is_convolution = isinstance(module, CONVOLUTIONS) and module._parameters.get("weight") is not None
    if isinstance(module, nn.Linear | GridLinear) or inputs_first or is_convolution or is_router:
        # as the dt_proj of a Mamba block, so that its input has no site
        read = name.endswith(NEVER_CALLED) or _is_short_convolution(module)
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
