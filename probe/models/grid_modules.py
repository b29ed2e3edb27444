"""Modules whose weights and inputs a linear mode puts on a grid, each in the place of a plain one.

A GridLinear stands for an nn.Linear or a Conv1D. All others keep their class, with one of these before it (`sited`), so
that their own forward runs, with its strides, padding, groups and routing, on a weight and an input on their grids.
"""

import copy
import inspect
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any, cast

from torch import Tensor, empty_like, nn

from probe.models.mamba import Site

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
    """Experts whose inputs are sites; the class of such a module is this one before its own (see `sited`)."""

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


class GridInput(nn.Module):
    """A module whose first input is a site, such as a router; the class of such a module is this one before its own."""

    input: Site
    first: str  # the name of the first argument

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module makes of its input on the grid."""
        run: Callable[..., Any] = super().forward
        if args:
            return run(self.at_site(args[0]), *args[1:], **kwargs)
        return run(**{**kwargs, self.first: self.at_site(kwargs[self.first])})

    def at_site(self, x: Tensor) -> Tensor:
        """The input on the grid."""
        return cast(Tensor, self.input(x))


class GridConvolution(GridInput):
    """A convolution: at the site its input [batch, channel, ...] has the channels last, so blocks run along them."""

    kernel_size: tuple[int, ...]

    def _channels(self, x: Tensor) -> int:
        """The axis of the channels; without a batch the first one."""
        return x.dim() - len(self.kernel_size) - 1

    def at_site(self, x: Tensor) -> Tensor:
        """The input on the grid, with the axes and the layout in memory that it had."""
        channels = self._channels(x)
        on_grid = cast(Tensor, self.input(x.movedim(channels, -1))).movedim(-1, channels)
        return on_grid if on_grid.stride() == x.stride() else empty_like(x).copy_(on_grid)

    def exact(self, x: Tensor) -> Tensor:
        """The convolution in float64 of an input that is on the grid already, with its channels last."""
        run: Callable[..., Tensor] = super(GridInput, copy.deepcopy(self).double()).forward
        return run(x.double().movedim(-1, self._channels(x)))


class GridEmbedding(nn.Module):
    """An embedding with its table on a grid; its inputs are tokens."""


#: The class of every module that a linear mode made.
SITED = (GridLinear, GridExperts, GridInput, GridEmbedding)


@cache
def _sited(kind: Hashable, before: Hashable) -> type[nn.Module]:
    assert isinstance(kind, type)
    assert isinstance(before, type)
    return type(f"Grid{kind.__name__}", (before, kind), {})


def sited(module: nn.Module, before: type[nn.Module]) -> None:
    """Put one of these classes before that of a module, in place, with a site for its first input."""
    plain: Any = type(module)
    first: Any = before
    if issubclass(before, GridInput):
        vars(module)["first"] = next(iter(inspect.signature(module.forward).parameters))
    module.__class__ = _sited(plain, first)
    if before is not GridEmbedding:
        module.input = Site()
