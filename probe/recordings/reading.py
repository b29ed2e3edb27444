"""Reading a recording: every defect of it is found before its first tensor is loaded.

A folder of the users' own scripts has no manifest. Its recipes and layers come from the names of files, its tokens from
metadata.pt if there is one; notes say what cannot be verified.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from probe.data.calls import input_fingerprint
from probe.files.defects import DefectError, file_inside, parsing, read_document
from probe.files.tensors import Kind, check_storage, kind_of, load_plain, load_tensor, numpy_dtype, tensors_in
from probe.recordings.manifest import (
    AGAIN,
    DTYPES,
    MANIFEST,
    Layout,
    Manifest,
    RecordedRecipe,
    RecordingError,
    StoredFile,
    StoredTensor,
    Tokens,
    data_flow_order,
    manifest_from_json,
    reading,
)
from probe.recordings.script_formats import METADATA, NPY_FILE, NPZ, NPZ_KEY, PT_FILE, recipe_named, tensor_named
from probe.running.modes import MODES

#: In the folder of a recording while it is made: the recipes that are whole, the files to be put in its place, and the
#: manifest of PARTIAL once all of them are there.
PARTIAL, NEW, FINISHED = ".partial", ".new", ".finished.json"

#: What to do where nothing was recorded yet.
FIRST = "Record the float model and the modes first: probe record --modes fp32 2-1 --out {}"

UNKNOWN = "unknown"
TensorsByRecipe = dict[tuple[str, str | None], dict[str, StoredTensor]]  # mode and format -> tensors

NO_MANIFEST = "no manifest: the model, its weights and the device are not known, and no file can be verified"
NO_MODE = f"no manifest: which mode ran is not known; it is called {UNKNOWN!r}"
NO_TOKENS = "no manifest: the inputs cannot be verified"


@dataclass(frozen=True)
class Recording:
    """A recording that was checked. A tensor is mapped from disk when `tensor` is called.

    `notes` say what a reader should know, such as what could not be verified.
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
        """The labels of the recorded layers, in the order of the model."""
        return self._recorded(recipe).layers

    def names(self, recipe: str) -> tuple[str, ...]:
        """The names of all tensors in the order of the data flow: `embedding.output`, `layer_0.output`, `logits`."""
        recorded = self._recorded(recipe)
        return data_flow_order(recorded.tensors, recorded.layers)

    def shape(self, recipe: str, name: str) -> tuple[int, ...]:
        """[samples, tokens, ...]."""
        return self._stored(recipe, name).shape

    def dtype(self, recipe: str, name: str) -> str:
        """The dtype in the model, `bfloat16`; where numpy lacks it, `tensor` of the layouts npy and npz is float32."""
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
        """The tokens of the input, int64 [samples, tokens]; None if they were not stored."""
        tokens = self.manifest.tokens
        if tokens.file is None:
            return None
        file = self._base / tokens.file
        with reading(file):
            ids = _token_ids(file) if tokens.file.endswith(".safetensors") else _token_ids_of_metadata(file)
            if ids is not None and input_fingerprint([ids]) != tokens.fingerprint:
                raise DefectError(f"the tokens are not those of the manifest, {tokens.fingerprint}")
        return ids

    @property
    def _base(self) -> Path:
        """The folder of the files: `folder`, or its parent if it is an .npz file."""
        return self.folder.parent if self.folder.suffix == ".npz" and self.folder.is_file() else self.folder

    def _recorded(self, recipe: str) -> RecordedRecipe:
        if recipe not in self.manifest.recipes:
            raise RecordingError(f"{self.folder} has no recipe {recipe!r}. It has: {', '.join(self.recipes)}.")
        return self.manifest.recipes[recipe]

    def _stored(self, recipe: str, name: str) -> StoredTensor:
        recorded = self._recorded(recipe)
        if name not in recorded.tensors:
            raise RecordingError(f"{self.folder} has no {name} of {recipe}. It has: {', '.join(self.names(recipe))}.")
        return recorded.tensors[name]


def read_recording(folder: Path | str, *, verify: bool = True) -> Recording:
    """Check the manifest and every file that it names; no tensor is loaded.

    With `verify` every byte is checked (sha256); without, sizes and headers. A folder without a manifest can be read if
    its files have the names that the users' scripts give them; `notes` then say what could not be verified.
    """
    folder = Path(folder)
    with reading(folder):
        is_file, is_folder = folder.is_file(), folder.is_dir()
        has_manifest = is_folder and os.path.lexists(folder / MANIFEST)
    if not is_folder and not (is_file and folder.suffix == ".npz"):
        raise RecordingError(f"there is no folder {folder}. Expected a recording. {FIRST.format(folder)}.")
    again = "Run the same probe record command again to finish it."
    if is_folder and os.path.lexists(folder / NEW / MANIFEST):
        raise RecordingError(f"{folder} is being written, or was interrupted while it was. {again}")
    if is_folder and not has_manifest and os.path.lexists(folder / PARTIAL / MANIFEST):
        return read_recording(folder / PARTIAL)
    if not has_manifest:
        found = _manifest_of_scripts(folder)
        if found is None and not any(folder.iterdir()):
            raise RecordingError(f"{folder} is empty. Expected a recording. {FIRST.format(folder)}.")
        if found is None:
            raise RecordingError(f"{folder / MANIFEST}: is missing, so this is no whole recording. {AGAIN}")
        return Recording(folder, *found)
    manifest = read_manifest(folder)
    if manifest.unfinished is not None:
        whole, missing = len(manifest.recipes), manifest.unfinished.missing
        raise RecordingError(
            f"{folder} is an interrupted recording: {whole} of {whole + len(missing)} recipes are whole, "
            f"{', '.join(missing) or 'none'} missing. {again}"
        )
    check_files(folder, manifest, verify=verify)
    kept = manifest.tokens.file is not None
    return Recording(folder, manifest, () if kept else ("the token ids were not kept, only their fingerprint",))


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone, checked key by key."""
    with reading(folder / MANIFEST):
        return manifest_from_json(read_document(file_inside(folder, MANIFEST)))


def check_files(folder: Path, manifest: Manifest, *, verify: bool) -> None:
    """Check that every file has its size (with `verify`, its bytes) and exactly the tensors of the manifest."""
    for name, facts in manifest.files.items():
        with reading(folder / name):
            file = file_inside(folder, name)
            size = file.stat().st_size
            if size != facts.bytes:
                raise DefectError(f"has {size} bytes and the manifest says {facts.bytes}: it was cut short or changed")
            if verify and (found := StoredFile.of(file).sha256) != facts.sha256:
                digests = f"its sha256 is {found[:12]}... and the manifest says {facts.sha256[:12]}..."
                raise DefectError(f"{digests}: it was changed, or belongs to another recording")
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
            shape, stated = list(_token_ids(file_inside(folder, tokens.file)).shape), [tokens.samples, tokens.seqlen]
            if shape != stated:
                raise DefectError(f"holds {shape} tokens, and the manifest says {stated}")


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


# ------------------------------------------------------------------------------- folders of the users' own scripts


def _manifest_of_scripts(folder: Path) -> tuple[Manifest, tuple[str, ...]] | None:
    """The manifest that follows from the names in a folder or .npz file, and notes on what it cannot state.

    None if no name is one that the scripts use.
    """
    with reading(folder):
        names = [folder.name] if folder.is_file() else sorted(path.name for path in folder.iterdir())
    base = folder.parent if folder.is_file() else folder
    layout: Layout
    if any(PT_FILE.fullmatch(name) for name in names):
        layout, found = "pt", _file_tensors(base, names, PT_FILE)
    elif any(NPY_FILE.fullmatch(name) for name in names):
        layout, found = "npy", _file_tensors(base, names, NPY_FILE)
    elif archives := [name for name in names if name.endswith(".npz")]:
        if len(archives) > 1 and NPZ not in archives:
            raise RecordingError(f"{folder} has {len(archives)} .npz files: {', '.join(archives)}. Give one of them.")
        layout, found = "npz", _archive_tensors(base, NPZ if NPZ in archives else archives[0])
    else:
        return None
    notes = [NO_MANIFEST, *([NO_MODE] if layout == "pt" else [])]
    recipes = {"-".join(filter(None, key)): _script_recipe(base, key, tensors) for key, tensors in found.items()}
    tokens, more = _script_tokens(base, recipes.values(), has_metadata=layout == "pt" and METADATA in names)
    return Manifest(UNKNOWN, None, UNKNOWN, tokens, recipes, {}, layout), (*notes, *more)


def _token_ids_of_metadata(file: Path) -> Tensor | None:
    """The ids in a metadata.pt, int64 [samples, tokens]; None if it has none."""
    metadata = load_plain(file)
    if not isinstance(metadata, Mapping) or metadata.get("input_ids") is None:
        return None
    with parsing("a metadata.pt with input_ids of whole numbers"):
        ids = torch.as_tensor(metadata["input_ids"])
    if ids.is_floating_point() or ids.is_complex() or ids.dim() not in (1, 2) or not ids.numel():
        raise DefectError(f"its input_ids are {kind_of(ids)}. Expected whole numbers [samples, tokens]")
    check_storage(ids)
    return ids.detach().to(torch.int64).reshape(-1, ids.shape[-1])


def _file_tensors(base: Path, names: Iterable[str], pattern: re.Pattern[str]) -> TensorsByRecipe:
    """The tensors of files that hold one tensor each."""
    found: TensorsByRecipe = {}
    for name in names:
        if match := pattern.fullmatch(name):
            with reading(base / name):
                kinds = tensors_in(file_inside(base, name))
                if None not in kinds:
                    raise DefectError("is not a tensor but a dict of tensors")
                mode = match.groupdict().get("mode")
                recipe = (UNKNOWN, None) if mode is None else recipe_named(mode)
                _add(found, recipe, tensor_named(match), kinds[None], name, None)
    return found


def _archive_tensors(base: Path, name: str) -> TensorsByRecipe:
    found: TensorsByRecipe = {}
    with reading(base / name):
        for key, kind in tensors_in(file_inside(base, name)).items():
            match = NPZ_KEY.fullmatch(str(key))
            if not match:
                raise DefectError(f"the key {key} is not as in mode_2-1_output, mode_2-1_layer_0_input")
            _add(found, recipe_named(match["mode"]), tensor_named(match), kind, name, key)
    return found


def _add(
    found: TensorsByRecipe, recipe: tuple[str, str | None], name: str, kind: Kind, file: str, key: str | None
) -> None:
    if kind.dtype not in DTYPES or not kind.shape or 0 in kind.shape:
        raise DefectError(f"{name} is {kind}. Expected floats, samples along the first axis")
    tensors = found.setdefault(recipe, {})
    if name in tensors:
        raise DefectError(f"is a second {name}, beside {tensors[name].file}")
    tensors[name] = StoredTensor(*kind, file, key)


def _script_recipe(base: Path, recipe: tuple[str, str | None], tensors: dict[str, StoredTensor]) -> RecordedRecipe:
    labels = {name.removesuffix(".output") for name in tensors if re.fullmatch(r"layer_\d+\.output", name)}
    layers = tuple(sorted(labels, key=lambda label: int(label.removeprefix("layer_"))))
    if not layers:
        raise RecordingError(f"{base} has not one layer of {recipe[0]}. Expected files such as layer_0_output.pt.")
    return RecordedRecipe(*recipe, layers, tensors)


def _script_tokens(
    base: Path, recipes: Iterable[RecordedRecipe], *, has_metadata: bool
) -> tuple[Tokens, tuple[str, ...]]:
    """Those of metadata.pt; without it, as many as the first layer has rows. The notes say what does not fit."""
    first = next(iter(recipes))
    shape = first.tensors[f"{first.layers[0]}.output"].shape
    rows = (shape[0], shape[1] if len(shape) > 1 else 1)
    with reading(base / METADATA):
        ids = _token_ids_of_metadata(file_inside(base, METADATA)) if has_metadata else None
    if ids is None:
        return Tokens(rows[0] * rows[1], *rows, None), (NO_TOKENS,)
    given = (ids.shape[0], ids.shape[1])
    other = f"{METADATA} has {given[0]} x {given[1]} tokens, {first.layers[0]} is {list(shape)}: padded, or another run"
    tokens = Tokens(ids.numel(), *given, input_fingerprint([ids]), METADATA)
    return tokens, () if given == rows else (other,)
