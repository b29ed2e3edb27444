"""Running recipes: each against the float reference, layer by layer, in one pass that keeps no more than a layer."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from probe.calibration import Calibration
from probe.hooks import capture
from probe.metrics import Comparison, LogitComparison, LogitMetrics, Metrics
from probe.models.load import fingerprint
from probe.modes import Recipe, apply, find_mode

#: Two float32 runs of one layer that only add in another order differ by less than this, relative to its output;
#: no format rounds so finely (float16: 1e-7).
NOISE = 1e-11


class NotAppliedError(ValueError):
    """A quantized layer gave the very bits of the float layer: the mode did nothing to it."""


@dataclass(frozen=True, eq=False)
class Reference:
    """What the float model gave: the outputs of the chosen layers and the logits, batch by batch."""

    model: str  # fingerprint of the weights
    batches: tuple[Tensor, ...]
    layers: tuple[str, ...]  # labels, in model order
    wanted: tuple[str | int, ...]  # as they were asked for
    modules: dict[str, str]  # label -> module name
    tensors: dict[str, list[Tensor]]  # layer_0.input, layer_0.output: one entry a batch
    logits: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Measured:
    """One recipe against the reference."""

    recipe: Recipe
    layers: dict[str, Metrics]
    logits: LogitMetrics

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: the psnr and sqnr of a lossless layer are null, as `identical` explains."""
        layers = {label: _jsonable(metrics.as_dict()) for label, metrics in self.layers.items()}
        return {"recipe": str(self.recipe), "layers": layers, "logits": _jsonable(self.logits.as_dict())}


def _jsonable(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


@torch.no_grad()
def run_reference(model: nn.Module, batches: Sequence[Tensor], layers: Sequence[str | int] = ("all",)) -> Reference:
    """Run the float model (mode fp32) and keep the inputs and outputs of `layers`."""
    if not batches:
        raise ValueError("there is nothing to run: not one batch was given. Pass at least one.")
    twin = apply(model, Recipe("fp32"))
    logits = []
    with capture(twin, layers, inputs=True) as captured:
        for batch in batches:
            logits.append(_logits(twin, batch))
    selected = captured.selected
    return Reference(
        fingerprint(model), tuple(batches), tuple(selected), tuple(layers), selected, captured.tensors, tuple(logits)
    )


@torch.no_grad()
def measure(
    model: nn.Module,
    recipe: Recipe,
    reference: Reference,
    calibration: Calibration | None = None,
    *,
    injected: bool = False,
) -> Measured:
    """Run a recipe over the batches of the reference; every layer is compared as it appears, and then let go.

    propagated (the default): the run of the whole quantized model, errors accumulating from layer to layer.
    injected: every layer is given the reference's input instead, so its figures are what it adds by itself.
    """
    if reference.model != fingerprint(model):
        raise ValueError(
            f"the reference is of a model with fingerprint {reference.model}, this one has {fingerprint(model)}. "
            "Make it again with probe.run_reference on this model."
        )
    twin = apply(model, recipe, calibration)
    missing = [name for name in reference.modules.values() if name not in dict(twin.named_modules())]
    if missing:
        raise ValueError(
            f"under {recipe} the model has no module {missing[0]}, which the reference has: is it the same model?"
        )
    layers = {label: Comparison() for label in reference.layers}
    seen = dict.fromkeys(reference.layers, 0)
    whole = LogitComparison()

    def compare(name: str, tensor: Tensor) -> None:
        label = name.removesuffix(".output")
        layers[label].update(tensor.float(), reference.tensors[name][seen[label]])
        seen[label] += 1

    with ExitStack() as hooks:
        if injected:
            hooks.enter_context(_injecting(twin, reference))
        hooks.enter_context(capture(twin, reference.wanted, consumer=compare))
        for batch, expected in zip(reference.batches, reference.logits, strict=True):
            got = _logits(twin, batch).float()
            whole.update(got[:, :-1], expected[:, :-1], batch[:, 1:])
    return Measured(recipe, {label: layer.metrics() for label, layer in layers.items()}, whole.metrics())


@contextmanager
def _injecting(twin: nn.Module, reference: Reference) -> Iterator[None]:
    """While it lasts, the first argument of every selected layer is the reference's input of that layer."""
    modules = dict(twin.named_modules())
    with ExitStack() as hooks:
        for label, name in reference.modules.items():
            stored = iter(reference.tensors[f"{label}.input"])

            def replace(module: nn.Module, args: tuple[Any, ...], stored: Iterator[Tensor] = stored) -> tuple[Any, ...]:
                return (next(stored).to(args[0].dtype), *args[1:])

            hooks.callback(modules[name].register_forward_pre_hook(replace).remove)
        yield


def check_applied(
    model: nn.Module, recipe: Recipe, reference: Reference, calibration: Calibration | None = None
) -> Measured:
    """The injected measurement, after making sure that every selected layer differs from its float self."""
    measured = measure(model, recipe, reference, calibration, injected=True)
    broken = [label for label, metrics in measured.layers.items() if not metrics.finite]
    if broken:
        raise ValueError(f"{recipe} gives NaN or Inf in {', '.join(broken)}, given the finite input of the reference.")
    untouched = [
        label
        for label, metrics in measured.layers.items()
        if metrics.identical or (metrics.relative_mse is not None and metrics.relative_mse < NOISE)
    ]
    if untouched and find_mode(recipe.mode).name != "fp32":
        raise NotAppliedError(
            f"{recipe} was not applied to {', '.join(untouched)}: given the reference's input, the output is "
            f"that of the float layer, to the bit or to the order of sums "
            f"({len(untouched)} of {len(measured.layers)} layers)."
        )
    return measured


def _logits(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch, use_cache=False) if hasattr(model, "config") else model(batch)
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise ValueError(
            f"{type(model).__name__} returned a {type(output).__name__} without logits; "
            "expected a causal language model."
        )
    return found
