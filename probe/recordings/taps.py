"""Taps: the places in a model from which tensors are recorded, and a run that passes each tensor to a consumer.

Hooks read the tensors of a plain model. On compiled graphs hooks may not fire; there, a model wrapped by
`record_outputs` returns its tensors itself.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from probe.data.calls import Batch
from probe.data.library_logs import quietly
from probe.models.forward import call_model, call_options, run_model, tensor_in
from probe.models.layers import select
from probe.models.mamba_blocks import mamba_blocks
from probe.models.offload import device_of
from probe.models.outside import embedding_of, final_norm_of
from probe.running.capture import UncoveredError, capture, first_tensor
from probe.running.coverage import watching
from probe.running.recipes import Recipe
from probe.words import LOGITS, WHOLE, look_up

Side = Literal["input", "output"]
Consumer = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class TapPoints:
    """The tensors to record."""

    layers: tuple[str, ...]  # their labels
    sources: dict[str, tuple[str, Side]]  # the module of each tensor, and the side of it
    whole: str = ""  # the label of the whole model's output, logits or output; empty: it is not recorded

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors, the output of the model last."""
        return (*self.sources, *((self.whole,) if self.whole else ()))


#: Taps of every selected layer: the name of the tensor, the module in the layer, and the side of it. {mixer} is what
#: the layer calls its Mamba mixer.
OF_LAYERS: dict[str, tuple[tuple[str, str, Side], ...]] = {
    "inputs": (("input", "", "input"),),
    "mixer": (("mixer.output", ".{mixer}", "output"),),
    "conv1d": (("conv1d.output", ".{mixer}.sites.conv1d.output", "output"),),
    "scan": (
        ("scan.input", ".{mixer}.sites.scan.u", "output"),
        ("scan.output", ".{mixer}.sites.scan.y", "output"),
    ),
}
#: Taps of the model: the module, if it has one.
OF_MODEL: dict[str, Callable[[nn.Module], str | None]] = {"embedding": embedding_of, "final_norm": final_norm_of}
TAPS = (*OF_LAYERS, *OF_MODEL, *WHOLE)


def tap_points(
    model: nn.Module, layers: Sequence[str | int] | str | int, taps: Sequence[str] = (), *, model_name: str = "MODEL"
) -> TapPoints:
    """The outputs of `layers`, in the syntax of `select`, and the tensors of the taps.

    A tap of layers applies to the layers that have it. A tap that nothing has is an error that lists the others.
    """
    selected = select(model, layers, model_name=model_name)
    there = {name for name, _ in model.named_modules()}
    sources: dict[str, tuple[str, Side]] = {f"{label}.output": (module, "output") for label, module in selected.items()}
    for tap in taps:
        look_up("tap", tap, dict.fromkeys(TAPS))
        found = _sources(model, tap, selected, there)
        if not found and tap not in WHOLE:
            has = [one for one in TAPS if one in WHOLE or _sources(model, one, selected, there)]
            raise ValueError(f"{model_name} has no tap {tap!r} at these layers. It has: {', '.join(has)}.")
        sources |= found
    return TapPoints(tuple(selected), sources, next((tap for tap in taps if tap in WHOLE), ""))


def _sources(model: nn.Module, tap: str, selected: dict[str, str], there: set[str]) -> dict[str, tuple[str, Side]]:
    if tap in OF_MODEL:
        found = OF_MODEL[tap](model)
        return {} if found is None else {f"{tap}.output": (found, "output")}
    mixers = [block.mixer_name for block in mamba_blocks(model)]
    sources: dict[str, tuple[str, Side]] = {}
    for label, module in selected.items():
        own = next((name.removeprefix(f"{module}.") for name in mixers if name.startswith(f"{module}.")), "mixer")
        for name, inside, side in OF_LAYERS.get(tap, ()):
            place = f"{module}{inside.format(mixer=own)}"
            if place in there:
                sources[f"{label}.{name}"] = place, side
    return sources


# ------------------------------------------------------------------------------------- models that return tensors


class RecordedOutputs(nn.Module):
    """The wrapper that record_outputs makes: it maps its input to a dict of tensors by name, its output among them.

    The hooks belong to the wrapped model and are traced with it, so the tensors are results of the graph. All of them
    are in memory until the forward ends.
    """

    def __init__(self, model: nn.Module, points: TapPoints) -> None:
        super().__init__()
        self.model = model
        self.points = points
        self.options = call_options(model)
        self.tensors: dict[str, Tensor] = {}
        modules = dict(model.named_modules())
        for name, (module, side) in points.sources.items():
            modules[module].register_forward_hook(self._keep(name, side), with_kwargs=True)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """`layer_0.output` and so on, as the modules returned them, and `logits` (or `output`)."""
        self.tensors = {}
        output = tensor_in(
            self.model(*args, **{**self.options, **kwargs}), self.model
        )  # nothing that cannot be compiled
        found = self.tensors
        self.tensors = {}
        return {**found, self.points.whole or LOGITS: output}

    def _keep(self, name: str, side: Side) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            value = output if side == "output" else (*args, *kwargs.values())
            self.tensors[name] = first_tensor(name, side, value).clone()  # a later layer may add to it in place

        return keep


def record_outputs(
    model: nn.Module, layers: Sequence[str | int] | str | int = ("all",), *, taps: Sequence[str] = ()
) -> RecordedOutputs:
    """Wrap a model so that it returns its layer outputs beside its logits, compiled or not.

        compiled = torch.compile(probe.record_outputs(model, ["first", "last"]), fullgraph=True)
        probe.record("outputs", model=compiled, batches=batches)

    The hooks stay on `model`: use only the wrapper from then on.
    """
    return RecordedOutputs(model, tap_points(model, layers, taps, model_name=type(model).__name__))


def is_compiled(model: nn.Module) -> bool:
    """Whether the model is the result of torch.compile."""
    return hasattr(model, "_orig_mod")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model under torch.compile and record_outputs, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    inner = inner.model if isinstance(inner, RecordedOutputs) else inner
    assert isinstance(inner, nn.Module)
    return inner


def points_returned(model: nn.Module) -> TapPoints | None:
    """The tensors that a model wrapped by record_outputs returns, compiled or not; None for any other model."""
    inner = getattr(model, "_orig_mod", model)
    return replace(inner.points, whole=inner.points.whole or LOGITS) if isinstance(inner, RecordedOutputs) else None


# ------------------------------------------------------------------------------------------------------- running


@torch.no_grad()
def run_hooked(
    model: nn.Module, recipe: Recipe, points: TapPoints, batches: Sequence[Batch], consumer: Consumer
) -> dict[str, str]:
    """Run all batches and pass each tensor to `consumer` as it appears; returns what is not on the recipe's grid.

    Only one tensor is in memory beside the forward. A module that never ran is an UncoveredError.
    """
    wanted: dict[str, list[str]] = {}
    for name, (module, side) in points.sources.items():
        wanted.setdefault(f"{module}.{side}", []).append(name)
    with_inputs = {module: None for module, side in points.sources.values() if side == "input"}
    others = {module: None for module, _ in points.sources.values() if module not in with_inputs}
    device = device_of(model)
    try:
        with watching(model, recipe) as stray, ExitStack() as hooks:
            for modules, inputs in ((with_inputs, True), (others, False)):
                patterns = [f"^{re.escape(module)}$" for module in modules]
                if patterns:
                    renamed = _renamed(select(model, patterns), wanted, consumer)
                    hooks.enter_context(capture(model, patterns, inputs=inputs, consumer=renamed))
            for batch in batches:
                given = batch.to(device)
                output = run_model(model, given)
                if points.whole:
                    consumer(points.whole, tensor_in(output, model))
    except UncoveredError as problem:
        if not is_compiled(model):
            raise
        raise UncoveredError(
            f"{problem} A compiled model can return its layer outputs itself: "
            "torch.compile(probe.record_outputs(model, layers))."
        ) from None
    return stray


def _renamed(selected: dict[str, str], wanted: dict[str, list[str]], consumer: Consumer) -> Consumer:
    """A consumer that takes tensors by their names in `capture` and passes them on by those in the recording."""

    def consume(name: str, tensor: Tensor) -> None:
        label, _, side = name.rpartition(".")
        for one in wanted.get(f"{selected[label]}.{side}", ()):
            consumer(one, tensor)

    return consume


@torch.no_grad()
def run_returning(
    model: nn.Module, recipe: Recipe, points: TapPoints, batches: Sequence[Batch], consumer: Consumer
) -> dict[str, str]:
    """The same for a model of record_outputs. Its sites are inside the graph, so only weights are checked."""
    with watching(unwrapped(model), recipe) as stray:
        pass
    device = device_of(model)
    for batch in batches:
        with quietly():
            found = _outputs(model, batch.to(device))
        missing = [name for name in points.names if name not in found]
        if missing:
            advice = "Make it with probe.record_outputs of these layers."
            raise UncoveredError(f"the model did not return {', '.join(missing[:5])}. {advice}")
        for name in points.names:
            consumer(name, found.pop(name))
    return stray


def _outputs(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    from torch._dynamo.exc import TorchDynamoException

    try:
        return dict(call_model(model, batch, {}))
    except TorchDynamoException as problem:
        words = " ".join(str(problem).split())[:200]
        raise ValueError(f"the model cannot be compiled here: {words}. Record it without --compile.") from None
