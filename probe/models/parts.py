"""Parts of a model that linear modes leave float unless asked: routers, embedding, head; and the SSM convolutions."""

from torch import Tensor, nn

from probe.models.layers import blocks_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def included_parts(model: nn.Module) -> dict[str, list[str]]:
    """By the names in INCLUDABLE, the modules of the model that are such a part."""
    names = {module: name for name, module in model.named_modules()}
    head = output_head(model)
    return {
        "router": _routers(model),
        "embedding": [names[table] for table in _token_embeddings(model) if table is not head],
        "head": [names[head]] if head in names else [],
    }


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes the logits: the one that the model names.

    For other models, the last nn.Linear outside of the stack of layers with as many outputs as there are tokens.
    """
    if callable(getattr(model, "get_output_embeddings", None)):
        return _named_by(model, "get_output_embeddings")
    tokens = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    stack = tuple(f"{name}." for name in blocks_of(model))
    outside = [module for name, module in model.named_modules() if name and not f"{name}.".startswith(stack)]
    heads = [module for module in outside if isinstance(module, nn.Linear) and module.out_features in tokens]
    return heads[-1] if heads else None


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The module that makes vectors of tokens, where the model names one."""
    return _named_by(model, "get_input_embeddings")


def _named_by(model: nn.Module, method: str) -> nn.Module | None:
    get = getattr(model, method, None)
    try:
        found = get() if callable(get) else None
    except (AttributeError, NotImplementedError):  # of transformers' models without one
        return None
    return found if isinstance(found, nn.Module) else None


def _token_embeddings(model: nn.Module) -> list[nn.Module]:
    """The embedding of tokens, and every other table that shares its weight, as those of T5's encoder and decoder."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    stated = input_embedding(model)
    first = stated if stated is not None or not tables else tables[0]
    return [table for table in tables if isinstance(first, nn.Embedding) and table.weight is first.weight]


def _routers(model: nn.Module) -> list[str]:
    """The modules that choose experts: those called router, and those beside experts with an output for each of them.

    A module inside a shared expert is none.
    """
    modules = dict(model.named_modules())
    found = {name for name in modules if "router" in name.split(".")}
    for name, module in modules.items():
        owner, _, child = name.rpartition(".")
        if child != "experts":
            continue
        first = next((weight for weight in module.parameters(recurse=False) if weight.dim() == 3), None)
        count = len(first) if first is not None else len(list(module.children()))
        for other, beside in modules[owner].named_modules():
            weight = own_weight(beside)
            if "expert" not in other and weight is not None and len(weight) == count > 1:
                found.add(f"{owner}.{other}" if owner else other)
    return [name for name in modules if name in found and own_weight(modules[name]) is not None]


def own_weight(module: nn.Module) -> Tensor | None:
    """The weight of a module, if it is a parameter of its own with two dimensions."""
    weight = module._parameters.get("weight")
    return weight if weight is not None and weight.dim() == 2 else None


def ssm_convolutions(model: nn.Module) -> set[str]:
    """The convolutions of Mamba mixers, which are the modules with a state matrix A_log and a skip connection D."""
    mixers = {name for name, module in model.named_modules() if {"A_log", "D"} <= module._parameters.keys()}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, CONVOLUTIONS) and name.rpartition(".")[0] in mixers
    }
