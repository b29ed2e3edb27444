"""The cause of a failing path, as far as the tokens tell it: which of them differ, and what that is typical of."""

from collections.abc import Mapping

from torch import Tensor

from probe.gate.baselines.format import Entry
from probe.gate.cases import Outcome
from probe.gate.golden_values import HALF, gap, group_of, parted
from probe.gate.observations import Observation
from probe.gate.path_figures import DIFFERS, PathFigures, where
from probe.gate.tolerances import OF_PATHS
from probe.running.paths import Path

#: How much the difference must grow from the first decoded token to the last to be said to grow.
GROWS = 4.0
#: A half of a path that changed by less than this part of what the other one did has not changed.
ASIDE = 0.05


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
    more = f", and {len(wrong) - 1} more layers" if len(wrong) > 1 else ""
    evidence = _by_tokens(found, label) or _by_halves(found, label, entry)
    return f"{label}{more}: {evidence}" if evidence else ""


def _is_wrong(outcome: Outcome, label: str, found: PathFigures) -> bool:
    figures = [outcome.figures.get(f"{kind}.{label}") for kind in ("relation", "distance")]
    return label in found.broken or any(figure is not None and figure.moved for figure in figures)


def _by_tokens(found: PathFigures, label: str) -> str:
    """From the tokens that differ from the prefill, where the path must equal it."""
    path, profile = found.path, found.profiles[label]
    if label not in found.bounded or not bool((profile > DIFFERS).any()):
        return ""
    return f"{where(path, profile)}; {KINDS[path.name](path, profile)}"


def _decode(path: Path, profile: Tensor) -> str:
    prefilled, decoded = profile[path.half == 0], profile[path.half == 1].reshape(-1, len(path.calls[0])).amax(1)
    if bool((prefilled > DIFFERS).any()):
        return "the prefill that fills the cache differs already"
    first = float(decoded[0])
    if first <= DIFFERS:
        return "the first decoded token agrees: what it leaves for the next ones (state or cache) is wrong"
    if float(decoded[-1]) > GROWS * first:
        return "it grows with every decoded token: the carried state is wrong, or less exact than in the prefill"
    return "every decoded token differs: the step of one token, or what the prefill leaves for it"


def _ragged(path: Path, profile: Tensor) -> str:
    tokens = path.places[profile > DIFFERS] % path.seqlen
    if int(tokens.min()) >= len(profile) - len(profile) % 32:
        return "only the last partial chunk differs"
    return "the result depends on the length of the sequence, or on the batch size"


def _batch_1(path: Path, profile: Tensor) -> str:
    return "the result depends on the batch size"


def _padded(path: Path, profile: Tensor) -> str:
    left, right = ((profile[path.half == side] > DIFFERS).any() for side in (0, 1))
    if bool(left) and bool(right):
        return "rows with padding on either side differ: the mask is ignored, or a scale is shared between sequences"
    side = "left" if bool(left) else "right"
    return f"only the row with padding to the {side} differs: the mask is ignored, or positions count the padding"


KINDS = {"decode": _decode, "ragged": _ragged, "batch_1": _batch_1, "padded": _padded}


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
            other = found.path.parts[1 - side]
            return f"only {other} changed, by {moved[1 - side]:.2g} of its own error; {found.path.parts[side]} did not"
    return f"{found.path.parts[0]} changed by {moved[0]:.2g} of its own error, {found.path.parts[1]} by {moved[1]:.2g}"
