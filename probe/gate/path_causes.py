"""The cause of a failing path: the first layer of it that moved, and what the diagnosis finds there.

And how far each token differs, for a plot.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from probe.diagnosis.causes import in_a_line
from probe.diagnosis.explanations import UNKNOWN
from probe.diagnosis.path_steps import diagnose_path
from probe.gate.baselines.format import Entry
from probe.gate.cases import Outcome, TokenProfile
from probe.gate.golden_values import HALF, gap, group_of, parted
from probe.gate.measured_layers import Observation
from probe.gate.path_figures import CLOSE, PathFigures, differing, where
from probe.gate.tolerances import OF_PATHS
from probe.running.traces import LayerTrace

#: A half of a path that changed by less than this part of what the other one did has not changed.
ASIDE = 0.05
#: Layers of a path whose tokens are plotted.
MOST_LAYERS = 4


def wrong_layers(outcome: Outcome, found: PathFigures) -> list[str]:
    """The layers of a failing path that moved, in the order of the data flow."""
    return [label for label in found.profiles if _is_wrong(outcome, label, found)]


def path_cause(
    wrong: list[str], found: PathFigures, entry: Entry | None, layers: Mapping[str, Outcome], trace: LayerTrace
) -> str:
    """One line about the first layer of a failing path that moved; `trace` is of that layer."""
    label, path = wrong[0], found.path
    if label in layers and layers[label].status == "failed" and layers[label].is_own:
        return in_a_line(f"{label} itself changed, in the prefill too: see its own case")
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    cause = diagnose_path(trace, path, _differing_places(found, label, entry))
    if not cause and label in found.strays:
        cause = f"site {found.strays[label]}; it does not give the values of its grid"
    return in_a_line(f"{path.name}, {label}{more}: {cause or f'{UNKNOWN}, {_tokens(found, label, entry)}'}")


def token_profile(outcome: Outcome, seen: Observation) -> TokenProfile:
    """Of the first layers of a failing path that moved: how far each token is from the prefill, the worst row of it."""
    found = seen.path
    if found is None:
        return TokenProfile()
    related = found.path.is_related
    tokens, row = torch.unique(found.path.places[related] % found.path.seqlen, return_inverse=True)
    wrong = wrong_layers(outcome, found)[:MOST_LAYERS]
    start = torch.zeros(len(tokens), dtype=torch.float64)
    relations = {
        label: tuple(start.scatter_reduce(0, row, found.profiles[label][related], "amax").tolist()) for label in wrong
    }
    return TokenProfile(tuple(tokens.tolist()), relations)


def _is_wrong(outcome: Outcome, label: str, found: PathFigures) -> bool:
    figures = [outcome.figures.get(f"{kind}.{label}") for kind in ("relation", "distance")]
    return label in found.broken or any(figure is not None and figure.moved for figure in figures)


def _differing_places(found: PathFigures, label: str, entry: Entry | None) -> Tensor | None:
    """The tokens that differ from the prefill, where they must not, or did not when the baseline was made."""
    stored = None if entry is None else entry.figures.get(f"relation.{label}")
    agreed = label in found.bounded or (stored is not None and stored.value <= CLOSE[0])
    places = found.path.places[differing(found.profiles[label])]
    return places if agreed and places.numel() else None


def _tokens(found: PathFigures, label: str, entry: Entry | None) -> str:
    """Which tokens changed, by what is known of them."""
    if label in found.bounded and bool(differing(found.profiles[label]).any()):
        return f"differs from the prefill {where(found.path, found.profiles[label])}"
    return _by_halves(found, label, entry)


def _by_halves(found: PathFigures, label: str, entry: Entry | None) -> str:
    """From the golden values of both halves of the path."""
    group = f"{OF_PATHS}{label}"
    if entry is None or group not in entry.figures:
        return "nothing is stored of it"
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
