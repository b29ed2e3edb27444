"""Measuring a recipe against the float reference, layer by layer, without keeping more than one layer.

A recipe must change every selected layer except those that its mode declares float, which must keep their bits. This
one rule holds in all commands and in the gate; `application_problem` states it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import torch
from torch import Tensor, nn

from probe.data.calls import Batch, shortened
from probe.files.checked_json import finite
from probe.metrics import Comparison, Metrics
from probe.models.outputs import VALUES, OutputKind
from probe.running.calibration import Calibration
from probe.running.kept_float import changed_weights, float_layers
from probe.running.modes import equal_to, find_mode
from probe.running.outputs import OutputComparison, OutputMetrics
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference, check_reference, replay, run_reference
from probe.running.weights import Weights, count_weights
from probe.words import first_few

#: Two float32 runs of one layer that only add in another order differ by less than this, relative to its output;
#: no format rounds so finely (float16: 1e-7).
NOISE = 1e-11


#: Tokens of the one sequence on which `check_twin` runs.
SHORT = 64


class NotAppliedError(ValueError):
    """A layer that the recipe left as it was, or changed although its mode declares it float."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One recipe against the reference."""

    recipe: Recipe
    layers: dict[str, Metrics]
    output: OutputMetrics
    weights: Weights

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: the psnr and sqnr of a lossless layer are null, as `identical` explains."""
        layers = {label: metrics.as_dict() for label, metrics in self.layers.items()}
        mode = find_mode(self.recipe.mode)
        same = str(Recipe(mode.equals, self.recipe.format)) if mode.equals else None
        return {
            "recipe": str(self.recipe),
            "equal_by_definition": same,
            "keep_float": list(mode.keep_float),
            "include": list(self.recipe.include),
            "weights": self.weights.as_dict(),
            "layers": finite(layers),
            self.output.kind.label: finite(self.output.as_dict()),
        }


class Measuring:
    """The figures of a recipe on some of the batches, gathered; those of a row of shards merge in their order."""

    def __init__(self, recipe: Recipe, labels: Sequence[str], kind: OutputKind, weights: Weights) -> None:
        self.recipe, self.weights = recipe, weights
        self.layers = {label: Comparison() for label in labels}
        self.output = OutputComparison(kind)

    def merge(self, other: "Measuring") -> Self:
        """Append the figures of the next shard; returns itself."""
        for label, layer in self.layers.items():
            layer.merge(other.layers[label])
        self.output.merge(other.output)
        return self

    def expect(self, times: Fraction) -> None:
        """All batches together are `times` as many as these: see `Comparison.expect`."""
        for part in (*self.layers.values(), self.output.values):
            part.expect(times)

    def measured(self) -> Measured:
        """The figures so far."""
        layers = {label: layer.metrics() for label, layer in self.layers.items()}
        return Measured(self.recipe, layers, self.output.metrics(), self.weights)


@torch.no_grad()
def measure(
    model: nn.Module,
    recipe: Recipe,
    reference: Reference,
    calibration: Calibration | None = None,
    *,
    injected: bool = False,
    short: Reference | None = None,
) -> Measured:
    """Run a recipe over the batches of the reference; every layer is compared as it appears and not kept.

    propagated (the default): the run of the whole quantized model, errors accumulating from layer to layer.
    injected: every layer is given the reference's input instead, so its figures show its own error only. The logits
    are still those of the propagated run.

    A recipe that was not applied to one of the layers is a NotAppliedError. A propagated run does not show that, so
    it is found on `short`, the reference of one short sequence, which is made if it is not given.
    """
    check_reference(model, reference)
    short = short or short_reference(model, reference.batches, reference.wanted)
    return measure_shard(model, recipe, reference, calibration, short, injected=injected).measured()


def measure_shard(
    model: nn.Module,
    recipe: Recipe,
    reference: Reference,
    calibration: Calibration | None,
    short: Reference | None,
    *,
    injected: bool,
) -> Measuring:
    """The figures over the batches of one reference; `short` None: another shard shows whether the recipe applies."""
    twin = apply(model, recipe, calibration)
    if not injected and short is not None:
        check_twin(model, twin, recipe, short)
    measuring = _measuring(model, twin, recipe, reference, injected=injected)
    if injected:
        _check_layers(model, twin, recipe, measuring.measured().layers, reference.modules)
    return measuring


def _measuring(model: nn.Module, twin: nn.Module, recipe: Recipe, reference: Reference, *, injected: bool) -> Measuring:
    measuring = Measuring(recipe, reference.layers, reference.kind, count_weights(model, twin, recipe))
    layers, whole = measuring.layers, measuring.output
    batches = iter(reference.batches)

    def compare(label: str, output: Tensor, expected: Tensor) -> None:
        if label == reference.kind.label:
            whole.update(output, expected, next(batches))
        elif not injected:
            layers[label].update(output, expected)

    replay(twin, reference, compare)
    if injected:
        replay(twin, reference, lambda label, output, expected: layers[label].update(output, expected), injected=True)
    return measuring


def is_float_output(metrics: Metrics) -> bool:
    """Whether an output is that of the float layer, to the bit or up to the order of sums."""
    return metrics.identical or (metrics.relative_mse is not None and metrics.relative_mse < NOISE)


def application_problem(metrics: Metrics, *, is_declared_float: bool) -> str:
    """What is wrong with a layer that was given the reference's input; empty if nothing is.

    `is_declared_float`: its mode keeps it float, so that it must keep its bits. Every other layer must change.
    """
    if is_declared_float:
        mse = "not finite" if metrics.mse is None else f"{metrics.mse:.3g}"
        return "" if metrics.identical else f"declared float, but changed: mse {mse}"
    if not is_float_output(metrics):
        return ""
    return f"its output is the float layer's {'to the bit' if metrics.identical else 'up to the order of sums'}"


def _check_layers(
    model: nn.Module, twin: nn.Module, recipe: Recipe, layers: Mapping[str, Metrics], modules: Mapping[str, str]
) -> None:
    """Refuse the injected figures of a recipe that was not applied; `modules` has the names of the layers' modules."""
    mode = find_mode(recipe.mode)
    if mode.is_reference:
        return
    declared = float_layers(model, mode, modules)
    problems = {
        label: problem
        for label, metrics in layers.items()
        if (problem := application_problem(metrics, is_declared_float=label in declared))
    }
    changed = [label for label in problems if label in declared] or changed_weights(model, twin, mode)
    if changed:
        first = changed[0]
        what = f"{problems[first]}, given the reference's input" if first in problems else "declared float, but changed"
        raise NotAppliedError(
            f"{recipe} was not applied as declared: {first} is {what}. "
            f"Keep {first_few(changed)} float, or change keep_float of mode {recipe.mode}."
        )
    if problems:
        raise NotAppliedError(
            f"{recipe} was not applied to {first_few(list(problems))}: given the reference's input, the output is "
            f"that of the float layer, to the bit or to the order of sums ({len(problems)} of {len(layers)} layers). "
            "Select layers that it changes, or declare those that stay float (keep_float)."
        )


def short_reference(model: nn.Module, batches: Sequence[Batch], layers: Sequence[str | int]) -> Reference:
    """The reference of the first SHORT tokens of one sequence, for `check_twin`; modules may run several times."""
    return run_reference(model, [shortened(batches[0], samples=1, tokens=SHORT)], layers, once=False, kind=VALUES)


@torch.no_grad()
def check_twin(model: nn.Module, twin: nn.Module, recipe: Recipe, short: Reference) -> None:
    """Refuse a copy of the model to whose layers the recipe was not applied, before anything longer is run."""
    if find_mode(recipe.mode).is_reference:
        return
    layers = {label: Comparison(percentiles=False) for label in short.layers}
    replay(twin, short, lambda label, output, expected: layers[label].update(output, expected), injected=True)
    _check_layers(model, twin, recipe, {label: layer.metrics() for label, layer in layers.items()}, short.modules)


@torch.no_grad()
def check_applied(
    model: nn.Module, recipe: Recipe, reference: Reference, calibration: Calibration | None = None
) -> Measured:
    """The injected measurement, after making sure that every layer is finite and as `application_problem` wants it."""
    check_reference(model, reference)
    twin = apply(model, recipe, calibration)
    measured = _measuring(model, twin, recipe, reference, injected=True).measured()
    broken = [label for label, metrics in measured.layers.items() if not metrics.finite]
    if broken:
        raise ValueError(f"{recipe} gives NaN or Inf in {', '.join(broken)}, given the finite input of the reference.")
    _check_layers(model, twin, recipe, measured.layers, reference.modules)
    return measured


def equal_groups(measured: Sequence[Measured]) -> tuple[list[list[Measured]], list[str]]:
    """The recipes whose modes are equal by definition, together; and a message for each that is not equal to it.

    What differs although it must not stays a group of its own.
    """
    groups: dict[tuple[str, str | None, int], list[Measured]] = {}
    problems = []
    for one in measured:
        definition = (equal_to(one.recipe.mode), one.recipe.format)
        first = groups.get((*definition, 0))
        if first is None:
            groups[(*definition, 0)] = [one]
        elif (one.layers, one.output) == (first[0].layers, first[0].output):
            first.append(one)
        else:
            groups[(*definition, len(groups))] = [one]
            layers = [label for label in one.layers if one.layers[label] != first[0].layers[label]]
            problems.append(
                f"{one.recipe} must be identical to {first[0].recipe}, by definition, and differs in "
                f"{first_few(layers) or one.output.kind.label}: one of the two is wrong."
            )
    return list(groups.values()), problems
