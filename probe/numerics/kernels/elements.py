"""The elements of blocks: rounding by bit arithmetic as in `fast.py`, and codes."""

import numpy as np
import numpy.typing as npt

from probe.numerics.kernels.bits import Bits, as_bits, as_float
from probe.numerics.kernels.tiles import Tile, fetch_ahead
from probe.numerics.machine_code import kernel

#: The indices of the constants of a plan: integers, and bits of floats of the plan's machine.
SIZES, EXPONENTS, MAX_EXPONENT, MIN_EXPONENT, MAX, CEILING, MAGIC, STEP = range(8)
LOWEST, HIGHEST, CARRY, STILL_ZERO, LIMIT, UNSIGNED = range(8, 14)
CODE_SHIFT, CODE_OFFSET, CODE_STEPS, CODE_SIGN, BYTE_SHIFT, BYTE_OFFSET, CONSTANTS = range(14, 21)
#: The roundings by number; None is half_even.
HALF_AWAY, TOWARD_ZERO, FLOOR, STOCHASTIC = range(1, 5)

Constants = npt.NDArray[np.int64]
Noise = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]


@kernel
def nearest(whole, bits, inverse, sizes, exponents, least, most, ceiling, magic):  # type: ignore[no-untyped-def]
    """The bits of the element's magnitude for a value with these bits: nearest, ties to even, saturated."""
    quotient = as_bits(as_float(whole(bits & sizes)) * inverse)
    quotient = quotient if quotient < ceiling else ceiling
    power, y = whole(quotient & exponents), as_float(quotient)
    shift = as_float(power if power > least else least) * magic
    found = as_bits((y + shift) - shift)
    return found if found < most else most


@kernel
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


@kernel
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
            fetch_ahead(x, x, begin)
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


@kernel
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
