"""The fast twin: the tally of a batch in one pass over memory, on as many threads as torch may use.

Counts, extremes and percentiles are those of the readable twin to the bit; sums differ by the order of additions.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import reduce

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probe.metrics import kernels as k, reference as readable
from probe.metrics.magnitudes import BUCKETS, Magnitudes
from probe.metrics.tally import Spread, Tally

#: Elements that are converted at a time, where they are neither float32 nor float64; less is nothing for a thread.
STRETCH = 2**18
#: Squares of float64 below this sum up well within its range; those of narrower dtypes always do.
LARGEST = 1e100

_Floats = npt.NDArray[np.floating]
_Doubles = npt.NDArray[np.float64]
_Whole = npt.NDArray[np.int64]


def measure(output: Tensor, reference: Tensor, magnitudes: Magnitudes | None) -> Tally:
    """The tally of two flat tensors of one size; the sizes of their differences are added to `magnitudes`."""
    count = output.numel()
    dtype = torch.float64 if torch.float64 in (output.dtype, reference.dtype) else torch.float32
    if not count or (dtype == torch.float64 and not (_is_moderate(output) and _is_moderate(reference))):
        return readable.measure(output, reference, magnitudes)
    folded = magnitudes is not None and not magnitudes.has_room_for(count)
    kept = magnitudes is not None and not folded

    def measure_part(start: int, stop: int) -> tuple[Tally, _Whole, _Doubles]:
        buckets, sizes = np.zeros(BUCKETS * folded, np.int64), np.empty((stop - start) * kept)
        tally = Tally()
        step = stop - start if output.dtype == reference.dtype == dtype else STRETCH
        for place in range(start, stop, step):
            o, r = (x[place : min(place + step, stop)].to("cpu", dtype).numpy() for x in (output, reference))
            tally = tally.then(_measure_stretch(o, r, buckets, sizes[tally.count :]))
        return tally, buckets, sizes[: tally.count]

    threads = max(1, min(torch.get_num_threads(), count // STRETCH))
    cuts = [count * i // threads for i in range(threads + 1)]
    if threads == 1:
        parts = [measure_part(0, count)]
    else:
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(measure_part, cuts, cuts[1:]))
    tally = reduce(Tally.then, (part for part, _, _ in parts))
    if magnitudes is None:
        return tally
    if folded and magnitudes.has_room_for(tally.count):
        return readable.measure(output, reference, magnitudes)  # so much is NaN that the rest can be kept
    for part, buckets, sizes in parts:
        if folded:
            magnitudes.take_counts(buckets, part.count)
        else:
            magnitudes.take(sizes)
    return tally


def _is_moderate(x: Tensor) -> bool:
    """Whether it is narrower than float64, or all is finite and below LARGEST."""
    return x.dtype != torch.float64 or all(abs(float(end)) < LARGEST for end in torch.aminmax(x))


def _measure_stretch(output: _Floats, reference: _Floats, buckets: _Whole, sizes: _Doubles) -> Tally:
    bits = np.int32 if output.dtype == np.float32 else np.int64
    infinity = int(np.array(np.inf, output.dtype).view(bits))
    sums, counts, keys = np.zeros(k.SUMS), np.zeros(k.COUNTS, np.int64), np.full(k.KEYS, -1, np.int64)
    keys[[k.LOW_O, k.LOW_R]] = np.iinfo(np.int64).max
    keys[[k.HIGH_O, k.HIGH_R]] = np.iinfo(np.int64).min
    counts[k.FIRST_NONFINITE] = -1
    k.measure(output, reference, output.view(bits), reference.view(bits), infinity, sums, counts, keys, buckets, sizes)
    found = [int(x) for x in counts]
    if not found[k.COUNT]:
        output_spread = reference_spread = difference_spread = Spread()
    else:
        ends = [_from_key(int(key), output.dtype) for key in keys[: k.LARGEST_D]]
        largest = float(keys[k.LARGEST_D].view(np.float64))
        output_spread = Spread(float(sums[k.MEAN_O]), float(sums[k.SQUARES_O]), ends[k.LOW_O], ends[k.HIGH_O])
        reference_spread = Spread(float(sums[k.MEAN_R]), float(sums[k.SQUARES_R]), ends[k.LOW_R], ends[k.HIGH_R])
        difference_spread = Spread(float(sums[k.MEAN_D]), float(sums[k.SQUARES_D]), -largest, largest)
    return Tally(
        seen=output.size,
        count=found[k.COUNT],
        output=output_spread,
        reference=reference_spread,
        difference=difference_spread,
        product=float(sums[k.PRODUCT]),
        sum_difference=float(sums[k.SUM_D]),
        sum_reference=float(sums[k.SUM_R]),
        zeroed=found[k.ZEROED],
        at_largest=found[k.AT_LARGEST],
        moved=found[k.MOVED],
        nan_output=found[k.NAN_O],
        inf_output=found[k.INF_O],
        nan_reference=found[k.NAN_R],
        inf_reference=found[k.INF_R],
        first_nonfinite=None if found[k.FIRST_NONFINITE] < 0 else found[k.FIRST_NONFINITE],
    )


def _from_key(key: int, dtype: np.dtype[np.floating]) -> float:
    """The float whose key it is."""
    top = 2 ** (8 * dtype.itemsize - 1) - 1
    bits = key if key >= 0 else key ^ top
    return float(np.array(bits, f"i{dtype.itemsize}").view(dtype))
