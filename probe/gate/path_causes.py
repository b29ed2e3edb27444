"""The cause of a failing path, as far as the tokens tell it: which of them differ, and what that is typical of.

And how far each token differs, for a plot.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from probe.gate.baselines.format import Entry
from probe.gate.cases import Outcome, TokenProfile
from probe.gate.golden_values import HALF, gap, group_of, parted
from probe.gate.observations import Observation
from probe.gate.path_figures import PathFigures, differing, where
from probe.gate.tolerances import OF_PATHS
from probe.running.paths import Path

#: How much the difference must grow from the first decoded token to the last to be said to grow.
GROWS = 4.0
#: A half of a path that changed by less than this part of what the other one did has not changed.
ASIDE = 0.05
#: Layers of a path whose tokens are plotted.
MOST_LAYERS = 4


def path_cause(outcome: Outcome, seen: Observation, entry: Entry | None, layers: Mapping[str, Outcome]) -> str:
    """One sentence about the first layer of a failing path that moved; empty where the tokens tell nothing."""
    found = seen.path
    if found is None:
        return ""
    wrong = [label for label in found.profiles if _is_wrong(outcome, label, found)]
    if not wrong:
        return ""
    label = wrong[0]
    if label in layers and layers[label].status == "failed" and layers[label].is_own:
        return f"{label} itself changed, in the prefill too: see its own case"
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    if label in found.strays:
        return f"{label}{more}: site {found.strays[label]} does not give the values of its grid in {found.path.name}"
    evidence = _by_tokens(found, label) or _by_halves(found, label, entry)
    return f"{label}{more}: {evidence}" if evidence else ""


def token_profile(outcome: Outcome, seen: Observation) -> TokenProfile:
    """Of the first layers of a failing path that moved: how far each token is from the prefill, the worst row of it."""
    found = seen.path
    if found is None:
        return TokenProfile()
    related = found.path.is_related
    tokens, row = torch.unique(found.path.places[related] % found.path.seqlen, return_inverse=True)
    wrong = [label for label in found.profiles if _is_wrong(outcome, label, found)][:MOST_LAYERS]
    start = torch.zeros(len(tokens), dtype=torch.float64)
    relations = {
        label: tuple(start.scatter_reduce(0, row, found.profiles[label][related], "amax").tolist()) for label in wrong
    }
    return TokenProfile(tuple((tokens + 1).tolist()), relations)


def _is_wrong(outcome: Outcome, label: str, found: PathFigures) -> bool:
    figures = [outcome.figures.get(f"{kind}.{label}") for kind in ("relation", "distance")]
    return label in found.broken or any(figure is not None and figure.moved for figure in figures)


def _by_tokens(found: PathFigures, label: str) -> str:
    """From the tokens that differ from the prefill, where the path must equal it."""
    path, profile = found.path, found.profiles[label]
    if label not in found.bounded or not bool(differing(profile).any()):
        return ""
    return f"{where(path, profile)}: {KINDS[path.name](path, profile)}"


def _decode(path: Path, profile: Tensor) -> str:
    rows, differs = len(path.calls[0]), differing(profile)
    decoded = differs[path.half == 1].reshape(-1, rows)
    sizes = profile[path.half == 1].reshape(-1, rows).amax(1)
    if bool(differs[path.half == 0].any()):
        return "the prefill that fills the cache differs already"
    if bool(decoded.all()) and float(sizes[-1]) > GROWS * float(sizes[0]):
        return "it grows with every decoded token, as what is carried on does"
    if bool(decoded.all()):
        return "the step of one token, or what the prefill left for it"
    if bool(decoded[1:].all()):
        return "the first decoded token agrees, all later ones differ"
    return f"{int(decoded.sum())} of {decoded.numel()} decoded tokens differ"


def _padded(path: Path, profile: Tensor) -> str:
    differs = differing(profile)
    sides = [side for side, half in (("left", 0), ("right", 1)) if bool(differs[path.half == half].any())]
    return f"in the row with padding to the {' and to the '.join(sides)}"


KINDS: dict[str, Callable[[Path, Tensor], str]] = {
    "decode": _decode,
    "batch_1": lambda path, profile: "it depends on the size of the batch",
    "ragged": lambda path, profile: "it depends on the length of the sequence or the size of the batch",
    "padded": _padded,
}


def _by_halves(found: PathFigures, label: str, entry: Entry | None) -> str:
    """From the golden values of both halves of the path."""
    group = f"{OF_PATHS}{label}"
    if entry is None or group not in entry.figures:
        return ""
    golden = parted(entry.values, {group_of(name) for name in entry.figures})[group]
    now, unit = found.values[group], found.units[group]
    moved = []
    for side in (0, 1):
        part = slice(side * HALF, (side + 1) * HALF)
        count = int((found.path.half == side).sum()) * found.counts[group] // len(found.path.places)
        moved.append(gap(now[part], golden[part], count=max(count, 1), rmse=unit).distance)
    for side in (0, 1):
        if moved[side] <= ASIDE * moved[1 - side]:
            return f"only {found.path.parts[1 - side]} changed, by {moved[1 - side]:.2g} of its own error"
    return f"{found.path.parts[0]} changed by {moved[0]:.2g} of its own error, {found.path.parts[1]} by {moved[1]:.2g}"
