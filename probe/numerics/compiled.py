"""How the fast twins are compiled: by torch.compile, which makes one pass over memory (C++ or Triton), or by numba.

A compiler takes seconds, and small jobs never pay for it: a kernel is compiled once the eager code has worked about as
long on the same kind of tensors as the compiler will take. So no job takes more than about twice its best time.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from probe.formats import Format
from probe.numerics.fast import mx_values, plan_for

#: `fastmath` of numba loops: sums may be added in any order, and there is no NaN among the values.
ANY_ORDER = {"reassoc", "contract", "nsz", "nnan"}
#: Tensors below this many elements always run eagerly.
LARGE = 2**20
#: Elements of large tensors that run eagerly, per kernel, before that kernel is compiled: some 5 s of work.
COMPILE_AFTER = 2**31


@cache
def numba_twin(module: str, results: str) -> ModuleType | None:
    """The fast twin `module`; None, after one warning, where numba cannot be loaded: the `results` stay the same."""
    try:
        return import_module(module)
    except ImportError as problem:
        text = f"numba cannot be loaded ({problem}). Going on without it: the same {results}, but slower."
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return None


Kernel = Callable[[Tensor, Tensor, Tensor | None], None]


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
_eager_elements: Counter[KernelKey] = Counter()
_lock = threading.Lock()


def worth_compiling(key: KernelKey, elements: int) -> bool:
    """Whether a large tensor goes to the compiled kernel, counting its elements if it does not yet."""
    if key.dtype == torch.float64:  # torch 2.13 miscompiles the 64-bit integer steps
        return False
    kernel = _kernels.get(key)
    if isinstance(kernel, Exception):
        return False
    if kernel is not None:
        return True
    with _lock:
        _eager_elements[key] += elements
        return _eager_elements[key] > COMPILE_AFTER


def run(key: KernelKey, x: Tensor, out: Tensor, noise: Tensor | None, *, required: bool) -> bool:
    """Run the compiled kernel over rows; False, after one warning, where it cannot be had.

    With `required` (the caller asked for it by name) that is a RuntimeError instead.
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
    if required:
        raise RuntimeError(_no_compiler(kernel, "Use implementation='eager' or 'auto'")) from kernel
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
    """Compile for `key` and prove it on a small input, or keep the reason why that did not work."""
    plan, rounding = plan_for(key.format, key.dtype, key.rule), key.rounding

    def kernel(x: Tensor, out: Tensor, noise: Tensor | None) -> None:
        out.copy_(mx_values(x, plan, rounding, noise))

    # Dynamo counts recompilations per code object; a copy for each kernel keeps them apart.
    kernel.__code__ = kernel.__code__.replace(co_name=f"fake_quantize_{key.format.name}_{key.rule}_{rounding}")
    compiled: Kernel = torch.compile(kernel, fullgraph=True)
    shape = (4, key.block_size)
    noise = torch.full(shape, 0.5, device=key.device) if rounding == "stochastic" else None
    x = torch.ones(shape, dtype=key.dtype, device=key.device)
    try:
        with warnings.catch_warnings():  # torch's compiler warns of its own doings; not the caller's business
            warnings.simplefilter("ignore")
            _call(compiled, x, torch.empty_like(x), noise)
    except Exception as problem:
        return problem
    return compiled


def _no_compiler(problem: Exception, advice: str) -> str:
    reason = " ".join(str(problem).split())[:200] or type(problem).__name__
    return (
        f"torch.compile could not build a kernel here ({reason}). It needs a C++ compiler (g++ or clang) on the "
        f"CPU, Triton on a GPU. {advice}."
    )
