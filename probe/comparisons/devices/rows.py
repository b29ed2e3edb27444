"""A look at one tensor of two devices: some of its rows, in float64, for patterns that need the values themselves."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from probe.comparisons.devices.structure import Array, Structure, as_rows

#: Elements of each side that are looked at (16 MB each).
LOOKED_AT = 2**21


@dataclass(frozen=True, eq=False)
class Look:
    """One tensor: `a` and `b` are rows spread evenly over all that was recorded, those that are finite.

    `given` is what the layer was given on either side, `base` the same if the layer adds to it.
    """

    name: str
    unit: float
    structure: Structure
    a: Array
    b: Array
    given: tuple[Array, Array] | None
    residual: bool
    samples: int
    lost: tuple[Array, Array]  # values of a and b where just one of them is finite, some of them

    @cached_property
    def adds(self) -> tuple[Array, Array]:
        """What the layer adds on either side."""
        if self.residual and self.given is not None:
            return self.a - self.given[0], self.b - self.given[1]
        return self.a, self.b

    @cached_property
    def e(self) -> Array:
        """The difference in that."""
        return self.adds[1] - self.adds[0]


def look(
    name: str,
    a: Tensor,
    b: Tensor,
    given: tuple[Tensor, Tensor] | None,
    *,
    residual: bool,
    unit: float,
    structure: Structure,
) -> Look:
    """Whole samples if they fit, else as many tokens of each as do."""
    tensors = [as_rows(x) for x in (a, b, *(given or ()))]
    picked = spread(len(tensors[0]), tensors[0].shape[1])
    parts = [one[torch.from_numpy(picked)].double().numpy() for one in tensors]
    finite = np.logical_and.reduce([np.isfinite(part).all(1) for part in parts])
    x, y, *base = (part[finite] for part in parts)
    pair = (base[0], base[1]) if base else None
    return Look(name, unit, structure, x, y, pair, residual, a.shape[0], _lost(tensors[0], tensors[1]))


def spread(rows: int, width: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """Indices of rows, evenly spaced, as many as may be looked at."""
    count = min(rows, max(1, LOOKED_AT // max(width, 1)))
    return np.unique(np.linspace(0, rows - 1, count).round().astype(np.int64))


def _lost(a: Tensor, b: Tensor) -> tuple[Array, Array]:
    found: list[tuple[Array, Array]] = []
    step = max(1, LOOKED_AT // max(a.shape[1], 1))
    for start in range(0, len(a), step):
        x, y = (one[start : start + step].double().numpy() for one in (a, b))
        odd = np.isfinite(x) != np.isfinite(y)
        if odd.any():
            found.append((x[odd], y[odd]))
        if sum(len(one) for one, _ in found) > 2**16:
            break
    if not found:
        return np.zeros(0), np.zeros(0)
    return np.concatenate([x for x, _ in found]), np.concatenate([y for _, y in found])
