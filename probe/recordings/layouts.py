"""The layouts, written: where each puts its tensors, and what it keeps beside them (spelling.py has the names)."""

import json
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from probe.recordings.checked import RecordingError
from probe.recordings.disk import link_or_copy, replace_file
from probe.recordings.format import FILE_NAME, Layout, Recorded
from probe.recordings.loading import dtype_of, stored_dtype
from probe.recordings.reading import Recording
from probe.recordings.spelling import METADATA, NPZ, npy_file, npz_key, pt_file, spelled
from probe.recordings.statistics import Figures, figures_of


@dataclass(frozen=True)
class Beside:
    """What the scripts write down beside the tensors and a manifest does not."""

    prompt: str | list[str] | None = None
    config: dict[str, Any] | None = None
    pretrained_dir: str | None = None
    output_file: str = NPZ


@dataclass(frozen=True)
class Export:
    """A folder in the making: `source` has the new recipes, `kept` those of an older recording that stay."""

    folder: Path
    source: Recording
    kept: Recording | None
    beside: Beside

    @property
    def recipes(self) -> dict[str, Recorded]:
        """The new recipes."""
        return self.source.manifest.recipes

    @property
    def staying(self) -> dict[str, Recorded]:
        """The recipes of the older recording that are not recorded anew."""
        old = self.kept.manifest.recipes if self.kept else {}
        return {name: one for name, one in old.items() if name not in self.recipes}

    def tensors(self) -> Iterator[tuple[str, Recorded, str, Tensor]]:
        """All new tensors, one at a time."""
        for recipe, recorded in self.recipes.items():
            for name in self.source.names(recipe):
                yield recipe, recorded, name, self.source.tensor(recipe, name)


# ------------------------------------------------------------------------------------------------- the tensors

Places = dict[tuple[str, str], tuple[str, str | None]]


def _place_safetensors(export: Export) -> Places:
    for file in {one.file for recorded in export.recipes.values() for one in recorded.tensors.values()}:
        (export.folder / file).unlink(missing_ok=True)
        link_or_copy(str(export.source.folder / file), str(export.folder / file))
    return {
        (recipe, name): (one.file, one.key)
        for recipe, recorded in export.recipes.items()
        for name, one in recorded.tensors.items()
    }


def _place_npy(export: Export) -> Places:
    places: Places = {}
    for recipe, recorded, name, tensor in export.tensors():
        file = _free(npy_file(spelled(recorded.mode, recorded.format), name, recorded.layers), places)
        places[recipe, name] = (file, None)
        (export.folder / file).unlink(missing_ok=True)  # it may be a link to the file of an older recording
        with open(export.folder / file, "wb") as stream:
            _write_npy(stream, tensor)
    return places


def _place_npz(export: Export) -> Places:
    """All recipes in one archive, so those that stay are written again."""
    places: Places = {}
    file = _checked(export.beside.output_file)
    fresh = export.folder / f".{file}.new"
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as archive:
        for recipe, recorded in export.staying.items():
            assert export.kept is not None
            for name, one in recorded.tensors.items():
                with archive.open(_member(str(one.key)), "w", force_zip64=True) as stream:
                    _write_npy(stream, export.kept.tensor(recipe, name))
        for recipe, recorded, name, tensor in export.tensors():
            key = npz_key(spelled(recorded.mode, recorded.format), name, recorded.layers)
            if key in {taken for _, taken in places.values()}:
                raise RecordingError(f"{name} would be a second {key} in {file}. Choose other layers.")
            places[recipe, name] = (file, key)
            with archive.open(_member(key), "w", force_zip64=True) as stream:
                _write_npy(stream, tensor)
    fresh.replace(export.folder / file)
    return places


def _member(key: str) -> zipfile.ZipInfo:
    """A member with no time of its own, compressed."""
    member = zipfile.ZipInfo(f"{key}.npy")
    member.compress_type = zipfile.ZIP_DEFLATED
    return member


def _place_pt(export: Export) -> Places:
    """One mode fills the folder; several have a folder each."""
    places: Places = {}
    alone = len(export.recipes) == 1 and not export.staying
    for recipe, recorded, name, tensor in export.tensors():
        base = "" if alone else f"mode_{spelled(recorded.mode, recorded.format)}/"
        file = _free(f"{base}{pt_file(name, recorded.layers)}", places)
        places[recipe, name] = (file, None)
        (export.folder / file).parent.mkdir(exist_ok=True)
        (export.folder / file).unlink(missing_ok=True)
        torch.save(tensor, export.folder / file)
    return places


PLACES: dict[Layout, Callable[[Export], Places]] = {
    "safetensors": _place_safetensors,
    "npy": _place_npy,
    "npz": _place_npz,
    "pt": _place_pt,
}


def _write_npy(stream: IO[bytes], tensor: Tensor) -> None:
    """Sample by sample; what numpy has no dtype for, as float32."""
    name = stored_dtype("npy", dtype_of(tensor))
    header = {"descr": np.dtype(name).str, "fortran_order": False, "shape": tuple(tensor.shape)}
    np.lib.format.write_array_header_1_0(stream, header)
    for sample in tensor:
        stream.write(sample.to(getattr(torch, name)).contiguous().numpy().data.cast("B"))


def _free(file: str, places: Places) -> str:
    if any(file == taken for taken, _ in places.values()):
        raise RecordingError(f"two tensors would be {file}. Choose other layers.")
    return _checked(file)


def _checked(file: str) -> str:
    if not FILE_NAME.fullmatch(file):
        raise RecordingError(f"{file!r} cannot be the name of a file. Use letters, digits, '_', '-' and '.'.")
    return file


# ------------------------------------------------------------------------------------- what is written beside


ByName = dict[str, dict[str, Figures]]  # recipe -> tensor -> figures


def _describe_npy(export: Export, built: Recording, figures: ByName) -> list[str]:
    made = []
    for recipe, by_name in figures.items():
        recorded = built.manifest.recipes[recipe]
        mode = spelled(recorded.mode, recorded.format)
        facts = {
            "mode": mode,
            "format": recorded.format,
            "model": built.manifest.model,
            "samples": built.manifest.tokens.samples,
            "seq_len": built.manifest.tokens.seqlen,
            "layers": {
                npy_file("", name, recorded.layers)[len("mode__") : -len(".npy")]: _stats(one)
                for name, one in by_name.items()
            },
        }
        made.append(f"mode_{mode}_stats.json")
        replace_file(export.folder / made[-1], _json(facts))
    return made


def _describe_npz(export: Export, built: Recording, figures: ByName) -> list[str]:
    modes = {}
    for recipe in built.recipes:
        recorded = built.manifest.recipes[recipe]
        by_name = figures.get(recipe) or {
            name: figures_of(built.tensor(recipe, name), built.dtype(recipe, name)) for name in built.names(recipe)
        }
        modes[spelled(recorded.mode, recorded.format)] = {
            npz_key("", name, recorded.layers)[len("mode__") :]: _stats(one) for name, one in by_name.items()
        }
    facts = {
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
        "model": built.manifest.model,
        "pretrained_dir": export.beside.pretrained_dir,
        "seq_len": built.manifest.tokens.seqlen,
        "modes": modes,
    }
    made = f"{export.beside.output_file.removesuffix('.npz')}_stats.json"
    replace_file(export.folder / made, _json(facts))
    return [made]


def _stats(figures: Figures) -> dict[str, Any]:
    return figures.as_json("shape", "dtype", "first_10", "mean", "std", "min", "max")


def _json(facts: dict[str, Any]) -> bytes:
    return (json.dumps(facts, indent=4, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _describe_pt(export: Export, built: Recording, figures: ByName) -> list[str]:
    ids = export.source.input_ids()
    made = []
    for recipe, by_name in figures.items():
        recorded = built.manifest.recipes[recipe]
        statistics = {
            pt_file(name, recorded.layers).removesuffix(".pt").removesuffix("_output"): {
                "shape": list(one.shape),
                "dtype": f"torch.{one.dtype}",
                **{key: getattr(one, key) for key in ("mean", "std", "min", "max", "has_nan", "has_inf")},
            }
            for name, one in by_name.items()
        }
        facts = {
            "prompt": export.beside.prompt,
            "input_ids": ids,
            "attention_mask": None if ids is None else torch.ones_like(ids),
            "config": export.beside.config or {},
            "statistics": statistics,
        }
        base = next(iter(recorded.tensors.values())).file.rpartition("/")[0]
        made.append(f"{base}/{METADATA}" if base else METADATA)
        (export.folder / made[-1]).unlink(missing_ok=True)
        torch.save(facts, export.folder / made[-1])
    return made


DESCRIBED: dict[Layout, Callable[[Export, Recording, ByName], list[str]]] = {
    "safetensors": lambda export, built, figures: [],
    "npy": _describe_npy,
    "npz": _describe_npz,
    "pt": _describe_pt,
}
