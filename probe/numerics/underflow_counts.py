"""The fast twin of the counts of `analyze_underflow`: one pass of a numba loop, a scale for every row."""

import numpy as np
import numpy.typing as npt

from probe.numerics.machine_code import kernel

_Floats = npt.NDArray[np.floating]

#: The counts, in the order of `underflow.COUNTS`.
(ZEROS, OVERFLOW, SUBNORMAL, UNDERFLOW, FLUSHED, NONFINITE, COUNTS) = range(7)


@kernel
def count(rows: _Floats, scales: _Floats, ends: _Floats, counts: npt.NDArray[np.int64]) -> None:
    """Add the counts of rows [row, element] with one scale each; `ends` are max, min_normal, min_subnormal and half.

    Zeros are counted by the element, because the quotient may have underflowed.
    """
    highest, normal, smallest, half = ends[0], ends[1], ends[2], ends[3]
    number, zero = scales.dtype.type, scales.dtype.type(0)
    for row in range(rows.shape[0]):
        scale, values = scales[row], rows[row]
        good = zeros = high = coarse = low = lost = 0
        for i in range(values.size):
            magnitude = abs(number(values[i]))
            y = magnitude / scale
            is_finite = (y - y) == zero
            some = is_finite & (magnitude > zero)
            good += is_finite
            zeros += is_finite & (magnitude == zero)
            high += some & (y > highest)
            coarse += some & (y < normal)
            low += some & (y < smallest)
            lost += some & (y <= half)
        counts[ZEROS] += zeros
        counts[OVERFLOW] += high
        counts[SUBNORMAL] += coarse
        counts[UNDERFLOW] += low
        counts[FLUSHED] += lost
        counts[NONFINITE] += values.size - good
