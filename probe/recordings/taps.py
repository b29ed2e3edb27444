"""Where tensors are taken from a model: the outputs of layers, and taps beside and inside them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from probe.models.layers import blocks_of, select
from probe.words import LOGITS, look_up

Side = Literal["input", "output"]
NORMS = ("norm", "ln_f")


@dataclass(frozen=True)
class Points:
    """Tensors by name, each with its module and the side of it."""

    layers: tuple[str, ...]
    taken: dict[str, tuple[str, Side]]
    logits: bool

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the logits last."""
        return (*self.taken, *((LOGITS,) if self.logits else ()))


def _inputs(model: nn.Module, label: str, module: str) -> Iterator[tuple[str, str, Side]]:
    yield f"{label}.input", module, "input"


def _mixer(model: nn.Module, label: str, module: str) -> Iterator[tuple[str, str, Side]]:
    yield f"{label}.mixer.output", f"{module}.mixer", "output"


def _conv1d(model: nn.Module, label: str, module: str) -> Iterator[tuple[str, str, Side]]:
    yield f"{label}.conv1d.output", f"{module}.mixer.sites.conv1d.output", "output"


def _scan(model: nn.Module, label: str, module: str) -> Iterator[tuple[str, str, Side]]:
    yield f"{label}.scan.input", f"{module}.mixer.sites.scan.u", "output"
    yield f"{label}.scan.output", f"{module}.mixer.sites.scan.y", "output"


def _embedding(model: nn.Module) -> str | None:
    """The module that a model of transformers says is its embedding, else the first nn.Embedding."""
    known = getattr(model, "get_input_embeddings", None)
    try:
        found = known() if known is not None else None
    except (AttributeError, NotImplementedError):
        found = None
    names = [name for name, module in model.named_modules() if module is found or isinstance(module, nn.Embedding)]
    exact = [name for name, module in model.named_modules() if module is found]
    return next(iter(exact or names), None)


def _final_norm(model: nn.Module) -> str | None:
    """The norm beside the list of layers."""
    stack = blocks_of(model)
    if not stack:
        return None
    parent = stack[0].rpartition(".")[0].rpartition(".")[0]
    beside = [name for name, _ in model.get_submodule(parent).named_children() if any(n in name for n in NORMS)]
    return ".".join(filter(None, (parent, beside[-1]))) if beside else None


Inside = Callable[[nn.Module, str, str], Iterator[tuple[str, str, Side]]]
#: Taps of every selected layer, and taps of the model.
OF_LAYERS: dict[str, Inside] = {"inputs": _inputs, "mixer": _mixer, "conv1d": _conv1d, "scan": _scan}
OF_MODEL: dict[str, Callable[[nn.Module], str | None]] = {"embedding": _embedding, "final_norm": _final_norm}
TAPS = (*OF_LAYERS, *OF_MODEL, LOGITS)


def points_of(
    model: nn.Module, layers: Sequence[str | int], taps: Sequence[str] = (), *, model_name: str = "MODEL"
) -> Points:
    """The outputs of `layers`, as `select` understands them, and what the taps add.

    A tap of layers is taken wherever a layer has it; one that nothing has is an error that lists what there is.
    """
    selected = select(model, layers, model_name=model_name)
    there = {name for name, _ in model.named_modules()}
    taken: dict[str, tuple[str, Side]] = {f"{label}.output": (module, "output") for label, module in selected.items()}
    for tap in taps:
        look_up("tap", tap, dict.fromkeys(TAPS))
        found = _points(model, tap, selected, there)
        if not found and tap != LOGITS:
            has = [one for one in TAPS if one == LOGITS or _points(model, one, selected, there)]
            raise ValueError(f"{model_name} has no tap {tap!r} at these layers. It has: {', '.join(has)}.")
        taken |= found
    return Points(tuple(selected), taken, LOGITS in taps)


def _points(model: nn.Module, tap: str, selected: dict[str, str], there: set[str]) -> dict[str, tuple[str, Side]]:
    if tap in OF_MODEL:
        module = OF_MODEL[tap](model)
        return {} if module is None else {f"{tap}.output": (module, "output")}
    if tap not in OF_LAYERS:
        return {}
    points = [point for label, module in selected.items() for point in OF_LAYERS[tap](model, label, module)]
    return {name: (module, side) for name, module, side in points if module in there}
