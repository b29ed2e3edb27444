"""How the numba twins run: when they are loaded, where their machine code is kept on disk, on how many threads.

numba takes half a second to load, so nothing imports it before a kernel is needed: `numba_twin` is the one door.
Kernels are compiled when they are first called with a kind of arguments, and kept in the first of these folders that
can be written to: NUMBA_CACHE_DIR, the `__pycache__` beside their module, the user's cache folder, the user's own
folder among the temporary files.
"""

import ctypes
import gc
import hashlib
import mmap
import os
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import count, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

import torch

from probe.numerics.rounding import require_tensor

T = TypeVar("T")

#: `fastmath` of numba loops: sums may be added in any order, and there is no NaN among the values.
ANY_ORDER = {"reassoc", "contract", "nsz", "nnan"}
#: The least work for a thread, in elements: less takes no longer than waking a thread.
THREAD_WORK = 2**18
#: Bytes of a result from which on it is in huge pages, which are 2 MB on most systems.
HUGE = 2**22

#: Subclasses may be anything: tensors without memory, wrappers, quantized ones.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PACKAGE = Path(__file__).parents[1]
_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()
_forked = False
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def numba_twin(module: str, results: str) -> ModuleType | None:
    """The fast twin `module`; None, after one warning, where numba cannot be loaded: the `results` stay the same."""
    try:
        with without_collection():
            _load_numba()
            return import_module(module)
    except (ImportError, RuntimeError) as problem:  # RuntimeError: there is no folder at all for its cache
        text = f"numba cannot be loaded ({problem}). Going on without it: the same {results}, but slower."
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return None


@contextmanager
def without_collection() -> Iterator[None]:
    """Garbage waits while a library is imported: the collections that so many new objects cause take up to half of it.

    They walk over everything in memory, of which torch has much.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _load_numba() -> None:
    """Load numba with what the first call of any kernel needs of it, and keep kernels where `cache_folder` says."""
    _keep_kernels()
    from numba.core.registry import cpu_target

    target = cpu_target.target_context
    target.load_additional_registries()
    with mock.patch.object(target, "refresh"):  # each of 250 declarations of methods would refresh all there is
        cpu_target.typing_context.refresh()
    target.refresh()


def _keep_kernels() -> None:
    """Teach numba's cache about the kernels of this package; functions of others are cached as before.

    numba stamps a cached function with the file it is in, but a kernel is also made of the functions that it calls and
    of their types: the stamp here is that of the whole folder. It is part of the name, so that the index of other
    sources is never opened: to read it can fail where it names types that are gone.
    """
    from numba.core import caching

    config: Any = import_module("numba.core.config")

    class KernelLocator(caching._CacheLocator):
        def __init__(self, function: Any, file: str) -> None:
            self._source, self._line = Path(file), function.__code__.co_firstlineno

        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> "KernelLocator | None":
            file = Path(py_file)
            if _PACKAGE not in file.parents or not file.exists():
                return None
            return cls(py_func, py_file) if cache_folder(file.parent, config.CACHE_DIR or None) else None

        def get_cache_path(self) -> str:
            return str(cache_folder(self._source.parent, config.CACHE_DIR or None))

        def get_source_stamp(self) -> str:
            return _digest(self._source.parent)

        def get_disambiguator(self) -> str:
            return f"{self._line}-{_digest(self._source.parent)[:12]}"

    impl = caching.CompileResultCacheImpl
    impl._locator_classes = [KernelLocator, *impl._locator_classes]


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
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    private = Path(tempfile.gettempdir()) / f"probe-kernels-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    folders = [Path(chosen) / f"probe-{own}"] if chosen else []
    for folder in (*folders, sources / "__pycache__", caches / "probe" / f"kernels-{own}", private / own):
        try:
            if folder.parent == private:
                private.mkdir(mode=0o700, exist_ok=True)
                if not _is_private(private):
                    continue
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None


def _is_private(folder: Path) -> bool:
    """Whether nobody else can have put files here: what is cached is run. Anyone can make a folder in /tmp."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and (
        not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o077)
    )


def can_read(x: torch.Tensor) -> bool:
    """Whether a kernel can take this tensor: plain memory of the CPU, and nothing that records torch's operations."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in _PLAIN
        and x.is_cpu
        and x.layout == torch.strided
        and not x.is_neg()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and torch._C._get_tracing_state() is None
    )


def is_native(*tensors: torch.Tensor) -> bool:
    """Whether a loop can take all of them in place of torch's operations: `can_read`, and no gradient is wanted."""
    return all(can_read(x) and not (x.requires_grad and torch.is_grad_enabled()) for x in tensors)


def check_out(out: torch.Tensor, x: torch.Tensor) -> None:
    """Refuse a tensor that cannot receive a result of the shape, dtype and device of `x`."""
    require_tensor(out)
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}, but the result is {x.dtype} of shape "
            f"{tuple(x.shape)} on {x.device}. Pass torch.empty_like(x), or leave out away."
        )


def written(out: torch.Tensor | None, x: torch.Tensor, write: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """What `write` writes for `x`, in `out` if it is given: directly where that is plain memory and not that of `x`."""
    if out is not None and can_read(out) and out.is_contiguous() and not share_memory(out, x):
        write(out.detach())
        torch.autograd.graph.increment_version(out)
        return out
    target = new_tensor(x.shape, x.dtype)
    write(target)
    return target if out is None else out.copy_(target)


def new_tensor(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result. Much of it is asked for in huge pages: mapping small ones takes longer than most kernels."""
    made = torch.empty(shape, dtype=dtype)
    if made.nbytes < HUGE:
        return made
    system, advice = libc(), getattr(mmap, "MADV_HUGEPAGE", None)
    if system is not None and advice is not None:
        start = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = made.data_ptr() + made.nbytes - start
        system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)  # where there are none: no effect
    return made


@cache
def libc() -> ctypes.CDLL | None:
    """The C library, where its functions are known: on Linux."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are views of the same memory, overlapping or not."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def in_threads(work: Callable[[int, int], T], units: int, elements: int) -> list[T]:
    """`work(first, last)` of parts that cover `units`, in order, on as many threads as torch may use.

    `work` must release the GIL, as kernels do. The threads are torch's own where they can be had: for milliseconds
    after an operation those of OpenMP wait in a loop that takes a core each, and threads beside them would share it.
    """
    threads = min(torch.get_num_threads(), units, elements // THREAD_WORK)
    if threads < 2:
        return [work(0, units)]
    cuts = [units * i // threads for i in range(threads + 1)]
    parts, numbers = list(pairwise(cuts)), count()
    found: list[Any] = [None] * threads
    problems: list[BaseException] = []

    def take_parts() -> None:
        try:
            while (number := next(numbers)) < threads:
                found[number] = work(*parts[number])
        except BaseException as problem:  # C code, which may be the caller, cannot pass it on
            problems.append(problem)

    parallel = None if _forked else _openmp()
    if parallel is not None:  # all threads, as torch does: OpenMP ends those that one call leaves out
        parallel(_CALLBACK(lambda _: take_parts()), None, torch.get_num_threads(), 0)
    else:
        others = [_threads(threads - 1).submit(take_parts) for _ in range(threads - 1)]
        take_parts()
        wait(others)
    if problems:
        raise problems[0]
    return found


@cache
def _openmp() -> Any:
    """`GOMP_parallel` of the OpenMP that torch runs on; None where there is none or it has another name."""
    return getattr(libc(), "GOMP_parallel", None)


def _threads(number: int) -> ThreadPoolExecutor:
    """The threads beside the caller's, kept from call to call."""
    global _pool
    with _lock:
        if _pool is None or _pool._max_workers < number:
            _pool = ThreadPoolExecutor(number, thread_name_prefix="probe-kernel")
        return _pool


def _forget_threads() -> None:
    """A forked process has the pools of its parent, but not their threads: that of OpenMP cannot be made anew."""
    global _pool, _lock, _forked
    _pool, _lock, _forked = None, threading.Lock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
