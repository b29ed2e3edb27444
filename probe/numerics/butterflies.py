"""The fast twin of the Hadamard transform: every vector is transformed in the cache by numba loops.

The sums are those of hadamard.py in the same order, so the results are the same to the bit. Rounds over neighbours
1, 2 and 4 apart are done on eight planes, plane p holding every eighth element from p on, because loops over elements
that lie side by side are what a compiler vectorizes; the rounds after that go two at a time.
"""

import numpy as np
import numpy.typing as npt

from probe.numerics.machine_code import kernel

_Floats = npt.NDArray[np.floating]
_Bits = npt.NDArray[np.signedinteger]
_Signs = npt.NDArray[np.int8]
_Number = float | np.floating


@kernel
def transform(
    x: _Floats, bits: _Bits, out: _Floats, signs: _Signs, factor: float, room: float, ends: tuple[int, int]
) -> None:
    """Rows of `x` [row, n] into `out`: times H_base (x) H_{2^k}, times `factor`.

    `bits` are those of `x`, `signs` is H_base, and `ends` has the bits of a limit and of infinity. A row whose largest
    magnitude is between these is multiplied by `room` on the way, so that its sums do not overflow.
    """
    base = signs.shape[0]
    size = x.shape[1] // base
    y, planes = np.empty(x.shape[1], x.dtype), np.empty(2 * size, x.dtype)
    for row in range(x.shape[0]):
        given, made = x[row], out[row]
        is_crowded = ends[0] < _largest(bits[row]) < ends[1]
        if base > 1 or is_crowded:
            for i in range(given.size):
                y[i] = given[i] * room if is_crowded else given[i]
            given = y
        if base > 1:
            _times_base(given, made, signs, size)
            given = made
        for start in range(0, made.size, size):
            _butterfly(given[start : start + size], made[start : start + size], planes, factor)
        if is_crowded:
            for i in range(made.size):
                made[i] /= room


@kernel
def _largest(bits: _Bits) -> int:
    """The bits of the largest magnitude; those of a NaN are above those of infinity."""
    whole = bits.dtype.type
    size, found = whole((1 << (8 * bits.itemsize - 1)) - 1), whole(0)
    for i in range(bits.size):
        found = max(found, whole(bits[i] & size))
    return int(found)


@kernel
def _times_base(given: _Floats, made: _Floats, signs: _Signs, size: int) -> None:
    """H_base along the axis before the last of [base, size], one column after the other."""
    base = signs.shape[0]
    for line in range(base):
        total = made[line * size : (line + 1) * size]
        for column in range(base):
            part = given[column * size : (column + 1) * size]
            sign = given.dtype.type(signs[line, column])
            if column == 0:
                for i in range(size):
                    total[i] = sign * part[i]
            else:
                for i in range(size):
                    total[i] += sign * part[i]


@kernel
def _butterfly(given: _Floats, made: _Floats, planes: _Floats, factor: float) -> None:
    """H_{2^k} times `factor`: rounds of (a + b, a - b) over neighbours 1, 2, 4, ... apart; `given` may be `made`.

    `planes` is room for twice the size.
    """
    size, step = given.size, 1
    if size >= 32:
        _five_rounds(given, made, planes[:size], planes[size:])
        step = 32
    else:
        for i in range(size):
            made[i] = given[i]
    while 4 * step < size:
        _two_rounds(made, step)
        step *= 4
    if 2 * step < size:
        _round(made, step, made.dtype.type(1))
        step *= 2
    if step < size:
        _round(made, step, factor)
    else:
        for i in range(size):
            made[i] *= factor


@kernel
def _five_rounds(given: _Floats, made: _Floats, planes: _Floats, other: _Floats) -> None:
    """The rounds over neighbours 1, 2, 4, 8 and 16 apart: the last two are neighbours in a plane."""
    m = given.size // 8
    for k in range(m):
        for p in range(8):
            planes[p * m + k] = given[8 * k + p]
    p0, p1, p2, p3 = planes[:m], planes[m : 2 * m], planes[2 * m : 3 * m], planes[3 * m : 4 * m]
    p4, p5, p6, p7 = planes[4 * m : 5 * m], planes[5 * m : 6 * m], planes[6 * m : 7 * m], planes[7 * m : 8 * m]
    for k in range(m):
        a0, a1, a2, a3 = p0[k] + p1[k], p0[k] - p1[k], p2[k] + p3[k], p2[k] - p3[k]
        a4, a5, a6, a7 = p4[k] + p5[k], p4[k] - p5[k], p6[k] + p7[k], p6[k] - p7[k]
        b0, b1, b2, b3 = a0 + a2, a1 + a3, a0 - a2, a1 - a3
        b4, b5, b6, b7 = a4 + a6, a5 + a7, a4 - a6, a5 - a7
        p0[k], p1[k], p2[k], p3[k] = b0 + b4, b1 + b5, b2 + b6, b3 + b7
        p4[k], p5[k], p6[k], p7[k] = b0 - b4, b1 - b5, b2 - b6, b3 - b7
    _neighbours(planes, other)
    for k in range(m):
        for p in range(8):
            made[8 * k + p] = other[p * m + k]


@kernel
def _neighbours(given: _Floats, made: _Floats) -> None:
    """The rounds over neighbours 1 and 2 apart."""
    for k in range(given.size >> 2):
        i = 4 * k
        a, b = given[i] + given[i + 1], given[i] - given[i + 1]
        c, d = given[i + 2] + given[i + 3], given[i + 2] - given[i + 3]
        made[i], made[i + 1], made[i + 2], made[i + 3] = a + c, b + d, a - c, b - d


@kernel
def _two_rounds(v: _Floats, step: int) -> None:
    """The rounds over neighbours `step` and twice that apart."""
    for start in range(0, v.size, 4 * step):
        p0, p1 = v[start : start + step], v[start + step : start + 2 * step]
        p2, p3 = v[start + 2 * step : start + 3 * step], v[start + 3 * step : start + 4 * step]
        for i in range(step):
            a, b, c, d = p0[i] + p1[i], p0[i] - p1[i], p2[i] + p3[i], p2[i] - p3[i]
            p0[i], p1[i], p2[i], p3[i] = a + c, b + d, a - c, b - d


@kernel
def _round(v: _Floats, step: int, factor: _Number) -> None:
    """The round over neighbours `step` apart, times `factor`."""
    for start in range(0, v.size, 2 * step):
        p0, p1 = v[start : start + step], v[start + step : start + 2 * step]
        for i in range(step):
            p0[i], p1[i] = (p0[i] + p1[i]) * factor, (p0[i] - p1[i]) * factor
