"""The sketch and the sample of a stream of elements: a few numbers that stand for all of them.

sketch   s_b = sum of sign(i) x_i over the elements of bucket b; buckets and signs are fixed by a hash of i.
         It is linear in x. For two streams x and y, sum_b (s_b - t_b)^2 is an unbiased estimate of
         sum_i (x_i - y_i)^2 (relative standard deviation sqrt(2 / SKETCH), 18 %).
sample   x_i at SAMPLE places spread over the stream.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from probe.numerics.native import numba_twin

SKETCH = 64
SAMPLE = 40
#: Elements that are hashed at once.
CHUNK = 2**17

#: From a hash to its bucket.
_SHIFT = 64 - SKETCH.bit_length() + 1

Doubles = npt.NDArray[np.float64]


def sketched(values: npt.NDArray[np.floating], start: int = 0) -> Doubles:
    """The sketch of a stretch of a stream that begins at its element `start`; stretches add up."""
    twin = numba_twin("probe.numerics.sketch_sums", "sketches")
    sketch = np.zeros(SKETCH)
    for first in range(0, values.size, CHUNK):
        part = np.ascontiguousarray(values[first : first + CHUNK])
        if twin is None:
            bucket, sign = hashed(start + first, part.size)
            sketch += np.bincount(bucket, weights=sign * part, minlength=SKETCH)
        else:
            found = np.zeros(SKETCH)
            twin.add(part, start + first, _SHIFT, found)
            sketch += found
    return sketch


@lru_cache(maxsize=64)
def places_of(count: int, wanted: int) -> npt.NDArray[np.int64]:
    """`wanted` places in a stream of `count`: one in each of as many equal stretches, somewhere by its hash."""
    number = np.arange(wanted, dtype=np.uint64)
    fraction = (_mix(number) >> np.uint64(11)).astype(np.float64) / 2.0**53
    places = (np.arange(wanted) + fraction) * count / wanted
    return np.minimum(places.astype(np.int64), count - 1)


@lru_cache(maxsize=64)
def hashed(start: int, size: int) -> tuple[npt.NDArray[np.int64], Doubles]:
    """The bucket and the sign of each of `size` elements from `start` on."""
    mixed = _mix(np.arange(start, start + size, dtype=np.uint64))
    bucket = (mixed >> np.uint64(_SHIFT)).astype(np.int64)
    sign = 1.0 - 2.0 * (mixed & np.uint64(1)).astype(np.float64)
    return bucket, sign


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit of the result depends on every bit of x."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
