"""MX blocks in one pass over memory: the arithmetic of `fast.py` as loops over tiles that stay in the cache.

A tile is some blocks. Its largest magnitudes are found first, then its scales, then its elements: loops without a chain
from block to block. Arguments that may be None choose what is compiled: only what is asked for is.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from probe.numerics.kernels.bits import BFLOAT16, Bits, as_bits, as_float, widen
from probe.numerics.kernels.elements import (
    BYTE_OFFSET,
    BYTE_SHIFT,
    CEILING,
    EXPONENTS,
    LIMIT,
    MAGIC,
    MAX,
    MIN_EXPONENT,
    SIZES,
    UNSIGNED,
    Constants,
    encode,
    find_elements,
    nearest,
)
from probe.numerics.kernels.scales import find_largest, find_scales, largest_of, scale_tile
from probe.numerics.kernels.tiles import INNER, SIZE, WIDTH, Tile, fetch_ahead, load, place, store, tile_at
from probe.numerics.machine_code import kernel

_NAN_BYTE = 255
#: The block size that a loop is unrolled for.
_USUAL = 32


@kernel
def _value(whole, bits, magnitude, scale, limit, sizes, spoilt):  # type: ignore[no-untyped-def]
    """The bits of element times scale with the sign of the value; NaN if `spoilt` has all bits but the sign, not 0.

    Only a scale above that of floor can carry a value beyond the limit of its dtype.
    """
    value = as_bits(as_float(magnitude) * scale)
    value = value if value < limit else limit
    return whole(whole(value | spoilt) | whole(bits & ~sizes))


@kernel
def _without_sign(whole, bits, magnitude, unsigned, sizes):  # type: ignore[no-untyped-def]
    """The bits of a value; without its sign where an integer grid, which has no -0, makes it zero."""
    return bits if magnitude > unsigned else whole(bits & sizes)


@kernel
def _write_nearest(x: Bits, out: Bits, tile: Tile, constants: Constants, scales: Bits, inverses: Bits) -> None:
    """Values, rounded half to even. The first loop does what the second does, for what is usual."""
    whole = x.dtype.type
    sizes, exponents, limit = whole(constants[SIZES]), whole(constants[EXPONENTS]), whole(constants[LIMIT])
    least, most, unsigned = whole(constants[MIN_EXPONENT]), whole(constants[MAX]), whole(constants[UNSIGNED])
    ceiling, magic = whole(constants[CEILING]), as_float(whole(constants[MAGIC]))
    if tile.apart == 1 and tile.size == _USUAL and unsigned < 0:
        for b in range(tile.blocks):
            begin, end = b * _USUAL, (b + 1) * _USUAL
            fetch_ahead(x, out, begin)
            block, result, scale, inverse = x[begin:end], out[begin:end], as_float(scales[b]), as_float(inverses[b])
            spoilt = sizes if scales[b] >= exponents else whole(0)
            for i in range(_USUAL):
                found = nearest(whole, block[i], inverse, sizes, exponents, least, most, ceiling, magic)
                result[i] = _value(whole, block[i], found, scale, limit, sizes, spoilt)
        return
    if tile.apart == 1:
        for b in range(tile.blocks):
            begin, end = b * tile.size, (b + 1) * tile.size
            fetch_ahead(x, out, begin)
            block, result, scale, inverse = x[begin:end], out[begin:end], as_float(scales[b]), as_float(inverses[b])
            spoilt = sizes if scales[b] >= exponents else whole(0)
            for i in range(block.size):
                found = nearest(whole, block[i], inverse, sizes, exponents, least, most, ceiling, magic)
                bits = _without_sign(whole, block[i], found, unsigned, sizes)
                result[i] = _value(whole, bits, found, scale, limit, sizes, spoilt)
        return
    for i in range(tile.size):
        row, result = x[i * tile.apart : (i + 1) * tile.apart], out[i * tile.apart : (i + 1) * tile.apart]
        for b in range(row.size):
            found = nearest(whole, row[b], as_float(inverses[b]), sizes, exponents, least, most, ceiling, magic)
            bits = _without_sign(whole, row[b], found, unsigned, sizes)
            spoilt = sizes if scales[b] >= exponents else whole(0)
            result[b] = _value(whole, bits, found, as_float(scales[b]), limit, sizes, spoilt)


def write_short(x: Bits, out: Bits, tile: Tile, inner: int, kind: int, constants: Constants, room: Any) -> bool:
    """Values of consecutive 16-bit numbers, rounded half to even, without a copy in float32; False for other tensors.

    `room` is for the numbers of blocks: largest magnitudes in 16 bits, in 32 bits, scales and their inverses.
    """
    raise NotImplementedError("for kernels")


@overload(write_short)
def _write_short(x: Any, out: Any, tile: Any, inner: Any, kind: Any, constants: Any, room: Any) -> Any:
    def wide(x: Any, out: Any, tile: Any, inner: Any, kind: Any, constants: Any, room: Any) -> Any:
        return False

    def short(x: Any, out: Any, tile: Any, inner: Any, kind: Any, constants: Any, room: Any) -> Any:
        if inner > 1 or constants[UNSIGNED] >= 0:
            return False
        short_amax, amax, scales, inverses = room
        end = tile.start + tile.blocks * tile.size
        here, there = x[tile.start : end], out[tile.start : end]
        find_largest(here, tile, short_amax)
        widen(short_amax[: tile.blocks], amax[: tile.blocks], kind)
        find_scales(amax, tile.blocks, constants, scales, inverses)
        _write_halves(here, there, tile, kind, constants, scales, inverses)
        return True

    return short if x.dtype == types.int16 else wide


@kernel
def _write_halves(x, out, tile, kind, constants, scales, inverses):  # type: ignore[no-untyped-def]
    """As `_write_nearest`, from and to the bits of a 16-bit dtype, shifted to those of float32 and back.

    The exponents of float16 are off by 112 then. Nothing is lost by cutting values off: both dtypes have more bits than
    any element, and where the step of the grid is below their smallest number, the value was on the grid already.
    """
    whole = np.int32
    exponents, limit, sign = whole(constants[EXPONENTS]), whole(constants[LIMIT]), whole(-0x8000)
    up, down = np.float32(2.0**112), np.float32(2.0**-112)
    grid = (
        whole(constants[SIZES]),
        exponents,
        whole(constants[MIN_EXPONENT]),
        whole(constants[MAX]),
        whole(constants[CEILING]),
        as_float(whole(constants[MAGIC])),
    )
    for b in range(tile.blocks):
        begin, end = b * tile.size, (b + 1) * tile.size
        fetch_ahead(x, out, begin)
        block, result, scale, inverse = x[begin:end], out[begin:end], as_float(scales[b]), as_float(inverses[b])
        spoilt = whole(0x7FFF) if scales[b] >= exponents else whole(0)
        if kind == BFLOAT16:
            for i in range(block.size):
                bits = whole(whole(block[i]) << whole(16))
                value = as_bits(as_float(nearest(whole, bits, inverse, *grid)) * scale)
                value = whole((value if value < limit else limit) >> whole(16))
                result[i] = np.int16(whole(value | spoilt) | whole(whole(block[i]) & sign))
        else:
            for i in range(block.size):
                bits = as_bits(as_float(whole((whole(block[i]) & whole(0x7FFF)) << whole(13))) * up)
                value = as_bits(as_float(nearest(whole, bits, inverse, *grid)) * scale)
                value = whole(as_bits(as_float(value if value < limit else limit) * down) >> whole(13))
                result[i] = np.int16(whole(value | spoilt) | whole(whole(block[i]) & sign))


@kernel
def _write_values(x: Bits, magnitudes: Bits, out: Bits, tile: Tile, constants: Constants, scales: Bits) -> None:
    """Elements times scales."""
    whole = x.dtype.type
    sizes, exponents, limit = whole(constants[SIZES]), whole(constants[EXPONENTS]), whole(constants[LIMIT])
    unsigned = whole(constants[UNSIGNED])
    if tile.apart == 1:
        for b in range(tile.blocks):
            begin, end, scale = b * tile.size, (b + 1) * tile.size, as_float(scales[b])
            block, found, result = x[begin:end], magnitudes[begin:end], out[begin:end]
            spoilt = sizes if scales[b] >= exponents else whole(0)
            for i in range(block.size):
                bits = _without_sign(whole, block[i], found[i], unsigned, sizes)
                result[i] = _value(whole, bits, found[i], scale, limit, sizes, spoilt)
        return
    for i in range(tile.size):
        begin, end = i * tile.apart, (i + 1) * tile.apart
        row, found, result = x[begin:end], magnitudes[begin:end], out[begin:end]
        for b in range(row.size):
            bits = _without_sign(whole, row[b], found[b], unsigned, sizes)
            spoilt = sizes if scales[b] >= exponents else whole(0)
            result[b] = _value(whole, bits, found[b], as_float(scales[b]), limit, sizes, spoilt)


@kernel
def write_values(  # type: ignore[no-untyped-def]
    x, out, machine, kind, layout, first, last, constants, least_squares, rounding, noise
):
    """The values of the units from `first` to before `last`.

    x, out         flat bits: int32 or int64, or int16 of the 16-bit dtype `kind`
    machine        an array of the integers to compute with: int32, or int64 for float64
    least_squares  not None for the rule mse
    rounding       None for half_even
    noise          for stochastic rounding, in rows of one block each; else None
    """
    width, size, inner = layout[WIDTH], layout[SIZE], layout[INNER]
    amax, scales = np.empty(width, machine.dtype), np.empty(width, machine.dtype)
    inverses, short_amax = np.empty(width, machine.dtype), np.empty(width, x.dtype)
    length = width * size if inner > 1 or x.itemsize == 2 else 0
    wide, values = np.empty(length, machine.dtype), np.empty(length, machine.dtype)
    elements = np.empty(0 if rounding is None else width * size, machine.dtype)
    errors = np.empty(0 if least_squares is None else size + 1)
    unit = first
    while unit < last:
        tile, units = tile_at(unit, last, layout)
        unit += units
        if rounding is None and least_squares is None:
            done = write_short(x, out, tile, inner, kind, constants, (short_amax, amax, scales, inverses))
            if done:
                continue
        here = load(x, wide, tile, inner, kind)
        largest_of(x, here, tile, inner, kind, short_amax, amax)
        scale_tile(here, tile, size, constants, least_squares, rounding, noise, amax, scales, inverses, errors)
        results = place(out, values, tile, inner)
        if rounding is None:
            _write_nearest(here, results, tile, constants, scales, inverses)
        else:
            found = elements[: here.size]
            find_elements(here, found, tile, constants, inverses, rounding, noise)
            _write_values(here, found, results, tile, constants, scales)
        store(results, out, tile, inner, kind)


@kernel
def write_codes(  # type: ignore[no-untyped-def]
    x, codes, scale_bytes, machine, kind, layout, first, last, constants, least_squares, rounding, noise
):
    """As `write_values`: the codes of the elements, and the bytes of the scales."""
    width, size, inner = layout[WIDTH], layout[SIZE], layout[INNER]
    amax, scales = np.empty(width, machine.dtype), np.empty(width, machine.dtype)
    inverses, short_amax = np.empty(width, machine.dtype), np.empty(width, x.dtype)
    length = width * size if inner > 1 or x.itemsize == 2 else 0
    wide, short = np.empty(length, machine.dtype), np.empty(length, np.uint8)
    elements = np.empty(width * size, machine.dtype)
    errors = np.empty(0 if least_squares is None else size + 1)
    unit = first
    while unit < last:
        tile, units = tile_at(unit, last, layout)
        unit += units
        here = load(x, wide, tile, inner, kind)
        largest_of(x, here, tile, inner, kind, short_amax, amax)
        scale_tile(here, tile, size, constants, least_squares, rounding, noise, amax, scales, inverses, errors)
        found = elements[: here.size]
        results: Any = place(codes, short, tile, inner)
        find_elements(here, found, tile, constants, inverses, rounding, noise)
        encode(here, found, results, tile, constants, scales)
        store(results, codes, tile, inner, kind)
        for b in range(tile.blocks):
            exponent = (scales[b] >> constants[BYTE_SHIFT]) - constants[BYTE_OFFSET]
            scale_bytes[tile.block + b] = np.uint8(exponent if scales[b] < constants[EXPONENTS] else _NAN_BYTE)
