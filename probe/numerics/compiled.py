"""The torch operations of `fast.py` through torch.compile, which makes one pass over memory: for accelerators.

On the CPU the numba kernels do it (`native.py`), which need no compiler; there it is used on request only.
"""

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from probe.formats import Format
from probe.numerics import fast
from probe.numerics.corners import mx_corner_blocks
from probe.numerics.fast import mx_values, plan_for

#: Tensors below this many elements are not compiled for unless asked.
LARGE = 2**20

Kernel = Callable[[Tensor, Tensor, Tensor | None], None]


class WrongKernelError(RuntimeError):
    """A compiled kernel that does not give the bits of torch's operations."""


@dataclass(frozen=True)
class KernelKey:
    """Everything that a kernel is specialised on; the count of blocks stays dynamic."""

    format: Format
    rule: str
    rounding: str
    block_size: int
    dtype: torch.dtype
    device: str


_kernels: dict[KernelKey, Kernel | Exception] = {}
_lock = threading.Lock()


def run(key: KernelKey, x: Tensor, out: Tensor, noise: Tensor | None, *, required: bool) -> bool:
    """Run the compiled kernel over rows; False, after one warning, where it cannot be had.

    With `required` (the caller asked for it by name) that is a RuntimeError instead. A kernel that does not give the
    bits of torch's operations at corner values, which is tried before its first use, is a WrongKernelError.
    """
    if x.shape[0] < 2:  # torch.compile specialises sizes 0 and 1
        pad = torch.zeros(2 - x.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
        both = torch.cat([x, pad])
        noise = None if noise is None else torch.cat([noise, torch.full_like(pad, 0.5, dtype=noise.dtype)])
        result = torch.empty_like(both)
        done = run(key, both, result, noise, required=required)
        out.copy_(result[: x.shape[0]])
        return done
    with _lock:
        kernel = _kernels.get(key)
        first = kernel is None
        if kernel is None:
            kernel = _kernels[key] = _build(key)
    if not isinstance(kernel, Exception):
        _call(kernel, x.detach(), out.detach(), noise)
        return True
    if isinstance(kernel, WrongKernelError):
        raise kernel
    if required:
        raise RuntimeError(_no_compiler(kernel, "Use implementation='torch' or 'auto'")) from kernel
    if first:
        advice = "Going on without it: the same bits, slower"
        warnings.warn(_no_compiler(kernel, advice), RuntimeWarning, stacklevel=4)
    return False


def _call(kernel: Kernel, x: Tensor, out: Tensor, noise: Tensor | None) -> None:
    """Run a kernel with the count of rows marked as variable, so that it compiles once for all shapes."""
    for tensor in (x, out, noise):
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        kernel(x, out, noise)


def _build(key: KernelKey) -> Kernel | Exception:
    """Compile for `key` and compare with torch's operations at corner values; or the reason why not to use it."""
    plan, rounding = plan_for(key.format, key.dtype, key.rule), key.rounding

    def kernel(x: Tensor, out: Tensor, noise: Tensor | None) -> None:
        out.copy_(mx_values(x, plan, rounding, noise))

    # Dynamo counts recompilations per code object; a copy for each kernel keeps them apart.
    kernel.__code__ = kernel.__code__.replace(co_name=f"fake_quantize_{key.format.name}_{key.rule}_{rounding}")
    compiled: Kernel = torch.compile(kernel, fullgraph=True)
    x = _corners(key)
    noise = torch.linspace(0.01, 0.99, x.numel(), device=key.device).reshape(x.shape)
    expected, made = (torch.empty_like(x) for _ in range(2))
    given = noise if rounding == "stochastic" else None
    try:
        with warnings.catch_warnings():  # torch's compiler warns of its own doings; not the caller's business
            warnings.simplefilter("ignore")
            _call(compiled, x, made, given)
    except Exception as problem:
        return problem
    with torch.no_grad():
        expected.copy_(fast.mx_values(x, plan, rounding, given))
    return _wrong(key, x, made, expected) or compiled


def _corners(key: KernelKey) -> Tensor:
    """Rows of corner values, 4 at least, within the range of the dtype."""
    blocks = torch.cat([mx_corner_blocks(key.format, key.block_size, 0, is_open=is_open) for is_open in (False, True)])
    limit = torch.finfo(key.dtype).max
    return blocks.clamp(-limit, limit).to(key.device, key.dtype)


def _wrong(key: KernelKey, x: Tensor, made: Tensor, expected: Tensor) -> WrongKernelError | None:
    """The error that a kernel deserves which gave `made` for `x`; None if every bit is as expected."""
    whole = {2: torch.int16, 4: torch.int32}[x.element_size()]
    wrong = made.view(whole) != expected.view(whole)
    count = int(wrong.sum())
    if not count:
        return None
    first, got, wanted = (float(values[wrong][0]) for values in (x, made, expected))
    return WrongKernelError(
        f"the compiled kernel of {key.format.name} ({key.rule}, {key.rounding}, blocks of {key.block_size}, "
        f"{key.dtype}, {key.device}) does not give the bits of torch's operations: {count} of {x.numel()} corner "
        f"values differ, the first at {first:g}: {got:g} instead of {wanted:g}. Use implementation='torch', and report "
        "it."
    )


def _no_compiler(problem: Exception, advice: str) -> str:
    reason = " ".join(str(problem).split())[:200] or type(problem).__name__
    return (
        f"torch.compile could not build a kernel here ({reason}). It needs a C++ compiler (g++ or clang) on the "
        f"CPU, Triton on a GPU. {advice}."
    )
