"""The figures of paths: every layer on a path against its own prefill of the same tokens, and its golden values.

relation.LAYER    rms of path - prefill of the typical token, over the layer's own error: the median over the tokens of
                  a half of the path, the larger of both
distance.LAYER    rms of path - golden path over all tokens, estimated from sketches, over the layer's own error

Another order of sums now and then rounds a value to the neighbouring code. That moves a few tokens by up to a fifth of
the layer's own error in all, but not the typical one, so the relation can be held far closer than a mean could be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from probe.gate.cases import Verdict
from probe.gate.golden_values import sketch_of
from probe.gate.tolerances import OF_PATHS
from probe.running.modes import Mode
from probe.running.paths import Path, joined_rows

Bound = tuple[float, float]  # of the relation, and of the rms over all tokens

#: How far a path may be from the prefill that it must equal up to the order of sums. Paths whose inputs had a one-ulp
#: jitter that the prefill did not have reached 5e-5, and 0.18 over all tokens.
CLOSE: Bound = (0.002, 0.5)
#: Where sums are rounded to a narrower float, or the arithmetic is another library's; there 0.62 was seen.
WIDE: Bound = (2.0, 2.0)
#: A token differs from the prefill if it does by more than this, and than this part of the token that does most.
DIFFERS, OF_MOST = 1e-3, 0.02
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
    bounded: list[str] = field(default_factory=list)
    """The layers that must equal their prefill up to the order of sums; `broken` are those of them that do not."""
    broken: list[str] = field(default_factory=list)
    profiles: dict[str, Tensor] = field(default_factory=dict)
    """By layer, the relation of every token of `path.places` to the prefill; NaN where there is none."""
    strays: dict[str, str] = field(default_factory=dict)
    """By layer, the first site that did not give the values of its grid."""


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
    bounds: Mapping[str, Bound | None],
    strays: Mapping[str, str],
) -> PathFigures:
    """The figures and golden values of every layer on a path; `units` are the layers' own errors.

    `bounds`: how far a layer may be from its prefill, None where that is not known. `strays`: by layer, a site that did
    not give the values of its grid.
    """
    related, places, half = path.is_related, path.places, path.half
    found = PathFigures(path, strays=dict(strays), broken=list(strays))
    for label, site in strays.items():
        text = f"{path.name} of {label} does not put {site} on its grid as the prefill does."
        found.wrong.append(("differs from prefill", text))
    for label, output in outputs.items():
        flat, group, unit = output.flatten(1), f"{OF_PATHS}{label}", units[label]
        found.values[group], found.counts[group], found.units[group] = sketch_of(flat, half), flat.numel(), unit
        squares = (flat[related].double() - prefill.of(label, places[related]).flatten(1).double()).square()
        profile = torch.full((len(flat),), torch.nan, dtype=torch.float64)
        profile[related] = squares.mean(1).sqrt() / unit
        halves = [profile[related & (half == side)] for side in (0, 1)]
        relation, of_all = max(float(one.median()) for one in halves if len(one)), float(squares.mean().sqrt()) / unit
        found.figures[f"relation.{label}"], found.profiles[label] = round(relation, DECIMALS), profile
        finite, bound = flat.isfinite().all(1), bounds[label]
        if bound is not None:
            found.bounded.append(label)
        if not bool(finite.all()):
            first = token_of(path, int(places[~finite][0]))
            found.wrong.append(("not finite", f"{path.name} of {label} has NaN or Inf, first at {first}."))
        elif bound is not None and not (relation <= bound[0] and of_all <= bound[1]):
            found.broken.append(label)
            text = f"{path.name} of {label} differs from the prefill {where(path, profile)}: {of_all:.2g} of its own "
            found.wrong.append(("differs from prefill", f"{text}error, which no other order of sums causes."))
    return found


def bound_of(mode: Mode, keeps: bool | None) -> Bound | None:
    """How far a layer may be from its prefill, if it must keep to it."""
    if not keeps:
        return None
    return WIDE if not mode.is_quantized or mode.library else CLOSE


def token_of(path: Path, place: int) -> str:
    """`token 40`, counted from 0, or with its sequence where the path has several."""
    row, token = divmod(place, path.seqlen)
    return f"token {token}" + (f" of sequence {row}" if len(path.calls[0]) > 1 else "")


def differing(profile: Tensor) -> Tensor:
    """Which tokens differ from the prefill; none where there is no relation to it."""
    known = profile.nan_to_num(0.0)
    return known > max(DIFFERS, OF_MOST * float(known.max()))


def where(path: Path, profile: Tensor) -> str:
    """Which tokens differ from the prefill: `from token 40 on`."""
    differs, tokens = differing(profile), path.places % path.seqlen
    if not bool(differs.any()):
        return "in no token much"
    first, last = int(tokens[differs].min()), int(tokens[differs].max())
    if first == last:
        return f"at token {first} alone"
    after = ~profile.isnan() & (tokens >= first)
    if last == int(tokens[after].max()) and 2 * int(differs.sum()) >= int(after.sum()):
        return f"from token {first} on"
    return f"in {int(differs.sum())} tokens from {first} to {last}"
