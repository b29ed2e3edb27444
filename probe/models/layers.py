"""Layers by index, label or pattern: of a model, or among the names of a recording."""

import re
from collections.abc import Mapping, Sequence

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

    The label of a layer of the stack is `layer_3`, which also selects it; that of any other module is its name.
    """
    if isinstance(layers, str | int):
        layers = [layers]
    if not layers:
        raise ValueError("no layer was asked for. Give an index, first, last, all or a regular expression.")
    names = [name for name, _ in model.named_modules() if name]
    stack = blocks_of(model)
    by_label = {f"layer_{index}": name for index, name in enumerate(stack)}
    chosen: set[str] = set()
    for wanted in layers:
        found = match_layers(wanted, names, by_label)
        if not found:
            kinds = f"0 to {len(stack) - 1}, first, last, all or " if stack else ""
            typed = f"'{wanted}'" if isinstance(wanted, str) else wanted  # repr would double the backslashes
            raise ValueError(
                f"layer {typed} matches none of the {len(names)} modules of {type(model).__name__}. "
                f"{near_or_first(wanted, names, aliases=by_label)} Give {kinds}a regular expression. "
                f"List them with: probe layers --model {model_name}"
            )
        chosen |= set(found)
    labels = {name: label for label, name in by_label.items()}
    return {labels.get(name, name): name for name in names if name in chosen}


def match_layers(
    wanted: str | int, names: Sequence[str], layers: Mapping[str, str], *, whole: bool = False
) -> list[str]:
    """The names that 3, `layer_3`, `first`, `last`, `all` or a regular expression chooses; there may be none.

    `layers` has the names of the stack by label. An expression is searched for anywhere in a name; with `whole` it
    must describe all of it, and a name also stands for itself.
    """
    text, stack = str(wanted), list(layers.values())
    if stack and text in ("all", "first", "last"):
        return {"all": stack, "first": stack[:1], "last": stack[-1:]}[text]
    label = f"layer_{int(text)}" if text.isdecimal() else text
    if label in layers:
        return [layers[label]]
    if whole and text in names:
        return [text]
    if re.fullmatch(r"layer_\d+", label):
        return []
    pattern = compile_pattern(text)
    return [name for name in names if (pattern.fullmatch(name) if whole else pattern.search(name))]


def compile_pattern(text: str) -> re.Pattern[str]:
    """The regular expression that `text` is."""
    try:
        return re.compile(text)
    except re.error as problem:
        advice = "Escape special characters with a backslash."
        raise ValueError(f"layer '{text}' is not a regular expression ({problem}). {advice}") from None
