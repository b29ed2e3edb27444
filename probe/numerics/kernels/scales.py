"""The scales of MX blocks, from their largest magnitudes and a rule."""

from typing import Any

import numpy as np
from numba.extending import overload

from probe.numerics.kernels.bits import Bits, as_bits, as_float, kernel, widen
from probe.numerics.kernels.elements import (
    CARRY,
    CEILING,
    EXPONENTS,
    HIGHEST,
    LOWEST,
    MAGIC,
    MAX,
    MAX_EXPONENT,
    MIN_EXPONENT,
    SIZES,
    STILL_ZERO,
    Constants,
    Doubles,
    nearest,
    rounded,
)
from probe.numerics.kernels.tiles import Tile


@kernel
def find_largest(x: Bits, tile: Tile, amax: Bits) -> None:
    """The bits of the largest magnitude of each block; those of Inf and NaN are the largest of all."""
    whole = x.dtype.type
    sizes = whole(~(whole(1) << whole(8 * x.itemsize - 1)))
    if tile.apart == 1:
        for b in range(tile.blocks):
            block = x[b * tile.size : (b + 1) * tile.size]
            found = whole(0)
            for i in range(block.size):
                size = whole(block[i] & sizes)
                found = size if size > found else found
            amax[b] = found
        return
    amax[: tile.blocks] = whole(0)
    for i in range(tile.size):
        row = x[i * tile.apart : i * tile.apart + tile.blocks]
        for b in range(row.size):
            size = whole(row[b] & sizes)
            amax[b] = size if size > amax[b] else amax[b]


def largest_of(x: Bits, here: Bits, tile: Tile, inner: int, kind: int, room: Bits, amax: Bits) -> None:
    """`find_largest` of the tile `here` of `x`: from the 16 bits if it has no more, twice as many at a time."""
    raise NotImplementedError("for kernels")


@overload(largest_of)
def _largest_of(x: Any, here: Any, tile: Any, inner: Any, kind: Any, room: Any, amax: Any) -> Any:
    def wide(x: Any, here: Any, tile: Any, inner: Any, kind: Any, room: Any, amax: Any) -> Any:
        find_largest(here, tile, amax)

    def short(x: Any, here: Any, tile: Any, inner: Any, kind: Any, room: Any, amax: Any) -> Any:
        if inner == 1:
            find_largest(x[tile.start : tile.start + here.size], tile, room)
            widen(room[: tile.blocks], amax[: tile.blocks], kind)
        else:
            find_largest(here, tile, amax)

    return wide if x.dtype == here.dtype else short


@kernel
def find_scales(amax: Bits, blocks: int, constants: Constants, scales: Bits, inverses: Bits) -> None:
    """The bits of the scales by the rule of the plan, of floor for mse; NaN for a block with a NaN or Inf."""
    whole = amax.dtype.type
    sizes, exponents, carry = whole(constants[SIZES]), whole(constants[EXPONENTS]), whole(constants[CARRY])
    top, lowest, highest = whole(constants[MAX_EXPONENT]), whole(constants[LOWEST]), whole(constants[HIGHEST])
    still_zero = whole(constants[STILL_ZERO])
    for b in range(blocks):
        size = amax[b] if amax[b] > still_zero else whole(0)
        found = whole(whole(whole(size + carry) & exponents) - top)
        found = found if found > lowest else lowest
        found = found if found < highest else highest
        scale = as_float(found)
        scales[b] = found if amax[b] < exponents else sizes
        inverses[b] = as_bits(type(scale)(1) / scale)  # exact


@kernel
def _choose_scales(  # type: ignore[no-untyped-def]
    x, tile, size, constants, rounding, noise, amax, scales, inverses, errors
):
    """Rule mse: of the floor scale, twice that and half of it, the first with the least squared error of the block.

    The errors are those of the reference, in float64, summed as `tree_sum` sums rows of `size`. Half of the scale is
    not tried where the error of the largest value alone is too much.
    """
    whole = x.dtype.type
    sizes, exponents = whole(constants[SIZES]), whole(constants[EXPONENTS])
    least_exponent, most = whole(constants[MIN_EXPONENT]), whole(constants[MAX])
    ceiling, magic = whole(constants[CEILING]), as_float(whole(constants[MAGIC]))
    lowest, highest = as_float(whole(constants[LOWEST])), as_float(whole(constants[HIGHEST]))
    room = np.empty(0 if tile.apart == 1 else tile.size, x.dtype)
    for b in range(tile.blocks):
        if scales[b] >= exponents:
            continue
        block = x[b * tile.size : (b + 1) * tile.size] if tile.apart == 1 else room[: tile.size]
        if tile.apart > 1:
            for i in range(tile.size):
                block[i] = x[b + i * tile.apart]
        first = as_float(scales[b])
        unit = 1.0 / np.float64(first)
        best, least = first, np.inf
        for factor in (1.0, 2.0, 0.5):
            scale = first * type(first)(factor)
            scale = lowest if scale < lowest else (highest if scale > highest else scale)
            inverse, ratio = type(first)(1) / scale, np.float64(scale) * unit
            if factor == 0.5:
                excess = np.float64(as_float(amax[b])) * unit - np.float64(as_float(most)) * ratio
                if excess > 0 and excess * excess >= least:
                    continue
            for i in range(block.size):
                if rounding is None:
                    found = nearest(whole, block[i], inverse, sizes, exponents, least_exponent, most, ceiling, magic)
                elif noise is None:
                    found = rounded(block[i], inverse, constants, rounding, None)
                else:
                    drawn = noise[tile.noise + b * tile.noise_between + i]
                    found = rounded(block[i], inverse, constants, rounding, drawn)
                off = np.float64(as_float(whole(block[i] & sizes))) * unit - np.float64(as_float(found)) * ratio
                errors[i] = off * off
            if block.size < size:
                errors[block.size : size] = 0.0
            total = _tree_sum(errors, size)
            if total < least:
                best, least = scale, total
        scales[b], inverses[b] = as_bits(best), as_bits(type(best)(1) / best)


@kernel
def _tree_sum(values: Doubles, size: int) -> float:
    """As `tree_sum` of blocks.py, in place; there is room for one zero behind the values."""
    while size > 1:
        if size == 8:
            left = (values[0] + values[4]) + (values[2] + values[6])
            return float(left + ((values[1] + values[5]) + (values[3] + values[7])))
        if size % 2:
            values[size] = 0.0
        size = (size + 1) // 2
        low, high = values[:size], values[size : 2 * size]
        for i in range(low.size):
            low[i] += high[i]
    return float(values[0])


@kernel
def scale_tile(  # type: ignore[no-untyped-def]
    x, tile, size, constants, least_squares, rounding, noise, amax, scales, inverses, errors
):
    """The scales of a tile and their inverses, from its largest magnitudes."""
    find_scales(amax, tile.blocks, constants, scales, inverses)
    if least_squares is not None:
        _choose_scales(x, tile, size, constants, rounding, noise, amax, scales, inverses, errors)
