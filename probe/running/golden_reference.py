"""The golden reference: sketches of the float run, stored once for a model, that show whether the reference moved.

A fault on both sides (in the float model, its configuration, the capture, the text) is invisible in every comparison
of a quantized copy with its reference. So the reference itself is compared with what it was when the baselines were
made. Of each tensor of n elements a row of SKETCH + 2 numbers is kept:

    the rms of its finite elements; the spread, its largest distance under harmless changes when it was stored;
    s_b / sqrt(n) of its sketch (numerics/sketches.py)

The distance of two tensors is estimated by the root of sum_b (s_b - t_b)^2 / n, as a part of the golden rms.

    tolerance = max(MOVED, min(MULTIPLE * spread, MOST * MOVED))

NaN and infinities count as large numbers in the sketch, so that a new one moves it and old ones do not.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probe.numerics.sketches import SKETCH, sketched
from probe.running.reference import Reference
from probe.words import LOGITS, flow_key

#: A tensor has moved if its distance from the golden one is above this part of the rms. Threads, batch size, oneDNN,
#: instruction sets and one-ulp jitter moved those of the embedded models by up to 4.5e-7 (benchmarks/reference_noise).
MOVED = 2e-5
#: Deeper models have more noise, of which the spread tells; one that was edited by hand does not open the gate.
MULTIPLE, MOST = 8.0, 50.0
#: Places in a row.
RMS, SPREAD, BUCKETS = 0, 1, 2
#: What NaN, +Inf and -Inf count as in a sketch, in units of the rms.
NOT_FINITE = (1e3, 2e3, -2e3)


@dataclass(frozen=True)
class MovedTensor:
    """A tensor of the reference that is not the golden one."""

    label: str
    kind: str  # input, output, injected; empty for that of the whole model
    distance: float  # as a part of the golden rms
    tolerance: float

    def __str__(self) -> str:
        """From layer_1 on: its input differs by 0.032 of its golden rms (tolerance 2e-05)."""
        what = (
            f"its {_KINDS[self.kind]} differs" if self.kind else "they differ" if self.label == LOGITS else "it differs"
        )
        return f"from {self.label} on: {what} by {self.distance:.2g} of its golden rms (tolerance {self.tolerance:.2g})"


_KINDS = {"input": "input", "output": "output", "injected": "output on that input"}


def reference_rows(reference: Reference) -> dict[str, Tensor]:
    """By the names of the reference's tensors, in the order of the data's flow, the rows that stand for them."""
    order = {label: place for place, label in enumerate((*reference.layers, *reference.outside))}
    kinds = {kind: place for place, kind in enumerate(_KINDS)}

    def place(name: str) -> tuple[int, int, int]:
        label, _, kind = name.rpartition(".")
        return flow_key(label), order[label], kinds[kind]

    named: dict[str, Sequence[Tensor]] = {
        name: reference.tensors[name] for name in sorted(reference.tensors, key=place)
    }
    return {name: _row(tensors) for name, tensors in {**named, reference.kind.label: reference.outputs}.items()}


def moved_tensors(now: Mapping[str, Tensor], golden: Mapping[str, Tensor]) -> list[MovedTensor]:
    """Those of the rows that both sides have which moved, in the order of the data's flow."""
    found = []
    for name, row in now.items():
        if name not in golden:
            continue
        distance = row_distance(row, golden[name])
        tolerance = max(MOVED, min(MULTIPLE * float(golden[name][SPREAD]), MOST * MOVED))
        if not distance <= tolerance:
            label, _, kind = name.rpartition(".")
            found.append(MovedTensor(label or name, kind if label else "", distance, tolerance))
    return found


def row_distance(row: Tensor, golden: Tensor) -> float:
    """The distance of a tensor from the golden one, as a part of the golden rms; of another shape, infinite."""
    new, old = row.double(), golden.double()
    if new.shape != old.shape:
        return math.inf
    return float((new[BUCKETS:] - old[BUCKETS:]).square().sum().sqrt() / old[RMS].clamp(min=1e-30))


def with_spread(rows: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The rows with their spread: `others` are rows of the same run under harmless changes."""
    found = {name: row.clone() for name, row in rows.items()}
    for name, row in found.items():
        row[SPREAD] = max((row_distance(other[name], row) for other in others), default=0.0)
    return found


def without_rows(labels: Collection[str], golden: Mapping[str, Tensor]) -> list[str]:
    """Those of the labels of which the golden reference has nothing."""
    known = {name.rpartition(".")[0] or name for name in golden}
    return [label for label in labels if label not in known]


def _row(tensors: Sequence[Tensor]) -> Tensor:
    squares, finite, count = 0.0, 0, 0
    for tensor in tensors:
        values = tensor.double()
        good = values.isfinite()
        squares += float(torch.where(good, values, 0.0).square().sum())
        finite, count = finite + int(good.sum()), count + values.numel()
    rms = (squares / max(finite, 1)) ** 0.5
    sketch, start = np.zeros(SKETCH), 0
    nan, up, down = (factor * rms for factor in NOT_FINITE)
    for tensor in tensors:
        plain = torch.nan_to_num(tensor.double(), nan=nan, posinf=up, neginf=down).reshape(-1).numpy()
        sketch += sketched(plain, start)
        start += plain.size
    return torch.from_numpy(np.concatenate([[rms, 0.0], sketch / max(count, 1) ** 0.5])).float()
