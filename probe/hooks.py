"""Capture: what chosen modules of a model took in and gave out, by hooks that cannot outlive their block."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from probe.messages import some
from probe.names import near

Consumer = Callable[[str, Tensor], None]


class UncoveredError(ValueError):
    """A selected layer never ran, so there is nothing to say about it."""


@dataclass(frozen=True)
class Capture:
    """Tensors by name, `layer_0.output`; a list, one entry for each call of the module."""

    selected: dict[str, str]  # label -> module name
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    fired: dict[str, int] = field(default_factory=dict)


def blocks_of(model: nn.Module) -> list[str]:
    """The names of the model's layers: the members of its longest nn.ModuleList, the first of equals."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return []
    name, longest = max(lists, key=lambda pair: len(pair[1]))
    return [f"{name}.{index}" if name else str(index) for index in range(len(longest))]


def select(model: nn.Module, layers: Sequence[str | int] | str | int, *, model_name: str = "MODEL") -> dict[str, str]:
    """Modules by index, `first`, `last`, `all`, or regular expression; label -> module name, in model order.

    A layer of the stack is labelled `layer_3`, and can be asked for so; any other module by its own name.
    """
    if isinstance(layers, str | int):
        layers = [layers]
    if not layers:
        raise ValueError("no layer was asked for. Give an index, first, last, all or a regular expression.")
    names = [name for name, _ in model.named_modules() if name]
    stack = blocks_of(model)
    labels = {name: f"layer_{index}" for index, name in enumerate(stack)}
    chosen: set[str] = set()
    for wanted in layers:
        found = _match(wanted, names, stack)
        if not found:
            close = near(wanted, [*names, *labels.values()])
            told = f"Nearest: {', '.join(close)}" if close else f"It has: {some(names, most=5)}"
            kinds = f"0 to {len(stack) - 1}, first, last, all or " if stack else ""
            raise ValueError(
                f"layer {_typed(wanted)} matches none of the {len(names)} modules of {type(model).__name__}. "
                f"{told}. Give {kinds}a regular expression. "
                f"List them with: probe layers --model {model_name}"
            )
        chosen |= set(found)
    return {labels.get(name, name): name for name in names if name in chosen}


def _typed(wanted: str | int) -> str:
    """As it was typed: repr would double the backslashes."""
    return f"'{wanted}'" if isinstance(wanted, str) else str(wanted)


def _match(wanted: str | int, names: list[str], stack: list[str]) -> list[str]:
    text = str(wanted)
    if stack and text in ("all", "first", "last"):
        return {"all": stack, "first": stack[:1], "last": stack[-1:]}[text]
    index = text.removeprefix("layer_")
    if index.isdecimal():
        return [stack[int(index)]] if int(index) < len(stack) else []
    try:
        pattern = re.compile(text)
    except re.error as problem:
        raise ValueError(
            f"layer '{text}' is not a regular expression ({problem}). Escape special characters with a backslash."
        ) from None
    return [name for name in names if pattern.search(name)]


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

    with ExitStack() as hooks:
        for label, name in captured.selected.items():
            captured.fired[label] = 0
            if weights:
                for parameter, value in modules[name].named_parameters():
                    take(f"{label}.{parameter}", value)
            hook = _hook(label, captured, take, inputs=inputs, outputs=outputs)
            hooks.callback(modules[name].register_forward_hook(hook, with_kwargs=True).remove)
        yield captured
    silent = [label for label, count in captured.fired.items() if not count] if inputs or outputs else []
    if silent:
        raise UncoveredError(
            f"{len(silent)} of {len(captured.fired)} selected layers never ran: {', '.join(silent[:5])}"
            f"{', ...' if len(silent) > 5 else ''}. Either the model was not run inside the block, or it reads the "
            "weights of that module without calling it, or it is compiled. Capture the module around it, or a site."
        )


def _hook(
    label: str, captured: Capture, take: Consumer, *, inputs: bool, outputs: bool
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        captured.fired[label] += 1
        if inputs:
            take(f"{label}.input", first_tensor(label, "input", (*args, *kwargs.values())))
        if outputs:
            take(f"{label}.output", first_tensor(label, "output", output))

    return hook


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
