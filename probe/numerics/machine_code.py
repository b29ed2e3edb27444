"""Where the machine code of kernels is kept on disk, and how it is found again.

It is in the first of these folders that can be written to: NUMBA_CACHE_DIR, the `__pycache__` beside the module of the
kernel, the user's cache folder, the user's own folder among the temporary files.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numba

from probe.files.paths import is_private, user_cache

# Their types are partly given, and do not allow for what is done here.
_caching: Any = import_module("numba.core.caching")
_config: Any = import_module("numba.core.config")
_runtime: Any = import_module("numba.core.runtime")

Function = Callable[..., Any]


def kernel(function: Function) -> Function:
    """`numba.njit` for this package: without the GIL, and kept where `cache_folder` says.

    A division by zero gives Inf or NaN, as in numpy: a check for it would keep loops from using vectors.
    """
    return _compiled(function)


def summing_kernel(function: Function) -> Function:
    """As `kernel`; sums may be added in any order, and there is no NaN among the values.

    It becomes part of its caller. Otherwise there are two of it, alone and beside its caller, which may add in two
    orders; the process that compiles them runs the one, and those that load them from disk run the other.
    """
    return _compiled(function, fastmath={"reassoc", "contract", "nsz", "nnan"}, forceinline=True)


def _compiled(function: Function, **options: Any) -> Function:
    made: Any = numba.njit(nogil=True, error_model="numpy", **options)(function)
    made._cache = KernelCache(function)
    compiled: Function = made
    return compiled


class KernelLocator(_caching._CacheLocator):  # type: ignore[misc]
    """Names the files of a kernel by the sources of its whole folder.

    numba stamps a cached function with the file it is in, but a kernel is also made of the functions that it calls and
    of their types. The stamp is part of the name, so that the index of other sources is never opened: to read it can
    fail where it names types that are gone.
    """

    def __init__(self, function: Any, file: str) -> None:
        self._folder, self._line = Path(file).parent, function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "KernelLocator | None":
        """None where there is no folder to write to."""
        made = cls(py_func, py_file)
        return made if cache_folder(made._folder, _config.CACHE_DIR or None) else None

    def get_cache_path(self) -> str:
        """The folder of the files."""
        return str(cache_folder(self._folder, _config.CACHE_DIR or None))

    def get_source_stamp(self) -> str:
        """What the files are valid for."""
        return _digest(self._folder)

    def get_disambiguator(self) -> str:
        """The part of the files' names that tells kernels of one name apart."""
        return f"{self._line}-{_digest(self._folder)[:12]}"


class _KernelFiles(_caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (KernelLocator,)


class KernelCache(_caching.FunctionCache):  # type: ignore[misc]
    """The files of one kernel. Compiled code needs numba's runtime only."""

    _impl_class = _KernelFiles

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel for a signature, or None.

        numba would first load all that it can compile, which takes 100 ms; its compiler does that anyway.
        """
        _runtime.rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)
        return None


@cache
def _digest(folder: Path) -> str:
    """A digest of the sources in a folder."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


@cache
def cache_folder(sources: Path, chosen: str | None) -> Path | None:
    """The folder for the machine code of a folder of sources, made if need be; None if there is none to write to."""
    own = hashlib.sha256(str(sources).encode()).hexdigest()[:16]
    private = Path(tempfile.gettempdir()) / f"probe-kernels-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    folders = [Path(chosen) / f"probe-{own}"] if chosen else []
    for folder in (*folders, sources / "__pycache__", user_cache() / f"kernels-{own}", private / own):
        try:
            if folder.parent == private:
                private.mkdir(mode=0o700, exist_ok=True)
                if not is_private(private):
                    continue
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None
