"""Reading a recording: every defect of it is found before its first tensor is loaded."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from probe.data.samples import token_fingerprint
from probe.files.defects import DefectError, file_inside
from probe.files.tensors import Kind, kind_of, load_tensor, numpy_dtype, tensors_in
from probe.recordings.manifest import (
    AGAIN,
    MANIFEST,
    Layout,
    Manifest,
    RecordedRecipe,
    RecordingError,
    StoredFile,
    StoredTensor,
    data_flow_order,
    manifest_from_json,
    reading,
)
from probe.recordings.other_layouts import manifest_of_scripts, token_ids_of_metadata
from probe.running.modes import MODES

#: The names beside a recording: while it is made, and while it takes the place of another.
PARTIAL, PREVIOUS = "{}.partial", ".{}.previous"


@dataclass(frozen=True)
class Recording:
    """A folder that was read and found sound. A tensor is mapped from disk when `tensor` is called.

    `notes` says what a reader should know, such as what could not be verified.
    """

    folder: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()

    @property
    def recipes(self) -> tuple[str, ...]:
        """mode_2_1-fp8_e4m3 and so on, in the order of the table of modes."""
        places = {mode.id: place for place, mode in enumerate(MODES.values())}
        found = self.manifest.recipes
        return tuple(sorted(found, key=lambda name: (places.get(found[name].mode, len(places)), name)))

    def layers(self, recipe: str) -> tuple[str, ...]:
        """The labels of the layers that were recorded, in the order of the model."""
        return self._recorded(recipe).layers

    def names(self, recipe: str) -> tuple[str, ...]:
        """The names of all tensors in the order of the data flow: `embedding.output`, `layer_0.output`, `logits`."""
        recorded = self._recorded(recipe)
        return data_flow_order(recorded.tensors, recorded.layers)

    def shape(self, recipe: str, name: str) -> tuple[int, ...]:
        """[samples, tokens, ...]."""
        return self._stored(recipe, name).shape

    def dtype(self, recipe: str, name: str) -> str:
        """What the model gave, `bfloat16`. numpy has no such type, so `tensor` of an npy layout is float32 then."""
        return self._stored(recipe, name).dtype

    def tensor(self, recipe: str, name: str) -> Tensor:
        """[samples, tokens, ...] on the CPU. Pages are read as they are touched; an .npz is decompressed."""
        stored = self._stored(recipe, name)
        file = self._base / stored.file
        with reading(file):
            tensor = load_tensor(file, stored.key)
            found = kind_of(tensor)
            if found != _kind_on_disk(self.manifest.layout, stored):
                raise DefectError(f"{name} has become {found} since the recording was read")
        return tensor

    def input_ids(self) -> Tensor | None:
        """The tokens that the model was given, int64 [samples, tokens]; None where they were not kept."""
        tokens = self.manifest.tokens
        if tokens.file is None:
            return None
        file = self._base / tokens.file
        with reading(file):
            ids = _token_ids(file) if tokens.file.endswith(".safetensors") else token_ids_of_metadata(file)
            if ids is not None and token_fingerprint([ids]) != tokens.fingerprint:
                raise DefectError(f"the tokens are not those of the manifest, {tokens.fingerprint}")
        return ids

    @property
    def _base(self) -> Path:
        """The folder of the files: `folder`, or the folder around it if it is a file itself."""
        return self.folder.parent if self.folder.suffix == ".npz" and self.folder.is_file() else self.folder

    def _recorded(self, recipe: str) -> RecordedRecipe:
        if recipe not in self.manifest.recipes:
            raise RecordingError(f"{self.folder} has no recipe {recipe!r}. It has: {', '.join(self.recipes)}.")
        return self.manifest.recipes[recipe]

    def _stored(self, recipe: str, name: str) -> StoredTensor:
        recorded = self._recorded(recipe)
        if name not in recorded.tensors:
            names = ", ".join(self.names(recipe))
            raise RecordingError(f"{self.folder} has no {name} of {recipe}. It has: {names}.")
        return recorded.tensors[name]


def read_recording(folder: Path | str, *, verify: bool = True) -> Recording:
    """Check the manifest and every file that it names; no tensor is loaded.

    With `verify` every byte is checked (sha256); without, sizes and headers. A folder without a manifest is read if
    its files are named as the layouts name them; `notes` then says what could not be verified.
    """
    folder = Path(folder)
    with reading(folder):
        is_file, is_folder = folder.is_file(), folder.is_dir()
        has_manifest = is_folder and os.path.lexists(folder / MANIFEST)
    if not is_folder and not (is_file and folder.suffix == ".npz"):
        raise RecordingError(f"there is no folder {folder}. Expected a recording. {_where_it_may_be(folder)}")
    if not has_manifest:
        found = manifest_of_scripts(folder)
        if found is None:
            raise RecordingError(f"{folder / MANIFEST}: is missing, so this is no whole recording. {AGAIN}")
        return Recording(folder, *found)
    manifest = read_manifest(folder)
    if manifest.unfinished is not None:
        whole, missing = len(manifest.recipes), manifest.unfinished.missing
        raise RecordingError(
            f"{folder} is an interrupted recording: {whole} of {whole + len(missing)} recipes are whole, "
            f"{', '.join(missing) or 'none'} missing. Run the same probe record command again to finish it."
        )
    check_files(folder, manifest, verify=verify)
    kept = manifest.tokens.file is not None
    return Recording(folder, manifest, () if kept else ("the token ids were not kept, only their fingerprint",))


def _where_it_may_be(folder: Path) -> str:
    for name, words in (
        (PARTIAL, "is an interrupted recording of it: run the same probe record command again to finish it"),
        (PREVIOUS, "is what an interrupted overwriting left of it: rename it back"),
    ):
        beside = folder.with_name(name.format(folder.name)) if folder.name else folder
        with reading(folder):
            if beside.is_dir() and beside != folder:
                return f"{beside} {words}."
    return f"{AGAIN}."


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone, checked key by key."""
    with reading(folder / MANIFEST):
        return manifest_from_json(file_inside(folder, MANIFEST).read_bytes())


def check_files(folder: Path, manifest: Manifest, *, verify: bool) -> None:
    """Every file is there with its size (and its bytes, if `verify`), and holds exactly the tensors it should."""
    for name, facts in manifest.files.items():
        with reading(folder / name):
            file = file_inside(folder, name)
            size = file.stat().st_size
            if size != facts.bytes:
                raise DefectError(f"has {size} bytes and the manifest says {facts.bytes}: it was cut short or changed")
            if verify and (found := StoredFile.of(file).sha256) != facts.sha256:
                raise DefectError(
                    f"its sha256 is {found[:12]}... and the manifest says {facts.sha256[:12]}...: it was changed, or "
                    "belongs to another recording"
                )
    expected: dict[str, dict[str | None, Kind]] = {}
    for recorded in manifest.recipes.values():
        for one in recorded.tensors.values():
            expected.setdefault(one.file, {})[one.key] = _kind_on_disk(manifest.layout, one)
    for name, kinds in expected.items():
        with reading(folder / name):
            _check_kinds(kinds, tensors_in(file_inside(folder, name)))
    tokens = manifest.tokens
    if tokens.file is not None:
        with reading(folder / tokens.file):
            shape = tuple(_token_ids(file_inside(folder, tokens.file)).shape)
            if shape != (tokens.samples, tokens.seqlen):
                raise DefectError(
                    f"holds {list(shape)} tokens, and the manifest says {[tokens.samples, tokens.seqlen]}"
                )


def _check_kinds(expected: dict[str | None, Kind], found: dict[str | None, Kind]) -> None:
    for key in sorted(expected.keys() ^ found.keys(), key=str):
        raise DefectError(f"{key} is in {'the file' if key in found else 'the manifest'} only")
    for key, kind in found.items():
        if kind != expected[key]:
            raise DefectError(f"{key or 'it'} is {kind}, and the manifest says {expected[key]}")


def _kind_on_disk(layout: Layout, stored: StoredTensor) -> Kind:
    return Kind(numpy_dtype(stored.dtype) if layout in ("npy", "npz") else stored.dtype, stored.shape)


def _token_ids(file: Path) -> Tensor:
    """The token ids of a recording, int64 [samples, tokens]."""
    ids = load_tensor(file, "input_ids")
    if ids.dtype != torch.int64 or ids.dim() != 2:
        raise DefectError(f"its input_ids are {kind_of(ids)}. Expected int64 [samples, tokens]")
    return ids
