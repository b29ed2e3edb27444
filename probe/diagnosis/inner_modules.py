"""What goes on inside a layer whose steps are not known: its modules are watched, or run in another way."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from probe.models.mamba import Site

NARROW = (torch.bfloat16, torch.float16)


class _Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every cast to a narrower float keeps float32; `narrowed` has the dtypes that were asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrowed: dict[torch.dtype, None] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("dtype") in NARROW:
            self.narrowed[named["dtype"]] = None
            named["dtype"] = torch.float32
        return func(*tree_map(_wide, args), **tree_map(_wide, named))


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in NARROW else x


@contextmanager
def outputs_inside(layer: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """While the block runs, gather the output of every module inside the layer, call by call, as float32."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            found.setdefault(name, []).append(output.detach().float().clone())

    with ExitStack() as hooks:
        for name, module in layer.named_modules():
            if name and not isinstance(module, Site):
                hooks.callback(module.register_forward_hook(partial(keep, name)).remove)
        yield found


def other_settings(layer: nn.Module, stock: nn.Module) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
    """What the modules of a layer are set to, where it is not what the float layer's are: a sentence for each.

    And a context in which it is: numbers and words that both have, and modules without weights of another class.
    """
    plain = dict(stock.named_modules())
    for name, module in layer.named_modules():
        other, start = plain.get(name), f"{name}." if name else ""
        if other is None or type(other) is not type(module):
            continue
        for key, value in vars(module).items():
            wanted = vars(other).get(key)
            if isinstance(value, bool | int | float | str) and type(wanted) is type(value) and wanted != value:
                yield f"{start}{key} is {_short(value)}, not {_short(wanted)}", having(module, key, wanted)
        for key, child in module.named_children():
            wanted = getattr(other, key, None)
            weights = [*child.parameters(), *(wanted.parameters() if isinstance(wanted, nn.Module) else [child])]
            if not weights and type(wanted) is not type(child):
                words = f"{start}{key} is {type(child).__name__}, not {type(wanted).__name__}"
                yield words, having(module, key, wanted)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def having(module: nn.Module, key: str, value: Any) -> Iterator[None]:
    """While the block runs, an attribute of a module has another value."""
    before = getattr(module, key)
    setattr(module, key, value)
    try:
        yield
    finally:
        setattr(module, key, before)


@contextmanager
def scaled_output(module: nn.Module, factor: float) -> Iterator[None]:
    """While the block runs, the output of the module is multiplied by a factor."""
    handle = module.register_forward_hook(lambda module, args, output: output * factor)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def in_float32() -> Iterator[dict[torch.dtype, None]]:
    """While the block runs, casts to narrower floats are left out; gives those that there were."""
    mode = _Widened()
    with mode:
        yield mode.narrowed
