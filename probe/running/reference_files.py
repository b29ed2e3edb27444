"""A reference as one safetensors file, which the processes of a run share."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from probe.data.calls import Batch, Call
from probe.files import atomic
from probe.models.outputs import OUTPUT_KINDS
from probe.running.reference import Reference

#: The facts of a reference that JSON holds as they are.
PLAIN = ("model", "layers", "wanted", "modules", "outside")


def save_reference(reference: Reference, file: Path) -> None:
    """Write a reference, for `load_reference`."""
    named: dict[str, Mapping[str, Sequence[Tensor]]] = {"tensors": reference.tensors, "ties": reference.ties}
    lists = {f"{field} {name}": parts for field, group in named.items() for name, parts in group.items()}
    lists |= {"outputs": reference.outputs}
    lists |= {f"batches {i}": _tensors(batch) for i, batch in enumerate(reference.batches)}
    facts: dict[str, Any] = {name: getattr(reference, name) for name in PLAIN}
    facts["kind"] = reference.kind.name
    facts["calls"] = [_arguments(batch) for batch in reference.batches]
    facts["lists"] = {name: len(parts) for name, parts in lists.items()}
    tensors = {f"{name} {i}": x.contiguous().clone() for name, parts in lists.items() for i, x in enumerate(parts)}
    atomic.write(file, save(tensors, {"facts": json.dumps(facts)}))


def load_reference(file: Path) -> Reference:
    """A reference that `save_reference` wrote; its tensors are mapped from the file."""
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["facts"])
        lists = {name: [opened.get_tensor(f"{name} {i}") for i in range(n)] for name, n in facts.pop("lists").items()}
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
