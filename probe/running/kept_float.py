"""What a mode keeps float: the modules of a model that its patterns match, and the layers that follow from them."""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from probe.models.mamba_blocks import SITE_MIXERS, mamba_blocks
from probe.models.parts import input_embedding, output_head
from probe.running.declarations import name_matcher
from probe.running.modes import Mode
from probe.words import near_or_first

#: The ends of the names of parameters that belong to a Mamba mixer itself.
OWN_WEIGHTS = tuple(dict.fromkeys(f".{name}" for kind in SITE_MIXERS.values() for name in kind.layout.own_weights))


def keeps(mode: Mode) -> Callable[[str], bool]:
    """Whether the mode keeps the module of a name float; the tensors of a Mamba mixer have names too."""
    return name_matcher(mode.keep_float)


def float_layers(model: nn.Module, mode: Mode, modules: Mapping[str, str]) -> frozenset[str]:
    """The labels of the layers all of whose weights the mode keeps float; `modules` has the names by label.

    A layer without weights is one if its own name matches. Under an SSM mode so is a layer without a Mamba mixer: those
    of a hybrid with attention stay as they are.
    """
    mixers = [f"{block.mixer_name}." for block in mamba_blocks(model)] if mode.kind == "ssm" else []
    apart = frozenset(
        label
        for label, module in modules.items()
        if mixers and not any(one.startswith(f"{module}.") or f"{module}.".startswith(one) for one in mixers)
    )
    if not mode.keep_float:
        return apart
    kept = keeps(mode)
    weights = [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]

    def is_float(module: str) -> bool:
        inside = [name for name in weights if name.startswith(f"{module}.")]
        return all(map(_keeps_parameter(kept), inside)) if inside else kept(module)

    return apart | {label for label, module in modules.items() if is_float(module)}


def float_names(model: nn.Module) -> list[str]:
    """Everything that a pattern may name: modules, and the sites and parameters of Mamba mixers."""
    found = dict.fromkeys(name for name, _ in model.named_modules() if name)
    for block in mamba_blocks(model):
        parts = (*(f"sites.{site}" for site in block.layout.sites), *block.layout.own_weights)
        found |= dict.fromkeys(f"{block.mixer_name}.{part}" for part in parts)
    return list(found)


def check_kept(model: nn.Module, mode: Mode, *, model_name: str) -> None:
    """Refuse patterns that match nothing in the model, or everything that could be quantized."""
    if not mode.keep_float:
        return
    names = float_names(model)
    for pattern in mode.keep_float:
        if not any(map(name_matcher([pattern]), names)):
            raise ValueError(
                f"keep_float of mode {mode.name}: {pattern!r} matches no module of {model_name}. "
                f"{near_or_first(pattern, names)} List them with: probe layers --model {model_name}"
            )
    kept = _keeps_parameter(keeps(mode))
    weights = _weights(model)
    if weights and all(map(kept, weights)):
        raise ValueError(
            f"keep_float of mode {mode.name} matches all {len(weights)} weights of {model_name}, so nothing would be "
            "quantized. Leave out a pattern; the float model itself is mode fp32."
        )


def set_aside(twin: nn.Module, mode: Mode) -> dict[str, nn.Module]:
    """Copies of the modules that the mode keeps float, the outermost ones, by name."""
    kept, found = keeps(mode), dict[str, nn.Module]()
    for name, module in twin.named_modules() if mode.keep_float else ():
        if kept(name) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = copy.deepcopy(module)
    return found


def put_back(twin: nn.Module, aside: Mapping[str, nn.Module], mode: Mode) -> None:
    """Put the float modules back in their places, whatever became of them meanwhile."""
    for name, module in aside.items():
        parent, _, child = name.rpartition(".")
        try:
            setattr(twin.get_submodule(parent), child, module)
        except AttributeError:
            raise ValueError(
                f"mode {mode.name} keeps {name} float, but the model that {mode.base} builds has no {parent}. "
                "Name a module around it in keep_float."
            ) from None


def changed_weights(model: nn.Module, twin: nn.Module, mode: Mode) -> list[str]:
    """The parameters of kept modules that are not those of the float model in the copy that the mode made.

    Nothing of an SSM mode: parts of its mixers are kept in the rotated basis.
    """
    if not mode.keep_float or mode.kind == "ssm":
        return []
    kept, found = _keeps_parameter(keeps(mode)), dict(twin.named_parameters())
    every = [(name, plain) for name, plain in model.named_parameters() if kept(name)]
    return [name for name, plain in every if name not in found or not _same(found[name], plain)]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or other.is_meta:  # offloaded: the injected run shows it
        return True
    return one.shape == other.shape and bool(torch.equal(one.to(other.device, other.dtype), other))


def _keeps_parameter(kept: Callable[[str], bool]) -> Callable[[str], bool]:
    """A parameter is kept with its module; those of a Mamba mixer itself, such as A_log, also by their own names."""
    return lambda name: kept(name.rpartition(".")[0]) or (name.endswith(OWN_WEIGHTS) and kept(name))


def _weights(model: nn.Module) -> list[str]:
    """The parameters that a mode could quantize: all of two or more dimensions but the embedding and the head."""
    outside = [input_embedding(model), output_head(model), *(m for m in model.modules() if isinstance(m, nn.Embedding))]
    apart = {id(parameter) for module in outside if module is not None for parameter in module.parameters()}
    return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2 and id(parameter) not in apart]
