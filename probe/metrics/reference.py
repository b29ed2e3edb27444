"""The readable twin: the tally of a chunk in a few float64 operations of torch."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probe.metrics.tally import Magnitudes, Spread, Tally
from probe.numerics.moments import Moments

#: Elements converted to float64 at a time: one MB per temporary, five of which exist at once.
CHUNK = 2**17


def measure(output: Tensor, reference: Tensor, magnitudes: Magnitudes | None) -> Tally:
    """The tally of two flat tensors of one size; |output - reference| is added to `magnitudes`."""
    tally = Tally()
    for start in range(0, output.numel(), CHUNK):
        found, sizes = _measure_chunk(*(double_copy(x[start : start + CHUNK]) for x in (output, reference)))
        tally = tally.then(found)
        if magnitudes is not None:
            magnitudes.take(sizes.numpy())
    return tally


def double_copy(x: Tensor) -> Tensor:
    """A copy on the CPU that may be written to; float64 holds every float dtype exactly."""
    return x.to("cpu", torch.float64, copy=True)


def _measure_chunk(output: Tensor, reference: Tensor) -> tuple[Tally, Tensor]:
    """The tally of one chunk of float64 and the magnitudes of its differences; overwrites the chunk."""
    seen = output.numel()
    moved = int(np.count_nonzero(output.numpy().view(np.int64) != reference.numpy().view(np.int64)))
    ends = _ends(output), _ends(reference)
    nonfinite: dict[str, Any] = {}
    if not all(map(math.isfinite, ends[0] + ends[1])):
        good_output, good_reference = output.isfinite(), reference.isfinite()
        nonfinite = {
            "nan_output": int(output.isnan().sum()),
            "inf_output": int(output.isinf().sum()),
            "nan_reference": int(reference.isnan().sum()),
            "inf_reference": int(reference.isinf().sum()),
            "first_nonfinite": first_true(~good_output & good_reference),
        }
        good = good_output & good_reference
        output, reference = output[good], reference[good]
        if not output.numel():
            return Tally(seen=seen, moved=moved, **nonfinite), output
        ends = _ends(output), _ends(reference)
    difference = output - reference
    magnitude = difference.abs()
    values, largest = output.numpy(), max(map(abs, ends[0]))
    zeroed = int(np.count_nonzero((values == 0) & (reference.numpy() != 0)))
    at_largest = sum(int(np.count_nonzero(values == end)) for end in set(ends[0]) if abs(end) == largest)
    tally = Tally(
        seen=seen,
        count=output.numel(),
        sum_difference=float(magnitude.sum()),
        sum_reference=float(reference.abs().sum()),
        output=_centre(output, ends[0]),
        reference=_centre(reference, ends[1]),
        difference=_centre(difference, _ends(difference)),
        product=float(torch.dot(output, reference)),  # of the centred values
        moved=moved,
        zeroed=zeroed,
        at_largest=at_largest,
        **nonfinite,
    )
    return tally, magnitude


def _ends(x: Tensor) -> tuple[float, float]:
    """Minimum and maximum; an Inf is one of them, and with a NaN both are NaN."""
    minimum, maximum = torch.aminmax(x)
    return float(minimum), float(maximum)


def _centre(x: Tensor, ends: tuple[float, float]) -> Spread:
    """The spread of `x`; subtracts the mean from `x` in place."""
    minimum, maximum = ends
    mean = float(x.sum()) / x.numel()
    if math.isfinite(mean):  # rounding may put the mean of equal values beside them, as if they varied
        mean = min(max(mean, minimum), maximum)
    x -= mean
    return Spread(Moments(x.numel(), mean, float(torch.dot(x, x))), minimum, maximum)


def first_true(mask: Tensor) -> int | None:
    """The index of the first True."""
    return int(mask.numpy().argmax()) if mask.any() else None
