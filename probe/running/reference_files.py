"""A reference as the bytes of one safetensors file, which the processes of a run share."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from probe.data.calls import Batch, Call
from probe.files import atomic
from probe.files.tensors import SAFETENSORS_TYPES
from probe.models.outputs import OUTPUT_KINDS
from probe.running.reference import Reference

#: Torch's type by safetensors' name.
TORCH_TYPES: dict[str, torch.dtype] = {theirs: getattr(torch, name) for name, theirs in SAFETENSORS_TYPES.items()}
#: The facts of a reference that JSON holds as they are.
PLAIN = ("model", "layers", "wanted", "modules", "outside")


def save_reference(reference: Reference, file: Path) -> None:
    """Write a reference, for `load_reference`."""
    atomic.write(file, pack_reference(reference))


def pack_reference(reference: Reference) -> bytes:
    """A reference as bytes, for `unpack_reference`."""
    named: dict[str, Mapping[str, Sequence[Tensor]]] = {"tensors": reference.tensors, "ties": reference.ties}
    lists = {f"{field} {name}": parts for field, group in named.items() for name, parts in group.items()}
    lists |= {"outputs": reference.outputs}
    lists |= {f"batches {i}": _tensors(batch) for i, batch in enumerate(reference.batches)}
    facts: dict[str, Any] = {name: getattr(reference, name) for name in PLAIN}
    facts["kind"] = reference.kind.name
    facts["calls"] = [_arguments(batch) for batch in reference.batches]
    facts["lists"] = {name: len(parts) for name, parts in lists.items()}
    tensors = {f"{name} {i}": x.contiguous().clone() for name, parts in lists.items() for i, x in enumerate(parts)}
    return save(tensors, {"facts": json.dumps(facts)})


def load_reference(file: Path) -> Reference:
    """A reference that `save_reference` wrote; its tensors are mapped from the file."""
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["facts"])
        return _reference(facts, opened.get_tensor)


def unpack_reference(data: Any) -> Reference:
    """A reference that `pack_reference` packed: the path of a file, or a buffer, whose memory its tensors share."""
    if isinstance(data, Path):
        return load_reference(data)
    every = np.frombuffer(data, np.uint8)
    start = 8 + int.from_bytes(every[:8].tobytes(), "little")
    header = json.loads(every[8:start].tobytes())

    def tensor(name: str) -> Tensor:
        begin, end = header[name]["data_offsets"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the memory is that of a store and read-only, and nobody writes to it
            part = torch.from_numpy(every[start + begin : start + end])
        return part.view(TORCH_TYPES[header[name]["dtype"]]).reshape(header[name]["shape"])

    return _reference(json.loads(header["__metadata__"]["facts"]), tensor)


def _reference(facts: dict[str, Any], tensor: Callable[[str], Tensor]) -> Reference:
    lists = {name: [tensor(f"{name} {i}") for i in range(n)] for name, n in facts.pop("lists").items()}
    groups: dict[str, dict[str, list[Tensor]]] = {"tensors": {}, "ties": {}, "batches": {}, "outputs": {}}
    for name, parts in lists.items():
        field, _, label = name.partition(" ")
        groups[field][label] = parts
    calls, kind = facts.pop("calls"), OUTPUT_KINDS[facts.pop("kind")]
    plain: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in facts.items()}
    return Reference(
        **plain,
        kind=kind,
        batches=tuple(_batch(call, groups["batches"][str(i)]) for i, call in enumerate(calls)),
        tensors=groups["tensors"],
        ties={label: (places, values) for label, (places, values) in groups["ties"].items()},
        outputs=tuple(groups["outputs"][""]),
    )


def _tensors(batch: Batch) -> list[Tensor]:
    return list(batch.tensors.values()) if isinstance(batch, Call) else [batch]


def _arguments(batch: Batch) -> dict[str, Any] | None:
    """The arguments of a call with the places of tensors in their list; None for token ids."""
    if not isinstance(batch, Call):
        return None
    places = {name: place for place, name in enumerate(batch.tensors)}
    every = {
        name: {"tensor": places[name]} if name in places else {"value": value}
        for name, value in batch.arguments.items()
    }
    return {"by_place": len(batch.args), "arguments": every}


def _batch(call: dict[str, Any] | None, tensors: Sequence[Tensor]) -> Batch:
    """The inverse of `_arguments`."""
    if call is None:
        return tensors[0]
    every = {
        name: tensors[one["tensor"]] if "tensor" in one else one["value"] for name, one in call["arguments"].items()
    }
    by_place = [every.pop(str(place)) for place in range(call["by_place"])]
    return Call(tuple(by_place), every)
