"""A counted parameter of a model, and those that stayed float by the modules that they lie in."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CountedParameter:
    """A parameter of the float model, and how many of its elements are on a grid in the copy."""

    name: str
    kind: str  # weights, or one of APART
    what: str  # nn.Linear, Conv1D, convolutions, routers, 3-D parameters; and why it is float
    on_grid: int
    floating: int
    form: str = ""  # Int8Tensor of torchao; empty where the copy has plain floats


@dataclass(frozen=True)
class FloatWeights:
    """Weights that stayed float: their names, with * for numbers and for names that differ at the end."""

    names: str
    what: str
    elements: int


def float_groups(weights: Sequence[CountedParameter]) -> list[FloatWeights]:
    """Float weights by module and kind; a module of which all weights are float and of a kind stands for them all."""
    kinds: dict[str, set[tuple[int, str]]] = {}  # by module, of all weights inside: whether one is float, and what
    for one in weights:
        for module in _modules_around(one.name):
            kinds.setdefault(module, set()).add((one.on_grid == 0, one.what))
    found: dict[tuple[str, str], list[tuple[str, CountedParameter]]] = {}
    for one in weights:
        if one.floating:
            around = _modules_around(one.name)
            whole = next((module for module in around if kinds[module] == {(True, one.what)}), around[-1])
            found.setdefault((with_stars(whole), one.what), []).append((whole, one))
    groups = []
    for (starred, what), some in found.items():
        modules = dict.fromkeys(module for module, _ in some)
        names = {one.name.removeprefix(f"{module}.") for module, one in some}
        alike = sum(with_stars(module) == starred for module in kinds)
        shown = starred if len(modules) == alike else _some_of(list(modules), starred)
        own = names.pop() if len(names) == 1 else "*"
        groups.append(FloatWeights(f"{shown}.{own}".lstrip("."), what, sum(one.floating for _, one in some)))
    return sorted(groups, key=lambda group: -group.elements)


def _modules_around(name: str) -> list[str]:
    """The modules that a parameter lies in, the layer (the first with a number) first, its own one last."""
    parts = name.split(".")[:-1]
    layer = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return [".".join(parts[: end + 1]) for end in range(layer, len(parts))] or [""]


def _some_of(modules: list[str], starred: str) -> str:
    """layers.[1,3].mlp for two of more modules that are alike; the whole name of a single one."""
    if len(modules) == 1:
        return modules[0]
    before, _, after = starred.partition("*")
    numbers = [name.removeprefix(before).removesuffix(after) for name in modules]
    return f"{before}[{','.join(numbers)}]{after}" if all(map(str.isdigit, numbers)) else starred


def with_stars(name: str) -> str:
    """model.layers.*.mlp of model.layers.3.mlp."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
