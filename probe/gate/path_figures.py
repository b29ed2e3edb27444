"""The figures of paths: every layer on a path against its own prefill of the same tokens, and its golden values.

relation.LAYER    rms of path - prefill, over the layer's own error
distance.LAYER    rms of path - golden path, estimated from sketches, over the layer's own error
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from probe.gate.cases import Verdict
from probe.gate.golden_values import sketch_of
from probe.gate.tolerances import FLOAT_FACTOR, OF_PATHS
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
class PathFigures:
    """What is known of a path: figures, golden values by group with their counts and units, and what is wrong."""

    path: Path
    figures: dict[str, float] = field(default_factory=dict)
    values: dict[str, tuple[float, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    units: dict[str, float] = field(default_factory=dict)
    wrong: list[tuple[Verdict, str]] = field(default_factory=list)
    bounded: dict[str, float] = field(default_factory=dict)
    """The bound of the relation of every layer that has one."""
    profiles: dict[str, Tensor] = field(default_factory=dict)
    """By layer, the relation of every token of `path.places` to the prefill; NaN where there is none."""

    @property
    def broken(self) -> list[str]:
        """The layers that are further from their prefill than they may be."""
        return [label for label, bound in self.bounded.items() if not self.figures[f"relation.{label}"] <= bound]


class PrefillRows:
    """The outputs of the first rows of an injected run, by layer: what paths are compared with."""

    def __init__(self, layers: Sequence[str], rows: int) -> None:
        self.rows = rows
        self._kept: dict[str, list[Tensor]] = {label: [] for label in layers}

    def take(self, label: str, output: Tensor) -> None:
        """Append a batch; what is not needed is not kept."""
        kept = self._kept.get(label)
        if kept is not None and (missing := self.rows - sum(map(len, kept))):
            kept.append(output[:missing].clone())

    def of(self, label: str, places: Tensor) -> Tensor:
        """The outputs of the layer at these places of the text."""
        return joined_rows(self._kept[label], self.rows)[places]


def path_figures(
    path: Path,
    outputs: Mapping[str, Tensor],
    prefill: PrefillRows,
    units: Mapping[str, float],
    bounds: Mapping[str, float | None],
) -> PathFigures:
    """The figures and golden values of every layer on a path; `units` are the layers' own errors.

    `bounds`: how far a layer may be from its prefill, None where that is not known.
    """
    related, places, half = path.is_related, path.places, path.half
    found = PathFigures(path)
    for label, output in outputs.items():
        flat, group, unit = output.flatten(1), f"{OF_PATHS}{label}", units[label]
        found.values[group], found.counts[group], found.units[group] = sketch_of(flat, half), flat.numel(), unit
        squares = (flat[related].double() - prefill.of(label, places[related]).flatten(1).double()).square()
        relation = float(squares.mean().sqrt()) / unit
        found.figures[f"relation.{label}"] = round(relation, DECIMALS)
        profile = torch.full((len(flat),), torch.nan, dtype=torch.float64)
        profile[related] = squares.mean(1).sqrt() / unit
        found.profiles[label] = profile
        finite, bound = flat.isfinite().all(1), bounds[label]
        if bound is not None:
            found.bounded[label] = bound
        if not bool(finite.all()):
            first = token_of(path, int(places[~finite][0]))
            found.wrong.append(("not finite", f"{path.name} of {label} has NaN or Inf, first at {first}."))
        elif bound is not None and not relation <= bound:
            text = f"{path.name} of {label} differs from the prefill {where(path, profile)}: {relation:.2g} of its own "
            found.wrong.append(("differs from prefill", f"{text}error; sums in another order cause at most {bound:g}."))
    return found


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
