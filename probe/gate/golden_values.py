"""Golden values: a few numbers that stand for all the values of a layer's output, small enough for a baseline.

Two things are kept of a stream of elements, whatever batches it came in: its sketch, which sees a change of any element
at all, and its sample, some of the values themselves (numerics/sketches.py).

NaN and Inf make both useless, and are a verdict of their own before these are looked at.
"""

import math
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probe.gate.cases import Points
from probe.gate.tolerances import OF_PATHS
from probe.numerics.sketches import SAMPLE, SKETCH, Doubles, hashed, places_of, sketched
from probe.words import natural_key

#: What is kept of each group. In a run of the whole model nearly every element moves by noise, so there only the
#: distance says something.
KEPT = {"injected": SKETCH + SAMPLE, "propagated": SKETCH, "logits": SKETCH, "output": SKETCH, "outside": 16}
#: How many points of a layer a plot is given, beside those of the sample.
POINTS = 384
#: An element of the sample has moved if it differs by more than this part of the recipe's own rms error.
MOVED = 0.02


@dataclass(eq=False)
class Golden:
    """Gathers sketch and sample of a stream of `count` elements; for plots, elements of it and of the reference."""

    count: int
    seen: int = 0
    sketch: Doubles = field(default_factory=lambda: np.zeros(SKETCH))
    sample: Doubles = field(default_factory=lambda: np.zeros(SAMPLE))
    drawn: Doubles = field(default_factory=lambda: np.zeros((2, POINTS + SAMPLE)))
    shape: tuple[int, ...] = ()

    def update(self, output: Tensor, reference: Tensor) -> None:
        """Append a batch."""
        flat, other = (_flat(x) for x in (output, reference))
        end = self.seen + flat.size
        if end > self.count:
            raise ValueError(f"more than the {self.count} elements that were announced: {end}.")
        self.sketch += sketched(flat, self.seen)
        places = self._places()
        here = (places >= self.seen) & (places < end)
        self.drawn[:, here] = [values[places[here] - self.seen] for values in (other, flat)]
        self.sample[:] = self.drawn[1, POINTS:]
        self.seen, self.shape = end, tuple(output.shape[1:])

    def _places(self) -> npt.NDArray[np.int64]:
        """Of the points, then of the sample."""
        return np.concatenate([places_of(self.count, POINTS), places_of(self.count, SAMPLE)])

    def points(self) -> Points:
        """The elements that a plot is given: some more beside those of the sample."""
        places = self._places()
        there = places < self.seen
        with np.errstate(over="ignore"):
            reference, output = (array("f", values[there].astype(np.float32).tobytes()) for values in self.drawn)
        return Points(reference, output, places=array("q", places[there].tobytes()), shape=self.shape)

    def values(self) -> tuple[float, ...]:
        """Sketch, then sample, as float32: what a baseline stores."""
        return tuple(float(x) for x in np.concatenate([self.sketch, self.sample]).astype(np.float32))

    def coarse(self, buckets: int) -> tuple[float, ...]:
        """A sketch of fewer buckets, each the sum of as many of the fine ones; float32."""
        return tuple(float(x) for x in self.sketch.reshape(buckets, -1).sum(axis=1).astype(np.float32))


def with_golden(points: Points, golden: tuple[float, ...] | None) -> Points:
    """The points with the values that a baseline has of them: those of its sample, at the end of both."""
    sample = () if golden is None else golden[SKETCH:]
    if not sample or len(points.output) != POINTS + len(sample):
        return points
    return replace(points, golden=array("f", [*[math.nan] * POINTS, *sample]))


def _flat(x: Tensor) -> npt.NDArray[np.floating]:
    """The values in one row, in their own dtype where numpy has it, else in float32, which holds them exactly."""
    flat = x.detach().reshape(-1).cpu()
    return (flat if flat.dtype in (torch.float32, torch.float64) else flat.float()).numpy()


#: Buckets of a sketch for each half of a path.
HALF = 6


def sketch_of(rows: Tensor, half: Tensor) -> tuple[float, ...]:
    """A sketch of rows [token, element] with buckets of its own for each half of a path, as float32; see above."""
    flat = rows.detach().cpu().double().reshape(-1).numpy()
    bucket, sign = hashed(0, flat.size)
    bucket = bucket % HALF + HALF * np.repeat(half.numpy(), rows.shape[1])
    return tuple(float(x) for x in np.bincount(bucket, weights=sign * flat, minlength=2 * HALF).astype(np.float32))


def length_of(group: str) -> int:
    """How many golden values a group has; a path has a group for every layer, distance.layer_0."""
    return 2 * HALF if group.startswith(OF_PATHS) else KEPT[group]


def group_of(figure: str) -> str:
    """The group of golden values that a figure belongs to."""
    return figure if figure.startswith(OF_PATHS) else figure.partition(".")[0]


def flat(values: Mapping[str, tuple[float, ...]]) -> tuple[float, ...]:
    """The values of a case in one row, group by group in the order of KEPT, then layer by layer of a path."""
    return tuple(x for group in _ordered(values) for x in values[group][: length_of(group)])


def parted(row: tuple[float, ...], groups: Collection[str]) -> dict[str, tuple[float, ...]]:
    """The inverse of `flat` for a case that has these groups; a row of another length is a ValueError."""
    present = _ordered(groups)
    expected = sum(map(length_of, present))
    if len(row) != expected:
        raise ValueError(f"{len(row)} golden values, expected {expected} for {', '.join(present)}")
    rest = iter(row)
    return {group: tuple(islice(rest, length_of(group))) for group in present}


def _ordered(groups: Collection[str]) -> list[str]:
    of_paths = sorted((group for group in groups if group.startswith(OF_PATHS)), key=natural_key)
    return [*(group for group in KEPT if group in groups), *of_paths]


@dataclass(frozen=True)
class Gap:
    """How far values are from their golden ones.

    distance   rms of the difference of all elements, estimated from the sketches, over the recipe's own rms error
    moved      share of the sample that differs by more than MOVED of the recipe's own rms error
    """

    distance: float
    moved: float


def gap(values: tuple[float, ...], golden: tuple[float, ...], *, count: int, rmse: float) -> Gap:
    """Values against the golden ones of the same group, which may have no sample; `rmse` is the recipe's own error."""
    new, old = (np.array(x, dtype=np.float32).astype(np.float64) for x in (values[: len(golden)], golden))
    scale = max(rmse, 1e-30)
    distance = math.sqrt(float(np.sum((new[:SKETCH] - old[:SKETCH]) ** 2)) / count) / scale
    sample = np.abs(new[SKETCH:] - old[SKETCH:])
    return Gap(distance, float(np.mean(sample > MOVED * scale)) if sample.size else 0.0)
