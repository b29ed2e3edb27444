"""A bench: one model with what all its recipes share: the text, the reference, the calibration and the baselines.

One process of a run computes a reference or a calibration; the others read it from memory-mapped files.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from torch import Tensor

from probe.data.calls import input_fingerprint, split_rows
from probe.engines import Engine, Unit, UnitFailedError
from probe.files.atomic import locked
from probe.gate.baselines.format import BaselineError
from probe.gate.configuration import Settings
from probe.gate.matrix import Matrix
from probe.gate.measured_layers import Observation
from probe.gate.observation_job import ObservationJob, ObservedRecipe
from probe.gate.observations import observe, uncovered_path
from probe.gate.recorded_observations import observe_recording
from probe.models.loading import configuration_of
from probe.models.offload import return_free_memory
from probe.recordings import read_recording
from probe.running.calibration import Calibration, calibrate_on, load_calibration
from probe.running.environment import ANCHORS, INCLUDE, is_recorded, recorded_folder
from probe.running.golden_reference import MovedTensor, moved_tensors, reference_rows, with_spread, without_rows
from probe.running.kept_float import float_layers
from probe.running.modes import find_mode
from probe.running.noise import Anchors, Variation, anchored, under
from probe.running.recipes import Recipe
from probe.running.reference import UNFED, Reference, run_reference
from probe.running.reference_files import load_reference, pack_reference, save_reference
from probe.running.shared_models import SharedModel

T = TypeVar("T")

#: Errors of a full disk: then every process computes its own reference.
NO_ROOM = (OSError, SafetensorError)


class Bench(Matrix):
    """The matrix of a model, with the runs that were made so far.

    The processes of a run share `folder`; None for a single process. With an `engine`, recipes are observed there.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        root: Path | None = None,
        folder: Path | None = None,
        engine: Engine | None = None,
    ) -> None:
        super().__init__(settings, root=root)
        self._engine = engine
        self._job: ObservationJob | None = None
        self._ahead: Iterator[tuple[str, dict[str, Observation] | UnitFailedError]] = iter(())
        self._coming: set[str] = set()  # the names of those that `_ahead` will give
        self._broken: UnitFailedError | None = None  # why the engine runs nothing any more
        self._observed: dict[str, dict[str, Observation] | UnitFailedError] = {}
        self.expected: list[tuple[Recipe, str]] = []  # recipes and devices that the run will ask for, in its order
        self.anchors: Anchors | None = None
        self._folder = folder
        self.moved = ""  # where the float run was found to differ from the golden reference
        self.moved_tensors: list[MovedTensor] = []
        self._references: dict[Variation | None, Reference] = {}
        self._rows: dict[Variation | None, dict[str, Tensor]] = {}
        self._recording = cache(lambda device: read_recording(recorded_folder(device, self._root)))
        self._calibrations: dict[Variation | None, Calibration] = {}

    def check(self) -> None:
        """Refuse also an engine whose workers lack the model, a checkpoint, the code of a mode, or memory."""
        super().check()
        if self._engine is not None:
            self._engine.inspect(self._early_job)

    def use_stored_anchors(self, *, all_devices: bool) -> None:
        """Use the anchors of the baselines that have this input; with `all_devices`, also of devices not in the matrix.

        All modes name the same anchors, unless an update was killed half way or measured other layers.
        """
        if self.anchors is not None:
            return
        devices = self.store.devices(self.settings.model) if all_devices else []
        modes = [mode for device in dict.fromkeys([*self.settings.devices, *devices]) for mode in self.stored(device)]
        wanted = {name: fact for name, fact in self.input_facts.items() if name != INCLUDE}  # nothing to a float run
        fitting = [mode.environment for mode in modes if wanted.items() <= mode.environment.items()]
        names = dict.fromkeys(facts.get(ANCHORS, "") for facts in fitting)
        if names:
            self.anchors = Anchors.united(self._read_anchors(name) for name in sorted(names))

    def _read_anchors(self, name: str) -> Anchors:
        data = self.store.anchors(self.settings.model, name)
        try:
            return Anchors.from_bytes(data)
        except ValueError as problem:
            raise BaselineError(f"{self.store.root}: {name} {problem}. Restore it with git checkout.") from None

    def reference(self, variation: Variation | None = None) -> Reference:
        """The float run; with a variation, under that harmless change."""
        if variation not in self._references:
            name = f"{self._key('reference', variation)}.safetensors"
            make = partial(self._run_reference, variation)
            self._references[variation] = shared(self._folder, name, make, save_reference, load_reference)
        return self._references[variation]

    def calibration(self, variation: Variation | None = None) -> Calibration:
        """The scales; with anchors, a scale that differs from the golden one only by noise is the golden one."""
        if variation not in self._calibrations:
            model = self.loaded.fingerprint
            self._calibrations[variation] = shared(
                self._folder,
                f"{self._key('calibration', variation)}.json",
                partial(self._calibrate, variation),
                lambda made, file: made.save(file.with_suffix("")),
                lambda file: load_calibration(file.with_suffix(""), model=model),
            )
        found = self._calibrations[variation]
        return found if self.anchors is None else anchored(found, self.anchors.amax)

    def make_anchors(self, variation: Variation, changes: Sequence[Variation] = ()) -> None:
        """Add anchors of all layers that have none, from the run under `variation`; `changes` are harmless."""
        there = self.anchors or Anchors()
        labels, reference = {*self.labels, *self.outside} - {UNFED}, self.reference(variation)
        if not labels <= set(there.places):
            places, values = ({label: pair[side] for label, pair in reference.ties.items()} for side in (0, 1))
            there = Anchors.united([there, Anchors(places, values, self.calibration(variation).amax)])
        self.anchors = there
        rows = self.reference_rows(variation)
        if not set(rows) <= set(there.rows):
            there = Anchors.united([there, Anchors(rows=with_spread(rows, [*map(self.reference_rows, changes)]))])
        self.anchors = replace(there, config=configuration_of(self.loaded.model))

    def reference_rows(self, variation: Variation | None) -> dict[str, Tensor]:
        """What stands for the float run in the golden reference."""
        if variation not in self._rows:
            self._rows[variation] = reference_rows(self.reference(variation))
        return self._rows[variation]

    def compare_reference(self, variation: Variation | None = None) -> str:
        """Where the float run differs from the golden reference, as `from layer_1 on: ...`; empty if it does not.

        A stored layer of which the golden reference has nothing differs too.
        """
        golden = self.anchors.rows if self.anchors else {}
        stored = self._stored_labels()
        known = [label for label in (*self.labels, *self.outside, self.output.label) if label in stored]
        lacking = without_rows(known, golden) if self.anchors else []
        self.moved_tensors = moved_tensors(self.reference_rows(variation), golden)
        if lacking:
            self.moved = f"from {lacking[0]} on: the baselines have no golden reference of it"
        elif self.moved_tensors:
            self.moved = str(self.moved_tensors[0])
        return self.moved

    def discard_anchors(self) -> None:
        """Forget the stored anchors and what was run with them: the reference moved, and an update accepts it."""
        self.anchors = None
        for runs in (self._references, self._calibrations, self._rows):
            runs.clear()
        self._job = None

    def observe(self, recipe: Recipe, device: str, variation: Variation | None = None) -> dict[str, Observation]:
        """Both measurements of every layer of a recipe, on a device or from a recording."""
        reference = self.reference(variation)
        return_free_memory()  # of the float copy, before the next one is made
        if is_recorded(device):
            return observe_recording(
                self._recording(device),
                recipe,
                reference,
                model_fingerprint=self.loaded.fingerprint,
                data_fingerprint=input_fingerprint(self.inputs.batches),
                configuration=configuration_of(self.loaded.model),
                declared=float_layers(self.loaded.model, find_mode(recipe.mode), reference.modules),
                bytes_per_token=self.bytes_per_token,
            )
        if self._engine is not None:
            seen = self._observe_elsewhere(self._engine, self._unit(recipe, device, variation))
        else:
            calibration = self.calibration(variation) if recipe.needs_calibration else None
            with self._under(variation):
                size, model = self.bytes_per_token, self.loaded.model
                paths = self._paths(recipe)
                seen = observe(model, recipe, reference, calibration, device=device, bytes_per_token=size, paths=paths)
        return seen | {path: uncovered_path(path, self.path_support[path]) for path in self.paths if path not in seen}

    def observe_each(self, recipe: Recipe, device: str, changes: Sequence[Variation]) -> list[dict[str, Observation]]:
        """`observe` under every one of these changes; on an engine, at the same time."""
        if self._engine is not None and not is_recorded(device):
            works = [self._unit(recipe, device, variation) for variation in changes]
            self._observed |= dict(self._observations(self._engine, works))
        return [self.observe(recipe, device, variation) for variation in changes]

    def _unit(self, recipe: Recipe, device: str, variation: Variation | None) -> ObservedRecipe:
        return ObservedRecipe(recipe, device, variation, tuple(self._paths(recipe)), self.bytes_per_token)

    def _observe_elsewhere(self, engine: Engine, work: ObservedRecipe) -> dict[str, Observation]:
        """The observation of a unit; all that the run will ask for are made in this order, ahead of the tests.

        One that failed fails the tests of its own recipe only, all of them. Without a cluster all tests fail at once.
        """
        if self.expected:
            expected, self.expected = self.expected, []
            works = [self._unit(recipe, device, work.variation) for recipe, device in expected]
            self._ahead, self._coming = self._observations(engine, works), {work.name for work in works}
        if self._broken is not None:
            raise self._broken
        try:
            while work.name in self._coming:
                name, seen = next(self._ahead)
                self._coming.discard(name)
                self._observed[name] = seen
            if work.name not in self._observed:
                self._observed |= dict(self._observations(engine, [work]))
        except UnitFailedError as problem:
            self._broken = problem
            raise
        found = self._observed[work.name]
        if isinstance(found, UnitFailedError):
            raise found
        del self._observed[work.name]
        return found

    def _observations(
        self, engine: Engine, works: Sequence[ObservedRecipe]
    ) -> Iterator[tuple[str, dict[str, Observation] | UnitFailedError]]:
        wanted = {work.variation for work in works}
        if self._job is None or not wanted <= set(self._job.references):
            self._job = self._with_references(wanted | set(self._job.references if self._job else ()))
        results = engine.run(self._job, [Unit(work.name, work) for work in works], keep_going=True)
        for work, result in zip(works, results, strict=True):
            yield work.name, result

    def _with_references(self, variations: Collection[Variation | None]) -> ObservationJob:
        calibrated = any(recipe.needs_calibration for recipe in self.recipes)
        return replace(
            self._early_job,
            references={variation: pack_reference(self.reference(variation)) for variation in variations},
            calibrations={variation: self.calibration(variation) for variation in variations if calibrated},
        )

    @cached_property
    def _early_job(self) -> ObservationJob:
        """The job of the engine before there is any reference."""
        ours = self.settings
        assert self._engine is not None
        return ObservationJob(
            model=SharedModel.of(
                ours.reference or ours.model,
                self.loaded,
                self._engine,
                modes=[recipe.mode for recipe in self.recipes],
                allow_download=ours.allow_download,
                trust_remote_code=ours.trust_remote_code,
            ),
            references={},
            calibrations={},
            devices=tuple(device for device in ours.devices if not is_recorded(device)),
        )

    def _under(self, variation: Variation | None) -> AbstractContextManager[None]:
        return nullcontext() if variation is None else under(variation, self.loaded.model)

    def _run_reference(self, variation: Variation | None) -> Reference:
        with self._under(variation):
            batches = self.inputs.batches
            if variation and variation.batch_size:
                batches = split_rows(batches, variation.batch_size)
            jitter = variation.jitter if variation else 0
            wanted = self.settings.layers
            return run_reference(
                self.loaded.model,
                batches,
                wanted,
                outside=self.outside,
                anchors=self.anchors,
                jitter=jitter,
                kind=self.output,
            )

    def _calibrate(self, variation: Variation | None) -> Calibration:
        with self._under(variation):
            return calibrate_on(self.loaded, *self.calibrated, percentile=self.settings.calibration.percentile)

    def _key(self, kind: str, variation: Variation | None) -> str:
        name = "check" if variation is None else variation.name.replace(" ", "_").replace(",", "")
        ours = self.settings
        data = (ours.data, ours.inputs, ours.samples, ours.seqlen, ours.batch_size, ours.calibration)
        digest = hashlib.sha256(
            repr((ours.model, ours.reference, ours.baselines, ours.layers, ours.without, data)).encode()
        ).hexdigest()[:16]
        return f"{kind}-{self.loaded.fingerprint}-{digest}-{name}{'-anew' if self.moved else ''}"


def shared(
    folder: Path | None, name: str, make: Callable[[], T], save: Callable[[T, Path], None], load: Callable[[Path], T]
) -> T:
    """The value that another process of this run saved as `folder / name`; else a new one, saved for the others."""
    if folder is None:
        return make()
    file, made = folder / name, None
    try:
        with locked(folder / f"{name}.lock"):
            if not file.exists():
                made = make()
                save(made, file)
    except NO_ROOM:
        return made or make()
    return load(file)
