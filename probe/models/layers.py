"""Layers by index, label or pattern: of a model, or among the names of a recording."""

import re
from collections.abc import Mapping, Sequence

from torch import nn

from probe.words import near_or_first

#: A list of modules is a stack of layers of its own if it has this share of the parameters of the largest stack.
STACK_SHARE = 1 / 8


def labelled_blocks(model: nn.Module) -> dict[str, str]:
    """The model's layers by label: label -> module name, stack after stack in the order of the model.

    A stack is an nn.ModuleList that does not lie inside a member of another one, so experts are none, and holds the
    most parameters of the lists beside it. The main stack holds the most of all; one elsewhere in the model that holds
    STACK_SHARE of that many is a stack too. Layers of one stack are `layer_0`, `layer_1`, ...; of several,
    `encoder.layer_0`, `decoder.layer_0`, ... by the part of their names in which the stacks differ.
    """
    lists = {name: one for name, one in model.named_modules() if isinstance(one, nn.ModuleList) and len(one)}
    outer = {name: one for name, one in lists.items() if not any(_inside(name, other) for other in lists)}
    sizes = {name: (sum(p.numel() for p in one.parameters()), len(one)) for name, one in outer.items()}
    parents: dict[str, list[str]] = {}
    for name in outer:
        parents.setdefault(name.rpartition(".")[0], []).append(name)
    largest = max(sizes.values(), default=(0, 0))
    candidates = [max(beside, key=lambda name: sizes[name]) for beside in parents.values()]
    stacks = [name for name in candidates if sizes[name] == largest or sizes[name][0] >= STACK_SHARE * largest[0] > 0]
    stacks = stacks if largest[0] else stacks[:1]
    titles = _titles(stacks)
    return {
        f"{title}layer_{index}": f"{name}.{index}" if name else str(index)
        for title, name in zip(titles, stacks, strict=True)
        for index in range(len(outer[name]))
    }


def _inside(name: str, other: str) -> bool:
    """Whether a module lies inside the other, which is not itself."""
    return name != other and (name.startswith(f"{other}.") or not other)


def _titles(stacks: Sequence[str]) -> list[str]:
    """`encoder.` and `decoder.` of model.encoder.layers and model.decoder.layers; empty for a single stack.

    The first part of the names that tells them apart; the whole names where none does.
    """
    if len(stacks) < 2:
        return [""] * len(stacks)
    parts = [name.split(".") for name in stacks]
    for column in zip(*parts, strict=False):
        if len(set(column)) == len(stacks):
            return [f"{part}." for part in column]
    return [f"{name}." for name in stacks]


def blocks_of(model: nn.Module) -> list[str]:
    """The names of the model's layers, as `labelled_blocks` finds them."""
    return list(labelled_blocks(model).values())


def select(model: nn.Module, layers: Sequence[str | int] | str | int, *, model_name: str = "MODEL") -> dict[str, str]:
    """Modules by index, `first`, `last`, `all`, or regular expression; label -> module name, in model order.

    The label of a layer of the stack is `layer_3`, which also selects it; that of any other module is its name. In a
    model with an encoder and a decoder the labels are `encoder.layer_3` and `decoder.layer_3`, and `layer_3`, or 3,
    selects both; `first` and `last` are those of each stack.
    """
    if isinstance(layers, str | int):
        layers = [layers]
    if not layers:
        raise ValueError("no layer was asked for. Give an index, first, last, all or a regular expression.")
    names = [name for name, _ in model.named_modules() if name]
    by_label = labelled_blocks(model)
    stack = {label.rpartition("layer_")[2] for label in by_label}  # the numbers
    chosen: set[str] = set()
    for wanted in layers:
        found = match_layers(wanted, names, by_label)
        if not found:
            kinds = f"0 to {max(map(int, stack))}, first, last, all or " if stack else ""
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
    text, stacks = str(wanted), _by_stack(layers)
    if stacks and text in ("all", "first", "last"):
        chosen = {"all": slice(None), "first": slice(1), "last": slice(-1, None)}[text]
        return [name for stack in stacks.values() for name in stack[chosen]]
    label = f"layer_{int(text)}" if text.isdecimal() else text
    if label in layers:
        return [layers[label]]
    if whole and text in names:
        return [text]
    if re.fullmatch(r"layer_\d+", label):
        return [name for one, name in layers.items() if one.endswith(f".{label}")]
    pattern = compile_pattern(text)
    return [name for name in names if (pattern.fullmatch(name) if whole else pattern.search(name))]


def _by_stack(layers: Mapping[str, str]) -> dict[str, list[str]]:
    """The names of the layers by the title of their stack, which is empty where there is one stack."""
    found: dict[str, list[str]] = {}
    for label, name in layers.items():
        found.setdefault(label.rpartition("layer_")[0], []).append(name)
    return found


def compile_pattern(text: str) -> re.Pattern[str]:
    """The regular expression that `text` is."""
    try:
        return re.compile(text)
    except re.error as problem:
        advice = "Escape special characters with a backslash."
        raise ValueError(f"layer '{text}' is not a regular expression ({problem}). {advice}") from None
