"""When numba loops can work on tensors, where results may go, and how loops share the work among threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from probe.numerics.rounding import require_tensor

T = TypeVar("T")

#: The least elements that are worth a thread of their own: some 100 us of work.
LEAST = 2**18


def is_native(*tensors: Tensor) -> bool:
    """Whether numpy can read all of them as they are: on the CPU, outside of autograd, and not being traced."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    return all(map(_is_plain, tensors))


def _is_plain(x: Tensor) -> bool:
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:  # a subclass may hold anything
        return False
    return x.device.type == "cpu" and not (x.requires_grad and torch.is_grad_enabled())


def check_out(out: Tensor, x: Tensor) -> None:
    """Refuse a tensor that cannot receive a result of the shape, dtype and device of `x`."""
    require_tensor(out)
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}, but the result is {x.dtype} of shape "
            f"{tuple(x.shape)} on {x.device}. Pass torch.empty_like(x), or leave out away."
        )


def in_parts(work: Callable[[int, int], T], rows: int, elements: int) -> list[T]:
    """`work(start, stop)` of parts that make up 0 .. rows, as many at once as torch may use threads; in order.

    The loops that `work` runs must release Python's lock. Fewer than LEAST elements for each thread: fewer threads.
    """
    threads = max(1, min(torch.get_num_threads(), rows, elements // LEAST))
    if threads == 1:
        return [work(0, rows)]
    cuts = [rows * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, cuts, cuts[1:]))
