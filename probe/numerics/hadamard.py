"""The Hadamard rotation of the W8A8 recipe. Every matrix here is symmetric, so every rotation undoes itself.

Sizes n = base * 2^k with base 1, 12 or 20 (40 * 2^k is 20 * 2^(k+1)), and H_n = H_base (x) H_{2^k}.
"""

import math
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probe.numerics.blocks import resolve_axis
from probe.numerics.native import check_out, in_threads, is_native, new_tensor, numba_twin
from probe.numerics.rounding import require_float

#: order of the base -> (p, degree) of the finite field of q = p^degree elements, order = 2 (q + 1).
BASES: dict[int, tuple[int, int]] = {12: (5, 1), 20: (3, 2)}


def hadamard_transform(x: Tensor, *, axis: int = -1, out: Tensor | None = None) -> Tensor:
    """`x` times the orthonormal Hadamard matrix along `axis`; `out`, which may be `x`, receives the result.

        y = H x / sqrt(n),  n = x.shape[axis],  H = hadamard_matrix(n)

    Applying it twice gives `x` back, up to rounding. The 2^k part is a butterfly, the base a sum of 12 or 20 terms in a
    fixed order, and both work element by element, so the result for a vector does not depend on the rest of the batch.

    Computed in float32 (in float64 for float64) and rounded once to the dtype of `x`. NaN and Inf spread over their
    whole vector; a result beyond the range of the dtype is Inf.
    """
    require_float(x, "Hadamard transforms")
    if out is not None:
        check_out(out, x)
    place = resolve_axis(axis, x.ndim)
    base, power = _split(x.shape[place])
    y = x.movedim(place, -1).to(torch.promote_types(x.dtype, torch.float32))
    twin = numba_twin("probe.numerics.butterflies", "rotations") if is_native(x) else None
    if twin is None:
        y = _by_torch(y, base, power)
    else:
        room = y if out is None else out.detach().movedim(place, -1)
        if out is not None and room.is_contiguous() and room.dtype == y.dtype:
            _by_loops(twin, y.detach(), base, room)
            return out
        y = _by_loops(twin, y.detach(), base, new_tensor(y.shape, y.dtype))
    y = y.to(x.dtype).movedim(-1, place)
    return y if out is None else out.copy_(y)


def _by_torch(y: Tensor, base: int, power: int) -> Tensor:
    """The transform along the last axis in operations of torch: the readable twin, on any device."""
    shape, head_room = y.shape, _head_room(y)
    if head_room is not None:
        y = y * head_room
    y = y.reshape(*shape[:-1], base, power)
    if base > 1:
        y = _times_base(y, base)
    y = _butterfly(y).reshape(shape) * (1 / math.sqrt(base * power))
    return y if head_room is None else y / head_room


def _by_loops(twin: ModuleType, y: Tensor, base: int, out: Tensor) -> Tensor:
    """The same into `out` by the loops of butterflies.py."""
    n = y.shape[-1]
    given, made = y.reshape(-1, n).contiguous().numpy(), out.view(-1, n).numpy()
    bits = given.view(f"i{given.itemsize}")
    scalars = _scalars(given.dtype.name, n, base)

    def transform(start: int, stop: int) -> None:
        here = slice(start, stop)
        twin.transform(given[here], bits[here], made[here], *scalars)

    in_threads(transform, len(given), given.size)
    return out


@cache
def _scalars(dtype: str, n: int, base: int) -> tuple[Any, ...]:
    """What the loops need to know about vectors of n numbers: H_base, 1 / sqrt(n), head room, and when it is needed."""
    number = np.dtype(dtype).type
    ends = np.array([float(np.finfo(dtype).max) / n, math.inf], dtype)
    low, high = (int(end) for end in ends.view(f"i{ends.itemsize}"))
    return np.array(_base_matrix(base), np.int8), number(1 / math.sqrt(n)), number(_room(n)), (low, high)


def _head_room(y: Tensor) -> Tensor | None:
    """A power of two for each vector whose sums could overflow on the way to a result that does not; else None."""
    n = y.shape[-1]
    peak = y.detach().abs().amax(-1, keepdim=True) if y.numel() else y.detach()
    crowded = (peak > torch.finfo(y.dtype).max / n) & peak.isfinite()
    if not bool(crowded.any()):
        return None
    return torch.where(crowded, _room(n), 1.0).to(y.dtype)


def _room(n: int) -> float:
    """A power of two that makes room for sums of n numbers."""
    return 2.0 ** -n.bit_length()


def hadamard_matrix(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The symmetric matrix of +1 and -1 with H H = n I, not yet divided by sqrt(n).

    H_n = H_base (x) H_{2^k}. H_{2^k} is Sylvester's: entry (i, j) is -1 to the number of ones in i & j.
    H_12 and H_20 are Paley's second construction, over the fields of 5 and of 9 elements.
    """
    if not (dtype.is_signed and not dtype.is_complex):
        raise ValueError(f"{dtype} cannot hold +1 and -1 as plain numbers. Give a float or signed integer dtype.")
    base, power = _split(n)
    matrix, double = (torch.tensor(m, dtype=torch.int8) for m in (_base_matrix(base), ((1, 1), (1, -1))))
    for _ in range(power.bit_length() - 1):
        matrix = torch.kron(matrix, double)
    return matrix.to(dtype)


def _butterfly(y: Tensor) -> Tensor:
    """H_{2^k} along the last axis: k rounds of (a + b, a - b) over neighbours 1, 2, 4, ... apart."""
    shape, size = y.shape, y.shape[-1]
    step = 1
    while step < size:
        a, b = y.reshape(*shape[:-1], size // (2 * step), 2, step).unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).reshape(shape)
        step *= 2
    return y


def _times_base(y: Tensor, base: int) -> Tensor:
    """H_base along the axis before the last, one column after the other.

    Not a matmul: BLAS may choose its order of summation by the size of the batch.
    """
    columns = torch.tensor(_base_matrix(base), dtype=y.dtype, device=y.device).unsqueeze(-1).unbind(1)
    total = columns[0] * y[..., 0:1, :]
    for j in range(1, base):
        total = torch.addcmul(total, columns[j], y[..., j : j + 1, :])
    return total


@cache
def _base_matrix(order: int) -> tuple[tuple[int, ...], ...]:
    """H_1 = (1), or Paley's second construction of order 2 (q + 1), q = 1 mod 4, which is symmetric.

        chi(a) = 0 if a = 0, 1 if a is a square of the field, else -1
        C = [[0, 1 ... 1], [1, chi(a_i - a_j)], ...]        C C = q I
        H = C (x) [[1, 1], [1, -1]] + I (x) [[1, -1], [-1, -1]]

    Field elements are pairs a + b i mod p with i^2 = -1: b = 0 throughout for degree 1, and a field of p^2
    elements for degree 2 because -1 is no square mod 3.
    """
    if order == 1:
        return ((1,),)
    p, degree = BASES[order]
    field = [(a, b) for a in range(p) for b in range(p if degree == 2 else 1)]
    squares = {((a * a - b * b) % p, 2 * a * b % p) for a, b in field}

    def chi(a: int, b: int) -> int:
        return 0 if (a, b) == (0, 0) else 1 if (a, b) in squares else -1

    core = [[chi((a - c) % p, (b - d) % p) for c, d in field] for a, b in field]
    conference = [[0] + [1] * len(field)] + [[1, *row] for row in core]
    blocks = {0: ((1, -1), (-1, -1)), 1: ((1, 1), (1, -1)), -1: ((-1, -1), (-1, 1))}
    return tuple(
        tuple(blocks[entry][half][k] for entry in row for k in (0, 1)) for row in conference for half in (0, 1)
    )


def _split(n: int) -> tuple[int, int]:
    """(base, 2^k) with n = base * 2^k."""
    for base in (1, *BASES):
        power, rest = divmod(n, base)
        if rest == 0 and power > 0 and power & (power - 1) == 0:
            return base, power
    sizes = sorted(base << k for base in (1, *BASES) for k in range(max(n, 1).bit_length() + 1))
    below = [f"{size} below" for size in sizes if size < n][-1:]
    above = [f"{size} above" for size in sizes if size > n][:1]
    raise ValueError(
        f"no Hadamard matrix of size {n} here: sizes are 2^k, 12 * 2^k, 20 * 2^k and 40 * 2^k. "
        f"Nearest: {' and '.join(below + above)}. Pad to one of those, or leave this axis unrotated."
    )
