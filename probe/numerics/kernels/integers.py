"""Plain integer grids with given scales, as `integers.quantize_integer` and back, in float64."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from probe.numerics.kernels.bits import as_float, narrow
from probe.numerics.kernels.elements import HALF_AWAY, TOWARD_ZERO
from probe.numerics.kernels.scales import find_largest
from probe.numerics.kernels.tiles import INNER, SIZE, WIDTH, fetch_ahead, load, place, store, tile_at
from probe.numerics.machine_code import kernel

#: Elements for which the next ones are fetched.
_STRIP = 32
#: Quotients are clipped here: far beyond all codes.
_FAR = 1024.0
#: Adding and subtracting these rounds a number below 2^21 to multiples of 2^-30, and to integers, ties to even.
_TO_BILLIONTHS, _TO_INTEGERS = 1.5 * 2.0**22, 1.5 * 2.0**52


@kernel
def _nearest(x, inverse, away):  # type: ignore[no-untyped-def]
    """x / scale rounded half to even or, with `away`, half away from zero; x and the scale have at most 24 bits.

    The product is off by at most 2^-44. Among the codes the exact quotient is a tie or at least 2^-26 away from one, so
    rounding to multiples of 2^-30 makes ties exact and no others.
    """
    quotient = x * inverse
    quotient = _FAR if quotient > _FAR else quotient
    quotient = -_FAR if quotient < -_FAR else quotient
    exact = (quotient + _TO_BILLIONTHS) - _TO_BILLIONTHS
    if away:
        return np.trunc(exact + (0.5 if exact > 0 else -0.5)) + 0.0  # no -0
    return (exact + _TO_INTEGERS) - _TO_INTEGERS


@kernel
def _rounded(x, scale, rounding, noise):  # type: ignore[no-untyped-def]
    """x / scale rounded by any rounding; `rounding` is None for half_even, `noise` is None or of this element.

    A float64 x may come so close to a tie that the quotient becomes one: it is moved to its true side.
    """
    quotient = x / scale
    quotient = _FAR if quotient > _FAR else quotient
    quotient = -_FAR if quotient < -_FAR else quotient
    back = quotient * scale
    if back != x and np.rint(2 * quotient) == 2 * quotient and abs(quotient) < _FAR:
        quotient = np.nextafter(quotient, np.inf if x > back else -np.inf)
    if rounding is None:
        return np.rint(quotient)
    inward = np.trunc(quotient)
    away = inward + (-1.0 if quotient < 0 else 1.0)
    if noise is not None:
        return away if noise < abs(quotient - inward) else inward
    if rounding == HALF_AWAY:
        return away if abs(quotient - inward) >= 0.5 else inward
    if rounding == TOWARD_ZERO:
        return inward
    return np.floor(quotient)


def _result(like: Any, steps: float, scale: float, zero: float, limit: float, odd: bool) -> int:
    """What is written for steps from the zero point: bits of the value, or the code if `like` is of bytes."""
    raise NotImplementedError("for kernels")


@overload(_result)
def _choose_result(like: Any, steps: Any, scale: Any, zero: Any, limit: Any, odd: Any) -> Any:
    def value(like: Any, steps: Any, scale: Any, zero: Any, limit: Any, odd: Any) -> Any:
        return narrow(like, steps * scale, limit, odd)

    def code(like: Any, steps: Any, scale: Any, zero: Any, limit: Any, odd: Any) -> Any:
        return np.uint8(np.int64(steps + zero) if steps == steps else 0)

    return code if like.dtype == types.uint8 else value


@kernel
def _write_nearest(x, out, scale, zero, limits, odd, away):  # type: ignore[no-untyped-def]
    """The results of one block at one scale, rounded to nearest, of a dtype with at most 24 bits."""
    inverse, low, high = 1.0 / scale, limits[0] - zero, limits[1] - zero
    for begin in range(0, x.size, _STRIP):
        fetch_ahead(x, out, begin)
        here, there = x[begin : begin + _STRIP], out[begin : begin + _STRIP]
        for i in range(here.size):
            steps = _nearest(np.float64(as_float(here[i])), inverse, away)
            steps = low if steps < low else steps
            steps = high if steps > high else steps
            there[i] = _result(out, steps, scale, zero, limits[2], odd)


@kernel
def _find_steps(x, steps, tile, scales, zeros, limits, rounding, noise, drawn, inner):  # type: ignore[no-untyped-def]
    """The steps from the zero point to the code of every element; NaN stays NaN. `drawn` is room for noise."""
    near = None if noise is None else load(noise, drawn, tile, inner, 0)
    for line in range(tile.blocks if tile.apart == 1 else tile.size):
        length = tile.size if tile.apart == 1 else tile.blocks
        begin, end = line * length, (line + 1) * length
        here, there = x[begin:end], steps[begin:end]
        for i in range(here.size):
            b = line if tile.apart == 1 else i
            value = np.float64(as_float(here[i]))
            if near is None:
                found = _rounded(value, scales[b], rounding, None)
            else:
                found = _rounded(value, scales[b], rounding, as_float(near[begin + i]))
            low, high = limits[0] - zeros[b], limits[1] - zeros[b]
            found = low if found < low else found + 0.0  # no -0
            there[i] = high if found > high else found


@kernel
def _spread_scales(tile, scales, zero_points, sharing, here, zeros):  # type: ignore[no-untyped-def]
    """The scales and zero points of the blocks of a tile; block b of all has number (b // d) % m."""
    for b in range(tile.blocks):
        number = ((tile.block + b) // sharing[0]) % sharing[1]
        here[b], zeros[b] = np.float64(scales[number]), np.float64(zero_points[number])


@kernel
def quantize(  # type: ignore[no-untyped-def]
    x, out, machine, written, kind, layout, first, last, scales, zero_points, sharing, limits, rounding, noise
):
    """The values or codes of the units from `first` to before `last`; codes are 0 where the scale is NaN.

    written   an array of what results are before they are stored: as `machine` for values, bytes for codes
    sharing   (d, m): block b of the layout has scale (b // d) % m
    limits    the first code, the last, and the largest number of the dtype
    rounding  None for half_even
    noise     for stochastic rounding, as bits in the order of x; else None

    Where there are codes, x must have no NaN but with such a scale.
    """
    width, size, inner = layout[WIDTH], layout[SIZE], layout[INNER]
    length = width * size if inner > 1 or x.itemsize == 2 else 0
    wide, room = np.empty(length, machine.dtype), np.empty(length, written.dtype)
    drawn, steps = np.empty(width * size, np.int32), np.empty(width * size)
    factors, zeros = np.empty(width), np.empty(width)
    odd = x.itemsize == 2
    unit = first
    while unit < last:
        tile, units = tile_at(unit, last, layout)
        unit += units
        _spread_scales(tile, scales, zero_points, sharing, factors, zeros)
        here: Any = load(x, wide, tile, inner, kind)
        results: Any = place(out, room, tile, inner)
        if (rounding is None or rounding == HALF_AWAY) and tile.apart == 1 and x.itemsize < 8:
            away = rounding is not None
            for b in range(tile.blocks):
                begin, end = b * tile.size, (b + 1) * tile.size
                _write_nearest(here[begin:end], results[begin:end], factors[b], zeros[b], limits, odd, away)
        else:
            _find_steps(here, steps, tile, factors, zeros, limits, rounding, noise, drawn, inner)
            for i in range(here.size):
                b = i // tile.size if tile.apart == 1 else i % tile.blocks
                results[i] = _result(results, steps[i], factors[b], zeros[b], limits[2], odd)
        store(results, out, tile, inner, kind)


@kernel
def largest(x, amax, machine, kind, layout, first, last):  # type: ignore[no-untyped-def]
    """The bits of the largest magnitude of every block."""
    length = layout[WIDTH] * layout[SIZE]
    wide = np.empty(length, machine.dtype)
    unit = first
    while unit < last:
        tile, units = tile_at(unit, last, layout)
        unit += units
        find_largest(load(x, wide, tile, layout[INNER], kind), tile, amax[tile.block : tile.block + tile.blocks])
