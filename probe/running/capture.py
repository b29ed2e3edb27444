"""Capture: the inputs and outputs of chosen modules, by hooks that cannot outlive their block."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from probe.models.layers import select
from probe.words import first_few

Consumer = Callable[[str, Tensor], None]


class UncoveredError(ValueError):
    """A selected layer never ran, so nothing is known about it."""


@dataclass(frozen=True)
class Capture:
    """Tensors by name, `layer_0.output`; a list, one entry for each call of the module."""

    selected: dict[str, str]  # label -> module name
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    fired: dict[str, int] = field(default_factory=dict)


@contextmanager
def capture(
    model: nn.Module,
    layers: Sequence[str | int] | str | int = ("all",),
    *,
    inputs: bool = False,
    outputs: bool = True,
    weights: bool = False,
    consumer: Consumer | None = None,
) -> Iterator[Capture]:
    """Capture while the block runs; afterwards a selected layer that never ran is an UncoveredError.

    Tensors come to the CPU in the dtype they had. With a `consumer` they are handed over as they appear, and
    nothing is kept; without, copies are collected in `Capture.tensors`. Weights are handed over at once.
    """
    if not (inputs or outputs or weights):
        raise ValueError("nothing to capture: inputs, outputs and weights are all off. Switch one on.")
    captured = Capture(select(model, layers))
    modules = dict(model.named_modules())

    def take(name: str, tensor: Tensor) -> None:
        if consumer is not None:
            consumer(name, tensor.detach().cpu())
        else:
            captured.tensors.setdefault(name, []).append(tensor.detach().cpu().clone())

    def hook(label: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        captured.fired[label] += 1
        if inputs:
            take(f"{label}.input", first_tensor(label, "input", (*args, *kwargs.values())))
        if outputs:
            take(f"{label}.output", first_tensor(label, "output", output))

    with ExitStack() as hooks:
        for label, name in captured.selected.items():
            captured.fired[label] = 0
            if weights:
                for parameter, value in modules[name].named_parameters():
                    take(f"{label}.{parameter}", value)
            hooks.callback(modules[name].register_forward_hook(partial(hook, label), with_kwargs=True).remove)
        yield captured
    silent = [label for label, count in captured.fired.items() if not count] if inputs or outputs else []
    if silent:
        raise UncoveredError(
            f"{len(silent)} of {len(captured.fired)} selected layers never ran: {first_few(silent, most=5)}. "
            "Either the model was not run inside the block, or it reads the weights of that module without calling "
            "it, or it is compiled. Capture the module around it, or a site."
        )


def with_first_tensor(
    label: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with `tensor` in place of the first tensor among them, on its device, in its dtype."""
    for place, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:place], tensor.to(value), *args[place + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, name: tensor.to(value)}
    raise UncoveredError(f"{label} was called without a tensor, so there is nothing to feed it.")


def first_tensor(label: str, kind: str, value: Any) -> Tensor:
    """The tensor itself, or the first one in a tuple, list or ModelOutput."""
    if isinstance(value, Tensor):
        return value
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    for member in members:
        if isinstance(member, Tensor):
            return member
    raise UncoveredError(
        f"the {kind} of {label} holds no tensor but a {type(value).__name__}. Capture a module inside it instead."
    )
