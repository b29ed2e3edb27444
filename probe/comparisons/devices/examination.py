"""The values of the first tensor beyond noise: signs of another capture, a hidden precision, or the pattern of a fault.

Whatever a verdict needs beyond figures is measured here; `verdict.py` reads the result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from probe.comparisons.devices.differences import Array, Places, as_rows, evenly, sample_rows
from probe.comparisons.devices.pairs import UNITS, MeasuredTensor, Pair, is_in_stream, is_layer
from probe.comparisons.devices.patterns import (
    NARROWER,
    SAMPLED,
    Pattern,
    SampledRows,
    narrower,
    off_grid,
    recognise,
    sample_tensor,
)
from probe.comparisons.selection import label_of
from probe.words import LOGITS

UNSTRUCTURED = "no bias, no common factor, no channel or sample that stands out: it looks like rounding"
#: Two rows are the same if they differ by less than this part of the difference between other rows.
SAME = 0.02
#: Tokens and words of the vocabulary that the head of a model is fitted to, at most.
_FITTED, _VOCABULARY = 4096, 256


@dataclass(frozen=True, eq=False)
class Suspect:
    """The first tensor that differs by more than noise, and the reason in words."""

    tensor: MeasuredTensor
    reason: str


@dataclass(frozen=True)
class HiddenPrecision:
    """A device that computes in a narrower dtype than it is recorded in."""

    sure: Literal["likely", "possible"]
    cause: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Examination:
    """What the values of a suspect show; a text is empty, and a number 0, where they do not show it."""

    suspect: Suspect
    is_first: bool
    """Whether it is the first tensor that both have."""
    renamed: str
    moved_samples: str
    each_sample_once: bool
    token_shift: int
    """How many places later the tokens of B are: -1, 0 or 1."""
    other_prompt: str
    precision: HiddenPrecision | None
    pattern: Pattern


def examine(pair: Pair, tensors: Sequence[MeasuredTensor], suspect: Suspect) -> Examination:
    """Read the values of the suspect, and of other tensors where they are needed; `tensors` are all that both have."""
    tensor = suspect.tensor
    a, b = pair.tensors(tensor.name)
    given = pair.tensors(tensor.given) if tensor.given else None
    if given is not None and len(as_rows(given[0])) != len(as_rows(a)):
        given = None
    residual = tensor.residual and given is not None
    rows = sample_tensor(a, b, given, residual=residual, unit=pair.unit, structure=tensor.structure)
    moved, each_once = sample_order(rows)
    return Examination(
        suspect=suspect,
        is_first=tensor is tensors[0],
        renamed=_renamed(pair, tensor.name),
        moved_samples=moved,
        each_sample_once=each_once,
        token_shift=token_shift(rows, rows.a, rows.b) or token_shift(rows, *rows.added),
        other_prompt=other_prompt(rows) if tensor is tensors[0] else "",
        precision=hidden_precision(pair, tensors, tensor),
        pattern=recognise(rows),
    )


def _renamed(pair: Pair, name: str) -> str:
    """A's name of B's tensor, in words, if it is another one; empty for a layer that was skipped on B."""
    stream = [one for one in pair.names if is_in_stream(one)]
    if name not in stream:
        return ""
    place, noise = stream.index(name), max(64 * pair.unit, 0.1 * pair.recipe_error)
    others = {one: sample_rows(pair.a.tensor(one)) for one in stream}
    found = same_elsewhere(name, sample_rows(pair.b.tensor(name)), others, noise=noise)
    if not found:
        return ""
    shift = stream.index(found) - place
    later = range(place + 1, len(stream))
    after = [(stream[i], stream[i + shift]) for i in later if is_layer(stream[i]) and 0 <= i + shift < len(stream)]
    for one, wanted in after:
        rows = sample_rows(pair.b.tensor(one))
        same = others[wanted].shape == rows.shape and distance(others[wanted], rows) < noise
        if same and same_elsewhere(one, rows, others, noise=noise) == wanted:
            return f"the layers are shifted: {label_of(name)} of B is {label_of(found)} of A, and so on"
    if found in stream[:place] and others[found].shape == others[name].shape:
        return ""  # B returns the layer's input: the layer was skipped
    return f"{label_of(name)} of B is {label_of(found)} of A: layers under other names"


def distance(a: Array, b: Array) -> float:
    """rms(b - a) / rms(a) over the elements that are finite on both; infinite if there are none."""
    good = np.isfinite(a) & np.isfinite(b)
    if not good.all():
        a, b = a[good], b[good]
    if not a.size:
        return np.inf
    size = float(np.square(a).mean())
    return (float(np.square(b - a).mean()) / size) ** 0.5 if size else float(bool(b.any()))


def squared_distances(x: Array, y: Array) -> Array:
    """[rows of x, rows of y]."""
    distances: Array = np.square(x).sum(1)[:, None] - 2 * x @ y.T + np.square(y).sum(1)[None]
    return distances


def same_elsewhere(name: str, b: Array, others: Mapping[str, Array], *, noise: float) -> str:
    """The name under which A (`others`) has the values that B calls `name`; empty if it has them nowhere else."""
    here = distance(others[name], b)
    found = {other: distance(a, b) for other, a in others.items() if other != name and a.shape == b.shape}
    nearest = min(found, key=found.__getitem__, default="")
    return nearest if nearest and found[nearest] < min(noise, SAME * here) else ""


def sample_order(rows: SampledRows) -> tuple[str, bool]:
    """Samples that are at other places on B, in words, and whether B has each sample of A once."""
    for x, y in rows.by_sample():
        samples = len(x)
        if samples < 2:
            continue
        own, places = np.square(y - x).sum(1), np.arange(samples)
        nearest = np.where(own <= SAME**2 * np.square(x).sum(1), places, _nearest(y, x))
        best = np.square(y - x[nearest]).sum(1)
        moved = (nearest != places) & (best < SAME**2 * own)
        # samples at their own place differ by far less than the moved ones
        rest_agrees = moved.all() or own[~moved].max() < SAME * own[moved].min(initial=np.inf)
        if moved.any() and (moved | (own <= best * 1.0001)).all() and rest_agrees:
            first = int(np.flatnonzero(moved)[0])
            words = f"{int(moved.sum())} of {samples} samples: sample {first} of B is sample {nearest[first]} of A"
            return words, len(set(nearest.tolist())) == samples
    return "", False


def _nearest(y: Array, x: Array) -> Places:
    """The row of x that is nearest to each row of y."""
    step = max(1, SAMPLED // len(x))
    parts = [squared_distances(y[start : start + step], x).argmin(1) for start in range(0, len(y), step)]
    return np.concatenate(parts)


def token_shift(rows: SampledRows, a: Array, b: Array) -> int:
    """How many places later the tokens of B come than A's: -1, 0 or 1."""
    if rows.grid[2] < 4:
        return 0
    x, y = (side.reshape(*rows.grid, -1) for side in (a, b))
    here = distance(x, y)
    for shift, moved in ((1, distance(x[:, :, :-1], y[:, :, 1:])), (-1, distance(x[:, :, 1:], y[:, :, :-1]))):
        if moved < SAME * here:
            return shift
    return 0


def other_prompt(rows: SampledRows) -> str:
    """Signs of another text, in words; empty if there are none.

    Either some tokens agree and the rest do not at all, or B's tokens are found at other places of A, or every channel
    has the spread that it has on A while the values are unrelated.
    """
    known = rows.a.any(1) | rows.b.any(1)
    a, b = rows.a[known], rows.b[known]
    if len(a) < 4:
        return ""
    size = np.sqrt(np.square(a).mean(1)) + 1e-300
    apart = np.sqrt(np.square(b - a).mean(1)) / size
    noise = 64 * rows.unit
    same, far = float((apart < noise).mean()), float((apart > 0.3).mean())
    if same > 0.005 and far > 0.1 and same + far > 0.9:
        return f"{far:.0%} of the tokens are unlike, {same:.0%} agree: another text"
    places = np.linspace(0, len(b) - 1, min(len(b), 256)).round().astype(int)
    places = places[apart[places] > 0.3]
    if len(places) >= 4:
        found = np.sqrt(np.maximum(squared_distances(b[places], a).min(1), 0) / a.shape[1]) / size.mean()
        elsewhere = float((found < max(noise, 1e-5)).mean())
        if elsewhere > 0.3:
            return f"{elsewhere:.0%} of B's unlike tokens are found at other places of A: another text"
    centred = [x - x.mean(0) for x in (a, b)]
    spreads = [np.sqrt(np.square(x).mean(0)) for x in centred]
    if min(float(x.sum()) for x in spreads) == 0:
        return ""
    powers = [np.square(x).sum() for x in centred]
    relation = float((centred[0] * centred[1]).sum() / np.sqrt(powers[0] * powers[1]))
    alike = float(np.corrcoef(np.concatenate([a.mean(0), spreads[0]]), np.concatenate([b.mean(0), spreads[1]]))[0, 1])
    scale = float(spreads[1].sum() / spreads[0].sum())
    if relation < 0.5 and alike > 0.9 and 0.7 < scale < 1.4 and far > 0.5:
        return (
            f"every channel is spread as on A (correlation {alike:.2f}) but the values are unrelated "
            f"(correlation {relation:+.2f}): another text"
        )
    return ""


def hidden_precision(pair: Pair, tensors: Sequence[MeasuredTensor], suspect: MeasuredTensor) -> HiddenPrecision | None:
    """Whether B has the noise of a narrower float in every layer from the first on, so that it must compute in it.

    A single half-precision layer at the very beginning looks the same at first. A device that is narrow everywhere
    makes new noise in every layer, and in the head too.
    """
    layers = [tensor for tensor in tensors if is_layer(tensor.name)]
    beginning = tensors[: tensors.index(layers[0]) + 1 if layers else 1]
    if suspect not in beginning or not suspect.structure.is_unstructured:
        return None
    own, added = suspect.difference.added, [layer.difference.added for layer in layers]
    for name, words in narrower(pair.unit):
        low, high = (bound * UNITS[name] for bound in NARROWER)
        if not low < own < high or not all(low < one < 2 * high for one in added):
            continue
        cause = f"computed in {words}, though recorded as {suspect.difference.dtype_b}"
        size = f"{suspect.difference.label} differs by {own:.2g} of its size"
        if added:
            size = f"every layer differs by {min(added):.2g} to {max(added):.2g} of what it adds, from the first on"
        evidence = (f"{size}: {words} causes that much", UNSTRUCTURED)
        on_grid = [off_grid(sample_rows(pair.b.tensor(layer.name)), name) < 0.05 for layer in layers]
        if len(on_grid) > 1 and on_grid[0] and not any(on_grid[1:]):
            return None
        if len(on_grid) > 1 and all(on_grid):
            return HiddenPrecision("likely", cause, (*evidence, f"all layers of B lie on the grid of {name}"))
        head = head_error(pair)
        if head is None:
            unknown = f"unknown: whether every layer or only the first computes in {words}"
            return HiddenPrecision("possible", cause, (*evidence, unknown))
        if head < low:
            return None
        return HiddenPrecision("likely", cause, (*evidence, f"the head adds new noise of {head:.2g} too"))
    return None


def head_error(pair: Pair) -> float | None:
    """The distance of B's logits from those of A's head on B's last hidden state; None if it cannot be computed.

    logits = W y: W is found from A by least squares over its tokens, and applied to B's y.
    """
    before = pair.given(LOGITS) if LOGITS in pair.names else None
    if before is None or pair.a.shape(before)[-1] >= 2048:
        return None
    for normed in (None, "rms", "spread") if before != "final_norm.output" else (None,):
        x, y = (_features(_fitted(side.tensor(before)), normed) for side in (pair.a, pair.b))
        out, other = (_fitted(side.tensor(LOGITS), _VOCABULARY) for side in (pair.a, pair.b))
        if len(x) != len(out) or len(x) < 1.25 * x.shape[1]:
            return None
        if not all(np.isfinite(part).all() for part in (x, y, out, other)):
            return None
        head = np.linalg.lstsq(x, out, rcond=None)[0]
        size = float(np.sqrt(np.square(out).mean()))
        if float(np.sqrt(np.square(x @ head - out).mean())) / size < 1e-5:
            return float(np.sqrt(np.square(y @ head - other).mean())) / size
    return None


def _fitted(tensor: Tensor, most: int | None = None) -> Array:
    """At most _FITTED rows and `most` columns, evenly spaced, in float64."""
    rows = as_rows(tensor)
    picked, columns = evenly(len(rows), _FITTED), evenly(rows.shape[1], most or rows.shape[1])
    return rows[torch.from_numpy(picked)[:, None], torch.from_numpy(columns)[None]].double().numpy()


def _features(x: Array, normed: str | None) -> Array:
    """Rows as a final norm leaves them, without its gain, and a column of ones for a bias."""
    if normed:
        centre = x.mean(1, keepdims=True) if normed == "spread" else 0.0
        x = x / np.sqrt(np.square(x - centre).mean(1, keepdims=True) + 1e-12)
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)
