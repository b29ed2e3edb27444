"""The job of the gate on other machines: a recipe on a device, under a variation, is observed in one unit."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from probe.engines.interface import Emit
from probe.gate.measured_layers import Observation
from probe.gate.observations import observe
from probe.models.loading import Loaded
from probe.running.calibration import Calibration
from probe.running.noise import Variation, under
from probe.running.paths import Path as PathThrough
from probe.running.recipes import Recipe
from probe.running.reference import Reference
from probe.running.reference_files import unpack_reference
from probe.running.shared_models import ModelJob, accelerators


@dataclass(frozen=True, eq=False)
class ObservedRecipe:
    """A unit: what to observe. It is compared with another by its name."""

    recipe: Recipe
    device: str
    variation: Variation | None
    paths: tuple[PathThrough, ...]
    bytes_per_token: float | None

    @property
    def name(self) -> str:
        """For people: mode_2_1-cpu-int8."""
        return f"{self.recipe} on {self.device}{f', {self.variation.name}' if self.variation else ''}"


@dataclass(eq=False)
class _Bench:
    loaded: Loaded
    references: dict[Variation | None, Reference]


@dataclass(frozen=True, eq=False, kw_only=True)
class ObservationJob(ModelJob[_Bench, dict[str, Observation]]):
    """The recipes of a bench. The reference is that of the process that judges, and reaches every worker once.

    Observations are never taken from an earlier run: the gate looks at the code of now.
    """

    references: Mapping[Variation | None, bytes]
    calibrations: Mapping[Variation | None, Calibration]
    devices: tuple[str, ...]

    def open(self) -> _Bench:
        """The model; references are unpacked as they are needed."""
        return _Bench(self.model.load(), {})

    def run(self, state: _Bench, work: ObservedRecipe, given: None, emit: Emit) -> dict[str, Observation]:
        """Both measurements of every layer."""
        model, variation = state.loaded.model, work.variation
        if variation not in state.references:
            state.references = {variation: unpack_reference(self.references[variation])}
        with nullcontext() if variation is None else under(variation, model):
            return observe(
                model,
                work.recipe,
                state.references[variation],
                self.calibrations[variation] if work.recipe.needs_calibration else None,
                device=work.device,
                bytes_per_token=work.bytes_per_token,
                paths=work.paths,
            )

    @property
    def is_journaled(self) -> bool:
        """Never."""
        return False

    @property
    def gpus(self) -> int:
        """One, if any recipe runs on one."""
        return accelerators(*self.devices)
