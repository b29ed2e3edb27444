"""`record`: run a model under recipes and stream tensors of its layers to disk, into `<out>/.partial`.

That folder is a recording in the layout safetensors whose manifest says which recipes are missing. A recipe is listed
once its file is whole and on disk, so a kill costs one recipe at most. A request that fits continues it; any other is
refused after a kill, and replaces what an error left.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from probe.data.calls import Batch
from probe.files.atomic import write
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
from probe.running.calibration import Calibration, calibrate_on
from probe.running.environment import differences, environment
from probe.running.inputs import input_batches
from probe.running.kept_float import float_layers
from probe.running.measurement import NotAppliedError, check_twin, short_reference
from probe.running.modes import find_mode
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference
from probe.running.weights import Weights, count_weights
from probe.words import first_few

#: The names in `.partial`, also those of files that a kill left unfinished.
OWN = re.compile(r"manifest\.json|.+\.safetensors(\.aligned)?|\..+\.tmp")


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
    if other := differences(there.asked, now.asked | ({} if unasked else {"recipes": there.asked["recipes"]})):
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
    existing: Recording | None
    partial: PartialRecording
    progress: Progress


@torch.no_grad()
def record(
    out: RecordRequest | Path | str = "layer_outputs", *, progress: Progress | None = None, **options: Any
) -> Recording:
    """Run a model under modes and store tensors of its layers in the folder `out`.

        record("outputs", modes=["fp32", "2-1"], samples=1)
        record(RecordRequest("outputs", modes=["fp32", "2-1"], samples=1))

    The options are the fields of RecordRequest; beside a request, they replace its own.

    An interrupted recording stays in `<out>/.partial`, and the same call finishes it. If `out` holds a recording of the
    same model, tokens and layers, the recipes are added to it.
    """
    request = replace(out, **options) if isinstance(out, RecordRequest) else RecordRequest(out, **options)
    with publishing.locked_folder(request.folder):
        return _record(request, progress or _Silent())


def _record(request: RecordRequest, progress: Progress) -> Recording:
    folder, layout = request.folder, request.layout
    check_request(request)
    model = model_to_run(request)
    device = device_name(request, model)
    for note in model.loaded.notes:
        progress.line(f"note: {note}")
    recipes = recipes_for(request, model)
    inputs = inputs_for(request, model)
    if any(recipe.needs_calibration for recipe in recipes) and not model.runs_as_is:
        input_batches(model.loaded, request.calibrated, key="calib_seqlen")  # refused before anything runs
    for note in inputs.notes:
        progress.line(f"note: {note}")
    batches = inputs.batches
    check_whole(request, model, batches)
    keys = tuple(map(str, recipes))
    tokens, weights = tokens_of(batches, request.source), model.loaded.fingerprint
    tokens = tokens if tokens.kind == "token ids" else replace(tokens, source=inputs.about)
    begun = Manifest(model.loaded.name, weights, device, tokens, {}, environment())
    asked = publishing.shared_facts(begun, layout) | _resume_facts(request, model, batches, recipes)
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
        run = _Run(request, model, tuple(batches), existing, partial, progress)
        _record_missing(run, [recipe for recipe in recipes if str(recipe) in partial.missing])
        source, facts = Recording(partial.folder, partial.manifest), script_facts(request, model, batches)
        return publishing.publish(folder, source, existing, facts, layout)


def _resume_facts(
    request: RecordRequest, model: ModelToRun, batches: Sequence[Batch], recipes: Sequence[Recipe]
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
    }


def _record_missing(run: _Run, recipes: Sequence[Recipe]) -> None:
    request, loaded = run.request, run.model.loaded
    calibration: Calibration | None = None
    short: Reference | None = None
    for index, recipe in enumerate(recipes):
        if calibration is None and recipe.needs_calibration and not run.model.runs_as_is:
            run.progress.line(f"[calibration] {request.calibration}")
            calibration = calibrate_on(loaded, *request.calibrated, percentile=request.percentile)
        used = calibration if recipe.needs_calibration else None
        twin, mode, weights = loaded.model, find_mode(recipe.mode), None
        if not run.model.runs_as_is:
            twin = apply(loaded.model, recipe, used)
            weights = count_weights(loaded.model, twin, recipe) if mode.is_quantized else None
            if not mode.is_reference:
                short = short or short_reference(loaded.model, run.batches, request.chosen_layers)
                check_twin(loaded.model, twin, recipe, short)
            twin = twin.to(request.device)
        points = taps.points_returned(twin)
        if points is None:
            points = taps.tap_points(twin, request.chosen_layers, request.chosen_taps, model_name=loaded.name)
        _check_addition(run, recipe, points)
        if not index:
            run.progress.begin(len(points.names) * len(run.batches) * len(recipes))
        run.progress.line(f"[{index + 1}/{len(recipes)}] {recipe}")
        modules = {label: points.sources[f"{label}.output"][0] for label in points.layers}
        declared = float_layers(taps.unwrapped(loaded.model), mode, modules)
        _record_recipe(run, recipe, twin, points, used, declared, weights)


def _record_recipe(
    run: _Run,
    recipe: Recipe,
    twin: nn.Module,
    points: taps.TapPoints,
    calibration: Calibration | None,
    declared: Collection[str],
    weights: Weights | None,
) -> None:
    """Run one recipe over all batches, and add it to the manifest once its file is whole."""
    request, partial, key = run.request, run.partial, str(recipe)
    file = partial.folder / f"{key}.safetensors"
    with TensorStream(file, points.names, partial.manifest.tokens.samples, label=key) as stream:

        def consume(name: str, tensor: Tensor) -> None:
            stream.add(name, tensor)
            run.progress.step(key, name)

        if request.compile and taps.points_returned(twin) is None:
            twin = taps.record_outputs(twin, request.chosen_layers, taps=request.chosen_taps)
        if request.compile and not taps.is_compiled(twin):
            twin = cast(nn.Module, torch.compile(twin))
        run_model = taps.run_hooked if taps.points_returned(twin) is None else taps.run_returning
        stray = run_model(twin, recipe, points, run.batches, consume)
        if stray:
            raise NotAppliedError(f"{recipe} was not applied: {next(iter(stray.values()))}.")
        recorded, stored = finished(recipe, stream, points.layers)
        applied: Literal["by probe", "before"] = "before" if run.model.runs_as_is else "by probe"
        used = None if calibration is None else request.recorded_calibration(calibration.data)
        kept = tuple(label for label in recorded.layers if label in declared)
        compiled = taps.is_compiled(twin)
        recorded = replace(
            recorded, applied=applied, calibration=used, compiled=compiled, float_layers=kept, weights=weights
        )
        _check_changed(run, recipe, recorded)
    partial.add(key, recorded, file.name, stored)


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
