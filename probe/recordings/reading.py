"""Reading a recording: all that can be wrong with it is found before a tensor is."""

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from probe.data import token_fingerprint
from probe.recordings.checked import AGAIN, RecordingError, defect
from probe.recordings.disk import inside, reading, sha256_of
from probe.recordings.foreign import foreign_manifest, foreign_token_ids
from probe.recordings.format import MANIFEST, Manifest, Recorded, Stored, manifest_from_json, ordered
from probe.recordings.loading import READERS, dtype_of, load_token_ids, stored_dtype
from probe.running.modes import MODES

#: What lies beside a recording while it is made, and while it takes the place of another.
PARTIAL, PREVIOUS = "{}.partial", ".{}.previous"


@dataclass(frozen=True)
class Recording:
    """A folder that was read and found sound. Tensors are mapped from disk one at a time, when they are asked for.

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
        return ordered(recorded.tensors, recorded.layers)

    def shape(self, recipe: str, name: str) -> tuple[int, ...]:
        """[samples, tokens, ...]."""
        return self._stored(recipe, name).shape

    def dtype(self, recipe: str, name: str) -> str:
        """What the model gave, `bfloat16`. numpy has no such dtype, so `tensor` of an npy layout is float32 then."""
        return self._stored(recipe, name).dtype

    def tensor(self, recipe: str, name: str) -> Tensor:
        """[samples, tokens, ...] on the CPU. Pages are read as they are touched; an .npz is decompressed."""
        stored = self._stored(recipe, name)
        file = self._base / stored.file
        tensor = READERS[self.manifest.layout].load(file, stored.key)
        found = (dtype_of(tensor), tuple(tensor.shape))
        if found != (stored_dtype(self.manifest.layout, stored.dtype), stored.shape):
            raise defect(file, f"{name} has become {found[0]} {list(found[1])} since the recording was read")
        return tensor

    def input_ids(self) -> Tensor | None:
        """The tokens that the model was given, int64 [samples, tokens]; None where they were not kept."""
        tokens = self.manifest.tokens
        if tokens.file is None:
            return None
        file = self._base / tokens.file
        ids = load_token_ids(file) if tokens.file.endswith(".safetensors") else foreign_token_ids(file)
        if ids is not None and token_fingerprint([ids]) != tokens.fingerprint:
            raise defect(file, f"the tokens are not those of the manifest, {tokens.fingerprint}")
        return ids

    @property
    def _base(self) -> Path:
        """The folder of the files: `folder`, or where it lies if that is a file itself."""
        return self.folder.parent if self.folder.suffix == ".npz" and self.folder.is_file() else self.folder

    def _recorded(self, recipe: str) -> Recorded:
        if recipe not in self.manifest.recipes:
            raise RecordingError(f"{self.folder} has no recipe {recipe!r}. It has: {', '.join(self.recipes)}.")
        return self.manifest.recipes[recipe]

    def _stored(self, recipe: str, name: str) -> Stored:
        recorded = self._recorded(recipe)
        if name not in recorded.tensors:
            names = ", ".join(self.names(recipe))
            raise RecordingError(f"{self.folder} has no {name} of {recipe}. It has: {names}.")
        return recorded.tensors[name]


def read_recording(folder: Path | str, *, verify: bool = True) -> Recording:
    """Check the manifest and every file that it names; no tensor is loaded.

    With `verify` every byte counts (sha256); without, sizes and headers. A folder without a manifest is read if its
    files are named as the layouts name them; `notes` then says what nobody can verify.
    """
    folder = Path(folder)
    with reading(folder):
        is_file, is_folder = folder.is_file(), folder.is_dir()
        has_manifest = is_folder and os.path.lexists(folder / MANIFEST)
    if not is_folder and not (is_file and folder.suffix == ".npz"):
        raise RecordingError(f"there is no folder {folder}. Expected a recording. {_where_it_may_be(folder)}")
    if not has_manifest:
        found = foreign_manifest(folder)
        if found is None:
            raise defect(folder / MANIFEST, "is missing, so this is no whole recording")
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
    file = inside(folder, MANIFEST)
    with reading(file):
        return manifest_from_json(file.read_bytes(), file)


def check_files(folder: Path, manifest: Manifest, *, verify: bool) -> None:
    """Every file is there with its size (and its bytes, if `verify`), and holds just the tensors it should."""
    for name, facts in manifest.files.items():
        file = inside(folder, name)
        with reading(file):
            size = file.stat().st_size
        if size != facts.bytes:
            raise defect(file, f"has {size} bytes and the manifest says {facts.bytes}: it was cut short or changed")
        if verify and (found := sha256_of(file)) != facts.sha256:
            raise defect(
                file,
                f"its sha256 is {found[:12]}... and the manifest says {facts.sha256[:12]}...: it was changed, "
                "or belongs to another recording",
            )
    expected: dict[str, dict[str | None, tuple[str, tuple[int, ...]]]] = {}
    for recorded in manifest.recipes.values():
        for one in recorded.tensors.values():
            kind = (stored_dtype(manifest.layout, one.dtype), one.shape)
            expected.setdefault(one.file, {})[one.key] = kind
    for name, kinds in expected.items():
        _check_kinds(inside(folder, name), kinds, READERS[manifest.layout].kinds(folder / name))
    if manifest.tokens.file is not None:
        ids = load_token_ids(inside(folder, manifest.tokens.file))
        if tuple(ids.shape) != (manifest.tokens.samples, manifest.tokens.seqlen):
            raise defect(folder / manifest.tokens.file, f"holds {list(ids.shape)} tokens, and the manifest says more")


def _check_kinds(
    file: Path,
    expected: dict[str | None, tuple[str, tuple[int, ...]]],
    found: dict[str | None, tuple[str, tuple[int, ...]]],
) -> None:
    for key in sorted(expected.keys() ^ found.keys(), key=str):
        raise defect(file, f"{key} is in {'the file' if key in found else 'the manifest'} only")
    for key, kind in found.items():
        if kind != expected[key]:
            told, wanted = (f"{dtype} {list(shape)}" for dtype, shape in (kind, expected[key]))
            raise defect(file, f"{key or 'it'} is {told}, and the manifest says {wanted}")
