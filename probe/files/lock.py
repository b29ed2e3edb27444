"""Locks between processes; the system releases them when their process ends, however it ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder, or of a file that is made if missing: alone, or among readers only (`shared`).

    Without `wait`, a lock that another process holds is a BlockingIOError. Some network file systems have no locks;
    there the block runs without one.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # no locks here
        yield
    finally:
        os.close(descriptor)
