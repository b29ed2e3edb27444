"""Changes that must not fail a case: what differs between two honest runs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch


@dataclass(frozen=True)
class Harmless:
    """A change, the batch size that goes with it, and whether recipes are judged last first."""

    name: str
    applied: Callable[[], AbstractContextManager[Any]] = nullcontext
    batch_size: int | None = None
    is_reversed: bool = False


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_onednn() -> Iterator[None]:
    mkldnn: Any = torch.backends.mkldnn
    before = mkldnn.enabled
    mkldnn.set_flags(False)
    try:
        yield
    finally:
        mkldnn.set_flags(before)


@contextmanager
def without_numba() -> Iterator[None]:
    """As where numba is not installed: every module that loads numba loops finds none."""
    ours = [module for name, module in sys.modules.items() if name.startswith("probe.")]
    loading = [module for module in ours if "numba_twin" in vars(module)]
    assert len(loading) > 5
    with ExitStack() as undo:
        for module in loading:
            undo.enter_context(mock.patch.object(module, "numba_twin", return_value=None))
        yield


HARMLESS: dict[str, Harmless] = {
    change.name: change
    for change in (
        Harmless("1 thread", lambda: threads(1)),
        Harmless("2 threads", lambda: threads(2)),
        Harmless("oneDNN off", without_onednn),
        Harmless("numba loops off", without_numba),
        Harmless("recipes in another order", is_reversed=True),
        Harmless("batches of 1", batch_size=1),
        Harmless("batches of 3", batch_size=3),
    )
}
