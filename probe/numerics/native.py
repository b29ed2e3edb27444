"""How the numba twins run: when they are loaded, on which tensors, into which memory, on how many threads.

numba takes a fifth of a second to load, so nothing imports it before a kernel is needed: `numba_twin` is the one door.
"""

import ctypes
import gc
import mmap
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import count, pairwise
from types import ModuleType
from typing import Any, TypeVar

import torch

from probe.numerics.rounding import require_tensor

T = TypeVar("T")

#: The least work for a thread, in elements: less takes no longer than waking a thread.
THREAD_WORK = 2**18
#: Bytes of a result from which on it is in huge pages, which are 2 MB on most systems.
HUGE = 2**22

#: Subclasses may be anything: tensors without memory, wrappers, quantized ones.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()
_forked = False
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def numba_twin(module: str, results: str) -> ModuleType | None:
    """The fast twin `module`; None, after one warning, where numba cannot be loaded: the `results` stay the same."""
    try:
        with without_collection():
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
