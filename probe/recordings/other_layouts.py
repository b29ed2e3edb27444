"""The layouts of the users' own scripts, npy, npz and pt: folders without a manifest are read, and layouts are written.

In a folder without a manifest, recipes and layers come from the names of files, tokens from metadata.pt if there is
one. Whatever cannot be verified is said in notes.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from probe.data import fingerprint
from probe.files.atomic import link_or_copy, write
from probe.files.defects import DefectError, parsing
from probe.files.paths import file_inside
from probe.files.tensors import Kind, kind_of, load_plain, npz_writer, tensors_in, write_npy, write_pt
from probe.recordings.manifest import (
    DTYPES,
    FILE_NAME,
    Layout,
    Manifest,
    RecordedRecipe,
    RecordingError,
    StoredTensor,
    Tokens,
    reading,
)
from probe.recordings.script_formats import (
    METADATA,
    NPY_FILE,
    NPZ,
    NPZ_KEY,
    PT_FILE,
    Figures,
    ScriptFacts,
    figures_of,
    npy_file,
    npy_statistics,
    npz_key,
    npz_statistics,
    pt_file,
    pt_metadata,
    recipe_named,
    script_name,
    tensor_named,
)

if TYPE_CHECKING:
    from probe.recordings.reading import Recording

UNKNOWN = "unknown"
Found = dict[tuple[str, str | None], dict[str, StoredTensor]]  # mode and format -> tensors

NO_MANIFEST = "no manifest: the model, its weights and the device are not known, and no file can be verified"
NO_MODE = f"no manifest: which mode ran is not known; it is called {UNKNOWN!r}"
NO_TOKENS = "no manifest: the inputs cannot be verified"


def manifest_of_scripts(folder: Path) -> tuple[Manifest, tuple[str, ...]] | None:
    """The manifest that the names in a folder, or in one .npz file, allow, with notes on what it cannot say.

    None where nothing is named as the scripts name it.
    """
    with reading(folder):
        names = [folder.name] if folder.is_file() else sorted(path.name for path in folder.iterdir())
    base = folder.parent if folder.is_file() else folder
    layout: Layout
    if any(PT_FILE.fullmatch(name) for name in names):
        layout, found = "pt", _files(base, names, PT_FILE)
    elif any(NPY_FILE.fullmatch(name) for name in names):
        layout, found = "npy", _files(base, names, NPY_FILE)
    elif archives := [name for name in names if name.endswith(".npz")]:
        layout, found = "npz", _archive(base, NPZ if NPZ in archives else _only(folder, archives))
    else:
        return None
    notes = [NO_MANIFEST, *([NO_MODE] if layout == "pt" else [])]
    recipes = {"-".join(filter(None, key)): _recorded(base, key, tensors) for key, tensors in found.items()}
    tokens, more = _tokens(base, recipes.values(), has_metadata=layout == "pt" and METADATA in names)
    return Manifest(UNKNOWN, None, UNKNOWN, tokens, recipes, {}, layout), (*notes, *more)


def token_ids_of_metadata(file: Path) -> Tensor | None:
    """The ids in a metadata.pt, int64 [samples, tokens]; None if it has none."""
    metadata = load_plain(file)
    given = metadata.get("input_ids") if isinstance(metadata, Mapping) else None
    if given is None:
        return None
    with parsing("a metadata.pt with input_ids of whole numbers"):
        ids = torch.as_tensor(given)
    if ids.is_floating_point() or ids.is_complex() or ids.dim() not in (1, 2) or not ids.numel():
        raise DefectError(f"its input_ids are {kind_of(ids)}. Expected whole numbers [samples, tokens]")
    return ids.detach().to(torch.int64).reshape(-1, ids.shape[-1])


def _files(base: Path, names: Iterable[str], pattern: re.Pattern[str]) -> Found:
    """The tensors of files that are one tensor each."""
    found: Found = {}
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


def _archive(base: Path, name: str) -> Found:
    found: Found = {}
    with reading(base / name):
        for key, kind in tensors_in(file_inside(base, name)).items():
            match = NPZ_KEY.fullmatch(str(key))
            if not match:
                raise DefectError(f"the key {key} is not as in mode_2-1_output, mode_2-1_layer_0_input")
            _add(found, recipe_named(match["mode"]), tensor_named(match), kind, name, key)
    return found


def _only(folder: Path, archives: list[str]) -> str:
    if len(archives) != 1:
        raise RecordingError(f"{folder} has {len(archives)} .npz files: {', '.join(archives)}. Give one of them.")
    return archives[0]


def _add(found: Found, recipe: tuple[str, str | None], name: str, kind: Kind, file: str, key: str | None) -> None:
    if kind.dtype not in DTYPES or not kind.shape or 0 in kind.shape:
        raise DefectError(f"{name} is {kind}. Expected floats, samples along the first axis")
    tensors = found.setdefault(recipe, {})
    if name in tensors:
        raise DefectError(f"is a second {name}, beside {tensors[name].file}")
    tensors[name] = StoredTensor(*kind, file, key)


def _recorded(base: Path, recipe: tuple[str, str | None], tensors: dict[str, StoredTensor]) -> RecordedRecipe:
    labels = {name.removesuffix(".output") for name in tensors if re.fullmatch(r"layer_\d+\.output", name)}
    layers = tuple(sorted(labels, key=lambda label: int(label.removeprefix("layer_"))))
    if not layers:
        raise RecordingError(f"{base} has not one layer of {recipe[0]}. Expected files such as layer_0_output.pt.")
    return RecordedRecipe(*recipe, layers, tensors)


def _tokens(base: Path, recipes: Iterable[RecordedRecipe], *, has_metadata: bool) -> tuple[Tokens, tuple[str, ...]]:
    """From metadata.pt; else as many as the first layer has rows."""
    first = next(iter(recipes))
    shape = first.tensors[f"{first.layers[0]}.output"].shape
    rows = (shape[0], shape[1] if len(shape) > 1 else 1)
    with reading(base / METADATA):
        ids = token_ids_of_metadata(file_inside(base, METADATA)) if has_metadata else None
    if ids is None:
        return Tokens(rows[0] * rows[1], *rows, None), (NO_TOKENS,)
    given = (ids.shape[0], ids.shape[1])
    other = f"{METADATA} has {given[0]} x {given[1]} tokens, {first.layers[0]} is {list(shape)}: padded, or another run"
    tokens = Tokens(ids.numel(), *given, fingerprint([ids]), METADATA)
    return tokens, () if given == rows else (other,)


# -------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Export:
    """A folder in the making: `source` has the new recipes, `kept` is an older recording that they are added to."""

    folder: Path
    source: "Recording"
    kept: "Recording | None"
    facts: ScriptFacts

    @property
    def recipes(self) -> dict[str, RecordedRecipe]:
        """The new recipes."""
        return self.source.manifest.recipes

    @property
    def staying(self) -> dict[str, RecordedRecipe]:
        """The recipes of the older recording that are not recorded anew."""
        old = self.kept.manifest.recipes if self.kept else {}
        return {name: one for name, one in old.items() if name not in self.recipes}

    def tensors(self) -> Iterator[tuple[str, RecordedRecipe, str, Tensor]]:
        """All new tensors, one at a time."""
        for recipe, recorded in self.recipes.items():
            for name in self.source.names(recipe):
                yield recipe, recorded, name, self.source.tensor(recipe, name)


Places = dict[tuple[str, str], tuple[str, str | None]]  # recipe, tensor -> file, key
AllFigures = dict[str, dict[str, Figures]]  # recipe -> tensor -> figures


def _free(file: str, places: Places) -> str:
    if any(file == other for other, _ in places.values()):
        raise RecordingError(f"two tensors would be {file}. Choose other layers.")
    if not FILE_NAME.fullmatch(file):
        raise RecordingError(f"{file!r} cannot be the name of a file. Use letters, digits, '_', '-' and '.'.")
    return file


def _place_safetensors(export: Export) -> Places:
    for file in {one.file for recorded in export.recipes.values() for one in recorded.tensors.values()}:
        (export.folder / file).unlink(missing_ok=True)
        link_or_copy(export.source.folder / file, export.folder / file)
    return {
        (recipe, name): (one.file, one.key)
        for recipe, recorded in export.recipes.items()
        for name, one in recorded.tensors.items()
    }


def _place_npy(export: Export) -> Places:
    places: Places = {}
    for recipe, recorded, name, tensor in export.tensors():
        file = _free(npy_file(script_name(recorded.mode, recorded.format), name, recorded.layers), places)
        places[recipe, name] = (file, None)
        write_npy(export.folder / file, tensor)
    return places


def _place_npz(export: Export) -> Places:
    """All recipes in one archive, so those that stay are written again."""
    places: Places = {}
    file = _free(export.facts.output_file, places)
    with npz_writer(export.folder / file) as add:
        for recipe, recorded in export.staying.items():
            assert export.kept is not None
            for name, one in recorded.tensors.items():
                if one.file == file:
                    add(str(one.key), export.kept.tensor(recipe, name))
        for recipe, recorded, name, tensor in export.tensors():
            key = npz_key(script_name(recorded.mode, recorded.format), name, recorded.layers)
            if key in {other for _, other in places.values()}:
                raise RecordingError(f"{name} would be a second {key} in {file}. Choose other layers.")
            places[recipe, name] = (file, key)
            add(key, tensor)
    return places


def _place_pt(export: Export) -> Places:
    """One mode fills the folder; several have a folder each."""
    places: Places = {}
    alone = len(export.recipes) == 1 and not export.staying
    for recipe, recorded, name, tensor in export.tensors():
        base = "" if alone else f"mode_{script_name(recorded.mode, recorded.format)}/"
        file = _free(f"{base}{pt_file(name, recorded.layers)}", places)
        places[recipe, name] = (file, None)
        (export.folder / file).parent.mkdir(exist_ok=True)
        write_pt(export.folder / file, tensor)
    return places


def _npy_files(export: Export, built: "Recording", figures: AllFigures) -> list[str]:
    made = []
    for recipe, by_name in figures.items():
        statistics = npy_statistics(built.manifest, recipe, by_name)
        made.append(f"mode_{statistics['mode']}_stats.json")
        write(export.folder / made[-1], _json(statistics))
    return made


def _npz_files(export: Export, built: "Recording", figures: AllFigures) -> list[str]:
    everything = {
        recipe: figures.get(recipe)
        or {name: figures_of(built.tensor(recipe, name), built.dtype(recipe, name)) for name in built.names(recipe)}
        for recipe in built.recipes
    }
    made = f"{export.facts.output_file.removesuffix('.npz')}_stats.json"
    write(export.folder / made, _json(npz_statistics(built.manifest, everything, export.facts.pretrained_dir)))
    return [made]


def _pt_files(export: Export, built: "Recording", figures: AllFigures) -> list[str]:
    ids = export.source.input_ids()
    made = []
    for recipe, by_name in figures.items():
        recorded = built.manifest.recipes[recipe]
        base = next(iter(recorded.tensors.values())).file.rpartition("/")[0]
        made.append(f"{base}/{METADATA}" if base else METADATA)
        write_pt(export.folder / made[-1], pt_metadata(recorded.layers, by_name, ids, export.facts))
    return made


def _json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=4, ensure_ascii=False, allow_nan=False) + "\n"


class LayoutWriter(NamedTuple):
    """How a layout writes its tensors, and the files of statistics beside them."""

    tensors: Callable[[Export], Places]
    statistics: Callable[[Export, "Recording", AllFigures], list[str]]


#: A new layout is a row here and one in DEFAULTS.
WRITERS: dict[Layout, LayoutWriter] = {
    "safetensors": LayoutWriter(_place_safetensors, lambda export, built, figures: []),
    "npy": LayoutWriter(_place_npy, _npy_files),
    "npz": LayoutWriter(_place_npz, _npz_files),
    "pt": LayoutWriter(_place_pt, _pt_files),
}
