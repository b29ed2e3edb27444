"""Which twin does the work: the fast one, or where numba cannot be loaded the readable one."""

import warnings
from functools import cache
from types import ModuleType


@cache
def fast_twin() -> ModuleType | None:
    """`probe.activations.fast`; None, after one warning, where numba cannot be loaded."""
    try:
        from probe.activations import fast
    except ImportError as problem:
        slower = f"numba cannot be loaded ({problem}). Going on without it: the same statistics, but slower."
        warnings.warn(slower, RuntimeWarning, stacklevel=3)
        return None
    return fast
