"""Changes that must not fail a case: what differs between two honest runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import probe.metrics.comparison


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


def without_numba() -> AbstractContextManager[Any]:
    """As where numba is not installed."""
    return mock.patch.object(probe.metrics.comparison, "numba_twin", return_value=None)


def with_numba() -> AbstractContextManager[Any]:
    """The numba twin for tensors of any size; in the gate they are too small for it."""
    return mock.patch.object(probe.metrics.comparison, "LARGE", 1)


HARMLESS: dict[str, Harmless] = {
    change.name: change
    for change in (
        Harmless("1 thread", lambda: threads(1)),
        Harmless("2 threads", lambda: threads(2)),
        Harmless("oneDNN off", without_onednn),
        Harmless("numba twin off", without_numba),
        Harmless("numba twin everywhere", with_numba),
        Harmless("recipes in another order", is_reversed=True),
        Harmless("batches of 1", batch_size=1),
        Harmless("batches of 3", batch_size=3),
    )
}
