"""Recordings: what a model gave on one device, kept so that it can be judged on any other machine.

<folder>/manifest.json                   what really ran (format.py)
<folder>/mode_2_1-fp8_e4m3.safetensors   one recipe: layer_0.output, layer_0.input if it was asked for, logits

A tensor is [samples, tokens, ...], all samples in a row, in the dtype that the model gave. Files from elsewhere are
checked before anything is believed, and never unpickled; whatever is wrong with them is a RecordingError.
"""

import hashlib
import os
import platform
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from probe.data import fingerprint
from probe.gate.observations import Observation, Stream, layer_observation, logits_observation
from probe.metrics import LogitComparison
from probe.modes import Recipe, find_mode
from probe.names import LOGITS
from probe.recordings.format import (
    AGAIN,
    DTYPES,
    TENSOR_NAME,
    Manifest,
    Recorded,
    RecordingError,
    Tokens,
    defect,
    manifest_from_json,
    manifest_to_json,
)
from probe.runner import Reference
from probe.version import VERSION

__all__ = ["Manifest", "Recorded", "Recording", "RecordingError", "Tokens"]
__all__ += ["observe_recording", "read_recording", "write_recording"]

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Recording:
    """A folder that was read and found sound. Tensors are mapped from disk one at a time, when they are asked for."""

    folder: Path
    manifest: Manifest

    @property
    def recipes(self) -> tuple[str, ...]:
        """mode_2_1-fp8_e4m3 and so on."""
        return tuple(self.manifest.recipes)

    def layers(self, recipe: str) -> tuple[str, ...]:
        """The labels of the layers that were recorded, in the order in which they were."""
        return self._recorded(recipe).layers

    def shape(self, recipe: str, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or None if it was not recorded."""
        return self._recorded(recipe).shapes.get(name) if recipe in self.recipes else None

    def tensor(self, recipe: str, name: str) -> Tensor:
        """`layer_0.output`, `logits`: [samples, ...] on the CPU. Pages are read as they are touched."""
        recorded = self._recorded(recipe)
        if name not in recorded.shapes:
            raise RecordingError(f"{self.folder} has no {name} of {recipe}. It has: {', '.join(recorded.shapes)}.")
        with _opened(self.folder / recorded.file) as stored:
            tensor: Tensor = stored.get_tensor(name)
            return tensor

    def _recorded(self, recipe: str) -> Recorded:
        if recipe not in self.manifest.recipes:
            raise RecordingError(f"{self.folder} has no recipe {recipe!r}. It has: {', '.join(self.recipes)}.")
        return self.manifest.recipes[recipe]


# ---------------------------------------------------------------------------------------------------- reading


def read_recording(folder: Path | str) -> Recording:
    """Check the manifest, and every file that it names byte for byte; no tensor is loaded."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    for recorded in manifest.recipes.values():
        _check_file(folder, recorded)
    return Recording(folder, manifest)


def _read_manifest(folder: Path) -> Manifest:
    with _reading(folder):
        if not folder.is_dir():
            raise RecordingError(f"there is no folder {folder}. Expected a recording. {AGAIN}.")
    file = _inside(folder, MANIFEST)
    with _reading(file):
        return manifest_from_json(file.read_bytes(), file)


def _check_file(folder: Path, recorded: Recorded) -> None:
    file = _inside(folder, recorded.file)
    found = _sha256(file)
    if found != recorded.sha256:
        raise defect(
            file,
            f"its sha256 is {found[:12]}... and the manifest says {recorded.sha256[:12]}...: it was cut short or "
            "changed, or belongs to another recording",
        )
    with _opened(file) as stored:
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        kinds = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    for name in sorted(kinds.keys() ^ recorded.shapes.keys()):
        raise defect(file, f"{name} is in {'the file' if name in kinds else 'the manifest'} only")
    for name, kind in kinds.items():
        expected = (DTYPES[recorded.dtype[name]], recorded.shapes[name])
        if kind != expected:
            raise defect(file, f"{name} is {_told(*kind)}, and the manifest says {_told(*expected)}")


def _told(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _inside(folder: Path, name: str) -> Path:
    """A file of the recording: a real one, in its folder even when links are followed."""
    file = folder / name
    with _reading(file):
        if not file.is_file():
            raise defect(file, "is missing, so this is no whole recording")
        if file.resolve().parent != folder.resolve():
            raise defect(file, f"is a link to {file.resolve()}, which is not in the folder")
    return file


def _sha256(file: Path) -> str:
    with _reading(file), open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with _reading(file), safe_open(file, "pt") as stored:
        yield stored


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as problem:
        raise defect(file, f"is not safetensors that can be read ({problem})") from None
    except OSError as problem:
        raise defect(file, f"cannot be read: {problem.strerror or problem}") from None


# ---------------------------------------------------------------------------------------------------- writing


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
    _is_taken(folder, overwrite=overwrite)
    tokens = _tokens_of(batches)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        with _writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
        recorded: dict[str, Recorded] = {}
        for recipe, parts in recipes:
            if str(recipe) in recorded:
                raise RecordingError(f"{recipe} is given twice. Record each recipe once.")
            recorded[str(recipe)] = _write_recipe(partial, recipe, parts, tokens)
        if not recorded:
            raise RecordingError(f"nothing was recorded for {folder}: not one recipe was given. Give at least one.")
        known = {"probe": VERSION, "python": platform.python_version(), "torch": str(torch.__version__)}
        manifest = Manifest(model, model_fingerprint, device, tokens, recorded, known | dict(versions or {}))
        with _writing(folder):
            (partial / MANIFEST).write_bytes(manifest_to_json(manifest))
            for path in (*partial.iterdir(), partial):
                _sync(path)
        read_recording(partial)
        with _writing(folder):
            _put(partial, folder, in_place_of_another=_is_taken(folder, overwrite=overwrite))
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Recording(folder, manifest)


def _is_taken(folder: Path, *, overwrite: bool) -> bool:
    """Whether a recording has to make room; anything else that is in the way is an error."""
    with _writing(folder):
        if not os.path.lexists(folder):
            return False
        if not folder.is_dir():
            raise RecordingError(f"{folder} is a file. Expected the name of a folder to make.")
        names = set(os.listdir(folder))
    if not names:
        return False
    if MANIFEST not in names:
        raise RecordingError(f"{folder} is not empty and is no recording. Give another folder.")
    if not overwrite:
        raise RecordingError(f"{folder} holds a recording already. Give another folder, or overwrite=True.")
    try:
        own = {MANIFEST, *(one.file for one in _read_manifest(folder).recipes.values())}
    except RecordingError as problem:
        raise RecordingError(f"{folder} is not overwritten, since it is no sound recording. {problem}") from None
    for name in sorted(names - own):
        raise RecordingError(f"{folder} is not overwritten: {name!r} in it is no part of the recording. Move it away.")
    return True


def _tokens_of(batches: Sequence[Tensor]) -> Tokens:
    shapes = [tuple(batch.shape) for batch in batches]
    if not shapes or any(len(shape) != 2 or shape[1] != shapes[0][1] or 0 in shape for shape in shapes):
        raise RecordingError(f"batches have the shapes {shapes}. Expected [samples, tokens], all of one length.")
    samples, seqlen = sum(shape[0] for shape in shapes), shapes[0][1]
    return Tokens(samples * seqlen, samples, seqlen, fingerprint(batches))


def _write_recipe(folder: Path, recipe: Recipe, parts: Mapping[str, Sequence[Tensor]], tokens: Tokens) -> Recorded:
    tensors = {name: _joined(recipe, name, some, tokens) for name, some in parts.items()}
    layers = tuple(name.removesuffix(".output") for name in tensors if name.endswith(".output"))
    if not layers:
        raise RecordingError(f"{recipe} recorded not one layer. Expected tensors such as layer_0.output.")
    file = folder / f"{recipe}.safetensors"
    with _writing(file):
        save_file(tensors, file)
    return Recorded(
        file.name,
        find_mode(recipe.mode).id,
        recipe.format,
        layers,
        {name: _dtype(tensor) for name, tensor in tensors.items()},
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        _sha256(file),
    )


def _joined(recipe: Recipe, name: str, parts: Sequence[Tensor], tokens: Tokens) -> Tensor:
    """The batches of one tensor in a row. Nothing is cropped, broadcast or converted."""
    if not TENSOR_NAME.fullmatch(name):
        raise RecordingError(f"{recipe}: {name!r} names no tensor. Expected layer_0.output, layer_0.input or {LOGITS}.")
    kinds = sorted({_told(_dtype(part), tuple(part.shape[1:])) for part in parts})
    rows = sum(len(part) for part in parts if part.dim())
    if rows != tokens.samples or len(kinds) != 1:
        raise RecordingError(
            f"{recipe}: {name} has {rows} samples of {' and '.join(kinds)}. Expected {tokens.samples} of one dtype and "
            "shape: choose a module that runs once in every forward and has the samples along its first axis."
        )
    if _dtype(parts[0]) not in DTYPES:
        raise RecordingError(f"{recipe}: {name} is {_dtype(parts[0])}. Expected one of {', '.join(DTYPES)}.")
    return torch.cat([part.detach().cpu() for part in parts])


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _put(partial: Path, folder: Path, *, in_place_of_another: bool) -> None:
    """Rename into place. The old recording is set aside first, and put back if that fails.

    A folder cannot take the place of another in one step: a kill between the two leaves the old one as `.previous`.
    """
    old = partial.with_suffix(".previous")
    if in_place_of_another:
        folder.rename(old)
    try:
        partial.rename(folder)
    except BaseException:
        if in_place_of_another:
            old.rename(folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise RecordingError(f"cannot write {path}: {why}. What was there before is whole.") from None


# -------------------------------------------------------------------------------------------------- observing


@torch.no_grad()
def observe_recording(
    recording: Recording,
    recipe: Recipe,
    reference: Reference,
    *,
    model_fingerprint: str,
    data_fingerprint: str,
    bytes_per_token: float = 1.0,
) -> dict[str, Observation]:
    """What `observe` sees of a recipe, from its recording: the propagated figures of every layer, and the logits.

    A layer or recipe that was not recorded is a flaw, `uncovered`. A recording of another model, of other tokens or
    of other shapes is a RecordingError: there is nothing to compare.
    """
    _check_same(recording, reference, model_fingerprint, data_fingerprint)
    key = str(recipe)
    has = ", ".join(recording.layers(key)) if key in recording.recipes else ", ".join(recording.recipes)
    found = {}
    for label in reference.layers:
        stream = Stream(reference.count(label), percentiles=True)
        for output, expected in _pairs(recording, key, f"{label}.output", reference.tensors[f"{label}.output"]):
            stream.take(output, expected)
        uncovered = [f"{recording.folder} has no {label} of {key}, only {has}. {AGAIN}"]
        found[label] = layer_observation(label, recipe, reference, {"propagated": stream}, {}, uncovered)
    whole, logits = LogitComparison(), Stream(sum(one.numel() for one in reference.logits), percentiles=False)
    batches = iter(reference.batches)
    for output, expected in _pairs(recording, key, LOGITS, reference.logits):
        whole.update(output[:, :-1], expected[:, :-1], next(batches)[:, 1:])
        logits.take(output, expected)
    uncovered = [f"{recording.folder} has none of {key}, only {has}. {AGAIN}"]
    found[LOGITS] = logits_observation(whole, logits, uncovered, bytes_per_token)
    return found


def _check_same(recording: Recording, reference: Reference, model_fingerprint: str, data_fingerprint: str) -> None:
    own = (reference.model, fingerprint(reference.batches))
    if own != (model_fingerprint, data_fingerprint):
        raise ValueError(
            f"the reference is of model {own[0]} and tokens {own[1]}, expected {model_fingerprint} and "
            f"{data_fingerprint}. Make it again with probe.run_reference."
        )
    tokens, model = recording.manifest.tokens, recording.manifest.fingerprint
    samples, lengths = sum(len(batch) for batch in reference.batches), {batch.shape[1] for batch in reference.batches}
    for what, recorded, expected in (
        ("number of samples", {tokens.samples}, {samples}),
        ("length of a sample", {tokens.seqlen}, lengths),
        ("fingerprint of the tokens", {tokens.fingerprint}, {data_fingerprint}),
        ("fingerprint of the model", {model}, {model_fingerprint if model else None}),
    ):
        if recorded != expected:
            there, here = (", ".join(sorted(map(str, some))) for some in (recorded, expected))
            raise RecordingError(
                f"{recording.folder}: the {what} is {there}, that of the reference is {here}: they cannot be compared. "
                "Record this model on these tokens, or take the model and the tokens of the recording."
            )


def _pairs(recording: Recording, recipe: str, name: str, expected: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Recorded and expected, in the batches of the reference; nothing where nothing was recorded."""
    shape = recording.shape(recipe, name)
    if shape is None:
        return
    sizes = [len(one) for one in expected]
    wanted = (sum(sizes), *expected[0].shape[1:])
    if shape != wanted:
        raise RecordingError(
            f"{recording.folder}: {name} of {recipe} has the shape {list(shape)}, the reference {list(wanted)}: they "
            "cannot be compared, and are never cropped. Record this model on these tokens."
        )
    for output, one in zip(torch.split(recording.tensor(recipe, name), sizes), expected, strict=True):
        yield output.float(), one.float()
