"""The fast twin of `Buckets.count_tensor`: one pass of a numba loop over the bits of the values themselves.

A float32 is put into its bucket of float64 without being widened: its exponent, moved by the difference of the two
biases, and the first bits of its mantissa are those of the float64. Its subnormals have another exponent as float64.
"""

import numpy as np
import numpy.typing as npt

from probe.numerics.machine_code import kernel

_Whole = npt.NDArray[np.int64]


@kernel
def count_narrow(bits: npt.NDArray[np.int32], mantissa_bits: int, first: int, counts: _Whole) -> int:
    """Count the magnitudes of float32 values, given as bits, in buckets of float64; returns how many are beyond them.

    `counts` is [tables, size]: with two tables, negative values are counted in the second one.
    """
    tables, size = counts.shape
    shift, moved = 23 - mantissa_bits, (1023 - 127) << mantissa_bits
    beyond = 0
    for i in range(bits.size):
        raw = int(bits[i])
        magnitude = raw & 0x7FFFFFFF
        if magnitude >= 0x00800000:
            bucket = (magnitude >> shift) + moved - first
        elif magnitude == 0:
            bucket = -1
        else:
            bucket = _subnormal(magnitude, mantissa_bits) - first
        if bucket >= size:
            beyond += 1
        else:
            counts[tables - 1 if raw < 0 and magnitude else 0, max(bucket, 0)] += 1
    return beyond


@kernel
def _subnormal(magnitude: int, mantissa_bits: int) -> int:
    """The shifted float64 bits of magnitude * 2^-149, which is not 0."""
    exponent = 1023 - 149
    while magnitude >> 52 == 0:
        magnitude <<= 1
        exponent -= 1
    return ((exponent + 52) << mantissa_bits) + ((magnitude - (1 << 52)) >> (52 - mantissa_bits))


@kernel
def count_wide(bits: _Whole, mantissa_bits: int, first: int, counts: _Whole) -> int:
    """As `count_narrow`, of float64 values."""
    tables, size = counts.shape
    shift, beyond = 52 - mantissa_bits, 0
    for i in range(bits.size):
        magnitude = bits[i] & 0x7FFFFFFFFFFFFFFF
        bucket = int(magnitude >> shift) - first
        if bucket >= size:
            beyond += 1
        else:
            counts[tables - 1 if bits[i] < 0 and magnitude else 0, max(bucket, 0)] += 1
    return beyond
