"""Processes that work on tensors, and that end with the one that started them, whatever ends it."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, TypeVar

from probe.files.atomic import remove_unfinished

T = TypeVar("T")


@contextmanager
def submitted(
    work: Callable[..., T], calls: Sequence[tuple[Any, ...]], *, jobs: int, folders: Sequence[Path]
) -> Iterator[list["Future[T]"]]:
    """`work(*call)` for all calls in `jobs` processes. An exception in the block, Ctrl-C among them, ends them at once.

    Ctrl-C goes to all processes of a terminal: the workers do not see it, so that only this one decides. They are
    killed, and what they had begun to write to `folders` is taken away.
    """
    others = active_children()
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_share_cores, initargs=(threads,))
    workers = []
    try:
        with _no_interrupt():  # the mask is inherited, from the first moment of a worker on
            futures = [pool.submit(work, *call) for call in calls]
            workers = [one for one in active_children() if one not in others]
        yield futures
    except BaseException:
        with _no_interrupt():  # a second one must not leave half of them behind
            for worker in workers:
                worker.kill()
            pool.shutdown(cancel_futures=True)
            for folder in set(folders):
                for worker in workers:
                    remove_unfinished(folder, worker.pid or 0)
        raise
    pool.shutdown()


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """SIGINT waits until the end of the block; where signals have no mask, it does not."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _share_cores(threads: int) -> None:
    import torch

    torch.set_num_threads(min(threads, torch.get_num_threads()))
