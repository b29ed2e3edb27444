"""Forwards at the same time, each on threads of its own: they scale better than the operations inside of one."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Given = TypeVar("Given")
Found = TypeVar("Found")


def at_once(work: Callable[[Given], Found], items: Sequence[Given], threads: int) -> Iterator[tuple[Given, Found]]:
    """(item, work of it) in the order given. `threads` of them run at a time, and no more results are kept.

    torch's own threads are divided among them, and are as they were afterwards.
    """
    if threads < 2 or len(items) < 2:
        for item in items:
            yield item, work(item)
        return
    own = torch.get_num_threads()
    each = max(1, own // threads)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(each,)) as pool:
            for first in range(0, len(items), threads):
                some = items[first : first + threads]
                yield from zip(some, pool.map(work, some), strict=True)
    finally:
        torch.set_num_threads(own)
