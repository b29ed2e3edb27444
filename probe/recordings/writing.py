"""Writing a recording of tensors that the caller has, such as those of a device that probe does not run itself."""

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from probe.data import token_fingerprint
from probe.recordings.checked import RecordingError
from probe.recordings.disk import sha256_of, sync_all, writing
from probe.recordings.format import (
    ENDS,
    MANIFEST,
    PARTS,
    TENSOR_NAME,
    TOKENS,
    File,
    Manifest,
    Recorded,
    Stored,
    Tokens,
    manifest_to_json,
)
from probe.recordings.placing import may_be_overwritten, put
from probe.recordings.reading import Recording, read_recording
from probe.recordings.streams import TensorStream
from probe.running.environment import environment
from probe.running.modes import find_mode
from probe.running.recipes import Recipe
from probe.words import LOGITS


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

    Recipes may come from a generator: each is on disk before the next is asked for. All is written beside `folder`,
    read back, and only then renamed into its place, so that a folder is a whole recording or not there. With
    `overwrite` an older recording, and nothing but a recording, makes room.
    """
    folder = Path(os.path.realpath(folder))
    may_be_overwritten(folder, overwrite=overwrite)
    tokens = tokens_of(batches)
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            fresh.mkdir()
        files = {TOKENS: write_tokens(fresh, batches)}
        recorded: dict[str, Recorded] = {}
        for recipe, parts in recipes:
            if str(recipe) in recorded:
                raise RecordingError(f"{recipe} is given twice. Record each recipe once.")
            with TensorStream(fresh / f"{recipe}.safetensors", list(parts), tokens.samples, what=str(recipe)) as stream:
                for name, some in parts.items():
                    check_name(recipe, name)
                    for part in some:
                        stream.add(name, part)
                recorded[str(recipe)], files[stream.file.name] = finished(recipe, stream)
        if not recorded:
            raise RecordingError(f"nothing was recorded for {folder}: not one recipe was given. Give at least one.")
        known = environment() | dict(versions or {})
        manifest = Manifest(model, model_fingerprint, device, tokens, recorded, known, files=files)
        with writing(folder):
            (fresh / MANIFEST).write_bytes(manifest_to_json(manifest))
            sync_all(fresh)
        read_recording(fresh)
        put(fresh, folder, in_place_of_another=may_be_overwritten(folder, overwrite=overwrite))
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return Recording(folder, manifest)


def tokens_of(batches: Sequence[Tensor], source: str | None = None) -> Tokens:
    """The facts about what a model is given; anything but rows of one length is refused."""
    shapes = [tuple(batch.shape) for batch in batches]
    if not shapes or any(len(shape) != 2 or shape[1] != shapes[0][1] or 0 in shape for shape in shapes):
        raise RecordingError(f"batches have the shapes {shapes}. Expected [samples, tokens], all of one length.")
    if any(batch.is_floating_point() or batch.is_complex() for batch in batches):
        raise RecordingError(f"batches are {batches[0].dtype}. Expected token ids, whole numbers.")
    samples, seqlen = sum(shape[0] for shape in shapes), shapes[0][1]
    return Tokens(samples * seqlen, samples, seqlen, token_fingerprint(batches), TOKENS, source)


def write_tokens(folder: Path, batches: Sequence[Tensor]) -> File:
    """The token ids, so that another recording can be told which of them differs."""
    file = folder / TOKENS
    ids = torch.cat([batch.detach().cpu().to(torch.int64) for batch in batches])
    with writing(file):
        file.write_bytes(save({"input_ids": ids}))
    return File(file.stat().st_size, sha256_of(file))


def check_name(what: object, name: str) -> None:
    """Refuse what is no name of a tensor."""
    if not TENSOR_NAME.fullmatch(name):
        raise RecordingError(f"{what}: {name!r} names no tensor. Expected layer_0.output, layer_0.input or {LOGITS}.")


def finished(recipe: Recipe, stream: TensorStream, layers: Sequence[str] | None = None) -> tuple[Recorded, File]:
    """What a whole stream holds; without `layers`, every output but those of the ends is that of a layer."""
    kinds, file = stream.finish()
    if layers is None:
        labels = [name.removesuffix(".output") for name in kinds if name.endswith(".output")]
        parts = {f"{label}.{part}" for label in labels for part in PARTS}
        layers = [label for label in labels if label not in (*ENDS, *parts)]
    if not layers:
        raise RecordingError(f"{recipe} recorded not one layer. Expected tensors such as layer_0.output.")
    tensors = {name: Stored(dtype, shape, stream.file.name, name) for name, (dtype, shape) in kinds.items()}
    return Recorded(find_mode(recipe.mode).id, recipe.format, tuple(layers), tensors), file
