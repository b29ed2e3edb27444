"""The fast twin of `sketches.sketched`: buckets and signs are hashed as the elements are added, in their order.

Apart from `sketches` because loading it loads numba.
"""

import numpy as np
import numpy.typing as npt

from probe.numerics.machine_code import kernel

_A, _B, _C = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ONE, _27, _30, _31 = np.uint64(1), np.uint64(27), np.uint64(30), np.uint64(31)


@kernel
def add(values: npt.NDArray[np.floating], start: int, shift: int, sketch: npt.NDArray[np.float64]) -> None:
    """Add values, the first of which is element `start` of its stream; the bucket is the top of the hash."""
    down = np.uint64(shift)
    for i in range(values.size):
        x = np.uint64(start + i) + _A
        x = (x ^ (x >> _30)) * _B
        x = (x ^ (x >> _27)) * _C
        x = x ^ (x >> _31)
        value = np.float64(values[i])
        sketch[x >> down] += (1.0 - 2.0 * np.float64(x & _ONE)) * value
