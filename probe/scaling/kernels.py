"""The loops of `blockwise.py`, compiled by numba: stretches of blocks that stay in the first cache, at one distance."""

import numba
import numpy as np
import numpy.typing as npt

_Singles = npt.NDArray[np.float32]
_Bits = npt.NDArray[np.int32]
_Doubles = npt.NDArray[np.float64]
_Whole = npt.NDArray[np.int64]

#: Elements that are worked on at a time, if a block is not longer.
STRETCH = 1024
#: The places of sums.
(SQUARES, MAGNITUDES, LARGEST, PRODUCT, POWER, LOWEST, HIGHEST, SUMS) = range(8)

_EXPONENT, _SIGN = np.int32(0x7F800000), np.int32(-(2**31))


@numba.njit(cache=True, nogil=True)
def add_level(
    z: _Singles,
    scale: _Doubles,
    size: int,
    distance: int,
    magic: float,
    min_exponent: int,
    largest: int,
    has_negative_zero: bool,
    sums: _Doubles,
    steps_in_one: float,
    steps: _Whole,
) -> None:
    """Add the sums of blocks of `size` values z, of which each block has its own scale, at 2^distance.

    `magic`, `min_exponent` and `largest` are those of a `Plan`. With room in `steps`, outputs are counted there by
    their signed number of steps.
    """
    stretch = max(size, STRETCH // size * size)
    y, power = np.empty(stretch, np.float32), np.empty(stretch, np.float32)
    for start in range(0, z.size, stretch):
        here = z[start : start + stretch]
        q = y[: here.size]
        _round(
            here,
            here.view(np.int32),
            q,
            q.view(np.int32),
            power,
            power.view(np.int32),
            np.float32(2.0**-distance),
            np.float32(magic),
            np.int32(min_exponent),
            np.int32(largest),
        )
        if not has_negative_zero:
            for i in range(q.size):
                q[i] += np.float32(0)
        if steps.size:
            middle = steps.size // 2
            for i in range(q.size):
                steps[int(q[i] * steps_in_one) + middle] += 1
        for row in range(here.size // size):
            part = slice(row * size, (row + 1) * size)
            _add_row(here[part], q[part], 2.0**distance, scale[start // size + row], sums)


@numba.njit(cache=True, nogil=True)
def _round(
    z: _Singles,
    bits_z: _Bits,
    y: _Singles,
    bits_y: _Bits,
    power: _Singles,
    bits_power: _Bits,
    inverse: np.float32,
    magic: np.float32,
    min_exponent: np.int32,
    largest: np.int32,
) -> None:
    """y = z * inverse on the element grid, nearest, ties to even, saturating; as `fast.round_magnitudes_` has it."""
    for i in range(z.size):
        y[i] = abs(z[i]) * inverse
    for i in range(z.size):
        bits_power[i] = max(bits_y[i] & _EXPONENT, min_exponent)
    for i in range(z.size):
        constant = power[i] * magic
        y[i] = (y[i] + constant) - constant
    for i in range(z.size):
        bits_y[i] = min(bits_y[i], largest) | (bits_z[i] & _SIGN)


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz", "nnan"})
def _add_row(z: _Singles, q: _Singles, unit: float, scale: float, sums: _Doubles) -> None:
    """One block: with o = q * unit and d = o - z, all times the scale of the block."""
    squares, magnitudes, product, power = 0.0, 0.0, 0.0, 0.0
    largest, lowest, highest = 0.0, np.inf, -np.inf
    for i in range(z.size):
        value, output = np.float64(z[i]), np.float64(q[i]) * unit
        d = output - value
        squares += d * d
        magnitudes += abs(d)
        product += value * output
        power += output * output
        largest = max(largest, abs(d))
        lowest, highest = min(lowest, output), max(highest, output)
    square = scale * scale
    sums[SQUARES] += squares * square
    sums[MAGNITUDES] += magnitudes * scale
    sums[PRODUCT] += product * square
    sums[POWER] += power * square
    sums[LARGEST] = max(sums[LARGEST], largest * scale)
    sums[LOWEST] = min(sums[LOWEST], lowest * scale)
    sums[HIGHEST] = max(sums[HIGHEST], highest * scale)
