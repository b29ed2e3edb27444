"""Runs code as if nothing in it were cast to a narrower float: what it gives then shows what the casts did."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

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
def in_float32() -> Iterator[dict[torch.dtype, None]]:
    """While the block runs, casts to narrower floats are left out; gives those that there were."""
    mode = _Widened()
    with mode:
        yield mode.narrowed
