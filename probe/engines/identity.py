"""What tells jobs and their units apart: a digest of everything that is in them."""

import hashlib
import pickle
import sys
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any


def identity_of(*values: Any) -> str:
    """The first 24 hex digits of the sha256 of values with all that they hold: every field, element and bit.

    Values that differ anywhere have other digests, values that are equal have the same one in every process. Functions
    go by their names; an object that can neither be taken apart nor pickled goes by its `repr`.
    """
    found = hashlib.sha256()
    _add(found, values)
    return found.hexdigest()[:24]


def _add(found: Any, value: Any) -> None:
    kind, torch = type(value), sys.modules.get("torch")  # which no value needs that is not a tensor
    _add_bytes(found, f"{kind.__module__}.{kind.__qualname__}".encode())
    if torch is not None and isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        _add_bytes(found, f"{whole.dtype} {tuple(whole.shape)}".encode())
        _add_bytes(found, whole.reshape(-1).view(torch.uint8).numpy().data)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _add_bytes(found, field.name.encode())
            _add(found, getattr(value, field.name))
    elif isinstance(value, Mapping | Set):
        every = value.items() if isinstance(value, Mapping) else value
        for part in sorted(identity_of(one) for one in every):  # in whatever order it holds them
            _add_bytes(found, part.encode())
        _add_bytes(found, b"end")
    elif isinstance(value, list | tuple):
        _add_bytes(found, str(len(value)).encode())
        for one in value:
            _add(found, one)
    else:
        _add_bytes(found, _plain_bytes(value))


def _add_bytes(found: Any, data: Any) -> None:
    """With their length, so that no two sequences of parts give the same bytes."""
    found.update(f"{len(data)} ".encode())
    found.update(data)


def _plain_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}".encode()
    try:
        return pickle.dumps(value)
    except Exception:  # whatever the object's own code raises
        return repr(value).encode()
