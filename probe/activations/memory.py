"""Where the model runs. What does not fit is placed by accelerate: on the CPU or on disk, brought in layer by layer."""

import ctypes
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from probe.activations.settings import MemorySettings

#: Where the model has been loaded already, or what is free is not known.
ENOUGH = 2**63
_M_MMAP_THRESHOLD = -3  # of malloc.h
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, eq=False)
class Placed:
    """A model that can run: inputs go to `device`; `note` says what lies elsewhere."""

    model: nn.Module
    device: torch.device
    note: str = ""


def device_of(name: str) -> torch.device:
    """The device of that name, `auto` is the accelerator if there is one; one that is not there is an error."""
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as problem:
        said = str(problem).strip().split("\n")[0].rstrip(".")
        raise ValueError(
            f"memory.device {name!r} cannot be used here: {said}. Expected cpu, auto"
            f"{', cuda' if torch.cuda.is_available() else ''} or another device that torch has."
        ) from None
    if device.type == "meta":
        raise ValueError("memory.device 'meta' holds no numbers. Expected cpu, auto or a device that torch has.")
    return device


def size_of(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, tied ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def room_of(device: torch.device, limit: int | None) -> int:
    """Bytes of weights that the device may hold: the limit, or of a GPU nine tenths of what is free."""
    if limit is not None:
        return limit
    return int(torch.cuda.mem_get_info(device)[0] * 0.9) if device.type == "cuda" else ENOUGH


@contextmanager
def placed(model: nn.Module, settings: MemorySettings) -> Iterator[Placed]:
    """The model on its device; for as long as the block runs, with what does not fit offloaded by accelerate."""
    device = device_of(settings.device)
    size, room = size_of(model), room_of(device, settings.max_memory)
    if size <= room:
        yield Placed(model.to(device), device)
        return
    limit = (
        f"memory.max_memory is {said_size(room)}" if settings.max_memory else f"{device} has room for {said_size(room)}"
    )
    if not settings.auto_offload:
        raise ValueError(
            f"the model has {said_size(size)} of weights and {limit}. Allow memory.auto_offload, raise the limit, or "
            "take model.dtype bfloat16."
        )
    if device.type == settings.offload_device:
        raise ValueError(
            f"the model has {said_size(size)} of weights and {limit}, but memory.device and memory.offload_device are "
            f"both {device.type}. Take memory.offload_device disk, or raise the limit."
        )
    with tempfile.TemporaryDirectory(prefix="probe-offload-") as folder:
        yield offload(model, device, room, settings.offload_device, Path(folder), size)


def offload(model: nn.Module, device: torch.device, room: int, to: str, folder: Path, size: int) -> Placed:
    """The first layers that fit in `room` bytes on the device, the rest on `to`; accelerate brings them in to run."""
    try:
        import accelerate
    except ImportError:
        raise ValueError(
            f"the model has {said_size(size)} of weights, {device} takes {said_size(room)}, and offloading needs the "
            "package accelerate, which is not installed: pip install 'quant-probe[offload]'."
        ) from None
    main: Any = device.type if device.type == "cpu" else device.index or 0
    whole = sorted({type(block).__name__ for block in _stack(model)})
    places = accelerate.infer_auto_device_map(
        model,
        max_memory={main: room, **({"cpu": 2**62} if to == "cpu" and main != "cpu" else {})},
        no_split_module_classes=whole,
    )
    if places.keys() == {""}:  # not one layer fits
        if to == "disk":
            accelerate.disk_offload(model, str(folder), execution_device=device)
        else:
            accelerate.cpu_offload(model, execution_device=device)
        return Placed(model, device, f"the whole model is kept on {to} and brought in to run")
    accelerate.dispatch_model(model, places, main_device=main, offload_dir=str(folder), force_hooks=True)
    away = sum(place == to for place in places.values())
    return Placed(model, device, f"{away} of {len(places)} parts of the model are kept on {to} and brought in to run")


def _stack(model: nn.Module) -> list[nn.Module]:
    from probe.hooks import blocks_of

    return [model.get_submodule(name) for name in blocks_of(model)]


@contextmanager
def at_hand(module: nn.Module) -> Iterator[None]:
    """The weights of an offloaded module are there while the block runs."""
    if not any(t.device.type == "meta" for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield


def keep_large_blocks_apart() -> None:
    """Of glibc: blocks of a megabyte or more come from the system and go back to it, for the rest of the process.

    By default blocks of up to 32 MB share a heap with small ones, and what little is kept of each tensor ends up
    between them, so that freed blocks do not join: 70 MB for 3 MB of statistics. Other C libraries are left alone.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 2**20)


def said_size(size: int) -> str:
    """1.2 GB."""
    number, unit = float(size), 0
    while number >= 1000 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {_UNITS[unit]}"
