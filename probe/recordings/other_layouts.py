"""The layouts of the users' own scripts, npy, npz and pt: reading folders without a manifest, and writing.

In a folder without a manifest, recipes and layers come from the names of files, tokens from metadata.pt if there is
one. Whatever cannot be verified is said in notes.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from probe.data.samples import token_fingerprint
from probe.files.atomic import link_or_copy, write
from probe.files.defects import DefectError, file_inside, parsing
from probe.files.tensors import Kind, kind_of, load_plain, npz_writer, tensors_in, write_npy, write_pt
from probe.recordings import script_formats as scripts
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
from probe.recordings.script_formats import METADATA, NPZ, Figures, ScriptFacts, recorded_figures, script_name

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
    if any(scripts.PT_FILE.fullmatch(name) for name in names):
        layout, found = "pt", _files(base, names, scripts.PT_FILE)
    elif any(scripts.NPY_FILE.fullmatch(name) for name in names):
        layout, found = "npy", _files(base, names, scripts.NPY_FILE)
    elif archives := [name for name in names if name.endswith(".npz")]:
        if len(archives) > 1 and NPZ not in archives:
            raise RecordingError(f"{folder} has {len(archives)} .npz files: {', '.join(archives)}. Give one of them.")
        layout, found = "npz", _archive(base, NPZ if NPZ in archives else archives[0])
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
                recipe = (UNKNOWN, None) if mode is None else scripts.recipe_named(mode)
                _add(found, recipe, scripts.tensor_named(match), kinds[None], name, None)
    return found


def _archive(base: Path, name: str) -> Found:
    found: Found = {}
    with reading(base / name):
        for key, kind in tensors_in(file_inside(base, name)).items():
            match = scripts.NPZ_KEY.fullmatch(str(key))
            if not match:
                raise DefectError(f"the key {key} is not as in mode_2-1_output, mode_2-1_layer_0_input")
            _add(found, scripts.recipe_named(match["mode"]), scripts.tensor_named(match), kind, name, key)
    return found


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
    tokens = Tokens(ids.numel(), *given, token_fingerprint([ids]), METADATA)
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


AllTensors = dict[str, dict[str, StoredTensor]]  # by recipe and name
AllFigures = dict[str, dict[str, Figures]]


def _link_safetensors(export: Export) -> AllTensors:
    for file in {one.file for recorded in export.recipes.values() for one in recorded.tensors.values()}:
        (export.folder / file).unlink(missing_ok=True)
        link_or_copy(export.source.folder / file, export.folder / file)
    return {recipe: recorded.tensors for recipe, recorded in export.recipes.items()}


def _write_files(
    export: Export, file_of: Callable[[RecordedRecipe, str], str], write_tensor: Callable[[Path, Tensor], None]
) -> AllTensors:
    """A file for each tensor."""
    made: set[str] = set()
    stored: AllTensors = {recipe: {} for recipe in export.recipes}
    for recipe, recorded, name, tensor in export.tensors():
        file = file_of(recorded, name)
        if not FILE_NAME.fullmatch(file):
            raise RecordingError(f"{file!r} cannot be the name of a file. Use letters, digits, '_', '-' and '.'.")
        if file in made:
            raise RecordingError(f"two tensors would be {file}. Choose other layers.")
        made.add(file)
        stored[recipe][name] = replace(recorded.tensors[name], file=file, key=None)
        (export.folder / file).parent.mkdir(exist_ok=True)
        write_tensor(export.folder / file, tensor)
    return stored


def _write_pt(export: Export) -> AllTensors:
    alone = len(export.recipes) == 1 and not export.staying
    return _write_files(export, partial(scripts.pt_file, alone=alone), write_pt)


def _write_npz(export: Export) -> AllTensors:
    """All recipes in one archive, so those that stay are written again."""
    made: set[str] = set()
    stored: AllTensors = {recipe: {} for recipe in export.recipes}
    file = export.facts.output_file
    with npz_writer(export.folder / file) as add:
        for recipe, recorded in export.staying.items():
            assert export.kept is not None
            for name, one in recorded.tensors.items():
                if one.file == file:
                    add(str(one.key), export.kept.tensor(recipe, name))
        for recipe, recorded, name, tensor in export.tensors():
            key = scripts.npz_key(recorded, name)
            if key in made:
                raise RecordingError(f"{name} would be a second {key} in {file}. Choose other layers.")
            made.add(key)
            stored[recipe][name] = replace(recorded.tensors[name], file=file, key=key)
            add(key, tensor)
    return stored


def _npy_statistics(export: Export, built: "Recording", figures: AllFigures) -> Iterator[str]:
    for recipe, by_name in figures.items():
        recorded, tokens = built.manifest.recipes[recipe], built.manifest.tokens
        mode = script_name(recorded.mode, recorded.format)
        statistics = {
            "mode": mode,
            "format": recorded.format,
            "model": built.manifest.model,
            "samples": tokens.samples,
            "seq_len": tokens.seqlen,
            "layers": {scripts.npy_stem(name, recorded.layers): one.as_json() for name, one in by_name.items()},
        }
        yield _write_json(export.folder, f"mode_{mode}_stats.json", statistics)


def _npz_statistics(export: Export, built: "Recording", figures: AllFigures) -> Iterator[str]:
    modes = {}
    for recipe in built.recipes:
        recorded, names = built.manifest.recipes[recipe], built.names(recipe)
        by_name = figures.get(recipe) or {name: recorded_figures(built, recipe, name) for name in names}
        modes[script_name(recorded.mode, recorded.format)] = {
            scripts.npz_stem(name, recorded.layers): one.as_json() for name, one in by_name.items()
        }
    statistics = {
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
        "model": built.manifest.model,
        "pretrained_dir": export.facts.pretrained_dir,
        "seq_len": built.manifest.tokens.seqlen,
        "modes": modes,
    }
    yield _write_json(export.folder, f"{export.facts.output_file.removesuffix('.npz')}_stats.json", statistics)


def _write_json(folder: Path, name: str, statistics: dict[str, Any]) -> str:
    write(folder / name, json.dumps(statistics, indent=4, ensure_ascii=False, allow_nan=False) + "\n")
    return name


def _pt_metadata(export: Export, built: "Recording", figures: AllFigures) -> Iterator[str]:
    ids = export.source.input_ids()
    for recipe, by_name in figures.items():
        recorded = built.manifest.recipes[recipe]
        statistics = {
            scripts.pt_stem(name, recorded.layers).removesuffix("_output"): {
                "shape": list(one.shape),
                "dtype": f"torch.{one.dtype}",
                **{key: getattr(one, key) for key in ("mean", "std", "min", "max", "has_nan", "has_inf")},
            }
            for name, one in by_name.items()
        }
        metadata = {
            "prompt": export.facts.prompt,
            "input_ids": ids,
            "attention_mask": None if ids is None else torch.ones_like(ids),
            "config": export.facts.config or {},
            "statistics": statistics,
        }
        file = str(Path(next(iter(recorded.tensors.values())).file).with_name(METADATA))
        write_pt(export.folder / file, metadata)
        yield file


class LayoutWriter(NamedTuple):
    """How a layout writes its tensors, and the files of statistics beside them."""

    tensors: Callable[[Export], AllTensors]
    statistics: Callable[[Export, "Recording", AllFigures], Iterable[str]]


#: A new layout is a row here and one in DEFAULTS.
WRITERS: dict[Layout, LayoutWriter] = {
    "safetensors": LayoutWriter(_link_safetensors, lambda export, built, figures: ()),
    "npy": LayoutWriter(partial(_write_files, file_of=scripts.npy_file, write_tensor=write_npy), _npy_statistics),
    "npz": LayoutWriter(_write_npz, _npz_statistics),
    "pt": LayoutWriter(_write_pt, _pt_metadata),
}
