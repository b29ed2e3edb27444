"""Changes that must not fail a case: what differs between two honest runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Harmless:
    """A change, and the batch size that goes with it."""

    name: str
    applied: Callable[[], AbstractContextManager[None]]
    batch_size: int | None = None


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
def nothing() -> Iterator[None]:
    yield


HARMLESS: dict[str, Harmless] = {
    change.name: change
    for change in (
        Harmless("1 thread", lambda: threads(1)),
        Harmless("2 threads", lambda: threads(2)),
        Harmless("oneDNN off", without_onednn),
        Harmless("batches of 1", nothing, batch_size=1),
        Harmless("batches of 4", nothing, batch_size=4),
    )
}
