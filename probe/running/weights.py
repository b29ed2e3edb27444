"""How much of a model is on a grid: every parameter of the float model, counted in its quantized copy.

Weights are the parameters of two or more dimensions. The embedding, the output head, norms, biases and other vectors
are counted apart. A parameter is on a grid

    in probe's modes           if its values in the copy lie on a grid of the format (`coverage.off_grid`) and are not
                               the float ones; where the mode quantizes it, also if rounding leaves these as they are
    in users' and libraries'   if its values are not the float ones, or another form (packed codes, a scheme at its
                               module: `models.quantized`) took its place
    in a checkpoint            if it has such a form, or its file says so (GGUF). Other floats are no grid

What the configuration of a checkpoint states is compared with what is found. A gain of a norm that was folded into the
next weight leaves ones behind, which is no grid. Experts are counted one by one. Nothing here runs the model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from probe.files.checked_json import Node
from probe.formats import FORMATS
from probe.models.linear import linear_layers, linear_weights, stores_inputs_first
from probe.models.mamba_blocks import mamba_blocks
from probe.models.parts import CONVOLUTIONS, included_parts, input_embedding, output_head, ssm_convolutions
from probe.models.quantized import Statement, statement_of, weight_form
from probe.numerics.grids import weight_on_grid
from probe.running.counted_parameters import CountedParameter, FloatWeights, float_groups, with_stars
from probe.running.coverage import STRAY, off_grid
from probe.running.kept_float import keeps
from probe.running.modes import find_mode
from probe.running.recipes import Recipe
from probe.words import LOGITS, first_few

#: What is counted apart from the weights.
APART = ("embedding", "head", "norms", "biases", "other vectors")
#: A head that is tied to the embedding in the float model, where one of the two is on a grid: the copy has both.
UNTIED = "untied head"
#: Groups of float weights that the line names; the dict has all.
NAMED = 6


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
class Weights(Count):
    """The weights of a model under a recipe, on a grid and float. `line` says them in a sentence."""

    float_weights: list[FloatWeights]  # the largest group first
    apart: dict[str, Count]  # by the names in APART, or UNTIED, without those that the model has none of
    tied: bool  # the head is the embedding, and counted there
    float_inputs: list[str]  # inputs that the mode should put on a grid and cannot reach
    forms: dict[str, int] = field(default_factory=dict)  # elements by the form that a library gave them
    stated: str | None = None  # of a checkpoint: the tool and its scheme, as its configuration states them
    contradictions: list[str] = field(default_factory=list)  # what is not as the configuration states

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
            "quantized by ": [self.stated] if self.stated else [],
            "as: ": [f"{elements:,} {form}" for form, elements in self.forms.items()],
            "not as its configuration states: ": self.contradictions,
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
        if isinstance(node.value, dict):  # written before there were forms
            node = Node(node.key, {"forms": {}, "stated": None, "contradictions": [], **node.value})
        return node.as_dataclass(
            cls,
            **counts,
            forms=lambda forms: {name: one.count() for name, one in forms.members(empty=True).items()},
            contradictions=lambda texts: [one.text() for one in texts.entries(empty=True)],
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
    return summarize(model, count_parameters(model, twin, recipe), recipe, statement_of(twin))


def summarize(
    model: nn.Module, counted: Sequence[CountedParameter], recipe: Recipe, stated: Statement | None = None
) -> Weights:
    """The counts of all parameters together; `stated` is what the checkpoint of the copy states."""
    forms: dict[str, int] = {}
    for one in counted:
        if one.form and one.on_grid:
            forms[one.form] = forms.get(one.form, 0) + one.on_grid
    kinds: dict[str, list[CountedParameter]] = {name: [] for name in ("weights", *APART)}
    for one in counted:
        kinds[one.kind].append(one)
    weights, mode = kinds.pop("weights"), find_mode(recipe.mode)
    unreached = [
        with_stars(f"{name}.{site}")
        for name, layer in linear_layers(model, recipe.include).items()
        for site in (layer.float_inputs if mode.kind == "linear" and mode.inputs else ())
    ]
    tied = is_tied(model)
    if tied and kinds["head"]:
        kinds[UNTIED] = kinds.pop("head")
    return Weights(
        **asdict(_sum(weights)),
        float_weights=float_groups(weights),
        apart={name: _sum(some) for name, some in kinds.items() if some},
        tied=tied and UNTIED not in kinds,
        float_inputs=list(dict.fromkeys(unreached)),
        forms=forms,
        stated=str(stated) if stated else None,
        contradictions=_contradictions(counted, stated.forms) if stated and stated.forms is not None else [],
    )


def _contradictions(counted: Sequence[CountedParameter], stated: Mapping[str, str]) -> list[str]:
    """What a checkpoint states to be quantized and is float, or is not there, and the other way round."""
    found = {one.name: one.on_grid > 0 for one in counted}
    groups = {
        "stated to be quantized, but float": [name for name in stated if not found.get(name, True)],
        "stated to be quantized, but no parameter of the model": [name for name in stated if name not in found],
        "quantized, but not stated to be": [name for name, is_on in found.items() if is_on and name not in stated],
    }
    return [f"{first_few(names)} ({what})" for what, names in groups.items() if names]


def is_tied(model: nn.Module) -> bool:
    """Whether the head is the embedding."""
    of_head, of_embedding = (getattr(found(model), "weight", None) for found in (output_head, input_embedding))
    return of_head is not None and of_head is of_embedding


@torch.no_grad()
def count_parameters(model: nn.Module, twin: nn.Module, recipe: Recipe) -> list[CountedParameter]:
    """Every parameter of the float model, once, in model order; then tied ones that the copy has apart."""
    mode = find_mode(recipe.mode)
    format = recipe.format if mode.kind in ("ssm", "linear") else None
    modules, copies = dict(model.named_modules()), dict(twin.named_parameters(remove_duplicate=False))
    start = _prefix(model, copies)
    layers, claimed, kept = linear_weights(model, recipe.include), _claimed(model, recipe), keeps(mode)
    head, embedding, stated = output_head(model), input_embedding(model), statement_of(twin)
    by_file = stated.forms or {} if stated and stated.is_dequantized else {}
    parts = {name: part for part, names in included_parts(model).items() for name in names}
    of_ssm = ssm_convolutions(model)
    parameters = dict(model.named_parameters())
    if {"embedding", "head"} & set(recipe.include) and is_tied(model):
        heads = [f"{name}.weight" for name, part in parts.items() if part == "head"]
        parameters |= {name: model.get_parameter(name) for name in heads}
    found = []
    for name, parameter in parameters.items():
        copied, other = copies.get(f"{start}{name}"), ""
        form = by_file.get(name) or (_form(twin, f"{start}{name}") if mode.kind == "user" else "")
        if mode.kind == "float":
            on_grid = 0
        elif form or copied is None or _is_packed(parameter, copied):
            on_grid = parameter.numel() if form or copied is not None else 0
        elif mode.source:
            on_grid = 0
            other = "" if torch.equal(parameter, copied.to(parameter)) else ", other values than the model's"
        else:
            tensors = (parameter.detach(), copied.detach().to(parameter.device))
            split = layers[name].matrices if name in layers else lambda tensor: [tensor]
            pairs = zip(*map(split, tensors), strict=True)
            on_grid = sum(old.numel() for old, new in pairs if _on_grid(old, new, format, claimed=name in claimed))
        owner, _, own = name.rpartition(".")
        kind = _kind(modules[owner], own, parameter, head, embedding)
        what = "routers" if parts.get(owner) == "router" else _what(modules[owner], own, parameter)
        what = "not in the copy" if copied is None and not on_grid else f"{what}{other}"
        if not on_grid and (kept(name) or kept(owner)):
            what += ", kept float"
        elif not on_grid and mode.kind == "linear":
            what += ", not in include" if what == "routers" else ", of the SSM modes" if owner in of_ssm else ""
        found.append(CountedParameter(name, kind, what, on_grid, parameter.numel() - on_grid, form))
    counted, shared = {one.name for one in found}, copies.keys() - dict(twin.named_parameters()).keys()
    for name, parameter in model.named_parameters(remove_duplicate=False) if mode.kind == "user" else ():
        owner, _, own = name.rpartition(".")
        is_known = name in counted or f"{start}{name}" in shared
        if not is_known and (form := _form(twin, f"{start}{name}")):
            kind = _kind(modules[owner], own, parameter, head, embedding)
            found.append(CountedParameter(name, kind, "tied in the model", parameter.numel(), 0, form))
    return found


def count_by_layer(
    counted: Iterable[CountedParameter], modules: Mapping[str, str], *, whole: str = LOGITS
) -> dict[str, Count]:
    """The weights of each layer by its label; under `whole` those of the whole model, with embedding and head.

    `modules` has the names of the layers' modules. The count of the whole does not depend on which are selected.
    """
    found = [one for one in counted if one.kind in ("weights", "embedding", "head")]
    inside = {label: [one for one in found if one.name.startswith(f"{module}.")] for label, module in modules.items()}
    return {label: _sum(some) for label, some in {**inside, whole: found}.items()}


def _claimed(model: nn.Module, recipe: Recipe) -> set[str]:
    """The parameters that one of probe's modes quantizes, without those that it keeps float."""
    mode = find_mode(recipe.mode)
    found: list[str] = list(linear_weights(model, recipe.include)) if mode.kind == "linear" else []
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


def _form(twin: nn.Module, name: str) -> str:
    """The form of a parameter in the copy; empty for plain floats, and where its module is gone."""
    owner, _, own = name.rpartition(".")
    try:
        return weight_form(twin.get_submodule(owner), own)
    except AttributeError:
        return ""


def _prefix(model: nn.Module, copies: Mapping[str, Tensor]) -> str:
    """What the copy puts before the names of the model, such as the _orig_mod. of torch.compile."""
    first = next((name for name, _ in model.named_parameters()), "")
    if first in copies:
        return ""
    return next((name.removesuffix(first) for name in copies if name.endswith(f".{first}")), "")


def _kind(module: nn.Module, own: str, parameter: Tensor, head: object, embedding: object) -> str:
    is_table = module is embedding and parameter.dim() > 1 and not isinstance(module, CONVOLUTIONS)
    if isinstance(module, nn.Embedding) or is_table:
        return "embedding"
    if own.endswith("bias"):
        return "biases"
    if parameter.dim() > 1:
        return "head" if module is head else "weights"
    return "norms" if "norm" in type(module).__name__.lower() else "other vectors"


def _what(module: nn.Module, own: str, parameter: Tensor) -> str:
    if own == "weight" and isinstance(module, nn.Linear):
        return "nn.Linear"
    if own == "weight" and isinstance(module, CONVOLUTIONS):
        return "convolutions"
    return "Conv1D" if stores_inputs_first(module) else f"{parameter.dim()}-D parameters"
