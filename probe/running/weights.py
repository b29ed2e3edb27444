"""How much of a model is on a grid: every parameter of the float model, counted in its quantized copy.

Weights are the parameters of two or more dimensions. The embedding, the output head, norms, biases and other vectors
are counted apart. A parameter is on a grid

    in probe's modes           if its values in the copy lie on a grid of the format (`coverage.off_grid`) and are not
                               the float ones; where the mode quantizes it, also if rounding leaves these as they are
    in users' and libraries'   if its values are not the float ones, or another tensor (packed codes) took its place

A gain of a norm that was folded into the next weight leaves ones behind, which is no grid. Experts are counted one by
one. Nothing here runs the model.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from probe.files.checked_json import Node
from probe.formats import FORMATS
from probe.models.linear import input_embedding, linear_layers, linear_weights, output_head, stores_inputs_first
from probe.models.mamba_blocks import mamba_blocks
from probe.numerics.grids import weight_on_grid
from probe.running.coverage import STRAY, off_grid
from probe.running.kept_float import keeps
from probe.running.modes import Mode, find_mode
from probe.running.recipes import Recipe
from probe.words import LOGITS

#: What is counted apart from the weights.
APART = ("embedding", "head", "norms", "biases", "other vectors")
#: Groups of float weights that the line names; the dict has all.
NAMED = 6


@dataclass(frozen=True)
class CountedParameter:
    """A parameter of the float model, and how many of its elements are on a grid in the copy."""

    name: str
    kind: str  # weights, or one of APART
    what: str  # nn.Linear, Conv1D, convolutions, 3-D parameters
    on_grid: int
    floating: int


@dataclass(frozen=True)
class Count:
    """Elements on a grid and elements that are float."""

    on_grid: int
    floating: int

    @property
    def total(self) -> int:
        """All elements."""
        return self.on_grid + self.floating


def _sum(parameters: Iterable[CountedParameter]) -> Count:
    found = list(parameters)
    return Count(sum(one.on_grid for one in found), sum(one.floating for one in found))


@dataclass(frozen=True)
class FloatWeights:
    """Weights that stayed float: their names, with * for numbers and for names that differ at the end."""

    names: str
    what: str
    elements: int


@dataclass(frozen=True)
class Weights(Count):
    """The weights of a model under a recipe, on a grid and float. `line` says them in a sentence."""

    float_weights: list[FloatWeights]  # the largest group first
    apart: dict[str, Count]  # by the names in APART, without those that the model has none of
    tied: bool  # the head is the embedding, and counted there
    float_inputs: list[str]  # inputs that the mode should put on a grid and cannot reach

    @property
    def line(self) -> str:
        """weights on a grid: 11.1 % (36,864 of 332,992); float: 296,128 in layers.*.experts.* (3-D parameters); ..."""
        share = 100 * self.on_grid / self.total if self.total else 0.0
        shown = f"{share:.1f}" if self.on_grid in (0, self.total) or 0.05 <= share < 99.95 else f"{share:.6g}"
        named = [f"{group.elements:,} in {group.names} ({group.what})" for group in self.float_weights[:NAMED]]
        more = self.float_weights[NAMED:]
        named += [f"{sum(group.elements for group in more):,} in {len(more)} more"] if more else []
        apart = [_apart(name, count) for name, count in self.apart.items()]
        apart += ["head tied to the embedding"] if self.tied else []
        parts = {
            f"weights on a grid: {shown} % ": [f"({self.on_grid:,} of {self.total:,})"],
            "float: ": named,
            "": apart,
            "float inputs, which the mode cannot reach: ": self.float_inputs,
        }
        return "; ".join(f"{start}{', '.join(texts)}" for start, texts in parts.items() if texts)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, node: Node) -> Self:
        """The inverse of as_dict, of a file that may come from elsewhere."""
        whole = partial(Node.count, least=0)
        counts = {"on_grid": whole, "floating": whole}
        return node.as_dataclass(
            cls,
            **counts,
            float_weights=lambda groups: [one.as_dataclass(FloatWeights) for one in groups.entries(empty=True)],
            apart=lambda kinds: {
                name: one.as_dataclass(Count, **counts) for name, one in kinds.members(empty=True).items()
            },
            float_inputs=lambda names: [name.text() for name in names.entries(empty=True)],
        )


def _apart(name: str, count: Count) -> str:
    if not count.on_grid:
        return f"{name} {count.floating:,} float"
    return f"{name} {count.on_grid:,} on a grid" + (f" and {count.floating:,} float" if count.floating else "")


def count_weights(model: nn.Module, twin: nn.Module, recipe: Recipe) -> Weights:
    """The counts of the float `model` in its copy `twin`, which `apply` made under the recipe."""
    return summarize(model, count_parameters(model, twin, recipe), recipe)


def summarize(model: nn.Module, counted: Iterable[CountedParameter], recipe: Recipe) -> Weights:
    """The counts of all parameters together."""
    kinds: dict[str, list[CountedParameter]] = {name: [] for name in ("weights", *APART)}
    for one in counted:
        kinds[one.kind].append(one)
    weights, mode = kinds.pop("weights"), find_mode(recipe.mode)
    unreached = [
        _starred(f"{name}.{site}")
        for name, layer in linear_layers(model).items()
        for site in (layer.float_inputs if mode.kind == "linear" and mode.inputs else ())
    ]
    of_head, of_embedding = (getattr(found(model), "weight", None) for found in (output_head, input_embedding))
    return Weights(
        **asdict(_sum(weights)),
        float_weights=_groups(weights),
        apart={name: _sum(some) for name, some in kinds.items() if some},
        tied=of_head is not None and of_head is of_embedding,
        float_inputs=list(dict.fromkeys(unreached)),
    )


@torch.no_grad()
def count_parameters(model: nn.Module, twin: nn.Module, recipe: Recipe) -> list[CountedParameter]:
    """Every parameter of the float model, once, in model order."""
    mode = find_mode(recipe.mode)
    format = recipe.format if mode.kind in ("ssm", "linear") else None
    modules, copies = dict(model.named_modules()), dict(twin.named_parameters(remove_duplicate=False))
    start = _prefix(model, copies)
    layers, claimed, kept = linear_weights(model), _claimed(model, mode), keeps(mode)
    head, embedding = output_head(model), input_embedding(model)
    found = []
    for name, parameter in model.named_parameters():
        copied = copies.get(f"{start}{name}")
        if mode.kind == "float":
            on_grid = 0
        elif copied is None:
            on_grid = parameter.numel() if _holds_something(twin, f"{start}{name}") else 0
        elif _is_packed(parameter, copied):
            on_grid = parameter.numel()
        else:
            tensors = (parameter.detach(), copied.detach().to(parameter.device))
            split = layers[name].matrices if name in layers else lambda tensor: [tensor]
            pairs = zip(*map(split, tensors), strict=True)
            on_grid = sum(old.numel() for old, new in pairs if _on_grid(old, new, format, claimed=name in claimed))
        owner, _, own = name.rpartition(".")
        kind = _kind(modules[owner], own, parameter, head, embedding)
        what = "not in the copy" if copied is None and not on_grid else _what(modules[owner], own, parameter)
        what += ", kept float" if not on_grid and (kept(name) or kept(owner)) else ""
        found.append(CountedParameter(name, kind, what, on_grid, parameter.numel() - on_grid))
    return found


def count_by_layer(counted: Iterable[CountedParameter], modules: Mapping[str, str]) -> dict[str, Count]:
    """The weights of each layer by its label; under LOGITS those of the whole model, with embedding and head.

    `modules` has the names of the layers' modules. The count of the whole does not depend on which are selected.
    """
    found = [one for one in counted if one.kind in ("weights", "embedding", "head")]
    inside = {label: [one for one in found if one.name.startswith(f"{module}.")] for label, module in modules.items()}
    return {label: _sum(some) for label, some in {**inside, LOGITS: found}.items()}


def _claimed(model: nn.Module, mode: Mode) -> set[str]:
    """The parameters that one of probe's modes quantizes, without those that it keeps float."""
    found: list[str] = list(linear_weights(model)) if mode.kind == "linear" else []
    if mode.kind == "ssm":
        found = [f"{block.mixer_name}.{weight}" for block in mamba_blocks(model) for weight in block.layout.weights]
    kept = keeps(mode)
    return {name for name in found if not kept(name) and not kept(name.rpartition(".")[0])}


def _on_grid(plain: Tensor, now: Tensor, format: str | None, *, claimed: bool) -> bool:
    """Whether a matrix (or any other tensor) is on a grid; without a format, whether it changed.

    `claimed`: the mode quantizes it, so that unchanged values are on the grid if rounding does not change them.
    """
    if torch.equal(plain, now.to(plain.dtype)):
        return claimed and torch.equal(weight_on_grid(plain.contiguous(), str(format)), plain)
    if bool((now == 1).all()):
        return False
    return format is None or (off_grid(now, format) <= STRAY and _is_lattice(now, format))


def _is_lattice(x: Tensor, format: str) -> bool:
    """Of an integer format, whether few values, which no count of different ones can judge, are multiples of a step.

    The largest magnitude is the largest code times the step.
    """
    fmt = FORMATS[format]
    if fmt.scale != "float32" or x.numel() > 2 << fmt.bits:
        return True
    steps = x.double() * (fmt.max / x.double().abs().max().clamp(min=1e-300))
    return bool((steps - steps.round()).abs().max() < 1e-3) if x.numel() else True


def _is_packed(plain: Tensor, copied: Tensor) -> bool:
    """Whether codes took the place of a parameter: another class of tensor, another shape, no float."""
    return type(copied.data) is not type(plain.data) or copied.shape != plain.shape or not copied.is_floating_point()


def _holds_something(twin: nn.Module, name: str) -> bool:
    """Whether the module of a parameter that is gone has other tensors in the copy, such as packed codes."""
    try:
        module = twin.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return False
    return bool(module.state_dict())


def _prefix(model: nn.Module, copies: Mapping[str, Tensor]) -> str:
    """What the copy puts before the names of the model, such as the _orig_mod. of torch.compile."""
    first = next((name for name, _ in model.named_parameters()), "")
    if first in copies:
        return ""
    return next((name.removesuffix(first) for name in copies if name.endswith(f".{first}")), "")


def _kind(module: nn.Module, own: str, parameter: Tensor, head: object, embedding: object) -> str:
    if isinstance(module, nn.Embedding) or (module is embedding and parameter.dim() > 1):
        return "embedding"
    if own.endswith("bias"):
        return "biases"
    if parameter.dim() > 1:
        return "head" if module is head else "weights"
    return "norms" if "norm" in type(module).__name__.lower() else "other vectors"


def _what(module: nn.Module, own: str, parameter: Tensor) -> str:
    if own == "weight" and isinstance(module, nn.Linear):
        return "nn.Linear"
    if own == "weight" and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return "convolutions"
    return "Conv1D" if stores_inputs_first(module) else f"{parameter.dim()}-D parameters"


def _groups(weights: Sequence[CountedParameter]) -> list[FloatWeights]:
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
            found.setdefault((_starred(whole), one.what), []).append((whole, one))
    groups = []
    for (starred, what), some in found.items():
        modules = dict.fromkeys(module for module, _ in some)
        names = {one.name.removeprefix(f"{module}.") for module, one in some}
        alike = sum(_starred(module) == starred for module in kinds)
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


def _starred(name: str) -> str:
    """model.layers.*.mlp of model.layers.3.mlp."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
