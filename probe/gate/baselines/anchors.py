"""Anchors on disk: `<root>/<model>/anchors-<digest>.safetensors`, named in the model's environment.

The name changes with the content, so that old baselines keep the anchors they were made with until the environment,
which is written last, names the new ones.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from probe.gate.baselines.files import PARTIAL, make_folder, replace_whole, writing
from probe.gate.baselines.format import BaselineError, digest
from probe.running.anchors import Anchors


def render(anchors: Anchors) -> tuple[str, bytes]:
    """File name and content; the same anchors always give the same bytes."""
    tensors: dict[str, np.ndarray] = {}
    for label, places in sorted(anchors.places.items()):
        gaps = np.diff(places.numpy(), prepend=0)
        small = gaps.size == 0 or int(gaps.max()) < 2**16
        tensors[f"gaps/{label}"] = gaps.astype(np.uint16 if small else np.uint32)
        tensors[f"bits/{label}"] = anchors.values[label].view(torch.int16).numpy()
    names = sorted(anchors.amax)
    tensors["amax"] = np.array([anchors.amax[name] for name in names], dtype=np.float64)
    data = save(tensors, {"sites": json.dumps(names)})
    return f"anchors-{digest(data)}.safetensors", data


def united(files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """File name and content of all anchors in several rendered files: tests of one model may look at other layers."""
    places: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    amax: dict[str, float] = {}
    for _, data in sorted(files.items()):
        one = _parsed(data)
        places, values, amax = {**one.places, **places}, {**one.values, **values}, {**one.amax, **amax}
    return render(Anchors(places, values, amax))


def write_anchors(folder: Path, name: str, data: bytes) -> None:
    """Store rendered anchors."""
    make_folder(folder)
    if not (folder / name).exists():
        replace_whole(folder / name, data)


def read_anchors(folder: Path, name: str) -> Anchors:
    """The anchors of that file, which must hold what its name says."""
    file = folder / name
    again = f"Restore it with git checkout, or delete {folder} and make all again with: pytest --update-baselines"
    if "/" in name or not name.startswith("anchors-"):
        raise BaselineError(f"{folder / 'environment.json'}: anchors is {name!r}, not a name of anchors. {again}")
    try:
        data = file.read_bytes()
    except OSError as problem:
        raise BaselineError(f"{file} cannot be read ({problem.strerror}). {again}") from None
    if name != f"anchors-{digest(data)}.safetensors":
        raise BaselineError(f"{file} does not hold what its name says: it is damaged or was edited. {again}")
    try:
        return _parsed(data)
    except (SafetensorError, KeyError, ValueError) as problem:
        raise BaselineError(f"{file} is not a file of anchors ({problem}). {again}") from None


def _parsed(data: bytes) -> Anchors:
    tensors = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    sites = json.loads(header["__metadata__"]["sites"])
    labels = [key.removeprefix("gaps/") for key in tensors if key.startswith("gaps/")]
    return Anchors(
        {label: torch.from_numpy(np.cumsum(tensors[f"gaps/{label}"].astype(np.int64))).int() for label in labels},
        {label: torch.from_numpy(tensors[f"bits/{label}"].copy()).view(torch.bfloat16) for label in labels},
        dict(zip(sites, (float(x) for x in tensors["amax"]), strict=True)),
    )


def remove_leftovers(folder: Path, name: str) -> None:
    """Once the environment names the anchors `name`, those of older baselines can go, and what a killed write left."""
    for file in (*folder.glob("anchors-*.safetensors"), *folder.glob(f"*{PARTIAL}")):
        if file.name != name:
            with writing(file, state="It is not needed any more; delete it."):
                file.unlink()
