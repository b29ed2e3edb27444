"""What two recordings say about their devices: identical, dtype noise, a device fault, or a mismatched capture.

dtype noise       every layer differs by no more than rounding and the order of sums explain, and without a pattern
device fault      a layer adds something else on B: it differs by more than that, or with a pattern noise has not
mismatched        the recordings are of different things: other inputs, other samples, layers under other names
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from probe.comparisons.devices.capture import other_prompt, renamed, sample_order, token_shift
from probe.comparisons.devices.inputs import Inputs
from probe.comparisons.devices.layers import label_of
from probe.comparisons.devices.noise import ROUNDINGS, is_layer
from probe.comparisons.devices.pairs import ENDS, Pair, Seen, some_rows
from probe.comparisons.devices.patterns import recognise
from probe.comparisons.devices.precision import lesser_precision

Kind = Literal["identical", "dtype noise", "device fault", "mismatched capture"]
Sure = Literal["certain", "likely", "possible"]

UNRECOGNISED = "kind not recognised"
#: A difference is structured if one factor explains this part of it, or one constant for each channel.
FACTOR, CONSTANT = 0.3, 0.6
#: One channel, token or sample differs by so many times the median one.
PEAK = 40.0
#: A device nearer to the float reference than this part of the recipe's own error runs the float model.
NOT_APPLIED = 0.1


@dataclass(frozen=True, kw_only=True)
class DeviceVerdict:
    """`layer` is where it began (None where nothing did); `evidence`, the figures that led here, in words."""

    kind: Kind
    layer: str | None
    cause: str
    sure: Sure
    evidence: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "evidence": list(self.evidence)}


def mismatched(cause: str, layer: str | None, *evidence: str, sure: Sure = "certain") -> DeviceVerdict:
    """Two recordings that are not of the same thing."""
    return DeviceVerdict(kind="mismatched capture", layer=layer, cause=cause, sure=sure, evidence=evidence)


def judge(pair: Pair, inputs: Inputs, seen: list[Seen]) -> DeviceVerdict:
    """The verdict on tensors that were compared, in the order of the data flow."""
    if all(one.difference.identical for one in seen):
        said = f"every bit of {len(seen)} tensors agrees"
        return DeviceVerdict(
            kind="identical", layer=None, cause="", sure="certain", evidence=(said, *_about_inputs(inputs))
        )
    known = [one for one in seen if one.difference.recipe_error is not None]
    if known and not any(one.difference.recipe_error for one in known):
        return mismatched("A is the float reference itself: its recipe was not applied", None, inputs.said)
    not_applied = next((one for one in known if _is_float(one)), None)
    if not_applied is not None:
        return _not_applied(inputs, not_applied)
    for one in seen:
        why = _suspicious(one, pair.unit, on_grid=pair.own_error > 0)
        if why:
            return _judged(pair, inputs, seen, one, why)
    return _noise(pair, inputs, seen)


def _is_float(one: Seen) -> bool:
    """Whether the device is where the float reference is, and the recipe is not."""
    own, device = one.difference.recipe_error or 0.0, one.difference.device_error
    return device is not None and device < NOT_APPLIED * own


def _not_applied(inputs: Inputs, one: Seen) -> DeviceVerdict:
    figures = one.difference
    said = (
        f"{figures.label} of B differs from the float reference by {figures.device_error:.2g} of its size, "
        f"the recipe (A) by {figures.recipe_error:.2g}"
    )
    return DeviceVerdict(
        kind="device fault",
        layer=figures.label,
        cause="the recipe was not applied: B gives what the float model gives",
        sure="certain",
        evidence=(said, inputs.said),
    )


def _suspicious(one: Seen, unit: float, *, on_grid: bool) -> tuple[str, ...]:
    """Why a difference is no noise, in words; empty if it is."""
    figures, spread = one.difference, one.structure
    label = figures.label
    if figures.lost:
        count = math.prod(figures.shape)
        return (f"{label} has {figures.lost} of {count} values that are finite on one device only",)
    if figures.added > figures.noise:
        return (
            f"what {label} adds differs by {figures.added:.2g} of its size, {figures.beyond_noise:.3g} times what "
            f"noise may reach there ({figures.noise:.2g})",
        )
    few = 2.0 / max(1.0, spread.rows) ** 0.5
    if figures.added > ROUNDINGS / 4 * unit:
        if spread.factor_share > FACTOR + few:
            share = f"{spread.factor_share:.0%} of it is one factor, {1 + spread.slope:.5g}"
            return (f"{label} differs by {figures.added:.2g} of what it adds, and {share}: noise has none",)
        if spread.constant_share > CONSTANT + few and spread.rows >= 8:
            share = f"{spread.constant_share:.0%} of it is constant over tokens"
            return (f"{label} differs by {figures.added:.2g} of what it adds, and {share}: noise is not",)
        places = ((*spread.channel_peak(), "channel"), (*spread.sample_peak(), "sample"))
        for place, peak, what in () if on_grid else places:  # on a grid a few flips are all there is
            if peak > PEAK:
                return (f"{what} {place} of {label} differs {peak:.3g} times as much as the others: noise does not",)
    return ()


def _judged(pair: Pair, inputs: Inputs, seen: list[Seen], one: Seen, why: tuple[str, ...]) -> DeviceVerdict:
    """A tensor is beyond noise: another capture, another precision, or a fault?"""
    own = _in_recipe_errors([one])
    label, evidence = one.difference.label, (*why, *_before(seen, one), *own, *_about_inputs(inputs))
    look = pair.look(one)
    is_first = one is seen[0]
    moved = _renamed(pair, one)
    if moved:
        return mismatched(moved, label, *evidence)
    words, each_once = sample_order(look)
    if words and each_once and is_first:
        return mismatched("the order of the samples differs", label, words, *evidence)
    if words:
        cause = "samples are swapped" if each_once else "a sample has what another should have: a stale buffer"
        return _fault(label, f"{cause} ({words})", evidence, one)
    shift = token_shift(look, look.a, look.b) or token_shift(look, *look.adds)
    later = "later" if shift > 0 else "earlier"
    if shift and not is_first:
        return _fault(label, f"what it adds comes one token {later} than on A", evidence, one)
    if shift:
        return mismatched(
            f"the tokens of B come one place {later} than A's: padding or a begin token", label, *evidence
        )
    if inputs.status != "same" and is_first:
        text = other_prompt(look)
        if text:
            return mismatched("the inputs differ: another prompt", label, text, *evidence, sure="likely")
    lesser = lesser_precision(pair, seen, one, look)
    if lesser is not None:
        sure, said = lesser
        return DeviceVerdict(
            kind="dtype noise", layer=label, cause=said[0], sure=sure, evidence=(*said[1:], *_about_inputs(inputs))
        )
    return _fault(label, recognise(look), evidence, one)


def _fault(label: str, cause: str, evidence: tuple[str, ...], one: Seen) -> DeviceVerdict:
    figures = one.difference
    sure: Sure = "certain" if figures.lost or figures.beyond_noise > 10 else "likely"
    return DeviceVerdict(kind="device fault", layer=label, cause=cause or UNRECOGNISED, sure=sure, evidence=evidence)


def _noise(pair: Pair, inputs: Inputs, seen: list[Seen]) -> DeviceVerdict:
    first = next(one for one in seen if not one.difference.identical)
    worst = max(seen, key=lambda one: one.difference.beyond_noise)
    dtypes = sorted({dtype for one in seen for dtype in (one.difference.dtype_a, one.difference.dtype_b)})
    said = (
        f"at most {worst.difference.beyond_noise:.2g} of what noise may reach, in {worst.difference.label} "
        f"({worst.difference.added:.2g} of what it adds; {worst.difference.noise:.2g} is allowed)",
        f"no bias, no factor and no single place: it looks like rounding ({', '.join(dtypes)})",
    )
    cause = "rounding and the order of sums" + (", and roundings to the grid that flip" if pair.own_error else "")
    return DeviceVerdict(
        kind="dtype noise",
        layer=first.difference.label,
        cause=cause,
        sure="certain" if worst.difference.beyond_noise < 0.5 and inputs.status == "same" else "likely",
        evidence=(*said, *_in_recipe_errors(seen), *_about_inputs(inputs)),
    )


def _in_recipe_errors(seen: list[Seen]) -> tuple[str, ...]:
    """With a reference: how far the device is from the recipe, beside how far that is from the float model."""
    known = [one.difference for one in seen if one.difference.recipe_errors is not None]
    if not known:
        return ()
    worst = max(known, key=lambda figures: figures.recipe_errors or 0.0)
    return (
        f"the device is at most {worst.recipe_errors:.2g} of the recipe's own error away from the recipe, in "
        f"{worst.label} ({worst.error:.2g} and {worst.recipe_error:.2g} of its size)",
    )


def _renamed(pair: Pair, one: Seen) -> str:
    """Whether A has what B calls by this name under another one. A skipped layer is none: the next differs too."""
    stream = [name for name in pair.names if is_layer(name) or name in ENDS]
    if one.name not in stream:
        return ""
    place = stream.index(one.name)
    noise = max(64 * pair.unit, 0.1 * pair.own_error)
    others = {name: some_rows(pair.a.tensor(name)) for name in stream}
    found = renamed(one.name, some_rows(pair.b.tensor(one.name)), others, noise=noise)
    if not found:
        return ""
    shift = stream.index(found) - place
    after = [stream[i] for i in range(place + 1, len(stream)) if is_layer(stream[i]) and 0 <= i + shift < len(stream)]
    for name in after:
        wanted = stream[stream.index(name) + shift]
        same_shape = pair.a.shape_of(wanted) == pair.b.shape_of(name)
        if same_shape and renamed(name, some_rows(pair.b.tensor(name)), others, noise=noise) == wanted:
            return f"the layers are shifted: {label_of(one.name)} of B is {label_of(found)} of A, and so on"
    if found in stream[:place] and others[found].shape == others[one.name].shape:
        return ""  # B gives again what the layer was given: it was skipped
    return f"{label_of(one.name)} of B is {label_of(found)} of A: layers under other names"


def _before(seen: list[Seen], one: Seen) -> tuple[str, ...]:
    place = seen.index(one)
    if not place:
        return ("it is the first tensor that both have",)
    worst = max(seen[:place], key=lambda other: other.difference.beyond_noise)
    if worst.difference.error == 0:
        labels = [other.difference.label for other in seen[:place]]
        return (f"all before it agree to the bit: {labels[0]}{f' to {labels[-1]}' if place > 1 else ''}",)
    return (f"all before it stay below {worst.difference.beyond_noise:.2g} of what noise may reach",)


def _about_inputs(inputs: Inputs) -> tuple[str, ...]:
    return (inputs.said,)
