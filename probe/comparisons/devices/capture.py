"""Whether two recordings are of the same thing: other samples, other prompts, or layers under other names."""

from collections.abc import Mapping

import numpy as np

from probe.comparisons.devices.rows import Look
from probe.comparisons.devices.structure import Array

#: Two rows are the same if they differ by less than this part of what others do.
SAME = 0.02


def distance(a: Array, b: Array) -> float:
    """rms(b - a) / rms(a)."""
    size = float(np.square(a).mean()) if a.size else 0.0
    return (float(np.square(b - a).mean()) / size) ** 0.5 if size else float(bool(b.any()))


def renamed(name: str, b: Array, others: Mapping[str, Array], *, noise: float) -> str:
    """The name under which A has what B calls `name`; empty if it has it nowhere else."""
    here = distance(others[name], b)
    found = {other: distance(a, b) for other, a in others.items() if other != name and a.shape == b.shape}
    if not found:
        return ""
    nearest = min(found, key=found.__getitem__)
    return nearest if found[nearest] < min(noise, SAME * here) else ""


def sample_order(seen: Look) -> tuple[str, bool]:
    """Samples at other places on B, in words, and whether each of A's is there once."""
    for a, b in ((seen.a, seen.b), seen.adds):
        if seen.samples < 2 or len(a) % seen.samples or not len(a):
            continue
        x, y = (side.reshape(seen.samples, -1) for side in (a, b))
        apart = np.square(y).sum(1)[:, None] - 2 * y @ x.T + np.square(x).sum(1)[None]
        own, nearest = np.square(y - x).sum(1), apart.argmin(1)
        nearest = np.where(own <= SAME**2 * np.square(x).sum(1), np.arange(seen.samples), nearest)
        best = np.square(y - x[nearest]).sum(1)
        moved = (nearest != np.arange(seen.samples)) & (best < SAME**2 * own)
        if moved.any() and (moved | (own <= best * 1.0001)).all() and _rest_agrees(own, moved):
            first = int(np.flatnonzero(moved)[0])
            words = f"{int(moved.sum())} of {seen.samples} samples: sample {first} of B is sample {nearest[first]} of A"
            return words, len(set(nearest.tolist())) == seen.samples
    return "", False


def _rest_agrees(own: Array, moved: Array) -> bool:
    """Samples that are where they belong differ by far less than those that are not."""
    where = moved.astype(bool)
    return bool(where.all()) or float(own[~where].max()) < SAME * float(own[where].min())


def token_shift(seen: Look, a: Array, b: Array) -> int:
    """By how many places the tokens of B are later than A's: -1, 0 or 1."""
    if len(a) % seen.samples or len(a) // seen.samples < 4:
        return 0
    x, y = (side.reshape(seen.samples, -1, side.shape[1]) for side in (a, b))
    here = distance(x, y)
    for shift, moved in ((1, distance(x[:, :-1], y[:, 1:])), (-1, distance(x[:, 1:], y[:, :-1]))):
        if moved < SAME * here:
            return shift
    return 0


def other_prompt(seen: Look) -> str:
    """Rows of another text: some agree and the rest do not at all, or B's are found at other places of A, or every
    channel has the spread that it has on A while the values are unrelated. Empty if it does not look like that."""
    a, b = seen.a, seen.b
    if len(a) < 4:
        return ""
    size = np.sqrt(np.square(a).mean(1)) + 1e-300
    apart = np.sqrt(np.square(b - a).mean(1)) / size
    noise = 64 * seen.unit
    same, far = float((apart < noise).mean()), float((apart > 0.3).mean())
    if same > 0.005 and far > 0.1 and same + far > 0.9:
        return f"{far:.0%} of the tokens are unlike, {same:.0%} agree: another text"
    rows = np.linspace(0, len(b) - 1, min(len(b), 256)).round().astype(int)
    rows = rows[apart[rows] > 0.3]
    if len(rows) >= 4:
        wanted = b[rows]
        others = np.square(wanted).sum(1)[:, None] - 2 * wanted @ a.T + np.square(a).sum(1)[None]
        found = np.sqrt(np.maximum(others.min(1), 0) / a.shape[1]) / size.mean()
        elsewhere = float((found < max(noise, 1e-5)).mean())
        if elsewhere > 0.3:
            return f"{elsewhere:.0%} of B's unlike tokens are found at other places of A: another text"
    centred = [x - x.mean(0) for x in (a, b)]
    spreads = [np.sqrt(np.square(x).mean(0)) for x in centred]
    if min(float(x.sum()) for x in spreads) == 0:
        return ""
    relation = float(
        (centred[0] * centred[1]).sum() / np.sqrt(np.square(centred[0]).sum() * np.square(centred[1]).sum())
    )
    alike = float(np.corrcoef(np.concatenate([a.mean(0), spreads[0]]), np.concatenate([b.mean(0), spreads[1]]))[0, 1])
    scale = float(spreads[1].sum() / spreads[0].sum())
    if relation < 0.5 and alike > 0.9 and 0.7 < scale < 1.4 and far > 0.5:
        return (
            f"every channel is spread as on A (correlation {alike:.2f}) but the values are unrelated "
            f"(correlation {relation:+.2f}): another text"
        )
    return ""
