"""MX blocks in one pass over memory: the arithmetic of `fast.py` as loops over tiles that stay in the cache.

A tile is some blocks. Its largest magnitudes are found first, then its scales, then its elements: loops without a chain
from block to block. Arguments that may be None choose what is compiled: only what is asked for is.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.extending import overload

from probe.numerics.kernels.bits import Bits, as_bits, as_float, widen
from probe.numerics.kernels.tiles import INNER, SIZE, WIDTH, Tile, load, place, store, tile_at

#: The indices of the constants of a plan: integers, and bits of floats of the plan's machine.
SIZES, EXPONENTS, MAX_EXPONENT, MIN_EXPONENT, MAX, CEILING, MAGIC, STEP = range(8)
LOWEST, HIGHEST, CARRY, STILL_ZERO, LIMIT, UNSIGNED = range(8, 14)
CODE_SHIFT, CODE_OFFSET, CODE_STEPS, CODE_SIGN, BYTE_SHIFT, BYTE_OFFSET, CONSTANTS = range(14, 21)
#: The roundings by number; None is half_even.
HALF_AWAY, TOWARD_ZERO, FLOOR, STOCHASTIC = range(1, 5)
_NAN_BYTE = 255
#: The block size that a loop is unrolled for.
_USUAL = 32

Constants = npt.NDArray[np.int64]
Noise = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def _find_scales(amax: Bits, blocks: int, constants: Constants, scales: Bits, inverses: Bits) -> None:
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


@numba.njit(cache=True, nogil=True)
def nearest(whole, bits, inverse, sizes, exponents, least, most, ceiling, magic):  # type: ignore[no-untyped-def]
    """The bits of the element's magnitude for a value with these bits: nearest, ties to even, saturated."""
    quotient = as_bits(as_float(whole(bits & sizes)) * inverse)
    quotient = quotient if quotient < ceiling else ceiling
    power, y = whole(quotient & exponents), as_float(quotient)
    shift = as_float(power if power > least else least) * magic
    found = as_bits((y + shift) - shift)
    return found if found < most else most


@numba.njit(cache=True, nogil=True)
def rounded(bits, inverse, constants, rounding, noise):  # type: ignore[no-untyped-def]
    """As `nearest`, by the other roundings; `noise` is None or of this element."""
    whole = type(bits)
    size = whole(bits & whole(constants[SIZES]))
    ceiling, least, most = as_float(whole(constants[CEILING])), whole(constants[MIN_EXPONENT]), whole(constants[MAX])
    y = as_float(size) * inverse
    y = y if y < ceiling else ceiling
    power = whole(as_bits(y) & whole(constants[EXPONENTS]))
    power = power if power > least else least
    shift = as_float(power) * as_float(whole(constants[MAGIC]))
    near = (y + shift) - shift
    step = as_float(power) * as_float(whole(constants[STEP]))
    inward = near - step if near > y else near
    if noise is not None:
        found = inward + step if noise < (y - inward) / step else inward
    elif rounding == HALF_AWAY:
        found = near + step if (y - near) + (y - near) == step else near
    elif rounding == FLOOR:
        outward = (bits < 0) & (size > 0) & ((inward < y) | (y == 0))
        found = inward + step if outward else inward
    else:
        found = inward
    magnitude = as_bits(found)
    return magnitude if magnitude < most else most


@numba.njit(cache=True, nogil=True)
def _value(whole, bits, magnitude, scale, limit, sizes, spoilt):  # type: ignore[no-untyped-def]
    """The bits of element times scale with the sign of the value; NaN if `spoilt` has all bits but the sign, not 0.

    Only a scale above that of floor can carry a value beyond the limit of its dtype.
    """
    value = as_bits(as_float(magnitude) * scale)
    value = value if value < limit else limit
    return whole(whole(value | spoilt) | whole(bits & ~sizes))


@numba.njit(cache=True, nogil=True)
def _without_sign(whole, bits, magnitude, unsigned, sizes):  # type: ignore[no-untyped-def]
    """The bits of a value; without its sign where an integer grid, which has no -0, makes it zero."""
    return bits if magnitude > unsigned else whole(bits & sizes)


@numba.njit(cache=True, nogil=True)
def _write_nearest(x: Bits, out: Bits, tile: Tile, constants: Constants, scales: Bits, inverses: Bits) -> None:
    """Values, rounded half to even. The first loop does what the second does, for what is usual."""
    whole = x.dtype.type
    sizes, exponents, limit = whole(constants[SIZES]), whole(constants[EXPONENTS]), whole(constants[LIMIT])
    least, most, unsigned = whole(constants[MIN_EXPONENT]), whole(constants[MAX]), whole(constants[UNSIGNED])
    ceiling, magic = whole(constants[CEILING]), as_float(whole(constants[MAGIC]))
    if tile.apart == 1 and tile.size == _USUAL and unsigned < 0:
        for b in range(tile.blocks):
            begin, end = b * _USUAL, (b + 1) * _USUAL
            block, result, scale, inverse = x[begin:end], out[begin:end], as_float(scales[b]), as_float(inverses[b])
            spoilt = sizes if scales[b] >= exponents else whole(0)
            for i in range(_USUAL):
                found = nearest(whole, block[i], inverse, sizes, exponents, least, most, ceiling, magic)
                result[i] = _value(whole, block[i], found, scale, limit, sizes, spoilt)
        return
    if tile.apart == 1:
        for b in range(tile.blocks):
            begin, end = b * tile.size, (b + 1) * tile.size
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


@numba.njit(cache=True, nogil=True)
def find_elements(x, magnitudes, tile, constants, inverses, rounding, noise):  # type: ignore[no-untyped-def]
    """The bits of the magnitudes of all elements, by any rounding."""
    whole = x.dtype.type
    sizes, exponents = whole(constants[SIZES]), whole(constants[EXPONENTS])
    least, most = whole(constants[MIN_EXPONENT]), whole(constants[MAX])
    ceiling, magic = whole(constants[CEILING]), as_float(whole(constants[MAGIC]))
    if tile.apart == 1:
        for b in range(tile.blocks):
            begin, end, inverse = b * tile.size, (b + 1) * tile.size, as_float(inverses[b])
            block, found = x[begin:end], magnitudes[begin:end]
            if rounding is None:
                for i in range(block.size):
                    found[i] = nearest(whole, block[i], inverse, sizes, exponents, least, most, ceiling, magic)
            elif noise is None:
                for i in range(block.size):
                    found[i] = rounded(block[i], inverse, constants, rounding, None)
            else:
                start = tile.noise + b * tile.noise_between
                drawn = noise[start : start + tile.size]
                for i in range(block.size):
                    found[i] = rounded(block[i], inverse, constants, rounding, drawn[i])
        return
    for i in range(tile.size):
        begin, end = i * tile.apart, (i + 1) * tile.apart
        row, found = x[begin:end], magnitudes[begin:end]
        for b in range(row.size):
            inverse = as_float(inverses[b])
            if rounding is None:
                found[b] = nearest(whole, row[b], inverse, sizes, exponents, least, most, ceiling, magic)
            elif noise is None:
                found[b] = rounded(row[b], inverse, constants, rounding, None)
            else:
                drawn = noise[tile.noise + b * tile.noise_between + i]
                found[b] = rounded(row[b], inverse, constants, rounding, drawn)


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def encode(x: Bits, magnitudes: Bits, codes: Bytes, tile: Tile, constants: Constants, scales: Bits) -> None:
    """Of a float element its top bits, below the normal numbers and of an integer its count of steps; 0 for NaN."""
    whole = x.dtype.type
    steps, shift = as_float(whole(constants[CODE_STEPS])), whole(constants[CODE_SHIFT])
    offset, sign = whole(constants[CODE_OFFSET]), whole(constants[CODE_SIGN])
    least, exponents = whole(constants[MIN_EXPONENT]), whole(constants[EXPONENTS])
    for i in range(codes.size):
        magnitude, negative = magnitudes[i], x[i] < 0
        count = whole(as_float(magnitude) * steps)
        code = whole(whole(magnitude >> shift) - offset) if (magnitude >= least) & (sign != 0) else count
        flipped = whole(code | sign) if sign != 0 else whole(-code)
        codes[i] = np.uint8(flipped if negative else code)
    between, apart = (tile.size, 1) if tile.apart == 1 else (1, tile.apart)
    for b in range(tile.blocks):
        if scales[b] >= exponents:
            for i in range(tile.size):
                codes[b * between + i * apart] = 0


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def _scale_tile(  # type: ignore[no-untyped-def]
    x, tile, size, constants, least_squares, rounding, noise, amax, scales, inverses, errors
):
    """The scales of a tile and their inverses, from its largest magnitudes."""
    _find_scales(amax, tile.blocks, constants, scales, inverses)
    if least_squares is not None:
        _choose_scales(x, tile, size, constants, rounding, noise, amax, scales, inverses, errors)


@numba.njit(cache=True, nogil=True)
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
        here = load(x, wide, tile, inner, kind)
        largest_of(x, here, tile, inner, kind, short_amax, amax)
        _scale_tile(here, tile, size, constants, least_squares, rounding, noise, amax, scales, inverses, errors)
        results = place(out, values, tile, inner)
        if rounding is None:
            _write_nearest(here, results, tile, constants, scales, inverses)
        else:
            found = elements[: here.size]
            find_elements(here, found, tile, constants, inverses, rounding, noise)
            _write_values(here, found, results, tile, constants, scales)
        store(results, out, tile, inner, kind)


@numba.njit(cache=True, nogil=True)
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
        _scale_tile(here, tile, size, constants, least_squares, rounding, noise, amax, scales, inverses, errors)
        found = elements[: here.size]
        results: Any = place(codes, short, tile, inner)
        find_elements(here, found, tile, constants, inverses, rounding, noise)
        encode(here, found, results, tile, constants, scales)
        store(results, codes, tile, inner, kind)
        for b in range(tile.blocks):
            exponent = (scales[b] >> constants[BYTE_SHIFT]) - constants[BYTE_OFFSET]
            scale_bytes[tile.block + b] = np.uint8(exponent if scales[b] < constants[EXPONENTS] else _NAN_BYTE)
