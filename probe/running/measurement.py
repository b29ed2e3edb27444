"""Measuring a recipe against the float reference, layer by layer, without keeping more than one layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from probe.data.samples import CALIBRATION, EVALUATION, TextSamples
from probe.files.checked_json import finite
from probe.formats import PERCENTILE
from probe.metrics import Comparison, LogitComparison, LogitMetrics, Metrics
from probe.models.layers import select
from probe.models.loading import load_model
from probe.models.mamba import is_mamba
from probe.models.positions import check_positions
from probe.running.calibration import Calibration, calibrate_on
from probe.running.modes import find_mode
from probe.running.recipes import Recipe, apply, check_recipes, recipes_of
from probe.running.reference import Reference, check_reference, replay, run_reference
from probe.words import LOGITS

#: Two float32 runs of one layer that only add in another order differ by less than this, relative to its output;
#: no format rounds so finely (float16: 1e-7).
NOISE = 1e-11


class NotAppliedError(ValueError):
    """A quantized layer gave the very bits of the float layer: the mode did nothing to it."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One recipe against the reference."""

    recipe: Recipe
    layers: dict[str, Metrics]
    logits: LogitMetrics

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: the psnr and sqnr of a lossless layer are null, as `identical` explains."""
        layers = {label: metrics.as_dict() for label, metrics in self.layers.items()}
        return {"recipe": str(self.recipe), "layers": finite(layers), "logits": finite(self.logits.as_dict())}


@torch.no_grad()
def measure(
    model: nn.Module,
    recipe: Recipe,
    reference: Reference,
    calibration: Calibration | None = None,
    *,
    injected: bool = False,
) -> Measured:
    """Run a recipe over the batches of the reference; every layer is compared as it appears and not kept.

    propagated (the default): the run of the whole quantized model, errors accumulating from layer to layer.
    injected: every layer is given the reference's input instead, so its figures show its own error only. The logits
    are still those of the propagated run.
    """
    check_reference(model, reference)
    twin = apply(model, recipe, calibration)
    layers = {label: Comparison() for label in reference.layers}
    whole = LogitComparison()
    batches = iter(reference.batches)

    def compare(label: str, output: Tensor, expected: Tensor) -> None:
        if label == LOGITS:
            whole.update(output[:, :-1], expected[:, :-1], next(batches)[:, 1:])
        elif not injected:
            layers[label].update(output, expected)

    replay(twin, reference, compare)
    if injected:
        replay(twin, reference, lambda label, output, expected: layers[label].update(output, expected), injected=True)
    return Measured(recipe, {label: layer.metrics() for label, layer in layers.items()}, whole.metrics())


def is_float_output(metrics: Metrics) -> bool:
    """Whether an output is that of the float layer, to the bit or up to the order of sums."""
    return metrics.identical or (metrics.relative_mse is not None and metrics.relative_mse < NOISE)


def check_applied(
    model: nn.Module, recipe: Recipe, reference: Reference, calibration: Calibration | None = None
) -> Measured:
    """The injected measurement, after making sure that every selected layer differs from its float self."""
    measured = measure(model, recipe, reference, calibration, injected=True)
    broken = [label for label, metrics in measured.layers.items() if not metrics.finite]
    if broken:
        raise ValueError(f"{recipe} gives NaN or Inf in {', '.join(broken)}, given the finite input of the reference.")
    untouched = [label for label, metrics in measured.layers.items() if is_float_output(metrics)]
    if untouched and not find_mode(recipe.mode).is_reference:
        raise NotAppliedError(
            f"{recipe} was not applied to {', '.join(untouched)}: given the reference's input, the output is "
            f"that of the float layer, to the bit or to the order of sums "
            f"({len(untouched)} of {len(measured.layers)} layers)."
        )
    return measured


def measure_all(
    model: str,
    *,
    modes: Sequence[str] | None = None,
    formats: Sequence[str] | None = None,
    layers: Sequence[str | int] = ("all",),
    data: tuple[str, int, int, int] = EVALUATION,
    calibration_data: tuple[str, int, int, int] = CALIBRATION,
    percentile: float = PERCENTILE,
    injected: bool = False,
    allow_download: bool = False,
    trust_remote_code: bool = False,
    progress: Callable[[str], Any] = lambda text: None,
) -> list[Measured]:
    """Every recipe of modes x formats against fp32, on one model, with one reference and one calibration.

    Without modes: those that fit the model. `data` and `calibration_data` are TextSamples, or the same as plain tuples.
    """
    evaluated, calibrated = TextSamples(*data), TextSamples(*calibration_data)
    if evaluated.seqlen < 2:
        raise ValueError(f"seqlen is {evaluated.seqlen}; expected at least 2, a token and the next one.")
    recipes = recipes_of(modes, formats) if modes else []
    loaded = load_model(model, allow_download=allow_download, trust_remote_code=trust_remote_code)
    if not modes:
        recipes = recipes_of(["all"] if is_mamba(loaded.model) else ["linear_w", "linear_wa"], formats)
    check_recipes(loaded, recipes)
    check_positions(loaded.model, evaluated.seqlen, key="seqlen")
    select(loaded.model, layers, model_name=model)
    for note in loaded.notes:
        progress(f"note: {note}")
    batches = evaluated.batches(loaded.tokenizer)
    progress(f"[reference] {loaded.name}, {evaluated}")
    reference = run_reference(loaded.model, batches, layers)
    calibration = None
    if any(recipe.needs_calibration for recipe in recipes):
        progress(f"[calibration] {calibrated}")
        calibration = calibrate_on(loaded, *calibrated, percentile=percentile)
    measured = []
    for index, recipe in enumerate(recipes):
        progress(f"[{index + 1}/{len(recipes)}] {recipe}")
        measured.append(measure(loaded.model, recipe, reference, calibration, injected=injected))
    return measured
