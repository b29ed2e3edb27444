"""Memory that is given back: statistics are small and live long, between tensors that are large and do not."""

import ctypes
from contextlib import suppress

_M_MMAP_THRESHOLD = -3  # of malloc.h


def keep_large_blocks_apart() -> None:
    """Of glibc: blocks of a megabyte or more come from the system and go back to it, for the rest of the process.

    By default blocks of up to 32 MB share a heap with small ones, and what little is kept of each tensor ends up
    between them, so that freed blocks do not join: 70 MB for 3 MB of statistics. Other C libraries are left alone.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 2**20)
