"""A declared mode for the time of a test."""

from collections.abc import Iterator
from contextlib import contextmanager

from probe.running.declarations import DeclaredMode
from probe.running.modes import MODES, declare_modes


@contextmanager
def declared(base: str, *patterns: str, name: str = "mixed") -> Iterator[str]:
    """While the block runs, the mode `name` is `base` with these modules kept float."""
    declare_modes({name: DeclaredMode(base, patterns)}, where="a test")
    try:
        yield name
    finally:
        del MODES[name]
