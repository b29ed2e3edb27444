"""Making a recording, streamed to disk: `record` runs a model, `write_recording` takes tensors that the caller has."""

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from safetensors.torch import save
from torch import Tensor, nn

from probe.data.samples import token_fingerprint
from probe.files.atomic import make_folder, sync_tree, write
from probe.recordings import publishing, taps
from probe.recordings.manifest import (
    ENDS,
    MANIFEST,
    PARTS,
    TENSOR_NAME,
    TOKENS,
    Manifest,
    RecordedRecipe,
    RecordingError,
    StoredFile,
    StoredTensor,
    Tokens,
    UnfinishedWork,
    manifest_to_json,
    writing,
)
from probe.recordings.reading import Recording, read_recording
from probe.recordings.request import (
    ModelToRun,
    RecordRequest,
    batches_for,
    device_name,
    model_to_run,
    recipes_for,
    script_facts,
)
from probe.recordings.stream import TensorStream
from probe.running.calibration import Calibration, calibrate_on
from probe.running.environment import environment
from probe.running.measurement import NotAppliedError
from probe.running.modes import find_mode
from probe.running.recipes import Recipe, apply
from probe.words import LOGITS


class Progress(Protocol):
    """Receives what happens while a recording is made."""

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
    """What all recipes of a request are run with."""

    request: RecordRequest
    model: ModelToRun
    batches: tuple[Tensor, ...]
    existing: Recording | None
    partial: publishing.PartialRecording
    progress: Progress


@torch.no_grad()
def record(
    out: RecordRequest | Path | str = "layer_outputs", *, progress: Progress | None = None, **options: Any
) -> Recording:
    """Run a model under modes and keep tensors of its layers in the folder `out`.

        record("outputs", modes=["fp32", "2-1"], samples=1)
        record(RecordRequest("outputs", modes=["fp32", "2-1"], samples=1))

    The options are the fields of RecordRequest; those given beside a request replace its own.

    An interrupted recording is in `<out>.partial` and is finished by the same call. Recipes are added to a recording
    of the same model, tokens and layers that is there already.
    """
    request = replace(out, **options) if isinstance(out, RecordRequest) else RecordRequest(out, **options)
    progress = progress or _Silent()
    folder, layout = request.folder, request.layout
    publishing.recover(folder)
    publishing.holds_recording(folder)
    model = model_to_run(request)
    device = device_name(request, model)
    for note in model.loaded.notes:
        progress.line(f"note: {note}")
    recipes = recipes_for(request, model)
    batches = batches_for(request, model)
    keys = tuple(map(str, recipes))
    tokens, weights = _tokens_of(batches, request.source), model.loaded.fingerprint
    begun = Manifest(model.loaded.name, weights, device, tokens, {}, environment())
    existing = publishing.existing_recording(folder, begun, keys, layout, overwrite=request.overwrite)
    asked = publishing.shared_facts(begun, layout) | _resume_facts(request, model, batches, keys)
    begun = replace(begun, unfinished=UnfinishedWork(asked, keys))
    with publishing.partial_recording(folder, begun, restart=request.restart) as partial:
        if partial.reused:
            progress.line(f"continuing {partial.folder}: {', '.join(partial.reused)} recorded already")
        elif not partial.manifest.files:
            partial.manifest = replace(partial.manifest, files={TOKENS: _write_tokens(partial.folder, batches)})
            partial.save()
        run = _Run(request, model, tuple(batches), existing, partial, progress)
        _record_missing(run, [recipe for recipe in recipes if str(recipe) in partial.missing])
        return publishing.publish(folder, partial, existing, script_facts(request, model, batches), layout)


def _resume_facts(
    request: RecordRequest, model: ModelToRun, batches: Sequence[Tensor], recipes: Sequence[str]
) -> dict[str, str]:
    """What must be the same, beside the shared facts, for an interrupted recording to be continued."""
    return {
        "recipes": " ".join(recipes),
        "layers": " ".join(map(str, request.chosen_layers)),
        "taps": " ".join(request.chosen_taps) or "none",
        "output file": request.archive,
        "batch size": str(len(batches[0])),
        "compiled": str(request.compile or taps.is_compiled(model.loaded.model)),
        "calibration": request.calibration,
    }


def _record_missing(run: _Run, recipes: Sequence[Recipe]) -> None:
    request, loaded = run.request, run.model.loaded
    calibration: Calibration | None = None
    for index, recipe in enumerate(recipes):
        if calibration is None and recipe.needs_calibration and not run.model.runs_as_is:
            run.progress.line(f"[calibration] {request.calibration}")
            sizes = (request.calib_data_num, request.calib_seqlen)
            calibration = calibrate_on(loaded, request.calib_data, *sizes, percentile=request.percentile)
        used = calibration if recipe.needs_calibration else None
        twin = loaded.model
        if not run.model.runs_as_is:
            twin = apply(loaded.model, recipe, used).to(request.device)
        points = taps.points_returned(twin)
        if points is None:
            points = taps.tap_points(twin, request.chosen_layers, request.chosen_taps, model_name=loaded.name)
        _check_addition(run, recipe, points)
        if not index:
            run.progress.begin(len(points.names) * len(run.batches) * len(recipes))
        run.progress.line(f"[{index + 1}/{len(recipes)}] {recipe}")
        _record_recipe(run, recipe, twin, points, used)


def _record_recipe(
    run: _Run, recipe: Recipe, twin: nn.Module, points: taps.TapPoints, calibration: Calibration | None
) -> None:
    """Run one recipe over all batches, and list it once its file is whole."""
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
        recorded, stored = _finished(recipe, stream, points.layers)
        applied: Literal["by probe", "before"] = "before" if run.model.runs_as_is else "by probe"
        used = None if calibration is None else request.recorded_calibration(calibration)
        recorded = replace(recorded, applied=applied, calibration=used, compiled=taps.is_compiled(twin))
        _check_changed(run, recipe, recorded)
    partial.add(key, recorded, file.name, stored)


def _check_addition(run: _Run, recipe: Recipe, points: taps.TapPoints) -> None:
    """All recipes of a folder have the same layers and taps."""
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
    """A recipe whose every layer is bit-identical to fp32 did nothing."""
    partial, reference = run.partial, str(Recipe("fp32"))
    here = Recording(partial.folder, partial.manifest)
    place = here if reference in partial.manifest.recipes else run.existing
    if recipe.mode == reference or place is None or reference not in place.recipes:
        return
    mine = Recording(partial.folder, replace(partial.manifest, recipes={str(recipe): recorded}))
    names = [f"{label}.output" for label in recorded.layers]
    pairs = ((mine.tensor(str(recipe), name), place.tensor(reference, name)) for name in names)
    if all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs):
        raise NotAppliedError(
            f"{recipe} was not applied: {', '.join(recorded.layers)} are those of fp32, to the bit. Record a layer "
            f"that {find_mode(recipe.mode).name} changes."
        )


# --------------------------------------------------------------------------------- tensors that the caller has


def write_recording(
    folder: Path | str,
    recipes: Iterable[tuple[Recipe, Mapping[str, Sequence[Tensor]]]],
    *,
    model: str,
    batches: Sequence[Tensor],
    device: str,
    model_fingerprint: str | None = None,
    versions: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Recording:
    """Write what recipes gave over `batches`: `layer_0.output` and `logits`, a tensor for each batch, as captured.

    It is for devices that probe does not run itself. Recipes may come from a generator: each is on disk before the
    next is asked for. All is written beside `folder`, read back, and only then renamed into its place, so that a
    folder is a whole recording or not there. With `overwrite` an older recording, and nothing else, is replaced.
    """
    folder = Path(os.path.realpath(folder))
    publishing.is_to_be_replaced(folder, overwrite=overwrite)
    tokens = _tokens_of(batches)
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        with writing(folder):
            make_folder(fresh)
        files = {TOKENS: _write_tokens(fresh, batches)}
        recorded: dict[str, RecordedRecipe] = {}
        for recipe, parts in recipes:
            key = str(recipe)
            if key in recorded:
                raise RecordingError(f"{recipe} is given twice. Record each recipe once.")
            with TensorStream(fresh / f"{key}.safetensors", list(parts), tokens.samples, label=key) as stream:
                for name, some in parts.items():
                    if not TENSOR_NAME.fullmatch(name):
                        raise RecordingError(
                            f"{key}: {name!r} names no tensor. Expected layer_0.output, layer_0.input or {LOGITS}."
                        )
                    for part in some:
                        stream.add(name, part)
                recorded[key], files[stream.file.name] = _finished(recipe, stream)
        if not recorded:
            raise RecordingError(f"nothing was recorded for {folder}: not one recipe was given. Give at least one.")
        known = environment() | dict(versions or {})
        manifest = Manifest(model, model_fingerprint, device, tokens, recorded, known, files=files)
        with writing(folder):
            write(fresh / MANIFEST, manifest_to_json(manifest))
            sync_tree(fresh)
        read_recording(fresh)
        publishing.put_in_place(fresh, folder, replaces=publishing.is_to_be_replaced(folder, overwrite=overwrite))
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return Recording(folder, manifest)


def _tokens_of(batches: Sequence[Tensor], source: str | None = None) -> Tokens:
    """The facts about what a model is given; anything but rows of one length is refused."""
    shapes = [tuple(batch.shape) for batch in batches]
    if not shapes or any(len(shape) != 2 or shape[1] != shapes[0][1] or 0 in shape for shape in shapes):
        raise RecordingError(f"batches have the shapes {shapes}. Expected [samples, tokens], all of one length.")
    if any(batch.is_floating_point() or batch.is_complex() for batch in batches):
        raise RecordingError(f"batches are {batches[0].dtype}. Expected token ids, whole numbers.")
    samples, seqlen = sum(shape[0] for shape in shapes), shapes[0][1]
    return Tokens(samples * seqlen, samples, seqlen, token_fingerprint(batches), TOKENS, source)


def _write_tokens(folder: Path, batches: Sequence[Tensor]) -> StoredFile:
    """Keep the token ids, so that a comparison with another recording can say which of them differs."""
    ids = torch.cat([batch.detach().cpu().to(torch.int64) for batch in batches])
    with writing(folder / TOKENS):
        return StoredFile.of(write(folder / TOKENS, save({"input_ids": ids})))


def _finished(
    recipe: Recipe, stream: TensorStream, layers: Sequence[str] | None = None
) -> tuple[RecordedRecipe, StoredFile]:
    """What a whole stream holds. Without `layers`, every output is a layer's but those of the ends and of parts."""
    kinds, file = stream.finish()
    if layers is None:
        labels = [name.removesuffix(".output") for name in kinds if name.endswith(".output")]
        parts = {f"{label}.{part}" for label in labels for part in PARTS}
        layers = [label for label in labels if label not in (*ENDS, *parts)]
    if not layers:
        raise RecordingError(f"{recipe} recorded not one layer. Expected tensors such as layer_0.output.")
    tensors = {name: StoredTensor(*kind, stream.file.name, name) for name, kind in kinds.items()}
    return RecordedRecipe(find_mode(recipe.mode).id, recipe.format, tuple(layers), tensors), file
