"""One recipe over all batches, its tensors handed on as they appear; what of it is off its grid is returned."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from probe.data.transformers_logs import quietly
from probe.models.layers import select
from probe.recordings.returning import is_compiled, unwrapped
from probe.recordings.taps import Points
from probe.running.capture import UncoveredError, capture
from probe.running.coverage import watching
from probe.running.recipes import Recipe
from probe.running.reference import logits_of
from probe.words import LOGITS

Take = Callable[[str, Tensor], None]


@torch.no_grad()
def run_hooked(
    model: nn.Module, recipe: Recipe, points: Points, batches: Sequence[Tensor], take: Take
) -> dict[str, str]:
    """Every tensor is taken as its module gives it, and let go: no more than one is ever held.

    A module that never ran is an UncoveredError.
    """
    wanted: dict[str, list[str]] = {}
    for name, (module, side) in points.taken.items():
        wanted.setdefault(f"{module}.{side}", []).append(name)
    fed = {module: None for module, side in points.taken.values() if side == "input"}
    others = {module: None for module, _ in points.taken.values() if module not in fed}
    device = _device_of(model)
    try:
        with watching(model, recipe) as stray, ExitStack() as hooks:
            for modules, inputs in ((fed, True), (others, False)):
                patterns = [f"^{re.escape(module)}$" for module in modules]
                if patterns:
                    consumer = _renamed(select(model, patterns), wanted, take)
                    hooks.enter_context(capture(model, patterns, inputs=inputs, consumer=consumer))
            for batch in batches:
                logits = logits_of(model, batch.to(device))
                if points.logits:
                    take(LOGITS, logits)
    except UncoveredError as problem:
        if not is_compiled(model):
            raise
        raise UncoveredError(
            f"{problem} A compiled model can return its layer outputs itself: "
            "torch.compile(probe.record_outputs(model, layers))."
        ) from None
    return stray


def _renamed(selected: dict[str, str], wanted: dict[str, list[str]], take: Take) -> Take:
    """From what `capture` calls a tensor to what the recording does."""

    def consume(name: str, tensor: Tensor) -> None:
        label, _, side = name.rpartition(".")
        for one in wanted.get(f"{selected[label]}.{side}", ()):
            take(one, tensor)

    return consume


@torch.no_grad()
def run_returning(
    model: nn.Module, recipe: Recipe, points: Points, batches: Sequence[Tensor], take: Take
) -> dict[str, str]:
    """A model of record_outputs returns its tensors. Sites are part of its graph: only weights are looked at."""
    with watching(unwrapped(model), recipe) as stray:
        pass
    device = _device_of(model)
    for batch in batches:
        with quietly():
            found = _called(model, batch.to(device))
        missing = [name for name in points.names if name not in found]
        if missing:
            raise UncoveredError(
                f"the model did not return {', '.join(missing[:5])}. Make it with probe.record_outputs of these layers."
            )
        for name in points.names:
            take(name, found.pop(name))
    return stray


def _called(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    from torch._dynamo.exc import TorchDynamoException

    try:
        return dict(model(batch))
    except TorchDynamoException as problem:
        words = " ".join(str(problem).split())[:200]
        raise ValueError(f"the model cannot be compiled here: {words}. Record it without --compile.") from None


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
