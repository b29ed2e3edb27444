"""What lies outside the layers of a model: its embedding, its final norm and its output head, by module name."""

from torch import nn

from probe.models.layers import blocks_of
from probe.models.parts import input_embedding, output_head

#: Parts of the names that a final norm has.
NORMS = ("norm", "ln_f")


def embedding_of(model: nn.Module) -> str | None:
    """The embedding that a model of transformers states; for other models, the first nn.Embedding."""
    stated = _name_of(model, input_embedding(model))
    found = (name for name, module in model.named_modules() if isinstance(module, nn.Embedding))
    return stated or next(found, None)


def final_norm_of(model: nn.Module) -> str | None:
    """The norm beside the list of layers."""
    stack = blocks_of(model)
    if not stack:
        return None
    parent = stack[0].rpartition(".")[0].rpartition(".")[0]
    beside = [name for name, _ in model.get_submodule(parent).named_children() if any(n in name for n in NORMS)]
    return ".".join(filter(None, (parent, beside[-1]))) if beside else None


def head_of(model: nn.Module) -> str | None:
    """The module that makes the logits, where the model states it."""
    return _name_of(model, output_head(model))


def outside_modules(model: nn.Module) -> dict[str, str]:
    """By the labels in `words.OUTSIDE`, in that order, the names of those modules that the model has."""
    found = {"embedding": embedding_of(model), "norm": final_norm_of(model), "head": head_of(model)}
    return {label: name for label, name in found.items() if name}


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is wanted), None)
