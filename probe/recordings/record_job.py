"""The job of a recording: a recipe over some batches in one unit, which emits tensors as they appear."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from probe.data.calls import Batch
from probe.engines.interface import Emit
from probe.models.loading import Loaded
from probe.recordings import taps
from probe.running.calibration import Calibration, CalibrationRun
from probe.running.kept_float import float_layers
from probe.running.measurement import check_twin, short_reference
from probe.running.modes import find_mode
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference
from probe.running.shared_models import ModelJob, accelerators
from probe.running.weights import Weights, count_weights


@dataclass(frozen=True)
class RecipeFacts:
    """What is known of a recipe before its first tensor."""

    points: taps.TapPoints
    declared: frozenset[str]  # layers that its mode declares float
    weights: Weights | None
    compiled: bool


@dataclass(eq=False)
class RunningModel:
    """What a worker holds: the float model, and the copy of the last recipe."""

    loaded: Loaded
    runs_as_is: bool = False
    short: Reference | None = None
    last: tuple[Recipe, nn.Module, RecipeFacts] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordJob(ModelJob[RunningModel, Any]):
    """Recipes over batches: a unit is a recipe with the first batch and the end; or a CalibrationRun."""

    batches: tuple[Batch, ...]
    layers: tuple[str | int, ...]
    taps: tuple[str, ...]
    device: str
    compile: bool
    calibration: Calibration | None = None
    is_here: bool = True  # whether what is emitted is written at once, before the model goes on

    def open(self) -> RunningModel:
        """The float model."""
        return RunningModel(self.model.load())

    @torch.no_grad()
    def run(self, state: RunningModel, work: Any, given: None, emit: Emit) -> Any:
        """Emits the RecipeFacts, then (name, tensor) of every tensor; returns what is not on the grid of the recipe."""
        if isinstance(work, CalibrationRun):
            return work.of(state.loaded)
        recipe, first, end = work
        if state.last is None or state.last[0] != recipe:
            state.last = None
            state.last = (recipe, *self._apply(state, recipe))
        twin, facts = state.last[1:]
        emit(facts)

        def consume(name: str, tensor: Tensor) -> None:
            emit((name, tensor if self.is_here else tensor.detach().cpu().clone()))

        run_model = taps.run_hooked if taps.points_returned(twin) is None else taps.run_returning
        return run_model(twin, recipe, facts.points, self.batches[first:end], consume)

    def _apply(self, state: RunningModel, recipe: Recipe) -> tuple[nn.Module, RecipeFacts]:
        """The copy of the model under a recipe, which is refused if it was not applied, and its facts."""
        loaded, mode, weights = state.loaded, find_mode(recipe.mode), None
        twin = loaded.model
        if not state.runs_as_is:
            twin = apply(loaded.model, recipe, self.calibration if recipe.needs_calibration else None)
            weights = count_weights(loaded.model, twin, recipe) if mode.is_quantized else None
            if not mode.is_reference:
                state.short = state.short or short_reference(loaded.model, self.batches, self.layers)
                check_twin(loaded.model, twin, recipe, state.short)
            twin = twin.to(self.device)
        points = taps.points_returned(twin)
        if points is None:
            points = taps.tap_points(twin, self.layers, self.taps, model_name=loaded.name)
        modules = {label: points.sources[f"{label}.output"][0] for label in points.layers}
        declared = float_layers(taps.unwrapped(loaded.model), mode, modules)
        if self.compile and taps.points_returned(twin) is None:
            twin = taps.record_outputs(twin, self.layers, taps=self.taps)
        if self.compile and not taps.is_compiled(twin):
            twin = cast(nn.Module, torch.compile(twin))
        return twin, RecipeFacts(points, frozenset(declared), weights, taps.is_compiled(twin))

    @property
    def is_journaled(self) -> bool:
        """Never: what is recorded is on disk already, recipe by recipe."""
        return False

    @property
    def gpus(self) -> int:
        """One, if it runs on one."""
        return accelerators(self.device)


def parts_of(recipes: Sequence[Recipe], batches: int, *, is_here: bool) -> list[tuple[Recipe, int, int]]:
    """The units of a recording: a recipe in this process, which streams; elsewhere a recipe and a batch."""
    if is_here:
        return [(recipe, 0, batches) for recipe in recipes]
    return [(recipe, batch, batch + 1) for recipe in recipes for batch in range(batches)]
