"""The output of a layer that changed, beside what is stored of it: how much of the change a hypothesis explains."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from probe.numerics.sketches import SAMPLE, SKETCH, Doubles, hashed, places_of, sketched


@dataclass(frozen=True, eq=False)
class ChangedOutput:
    """The output of a layer over all batches, beside its input, the float layer's output, and what is stored of it."""

    output: Tensor
    given: Tensor
    expected: Tensor
    stored: tuple[float, ...]  # sketch, then perhaps sample
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # by module inside: outputs of the same shape

    @classmethod
    def of(
        cls,
        outputs: Sequence[Tensor],
        given: Sequence[Tensor],
        expected: Sequence[Tensor],
        stored: tuple[float, ...],
        parts: Mapping[str, Sequence[Tensor]],
    ) -> "ChangedOutput | None":
        """None where the outputs cannot be compared with what is stored. `parts` are outputs of modules inside."""
        batches = [torch.cat([x.double() for x in parts]) for parts in (outputs, expected, given)]
        fitting = batches[0].shape == batches[1].shape and len(stored) in (SKETCH, SKETCH + SAMPLE)
        if not fitting or not all(bool(x.isfinite().all()) for x in batches):
            return None
        base = batches[2] if batches[2].shape == batches[0].shape else torch.zeros_like(batches[0])
        shapes = [x.shape for x in outputs]
        inside = {name: torch.cat([x.double() for x in own]) for name, own in parts.items() if _shapes(own) == shapes}
        return cls(batches[0], base, batches[1], stored, inside)

    @cached_property
    def golden(self) -> Doubles:
        """The stored sketch."""
        return np.array(self.stored[:SKETCH], dtype=np.float64)

    @cached_property
    def sample(self) -> tuple[Doubles, Doubles, Doubles]:
        """Stored, present and input values at the places of the sample; empty where none was stored."""
        stored = np.array(self.stored[SKETCH:], dtype=np.float64)
        places = places_of(self.output.numel(), SAMPLE)[: stored.size]
        return stored, flat(self.output)[places], flat(self.given)[places]

    @cached_property
    def sketch(self) -> Doubles:
        """Of the output."""
        return sketched(flat(self.output))

    @property
    def change(self) -> float:
        """|sketch(output) - stored|^2: an estimate of the squared change of all elements together."""
        return squares(self.sketch - self.golden)

    @property
    def relative(self) -> float:
        """The rms of the change over that of what the layer adds to its input."""
        added = float((self.expected - self.given).square().sum()) or 1.0
        return float(np.sqrt(self.change / added))

    def left(self, sketch: Doubles) -> float:
        """The part of the change that is left by a hypothesis with this sketch."""
        return squares(sketch - self.golden) / self.change

    def fitted(self, base: Doubles, along: Doubles) -> tuple[float, float]:
        """The number c for which base + c * along is nearest to what is stored, and the part that it leaves.

        Of what c = 0 leaves too: an output that exploded is not a multiple of the stored one because 0 is nearer to it.
        """
        size, without = squares(along), self.left(base)
        c = float((self.golden - base) @ along) / size if size > 0 else 0.0
        left = self.left(base + c * along)
        return c, max(left, left / without) if without > 0 else left

    def by_index(self, values: Tensor, axis: int) -> Doubles:
        """[index, bucket]: the sketch of each channel, token or sequence alone."""
        size = values.shape[axis]
        shape = [size if other == axis else 1 for other in range(values.dim())]
        index = torch.arange(size).reshape(shape).expand(values.shape).reshape(-1).numpy()
        bucket, sign = hashed(0, values.numel())
        sums = np.bincount(index * SKETCH + bucket, weights=sign * flat(values), minlength=size * SKETCH)
        return sums.astype(np.float64).reshape(size, SKETCH)


def left_by(found: ChangedOutput, outputs: Sequence[Tensor | None]) -> float:
    """The part of the change that is left by outputs which the layer made in another way; infinite if by none."""
    sketch = _sketch_of(found, outputs)
    return math.inf if sketch is None else found.left(sketch)


def alikeness(found: ChangedOutput, outputs: Sequence[Tensor | None]) -> float:
    """cos^2 of the way from the output to such outputs, and to the stored one; 0 if they are none."""
    sketch = _sketch_of(found, outputs)
    if sketch is None:
        return 0.0
    there, wanted = sketch - found.sketch, found.golden - found.sketch
    size = squares(there) * squares(wanted)
    return float(there @ wanted) ** 2 / size if size > 0 else 0.0


def _sketch_of(found: ChangedOutput, outputs: Sequence[Tensor | None]) -> Doubles | None:
    real = [x.double() for x in outputs if x is not None]
    made = torch.cat(real) if real else torch.zeros(0)
    if made.shape != found.output.shape or not bool(made.isfinite().all()):
        return None
    return sketched(flat(made))


def _shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    return [x.shape for x in tensors]


def flat(x: Tensor) -> Doubles:
    """The values in a row."""
    return x.detach().double().reshape(-1).cpu().numpy()


def squares(x: Doubles) -> float:
    """The sum of the squares."""
    return float(np.square(x).sum())
