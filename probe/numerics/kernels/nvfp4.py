"""nvfp4 blocks, as `reference.nvfp4_blocks`: quotients in float64, and one rounding to the dtype of the tensor."""

from typing import Any

import numpy as np

from probe.numerics.kernels import elements as known
from probe.numerics.kernels.bits import as_bits, as_float, narrow
from probe.numerics.kernels.elements import encode, find_elements, nearest
from probe.numerics.kernels.scales import find_largest
from probe.numerics.kernels.tiles import INNER, SIZE, WIDTH, Tile, load, place, store, tile_at
from probe.numerics.machine_code import kernel

#: The code of a scale that is NaN.
_NAN_CODE = 0x7F
#: The block size that a loop is unrolled for.
_USUAL = 16


@kernel
def _find_scales(  # type: ignore[no-untyped-def]
    amax, blocks, infinite, tensor_scale, largest, constants, smallest, scales, factors
):
    """The bits of the block scales and of what elements are multiplied by, in float64; NaN for NaN and Inf.

    scale = e4m3(amax / (largest element * tensor_scale)), nearest even, from `smallest` on
    factor = float32(scale * tensor_scale)
    """
    sizes, exponents = constants[known.SIZES], constants[known.EXPONENTS]
    least, most = constants[known.MIN_EXPONENT], constants[known.MAX]
    ceiling, magic = constants[known.CEILING], as_float(constants[known.MAGIC])
    for b in range(blocks):
        wanted = np.float64(as_float(amax[b])) / (largest * np.float64(tensor_scale))
        found = as_float(nearest(np.int64, as_bits(wanted), 1.0, sizes, exponents, least, most, ceiling, magic))
        found = found if found > smallest else smallest
        finite = amax[b] < infinite
        scales[b] = as_bits(found) if finite else sizes
        factors[b] = as_bits(np.float64(np.float32(found) * tensor_scale)) if finite else sizes


@kernel
def _divide(x, quotients, tile, factors):  # type: ignore[no-untyped-def]
    """The bits of x / factor, in float64."""
    for line in range(tile.blocks if tile.apart == 1 else tile.size):
        length = tile.size if tile.apart == 1 else tile.blocks
        here, there = x[line * length : (line + 1) * length], quotients[line * length : (line + 1) * length]
        if tile.apart == 1:
            factor = as_float(factors[line])
            for i in range(here.size):
                there[i] = as_bits(np.float64(as_float(here[i])) / factor)
        else:
            for i in range(here.size):
                there[i] = as_bits(np.float64(as_float(here[i])) / as_float(factors[i]))


@kernel
def _nearest_value(like, bits, factor, sizes, grid, limit, odd):  # type: ignore[no-untyped-def]
    """The bits of a value, rounded half to even; `like` is an array of them."""
    quotient = as_bits(abs(np.float64(as_float(bits))) / factor)
    value = as_float(nearest(np.int64, quotient, 1.0, sizes, *grid)) * factor
    return narrow(like, -value if bits < 0 else value, limit, odd)


@kernel
def _write_nearest(x, out, tile, constants, factors, limit, odd):  # type: ignore[no-untyped-def]
    """All of the next three steps at once, rounded half to even. The first loop is the second for the usual size."""
    sizes, magic = constants[known.SIZES], as_float(constants[known.MAGIC])
    least, most = constants[known.MIN_EXPONENT], constants[known.MAX]
    grid = constants[known.EXPONENTS], least, most, constants[known.CEILING], magic
    for line in range(tile.blocks if tile.apart == 1 else tile.size):
        length = tile.size if tile.apart == 1 else tile.blocks
        here, there = x[line * length : (line + 1) * length], out[line * length : (line + 1) * length]
        if tile.apart == 1 and length == _USUAL:
            factor = as_float(factors[line])
            for i in range(_USUAL):
                there[i] = _nearest_value(out, here[i], factor, sizes, grid, limit, odd)
        elif tile.apart == 1:
            factor = as_float(factors[line])
            for i in range(here.size):
                there[i] = _nearest_value(out, here[i], factor, sizes, grid, limit, odd)
        else:
            for i in range(here.size):
                there[i] = _nearest_value(out, here[i], as_float(factors[i]), sizes, grid, limit, odd)


@kernel
def _write_values(x, found, results, tile, factors, limit, odd):  # type: ignore[no-untyped-def]
    """Elements with the sign of `x` times factors."""
    for line in range(tile.blocks if tile.apart == 1 else tile.size):
        length = tile.size if tile.apart == 1 else tile.blocks
        begin, end = line * length, (line + 1) * length
        here, elements, there = x[begin:end], found[begin:end], results[begin:end]
        for i in range(here.size):
            value = as_float(elements[i]) * as_float(factors[line if tile.apart == 1 else i])
            there[i] = narrow(results, -value if here[i] < 0 else value, limit, odd)


@kernel
def quantize(  # type: ignore[no-untyped-def]
    x, out, codes, scale_codes, machine, kind, layout, first, last, numbers, constants, scale_constants, rounding, noise
):
    """Values to `out`, or codes where there is room for them. The arguments are as in `mx`, and

    numbers          tensor scale, the bits of Inf in the machine, largest element, smallest scale, limit of the dtype
    constants        of the elements in float64
    scale_constants  of e4m3 in float64
    """
    width, size, inner = layout[WIDTH], layout[SIZE], layout[INNER]
    tensor_scale, infinite, largest, smallest, limit = numbers
    amax, scales, factors = np.empty(width, machine.dtype), np.empty(width, np.int64), np.empty(width, np.int64)
    ones = np.full(width, as_bits(1.0))
    length = width * size
    wide, values, short = np.empty(length, machine.dtype), np.empty(length, machine.dtype), np.empty(length, np.uint8)
    quotients, elements = np.empty(length, np.int64), np.empty(length, np.int64)
    odd, coded = x.itemsize == 2, codes.size > 0
    unit = first
    while unit < last:
        tile, units = tile_at(unit, last, layout)
        unit += units
        here = load(x, wide, tile, inner, kind)
        y, found = quotients[: here.size], elements[: here.size]
        find_largest(here, tile, amax)
        _find_scales(amax, tile.blocks, infinite, tensor_scale, largest, scale_constants, smallest, scales, factors)
        if rounding is not None or coded:
            _divide(here, y, tile, factors)
            find_elements(y, found, tile, constants, ones, rounding, noise)
        if not coded:
            results = place(out, values, tile, inner)
            if rounding is None:
                _write_nearest(here, results, tile, constants, factors, limit, odd)
            else:
                _write_values(here, found, results, tile, factors, limit, odd)
            store(results, out, tile, inner, kind)
        else:
            written: Any = place(codes, short, tile, inner)
            encode(y, found, written, tile, constants, scales)
            store(written, codes, tile, inner, kind)
            stored = scale_codes[tile.block : tile.block + tile.blocks]
            encode(scales[: stored.size], scales, stored, Tile(0, 0, 1, 0, 0, 0, 0), scale_constants, scales)
            for b in range(stored.size):
                stored[b] = stored[b] if scales[b] < scale_constants[known.EXPONENTS] else np.uint8(_NAN_CODE)
