"""Observations of paths: every layer on a path against its own prefill of the same tokens, and its golden values.

    relation.LAYER    rms of path - prefill, over the layer's own error
    distance.LAYER    rms of path - golden path, estimated from sketches, over the layer's own error
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from probe.gate.golden_values import HALF, sketch_of
from probe.gate.observations import Flaw, Observation
from probe.gate.tolerances import FLOAT_FACTOR
from probe.running.modes import Mode
from probe.running.paths import Path, joined_rows

#: The largest relation to the prefill that the order of sums may cause where a path must equal it. Under other
#: instruction sets, threads, batches and jitter it was seen to reach a tenth of this.
BOUND = 0.1
#: A token of a path differs from the prefill if it does by more than this part of the layer's own error.
DIFFERS = 0.02
#: Decimals of a relation that are kept.
DECIMALS = 5


@dataclass(frozen=True, eq=False)
class PathObservation(Observation):
    """The observation of a path; `profiles` has the relation of every token by layer, NaN where there is none."""

    path: Path | None = None
    profiles: dict[str, Tensor] = field(default_factory=dict)


class PrefillRows:
    """The outputs of the first rows of an injected run, by layer: what paths are compared with."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._kept: dict[str, list[Tensor]] = {}

    def take(self, label: str, output: Tensor) -> None:
        """Append a batch; what is not needed is not kept."""
        kept = self._kept.setdefault(label, [])
        missing = self.rows - sum(map(len, kept))
        if missing:
            kept.append(output[:missing].clone())

    def of(self, label: str, places: Tensor) -> Tensor:
        """The outputs of the layer at these places of the text."""
        return joined_rows(self._kept[label], self.rows)[places]


def observe_path(
    path: Path,
    outputs: Mapping[str, Tensor],
    prefill: PrefillRows,
    units: Mapping[str, float],
    bounds: Mapping[str, float | None],
) -> PathObservation:
    """The figures and golden values of every layer on a path; `units` are the layers' own errors.

    `bounds`: how far a layer may be from its prefill, None where that is not known.
    """
    related, places, half = path.is_related, path.places, path.half
    figures: dict[str, float | None] = {}
    values, counts, flaws = {}, {}, []
    profiles: dict[str, Tensor] = {}
    for label, output in outputs.items():
        flat = output.flatten(1)
        difference = flat[related].double() - prefill.of(label, places[related]).flatten(1).double()
        profile = torch.full((len(flat),), torch.nan, dtype=torch.float64)
        profile[related] = difference.square().mean(1).sqrt() / units[label]
        relation = float(difference.square().mean().sqrt()) / units[label]
        profiles[label], figures[f"relation.{label}"] = profile, round(relation, DECIMALS)
        group = f"distance.{label}"
        values[group], counts[group] = sketch_of(flat, half), flat.numel()
        bound = bounds[label]
        if not bool(flat.isfinite().all()):
            at = int(path.places[int((~flat.isfinite().all(1)).nonzero()[0])])
            flaws.append(Flaw("not finite", f"{path.name} of {label} has NaN or Inf, first at {token_of(path, at)}."))
        elif bound is not None and not relation <= bound:
            text = f"{path.name} of {label} differs from the prefill {where(path, profile)}: {relation:.2g} of its own "
            flaws.append(Flaw("differs from prefill", f"{text}error, where {bound:g} is the most that sums may cause."))
    return PathObservation(
        figures,
        values,
        counts,
        flaws=tuple(flaws),
        units={f"distance.{label}": unit for label, unit in units.items()},
        path=path,
        profiles=profiles,
    )


def bound_of(mode: Mode, keeps: bool | None) -> float | None:
    """The bound of a layer's relation; wider where the arithmetic is not in float32, or not ours."""
    if not keeps:
        return None
    return BOUND * (FLOAT_FACTOR if not mode.is_quantized or mode.library else 1.0)


def token_of(path: Path, place: int) -> str:
    """`token 41`, or with its row where the path has several."""
    row, token = divmod(place, path.seqlen)
    return f"token {token + 1}" + (f" of row {row + 1}" if len(path.calls[0]) > 1 and row else "")


def where(path: Path, profile: Tensor) -> str:
    """Which tokens differ from the prefill: `from token 41 on`."""
    differs = profile > DIFFERS
    if not bool(differs.any()):
        return "a little everywhere"
    places = path.places
    first = int(places[differs].remainder(path.seqlen).min())
    last = int(places[differs].remainder(path.seqlen).max())
    behind = differs & (places % path.seqlen >= first)
    after = (~profile.isnan()) & (places % path.seqlen >= first)
    if int(behind.sum()) == 1:
        return f"at token {first + 1} alone"
    if last == int(places[~profile.isnan()].remainder(path.seqlen).max()) and int(behind.sum()) * 2 >= int(after.sum()):
        return f"from token {first + 1} on"
    return f"in {int(behind.sum())} tokens from {first + 1} to {last + 1}"
