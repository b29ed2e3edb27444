"""`record`: run a model under modes, and stream what its layers give to disk."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from probe.formats import PERCENTILE
from probe.models.loading import Loaded
from probe.recordings.checked import RecordingError
from probe.recordings.exporting import build
from probe.recordings.format import LAYOUTS, TOKENS, Layout, Manifest, Recorded, Unfinished
from probe.recordings.layouts import Beside, Export
from probe.recordings.partial import Partial, partial_recording
from probe.recordings.placing import is_taken, put, recover
from probe.recordings.reading import Recording
from probe.recordings.request import (
    DEFAULTS,
    Calibrating,
    Subject,
    batches_of,
    check_only_one,
    check_ready,
    config_of,
    device_name,
    device_of,
    existing_recording,
    facts_of,
    recipes_for,
    subject_of,
)
from probe.recordings.returning import is_compiled, points_returned, record_outputs, returns_outputs, unwrapped
from probe.recordings.running import run_hooked, run_returning
from probe.recordings.spelling import NPZ
from probe.recordings.streams import TensorStream
from probe.recordings.taps import TAPS, Points, points_of
from probe.recordings.writing import finished, tokens_of, write_tokens
from probe.running.calibration import Calibration, calibrate_on
from probe.running.environment import environment
from probe.running.measurement import NotAppliedError
from probe.running.modes import find_mode
from probe.running.recipes import Recipe, apply
from probe.words import look_up


class Progress(Protocol):
    """Told what happens."""

    def line(self, text: str) -> None:
        """Something worth knowing."""

    def begin(self, steps: int) -> None:
        """How many tensors will be taken."""

    def step(self, recipe: str, name: str) -> None:
        """A tensor of a batch was written."""


class Silent:
    """Progress that nobody sees."""

    def line(self, text: str) -> None:
        """Keep it."""

    def begin(self, steps: int) -> None:
        """Never mind."""

    def step(self, recipe: str, name: str) -> None:
        """Never mind."""


@dataclass(frozen=True)
class Run:
    """All that recipes are run with."""

    subject: Subject
    layers: tuple[str | int, ...]
    taps: tuple[str, ...]
    batches: tuple[Tensor, ...]
    device: str
    compile: bool
    calibrating: Calibrating
    existing: Recording | None
    progress: Progress


@torch.no_grad()
def record(
    out: Path | str = "layer_outputs",
    *,
    model: str | Loaded | nn.Module = "tiny-mamba",
    pretrained_dir: str | None = None,
    modes: Sequence[str] | None = None,
    formats: Sequence[str] = ("int8",),
    layers: Sequence[str | int] | None = None,
    taps: Sequence[str] | None = None,
    samples: int | None = None,
    seqlen: int | None = None,
    data: str | None = None,
    prompt: str | None = None,
    batches: Sequence[Tensor] | None = None,
    batch_size: int = 1,
    device: str = "cpu",
    compile: bool = False,
    calib_data: str = "calibration",
    calib_data_num: int = 16,
    calib_seqlen: int = 256,
    percentile: float = PERCENTILE,
    layout: str = "safetensors",
    output_file: str | None = None,
    overwrite: bool = False,
    restart: bool = False,
    allow_download: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Recording:
    """Run a model under modes and keep tensors of its layers in the folder `out`; what is left out is in DEFAULTS.

    The tokens are `samples` windows of the text `data`, or those of `prompt`, or `batches`. A model that is compiled
    or made by record_outputs runs as it is, and `modes` and `formats` only say which one recipe it is.

    An interrupted recording lies in `<out>.partial` and is finished by the same call; `restart` deletes it. Recipes
    are added to a recording of the same model, tokens and layers that is there already; `overwrite` replaces those
    that it has.
    """
    progress = progress or Silent()
    look_up("layout", layout, dict.fromkeys(LAYOUTS))
    chosen = cast(Layout, layout)
    for tap in taps or ():
        look_up("tap", tap, dict.fromkeys(TAPS))
    file = output_file or NPZ
    if output_file is not None and chosen != "npz":
        raise ValueError(f"an output file is for the layout npz, and the layout is {layout}. Leave it out.")
    if not file.endswith(".npz") or Path(file).name != file:
        raise ValueError(f"the output file is {file!r}. Expected a plain name that ends in .npz.")
    check_only_one(batches=batches, prompt=prompt, data=data, samples=samples, seqlen=seqlen)
    defaults = DEFAULTS[chosen]
    folder = Path(os.path.realpath(out))
    recover(folder)
    is_taken(folder)
    subject = subject_of(model, pretrained_dir, allow_download=allow_download, trust_remote_code=trust_remote_code)
    where = device_name(device) if not subject.as_it_is else device_of(subject, device)
    if subject.as_it_is:
        check_ready(subject, layers=layers, taps=taps, compile=compile)
    for note in subject.loaded.notes:
        progress.line(f"note: {note}")
    recipes = recipes_for(subject, modes, formats, defaults)
    if batches is None:
        count = defaults.samples if samples is None else samples
        source = data or "evaluation"
        given = batches_of(subject, prompt=prompt, data=source, samples=count, seqlen=seqlen, batch_size=batch_size)
    else:
        given, source = list(batches), None
    tokens = tokens_of(given, source if prompt is None else None)
    keys = tuple(map(str, recipes))
    begun = Manifest(
        subject.loaded.name,
        subject.loaded.fingerprint,
        where,
        tokens,
        {},
        environment(),
        unfinished=Unfinished({}, keys),
    )
    existing = existing_recording(folder, begun, chosen, overwrite=overwrite)
    own = defaults.taps if taps is None else ("inputs",) if chosen == "npz" else ()
    run = Run(
        subject,
        tuple(layers or defaults.layers),
        tuple(dict.fromkeys((*own, *(taps or ())))),
        tuple(given),
        device,
        compile,
        Calibrating(calib_data, calib_data_num, calib_seqlen, percentile),
        existing,
        progress,
    )
    asked = facts_of(begun, chosen) | _asked(run, keys, file)
    with partial_recording(folder, replace(begun, unfinished=Unfinished(asked, keys)), restart=restart) as partial:
        if partial.reused:
            progress.line(f"continuing {partial.folder}: {', '.join(partial.reused)} recorded already")
        elif not partial.manifest.files:
            partial.manifest = replace(partial.manifest, files={TOKENS: write_tokens(partial.folder, given)})
            partial.save()
        _record_missing(run, partial, [recipe for recipe in recipes if str(recipe) in partial.missing])
        decode = subject.loaded.tokenizer.decode
        texts = [prompt] if prompt is not None else [decode(row.tolist()) for batch in given for row in batch]
        told = texts[0] if len(texts) == 1 else texts
        beside = Beside(told, config_of(unwrapped(subject.loaded.model)), pretrained_dir, file)
        return _publish(folder, partial, existing, beside, chosen)


def _asked(run: Run, recipes: Sequence[str], output_file: str) -> dict[str, str]:
    """What must be the same, beside the facts, for an interrupted recording to be continued."""
    return {
        "recipes": " ".join(recipes),
        "layers": " ".join(map(str, run.layers)),
        "taps": " ".join(run.taps) or "none",
        "output file": output_file,
        "batch size": str(len(run.batches[0])),
        "compiled": str(run.compile or is_compiled(run.subject.loaded.model)),
        "calibration": str(run.calibrating),
    }


# -------------------------------------------------------------------------------------------------- what is run


def _record_missing(run: Run, partial: Partial, recipes: Sequence[Recipe]) -> None:
    calibration: Calibration | None = None
    asked, loaded = run.calibrating, run.subject.loaded
    for index, recipe in enumerate(recipes):
        if calibration is None and recipe.needs_calibration and not run.subject.as_it_is:
            run.progress.line(f"[calibration] {asked}")
            calibration = calibrate_on(loaded, asked.data, asked.samples, asked.seqlen, percentile=asked.percentile)
        twin = loaded.model
        if not run.subject.as_it_is:
            twin = apply(loaded.model, recipe, calibration if recipe.needs_calibration else None).to(run.device)
        if returns_outputs(twin):
            points = points_returned(twin)
        else:
            points = points_of(twin, run.layers, run.taps, model_name=loaded.name)
        _check_addition(run, partial, recipe, points)
        if not index:
            run.progress.begin(len(points.names) * len(run.batches) * len(recipes))
        run.progress.line(f"[{index + 1}/{len(recipes)}] {recipe}")
        _record_recipe(run, partial, recipe, twin, points, calibration if recipe.needs_calibration else None)


def _record_recipe(
    run: Run, partial: Partial, recipe: Recipe, twin: nn.Module, points: Points, calibration: Calibration | None
) -> None:
    """Run one recipe over all batches, and list it once its file is whole."""
    key = str(recipe)
    file = partial.folder / f"{key}.safetensors"
    with TensorStream(file, points.names, partial.manifest.tokens.samples, what=key) as stream:

        def take(name: str, tensor: Tensor) -> None:
            stream.add(name, tensor)
            run.progress.step(key, name)

        if run.compile and not returns_outputs(twin):
            twin = record_outputs(twin, run.layers, taps=run.taps)
        if run.compile and not is_compiled(twin):
            twin = cast(nn.Module, torch.compile(twin))
        run_one = run_returning if returns_outputs(twin) else run_hooked
        stray = run_one(twin, recipe, points, run.batches, take)
        if stray:
            raise NotAppliedError(f"{recipe} was not applied: {next(iter(stray.values()))}.")
        recorded, facts = finished(recipe, stream, points.layers)
        asked = run.calibrating
        used = None if calibration is None else asked.done(calibration)
        recorded = replace(
            recorded,
            applied="before" if run.subject.as_it_is else "by probe",
            calibration=used,
            compiled=is_compiled(twin),
        )
        _check_changed(run, partial, recipe, recorded)
    partial.add(key, recorded, file.name, facts)


# ------------------------------------------------------------------------------------------------ what is checked


def _check_addition(run: Run, partial: Partial, recipe: Recipe, points: Points) -> None:
    """All recipes of a folder have the same layers and taps."""
    there = run.existing.manifest.recipes if run.existing else {}
    staying = {name: one for name, one in there.items() if name not in partial.missing}
    for other in (staying | partial.manifest.recipes).values():
        if other.layers != points.layers or set(other.tensors) != set(points.names):
            those, these = (", ".join(sorted(some)) for some in (other.tensors, points.names))
            raise RecordingError(
                f"{recipe} would have other tensors than {other.mode} in the same folder: {these}, not {those}. Give "
                "the same layers and taps, or another folder."
            )


def _check_changed(run: Run, partial: Partial, recipe: Recipe, recorded: Recorded) -> None:
    """A recipe whose every layer is that of fp32 to the bit did nothing."""
    float_one = str(Recipe("fp32"))
    here = Recording(partial.folder, partial.manifest)
    place = here if float_one in partial.manifest.recipes else run.existing
    if recipe.mode == float_one or place is None or float_one not in place.recipes:
        return
    mine = Recording(partial.folder, replace(partial.manifest, recipes={str(recipe): recorded}))
    names = [f"{label}.output" for label in recorded.layers]
    pairs = ((mine.tensor(str(recipe), name), place.tensor(float_one, name)) for name in names)
    if all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs):
        raise NotAppliedError(
            f"{recipe} was not applied: {', '.join(recorded.layers)} are those of fp32, to the bit. Record a layer "
            f"that {find_mode(recipe.mode).name} changes."
        )


def _publish(folder: Path, partial: Partial, existing: Recording | None, beside: Beside, layout: Layout) -> Recording:
    """Build the folder beside its place, rename it, and let the partial one go."""
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        source = Recording(partial.folder, partial.manifest)
        manifest = build(Export(fresh, source, existing, beside), layout)
        if is_taken(folder) != (existing is not None):
            raise RecordingError(f"{folder} has changed while it was recorded. Run the same command again.")
        put(fresh, folder, in_place_of_another=existing is not None)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(partial.folder, ignore_errors=True)
    return Recording(folder, manifest)
