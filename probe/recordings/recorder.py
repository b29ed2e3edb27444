"""`record`: run a model under recipes and stream tensors of its layers to disk, into `<out>/.partial`.

That folder is a recording in the layout safetensors whose manifest says which recipes are missing. A recipe is listed
once its file is whole and on disk, so a kill costs one recipe at most. A request that fits continues it; any other is
refused after a kill, and replaces what an error left.
"""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, cast

import torch

from probe.data.calls import Batch, input_fingerprint
from probe.engines import Engine, Unit
from probe.engines.interface import Progress as UnitProgress, silent
from probe.engines.local import LocalEngine
from probe.files.atomic import write
from probe.models.loading import configuration_of
from probe.recordings import publishing, taps
from probe.recordings.manifest import (
    MANIFEST,
    Manifest,
    RecordedRecipe,
    RecordingError,
    StoredFile,
    UnfinishedWork,
    manifest_to_json,
    writing,
)
from probe.recordings.reading import PARTIAL, Recording, check_files, read_manifest, read_recording
from probe.recordings.record_job import RecipeFacts, RecordJob, RunningModel, parts_of
from probe.recordings.request import (
    ModelToRun,
    RecordRequest,
    check_request,
    check_whole,
    device_name,
    inputs_for,
    model_to_run,
    recipes_for,
    script_facts,
)
from probe.recordings.stream import TensorStream, finished, tokens_of, write_tokens
from probe.running.calibration import Calibration, CalibrationRun
from probe.running.environment import differences, environment
from probe.running.inputs import input_batches
from probe.running.measurement import NotAppliedError
from probe.running.modes import find_mode
from probe.running.recipes import Recipe
from probe.running.shared_models import SharedModel
from probe.words import first_few

#: The names in `.partial`, also those of files that a kill left unfinished.
OWN = re.compile(r"manifest\.json|.+\.safetensors(\.aligned)?|\..+\.tmp")

#: The fingerprint of what recipes are calibrated on; UNUSED if none is.
CALIBRATED_ON, UNUSED = "inputs of the calibration", "none"


@dataclass
class PartialRecording:
    """The folder `<out>/.partial` and its present manifest."""

    folder: Path
    manifest: Manifest
    reused: tuple[str, ...] = ()  # the recipes of an interrupted recording that is continued

    @property
    def missing(self) -> tuple[str, ...]:
        """The recipes that are not recorded yet."""
        assert self.manifest.unfinished is not None
        return self.manifest.unfinished.missing

    def add(self, recipe: str, recorded: RecordedRecipe, file: str, facts: StoredFile) -> None:
        """Add a recipe, whose file is whole, to the manifest."""
        assert self.manifest.unfinished is not None
        left = tuple(one for one in self.missing if one != recipe)
        self.manifest = replace(
            self.manifest,
            recipes={**self.manifest.recipes, recipe: recorded},
            files={**self.manifest.files, file: facts},
            unfinished=replace(self.manifest.unfinished, missing=left),
        )
        self.save()

    def save(self) -> None:
        """Write the manifest."""
        with writing(self.folder / MANIFEST):
            write(self.folder / MANIFEST, manifest_to_json(self.manifest))


@contextmanager
def partial_recording(out: Path, begun: Manifest, *, restart: bool, progress: "Progress") -> Iterator[PartialRecording]:
    """Begin a recording, or continue an interrupted one; `begun` is its manifest without recipes.

    If the block fails, the folder is kept if it has a whole recipe, and deleted otherwise.
    """
    folder = out / PARTIAL
    with writing(folder):
        folder.mkdir(exist_ok=True)
        for name in os.listdir(folder):
            if not OWN.fullmatch(name):
                raise RecordingError(f"{folder / name} is in the way and is no part of a recording. Move it away.")
        found = None
        if os.path.lexists(folder / MANIFEST) and not restart:
            found = _continued(folder, begun)
            if found is None:
                progress.line(f"deleting {folder}: what an error left of a recording of something else")
        if found is None:
            _delete(folder)
            folder.mkdir()
    partial = PartialRecording(folder, found or begun, tuple(found.recipes) if found else ())
    try:
        yield partial
    except BaseException as problem:
        if not partial.manifest.recipes:
            _delete(folder)
        elif isinstance(problem, Exception) and (folder / MANIFEST).exists():
            assert partial.manifest.unfinished is not None
            partial.manifest = replace(partial.manifest, unfinished=replace(partial.manifest.unfinished, failed=True))
            with suppress(RecordingError):  # a full disk
                partial.save()
            progress.line(
                f"kept {', '.join(partial.manifest.recipes)} in {folder}: a command that records them goes on from "
                "there, any other deletes them"
            )
        raise


def _delete(folder: Path) -> None:
    """Delete `.partial`, its manifest first: a kill must not leave one that lists files that are gone."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _continued(folder: Path, begun: Manifest) -> Manifest | None:
    """The manifest to go on from: that in `folder`, if it is of the same request but for recipes that are not recorded.

    None if it is of another request, and was left by an error; one that was left by a kill is an error.
    """
    again = "Run the command that began it, or delete it with --restart."
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest, verify=True)
    except RecordingError as problem:
        raise RecordingError(f"{folder} is an interrupted recording that cannot be used. {problem}. {again}") from None
    there, now = manifest.unfinished, begun.unfinished
    assert now is not None
    if there is None:
        raise RecordingError(f"{folder} is a whole recording, not an interrupted one. Rename it.")
    unasked = manifest.recipes.keys() - set(now.missing)
    wanted = now.asked | ({} if unasked else {"recipes": there.asked["recipes"]})
    if UNUSED in (there.asked.get(CALIBRATED_ON, UNUSED), wanted[CALIBRATED_ON]):
        wanted[CALIBRATED_ON] = there.asked.get(CALIBRATED_ON, UNUSED)
    if other := differences(there.asked, wanted):
        if there.failed:
            return None
        raise RecordingError(f"{folder} is an interrupted recording of something else: {'; '.join(other)}. {again}")
    missing = tuple(recipe for recipe in now.missing if recipe not in manifest.recipes)
    return replace(manifest, unfinished=replace(now, missing=missing))


class Progress(Protocol):
    """Receives messages and steps while a recording is made."""

    def line(self, text: str) -> None:
        """A message."""

    def begin(self, steps: int) -> None:
        """How many steps follow."""

    def step(self, recipe: str, name: str) -> None:
        """A tensor of a batch was written."""


class _Silent:
    def line(self, text: str) -> None: ...
    def begin(self, steps: int) -> None: ...
    def step(self, recipe: str, name: str) -> None: ...


@dataclass(frozen=True)
class _Run:
    """What all recipes of a request share."""

    request: RecordRequest
    model: ModelToRun
    batches: tuple[Batch, ...]
    calibration: CalibrationRun | None
    existing: Recording | None
    partial: PartialRecording
    progress: Progress
    engine: Engine
    units: UnitProgress


@torch.no_grad()
def record(
    out: RecordRequest | Path | str = "layer_outputs",
    *,
    progress: Progress | None = None,
    engine: Engine | None = None,
    units: UnitProgress = silent,
    **options: Any,
) -> Recording:
    """Run a model under modes and store tensors of its layers in the folder `out`.

        record("outputs", modes=["fp32", "2-1"], samples=1)
        record(RecordRequest("outputs", modes=["fp32", "2-1"], samples=1))

    The options are the fields of RecordRequest; beside a request, they replace its own.

    An interrupted recording stays in `<out>/.partial`, and the same call finishes it. If `out` holds a recording of the
    same model, tokens and layers, the recipes are added to it. `engine` runs the model, None: this process, which alone
    writes; `units` is told of the units of other processes.
    """
    request = replace(out, **options) if isinstance(out, RecordRequest) else RecordRequest(out, **options)
    with publishing.locked_folder(request.folder):
        return _record(request, progress or _Silent(), engine or LocalEngine(), units)


def _record(request: RecordRequest, progress: Progress, engine: Engine, units: UnitProgress) -> Recording:
    folder, layout = request.folder, request.layout
    check_request(request)
    RecordJob.prepare(engine)
    model = model_to_run(request)
    device = device_name(request, model)
    for note in model.loaded.notes:
        progress.line(f"note: {note}")
    recipes = recipes_for(request, model)
    inputs = inputs_for(request, model)
    calibration = None
    if any(recipe.needs_calibration for recipe in recipes) and not model.runs_as_is:
        scaling = input_batches(model.loaded, request.calibrated, key="calib_seqlen")  # refused before anything runs
        calibration = CalibrationRun(tuple(scaling.batches), request.percentile)
    for note in inputs.notes:
        progress.line(f"note: {note}")
    batches = inputs.batches
    check_whole(request, model, batches)
    keys = tuple(map(str, recipes))
    tokens, weights = tokens_of(batches, request.source), model.loaded.fingerprint
    tokens = tokens if tokens.kind == "token ids" else replace(tokens, source=inputs.about)
    configuration = configuration_of(model.loaded.model)
    begun = Manifest(model.loaded.name, weights, device, tokens, {}, environment(), configuration=configuration)
    asked = publishing.shared_facts(begun, layout) | _resume_facts(request, model, batches, recipes, calibration)
    if publishing.was_finished(folder, asked) and not request.overwrite:
        progress.line(f"{folder} was complete before the interruption")
        return read_recording(folder)
    existing = publishing.existing_recording(folder, begun, keys, layout, overwrite=request.overwrite)
    begun = replace(begun, unfinished=UnfinishedWork(asked, keys))
    with partial_recording(folder, begun, restart=request.restart, progress=progress) as partial:
        if partial.reused:
            progress.line(f"continuing {partial.folder}: {', '.join(partial.reused)} recorded already")
            partial.save()  # what is asked for now
        elif not partial.manifest.files and not partial.manifest.recipes:
            partial.manifest = replace(partial.manifest, files=write_tokens(partial.folder, batches))
            partial.save()
        run = _Run(request, model, tuple(batches), calibration, existing, partial, progress, engine, units)
        _record_missing(run, [recipe for recipe in recipes if str(recipe) in partial.missing])
        source, facts = Recording(partial.folder, partial.manifest), script_facts(request, model, batches)
        return publishing.publish(folder, source, existing, facts, layout)


def _resume_facts(
    request: RecordRequest,
    model: ModelToRun,
    batches: Sequence[Batch],
    recipes: Sequence[Recipe],
    calibration: CalibrationRun | None,
) -> dict[str, str]:
    """The facts, beside the shared ones, that must be the same to continue an interrupted recording."""
    modes = (find_mode(mode) for mode in dict.fromkeys(recipe.mode for recipe in recipes))
    declared = [mode for mode in modes if mode.keep_float]
    return {
        "recipes": " ".join(map(str, recipes)),
        "layers": " ".join(map(str, request.chosen_layers)),
        "taps": " ".join(request.chosen_taps) or "none",
        "output file": request.archive,
        "batch size": str(len(batches[0])),
        "include": " ".join(request.include) or "none",
        "float modules": " ".join(f"{one.name} {' '.join(one.keep_float)}" for one in declared) or "none",
        "compiled": str(request.compile or taps.is_compiled(model.loaded.model)),
        "calibration": request.calibration,
        CALIBRATED_ON: UNUSED if calibration is None else input_fingerprint(calibration.batches),
    }


def _record_missing(run: _Run, recipes: Sequence[Recipe]) -> None:
    request, model, engine = run.request, run.model, run.engine
    job, state = _job(run, recipes), RunningModel(model.loaded, model.runs_as_is)
    if run.calibration is not None and any(recipe.needs_calibration for recipe in recipes):
        run.progress.line(f"[calibration] {request.calibration}")
        (found,) = engine.run(job, [Unit("calibration", run.calibration)], state=state)
        job = replace(job, calibration=cast(Calibration, found))
    works = parts_of(recipes, len(run.batches), is_here=engine.is_here)
    units = [Unit(f"{work[0]}, batches {work[1] + 1} to {work[2]}", work) for work in works]
    with _Writer(run, recipes, job.calibration) as writer:

        def take(index: int, item: Any) -> None:
            writer.take(works[index][0], item)

        parts = engine.run(job, units, state=state, take=take, progress=run.units)
        for (recipe, _, end), stray in zip(works, parts, strict=True):
            if stray:
                raise NotAppliedError(f"{recipe} was not applied: {next(iter(stray.values()))}.")
            if end == len(run.batches):
                writer.finish(recipe)


def _job(run: _Run, recipes: Sequence[Recipe]) -> RecordJob:
    request, loaded, engine = run.request, run.model.loaded, run.engine
    if isinstance(request.model, str):
        shared = SharedModel.of(
            request.reference or request.weights,
            loaded,
            engine,
            modes=[recipe.mode for recipe in recipes],
            allow_download=request.allow_download,
            trust_remote_code=request.trust_remote_code,
        )
    elif engine.is_here:
        shared = SharedModel.here(loaded.name, loaded.fingerprint)
    else:
        raise ValueError("other processes load a model by its name, and this is one in memory. Give its name.")
    return RecordJob(
        model=shared,
        batches=run.batches,
        layers=request.chosen_layers,
        taps=request.chosen_taps,
        device=request.device,
        compile=request.compile,
        is_here=engine.is_here,
    )


class _Writer:
    """Writes what units emit: the file of one recipe at a time, which is added to the manifest once it is whole."""

    def __init__(self, run: _Run, recipes: Sequence[Recipe], calibration: Calibration | None) -> None:
        self._run, self._recipes, self._calibration = run, list(recipes), calibration
        self._begun: tuple[Recipe, RecipeFacts, TensorStream] | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: Any) -> None:
        self._open.__exit__(*problem)

    def take(self, recipe: Recipe, item: Any) -> None:
        """The facts of a recipe, of which those of its first batches count, or a tensor of a batch."""
        if isinstance(item, RecipeFacts):
            if self._begun is None:
                self._begin(recipe, item)
            return
        assert self._begun is not None
        name, tensor = item
        self._begun[2].add(name, tensor)
        if self._run.engine.is_here:
            self._run.progress.step(str(recipe), name)

    def _begin(self, recipe: Recipe, facts: RecipeFacts) -> None:
        run, index, points = self._run, self._recipes.index(recipe), facts.points
        _check_addition(run, recipe, points)
        if not index and run.engine.is_here:
            run.progress.begin(len(points.names) * len(run.batches) * len(self._recipes))
        run.progress.line(f"[{index + 1}/{len(self._recipes)}] {recipe}")
        file, samples = run.partial.folder / f"{recipe}.safetensors", run.partial.manifest.tokens.samples
        stream = self._open.enter_context(TensorStream(file, points.names, samples, label=str(recipe)))
        self._begun = (recipe, facts, stream)

    def finish(self, recipe: Recipe) -> None:
        """All batches of the recipe are written."""
        run, calibration = self._run, self._calibration if recipe.needs_calibration else None
        assert self._begun is not None
        _, facts, stream = self._begun
        recorded, stored = finished(recipe, stream, facts.points.layers)
        applied: Literal["by probe", "before"] = "before" if run.model.runs_as_is else "by probe"
        recorded = replace(
            recorded,
            applied=applied,
            calibration=None if calibration is None else run.request.recorded_calibration(calibration.data),
            compiled=facts.compiled,
            float_layers=tuple(label for label in recorded.layers if label in facts.declared),
            weights=facts.weights,
        )
        _check_changed(run, recipe, recorded)
        self._open.close()
        self._begun = None
        run.partial.add(str(recipe), recorded, stream.file.name, stored)


def _check_addition(run: _Run, recipe: Recipe, points: taps.TapPoints) -> None:
    """Refuse a recipe whose layers or taps differ from those of the other recipes in the folder."""
    there = run.existing.manifest.recipes if run.existing else {}
    staying = {name: one for name, one in there.items() if name not in run.partial.missing}
    for other in (staying | run.partial.manifest.recipes).values():
        if other.layers != points.layers or set(other.tensors) != set(points.names):
            those, these = (", ".join(sorted(some)) for some in (other.tensors, points.names))
            raise RecordingError(
                f"{recipe} would have other tensors than {other.mode} in the same folder: {these}, not {those}. Give "
                "the same layers and taps, or another folder."
            )


def _check_changed(run: _Run, recipe: Recipe, recorded: RecordedRecipe) -> None:
    """Refuse a recipe of which a layer has the bits of the recorded fp32: it was not applied there.

    `check_twin` found that before, but for a model that runs as it is, whose float layers are not known.
    """
    partial, reference = run.partial, str(Recipe("fp32"))
    here = Recording(partial.folder, partial.manifest)
    place = here if reference in partial.manifest.recipes else run.existing
    if recipe.mode == reference or place is None or reference not in place.recipes:
        return
    mine = Recording(partial.folder, replace(partial.manifest, recipes={str(recipe): recorded}))
    labels = [label for label in recorded.layers if label not in recorded.float_layers]
    pairs = (
        (mine.tensor(str(recipe), name), place.tensor(reference, name)) for name in map("{}.output".format, labels)
    )
    same = [
        label
        for label, (one, other) in zip(labels, pairs, strict=True)
        if one.dtype == other.dtype and torch.equal(one, other)
    ]
    if same:
        raise NotAppliedError(
            f"{recipe} was not applied to {first_few(same)}: the output is that of fp32, to the bit "
            f"({len(same)} of {len(recorded.layers)} layers). Record layers that {find_mode(recipe.mode).name} changes."
        )
