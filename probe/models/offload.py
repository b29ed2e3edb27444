"""Where a model runs: on one device, or, where it does not fit, offloaded by accelerate to the CPU or to disk."""

import copy
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from probe.models.layers import blocks_of
from probe.numerics.native import libc
from probe.words import format_bytes

#: The room of a device whose free memory is not known.
ENOUGH = 2**63
#: The share of the free memory that weights may take.
SHARE = 0.9


@dataclass(frozen=True)
class Room:
    """How many bytes of weights a device may hold, and where all further ones are kept."""

    device: torch.device
    limit: int | None = None
    elsewhere: Literal["cpu", "disk"] = "disk"
    may_offload: bool = True

    @property
    def size(self) -> int:
        """The limit, or the share SHARE of the free memory."""
        return _free(self.device) if self.limit is None else self.limit

    def takes(self, size: int) -> bool:
        """Whether that many bytes of weights fit; a ValueError if they neither fit nor can be offloaded."""
        if size <= self.size:
            return True
        weights, room = f"the model has {format_bytes(size)} of weights", format_bytes(self.size)
        limit = f"{self.device} has room for {room}" if self.limit is None else f"memory.max_memory is {room}"
        if not self.may_offload:
            advice = "Allow memory.auto_offload, raise the limit, or take model.dtype bfloat16."
            raise ValueError(f"{weights} and {limit}. {advice}")
        if self.device.type == self.elsewhere:
            raise ValueError(
                f"{weights} and {limit}, but memory.device and memory.offload_device are both {self.device.type}. "
                "Take memory.offload_device disk, or raise the limit."
            )
        try:
            import accelerate  # noqa: F401
        except ImportError:
            raise ValueError(
                f"{weights}, {self.device} takes {room}, and offloading needs the package accelerate, which is not "
                "installed: pip install 'quant-probe[offload]'."
            ) from None
        return False

    @property
    def name(self) -> Any:
        """The name that accelerate has for the device."""
        return self.device.type if self.device.type == "cpu" else self.device.index or 0

    def by_device(self) -> dict[Any, int]:
        """`max_memory` of accelerate."""
        return {self.name: self.size, **({"cpu": 2**62} if self.elsewhere == "cpu" and self.name != "cpu" else {})}


@dataclass(frozen=True, eq=False)
class Placed:
    """A model that can run: inputs go to `device`; `note` says how much of it is offloaded."""

    model: nn.Module
    device: torch.device
    note: str = ""


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter; the CPU where there is none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def device_named(name: str) -> torch.device:
    """The device of that name; `auto` is the accelerator if there is one. A device that is not here is an error."""
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as problem:
        reason = str(problem).strip().split("\n")[0].rstrip(".")
        raise ValueError(
            f"memory.device {name!r} cannot be used here: {reason}. Expected cpu, auto"
            f"{', cuda' if torch.cuda.is_available() else ''} or another device that torch has."
        ) from None
    if device.type == "meta":
        raise ValueError("memory.device 'meta' holds no numbers. Expected cpu, auto or a device that torch has.")
    return device


def size_of(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, tied ones once."""
    return _size(_tensors(model))


def _tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    return {id(t): t for t in (*model.parameters(), *model.buffers())}.values()


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * SHARE)
    if device.type == "cpu":
        with suppress(OSError, StopIteration):
            lines = Path("/proc/meminfo").read_text().splitlines()
            return int(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024 * SHARE)
    return ENOUGH


def place(model: nn.Module, room: Room) -> Placed:
    """The model on its device; weights that do not fit are offloaded now, unless they were when it was loaded."""
    if hasattr(model, "hf_device_map"):  # placed already
        return _placed(model, room)
    return _placed(model.to(room.device), room) if room.takes(size_of(model)) else offload(model, room)


def offload(model: nn.Module, room: Room) -> Placed:
    """The first layers that fit on the device, all others offloaded; accelerate loads each for the time it runs."""
    import accelerate

    whole = sorted({type(block).__name__ for block in _stack(model)})
    places = accelerate.infer_auto_device_map(model, max_memory=room.by_device(), no_split_module_classes=whole)
    folder = tempfile.mkdtemp(prefix="probe-offload-")
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    if places.keys() != {""}:
        accelerate.dispatch_model(model, places, main_device=room.name, offload_dir=folder, force_hooks=True)
    elif room.elsewhere == "disk":  # not one layer fits
        accelerate.disk_offload(model, folder, execution_device=room.device)
    else:
        accelerate.cpu_offload(model, execution_device=room.device)
    return _placed(model, room)


def _placed(model: nn.Module, room: Room) -> Placed:
    away = _size(t for t in _tensors(model) if t.is_meta)
    for block in _stack(model) if away else ():
        block.register_forward_hook(return_free_memory)
    what = f"{format_bytes(away)} of {format_bytes(size_of(model))} of weights"
    return Placed(model, room.device, f"{what} are kept on {room.elsewhere} and brought in to run" if away else "")


def _stack(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(name) for name in blocks_of(model)]


def state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `state_dict`, sorted by name; offloaded ones are loaded one at a time."""
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, torch.Tensor):
            continue
        if not value.is_meta:
            yield name, value
            continue
        owner, _, last = name.rpartition(".")
        with at_hand(model.get_submodule(owner)):
            yield name, getattr(model.get_submodule(owner), last)


def is_offloaded(model: nn.Module) -> bool:
    """Whether weights of the model are kept elsewhere until they are needed."""
    return any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def brought_in(model: nn.Module) -> nn.Module:
    """A copy of an offloaded model with all its weights in memory, which recipes can change."""
    from accelerate.hooks import remove_hook_from_submodules

    whole = copy.deepcopy(model)
    remove_hook_from_submodules(whole)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in state_of(model):
        owner, _, last = name.rpartition(".")
        own = value.detach().clone()
        if name in parameters:
            whole.get_submodule(owner).register_parameter(last, nn.Parameter(own, requires_grad=False))
        else:
            whole.get_submodule(owner).register_buffer(last, own)
    tie = getattr(whole, "tie_weights", None)
    if callable(tie):  # of transformers: the head may share the embedding
        tie()
    return whole


class NumbersOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, an operation that mixes real tensors with `meta` tensors is an error.

    An offloaded weight is on `meta` until its module is called. A model that reads it without a call would compute
    with uninitialized memory: that is what F.linear of a CPU tensor and a `meta` weight does.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it mixes the two."""
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if any(value.is_meta for value in tensors) and any(not value.is_meta and value.dim() for value in tensors):
            shape = next(list(value.shape) for value in tensors if value.is_meta)
            raise RuntimeError(f"{func} reads a weight {shape} that was not brought in")
        return func(*args, **(kwargs or {}))


@contextmanager
def at_hand(module: nn.Module) -> Iterator[None]:
    """While the block runs, the weights of an offloaded module are loaded."""
    if not any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        yield
        return
    from accelerate.utils import align_module_device

    try:
        with align_module_device(module):
            yield
    finally:
        return_free_memory()


def return_free_memory(*_: object) -> None:
    """Give the memory of freed weights back to the system, if the C library can; also a forward hook.

    The allocator of glibc keeps freed blocks of up to 32 MB for reuse, so weights that were let go still take memory.
    """
    trim = getattr(libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)
