"""Whether a device computes in less than it is recorded in: noise of a narrower float in every layer, from the first.

A half-precision layer at the very beginning looks the same at first. What follows tells: a device that computes so
everywhere makes new noise in every layer, and in the head too.
"""

from typing import Literal

import numpy as np

from probe.comparisons.devices.noise import HIDDEN, LESSER, UNITS, is_layer
from probe.comparisons.devices.pairs import Pair, Seen, some_rows
from probe.comparisons.devices.patterns import is_unstructured, off_grid
from probe.comparisons.devices.rows import Look
from probe.comparisons.devices.structure import Array
from probe.words import LOGITS

Found = tuple[Literal["likely", "possible"], tuple[str, ...]]


def lesser_precision(pair: Pair, seen: list[Seen], one: Seen, look: Look) -> Found | None:
    """How sure, and the cause and the evidence in words; None if it is not so."""
    layers = [other for other in seen if is_layer(other.name)]
    if one not in seen[: seen.index(layers[0]) + 1 if layers else 1] or not is_unstructured(look):
        return None
    for name, words in HIDDEN.items():
        unit = UNITS[name]
        low, high = LESSER[0] * unit, 2 * LESSER[1] * unit
        follow = [other.difference.added for other in layers]
        if unit <= 2 * pair.unit or not low < one.difference.added < LESSER[1] * unit:
            continue
        if not all(low < added < high for added in follow):
            continue
        said = (
            f"computed in {words}, though recorded as {one.difference.dtype_b}",
            f"every layer differs by {min(follow, default=one.difference.added):.2g} to "
            f"{max(follow, default=one.difference.added):.2g} of what it adds, from the first: {words} makes that",
            "no bias, no factor and no single place: it looks like rounding",
        )
        on_grid = [off_grid(some_rows(pair.b.tensor(other.name)), name) < 0.05 for other in layers]
        if len(on_grid) > 1 and on_grid[0] and not any(on_grid[1:]):
            return None
        if len(on_grid) > 1 and all(on_grid):
            return "likely", (*said, f"all layers of B lie on the grid of {name}")
        head = head_error(pair)
        if head is None:
            return "possible", (*said, "whether it is so in every layer or only in the first cannot be told")
        if head < low:
            return None
        return "likely", (*said, f"the head adds new noise of {head:.2g} too")
    return None


def head_error(pair: Pair) -> float | None:
    """How far B's logits are from what A's head makes of B's last tensor before it; None if that cannot be told.

    logits = W y: W is found from A by least squares over its tokens, and applied to B's y.
    """
    if LOGITS not in pair.names:
        return None
    before = pair.given(LOGITS)
    if before is None:
        return None
    for normed in (None, "rms", "spread") if before != "final_norm.output" else (None,):
        x, y = (_features(some_rows(side.tensor(before), count=4096), normed) for side in (pair.a, pair.b))
        out, other = (some_rows(side.tensor(LOGITS), count=4096) for side in (pair.a, pair.b))
        if len(x) != len(out) or len(x) < 1.25 * x.shape[1] or x.shape[1] > 2048:
            return None
        if not all(np.isfinite(part).all() for part in (x, y, out, other)):
            return None
        head = np.linalg.lstsq(x, out, rcond=None)[0]
        size = float(np.sqrt(np.square(out).mean()))
        own = float(np.sqrt(np.square(x @ head - out).mean())) / size
        if own < 1e-5:
            return float(np.sqrt(np.square(y @ head - other).mean())) / size
    return None


def _features(x: Array, normed: str | None) -> Array:
    """Rows as a final norm leaves them, but for its gain: and a one, for a bias."""
    if normed:
        centre = x.mean(1, keepdims=True) if normed == "spread" else 0.0
        x = x / np.sqrt(np.square(x - centre).mean(1, keepdims=True) + 1e-12)
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)
