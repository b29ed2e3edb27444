"""Layers of a model by index, label or pattern: the one place that selects modules."""

import re
from collections.abc import Sequence

from torch import nn

from probe.words import near_or_first


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
            kinds = f"0 to {len(stack) - 1}, first, last, all or " if stack else ""
            raise ValueError(
                f"layer {_typed(wanted)} matches none of the {len(names)} modules of {type(model).__name__}. "
                f"{near_or_first(wanted, names, aliases=labels.values())} Give {kinds}a regular expression. "
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
