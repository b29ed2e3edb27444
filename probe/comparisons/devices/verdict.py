"""The verdict on two devices: identical, dtype noise, device fault or mismatched capture.

dtype noise          every layer differs by no more than rounding and the order of sums explain, without a pattern
device fault         a layer differs by more than noise, or with a pattern that noise does not have
mismatched capture   the recordings are of different things: other inputs, other samples, layers under other names
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from probe.comparisons.devices.examination import UNSTRUCTURED, Examination, Suspect
from probe.comparisons.devices.pairs import ROUNDINGS, Inputs, MeasuredTensor

Kind = Literal["identical", "dtype noise", "device fault", "mismatched capture"]
Sure = Literal["certain", "likely", "possible"]

UNRECOGNISED = "kind not recognised"
#: A difference is structured if one factor explains this part of it, or one constant for each channel.
FACTOR, CONSTANT = 0.3, 0.6
#: One channel, token or sample differs by this many times the median one.
PEAK = 40.0
#: A device nearer to the float reference than this part of the recipe's own error runs the float model.
NOT_APPLIED = 0.1


@dataclass(frozen=True)
class DeviceVerdict:
    """`layer` is where the difference began, if that is known; `evidence` are the figures behind the verdict."""

    kind: Kind
    layer: str | None
    cause: str
    sure: Sure
    evidence: tuple[str, ...]


def mismatched(cause: str, layer: str | None, *evidence: str, sure: Sure = "certain") -> DeviceVerdict:
    """Two recordings that are not of the same thing."""
    return DeviceVerdict("mismatched capture", layer, cause, sure, evidence)


def judge_figures(
    tensors: Sequence[MeasuredTensor], inputs: Inputs, *, unit: float, on_grid: bool
) -> DeviceVerdict | Suspect:
    """The verdict where figures decide; otherwise the first tensor that is beyond noise, to be examined.

    `tensors` are in the order of the data flow, `unit` is that of the coarser device, and `on_grid` says whether the
    recipe rounds to a grid.
    """
    if all(tensor.difference.identical for tensor in tensors):
        agree = f"every bit of {len(tensors)} tensors agrees"
        return DeviceVerdict("identical", None, "", "certain", (agree, inputs.reason))
    known = [tensor.difference for tensor in tensors if tensor.difference.recipe_error is not None]
    if known and not any(figures.recipe_error for figures in known):
        return mismatched("A is the float reference itself: its recipe was not applied", None, inputs.reason)
    for figures in known:
        if (figures.device_error or 0.0) < NOT_APPLIED * (figures.recipe_error or 0.0):
            distances = (
                f"{figures.label} of B differs from the float reference by {figures.device_error:.2g} of its size, "
                f"the recipe (A) by {figures.recipe_error:.2g}"
            )
            cause = "the recipe was not applied: B gives what the float model gives"
            return DeviceVerdict("device fault", figures.label, cause, "certain", (distances, inputs.reason))
    for tensor in tensors:
        reason = _beyond_noise(tensor, unit, on_grid=on_grid)
        if reason:
            return Suspect(tensor, reason)
    return _noise(tensors, inputs, on_grid=on_grid)


def judge_values(found: Examination, tensors: Sequence[MeasuredTensor], inputs: Inputs) -> DeviceVerdict:
    """The verdict on an examined suspect: another capture, another precision, or a fault."""
    tensor = found.suspect.tensor
    label = tensor.difference.label
    evidence = (found.suspect.reason, *_before(tensors, tensor), *_in_recipe_errors([tensor]), inputs.reason)
    if found.renamed:
        return mismatched(found.renamed, label, *evidence)
    if found.moved_samples and found.each_sample_once and found.is_first:
        return mismatched("the order of the samples differs", label, found.moved_samples, *evidence)
    if found.moved_samples:
        stale = "a sample has what another should have: a stale buffer"
        cause = "samples are swapped" if found.each_sample_once else stale
        return _fault(tensor, f"{cause} ({found.moved_samples})", evidence)
    if found.token_shift:
        later = "later" if found.token_shift > 0 else "earlier"
        if not found.is_first:
            return _fault(tensor, f"what it adds comes one token {later} than on A", evidence)
        cause = f"the tokens of B come one place {later} than A's: padding or a begin token"
        return mismatched(cause, label, *evidence)
    if inputs.status != "same" and found.other_prompt:
        return mismatched("the inputs differ: another prompt", label, found.other_prompt, *evidence, sure="likely")
    if found.precision is not None:
        hidden = found.precision
        return DeviceVerdict("dtype noise", label, hidden.cause, hidden.sure, (*hidden.evidence, inputs.reason))
    return _fault(tensor, found.pattern, evidence)


def _beyond_noise(tensor: MeasuredTensor, unit: float, *, on_grid: bool) -> str:
    """Why a difference is more than noise, in words; empty if it is not."""
    figures, spread = tensor.difference, tensor.structure
    label = figures.label
    if figures.lost:
        return f"{label} has {figures.lost} of {math.prod(figures.shape)} values that are finite on one device only"
    if figures.added > figures.noise:
        return (
            f"what {label} adds differs by {figures.added:.2g} of its size, {figures.beyond_noise:.3g} times the noise "
            f"bound there ({figures.noise:.2g})"
        )
    if figures.added <= ROUNDINGS / 4 * unit:
        return ""
    few = 2.0 / max(1.0, spread.rows) ** 0.5
    differs = f"{label} differs by {figures.added:.2g} of what it adds"
    if spread.factor_share > FACTOR + few:
        factor = f"one factor, {1 + spread.slope:.5g}, explains {spread.factor_share:.0%} of it"
        return f"{differs}, and {factor}: noise has no common factor"
    if spread.constant_share > CONSTANT + few and spread.rows >= 8:
        return f"{differs}, and {spread.constant_share:.0%} of it is constant over tokens: noise varies with the token"
    places = ((*spread.channel_peak(), "channel"), (*spread.sample_peak(), "sample"))
    for place, peak, what in () if on_grid else places:  # on a grid a few flips are all there is
        if peak > PEAK:
            return f"{what} {place} of {label} differs {peak:.3g} times as much as the others: noise is spread evenly"
    return ""


def _fault(tensor: MeasuredTensor, cause: str, evidence: tuple[str, ...]) -> DeviceVerdict:
    figures = tensor.difference
    sure: Sure = "certain" if figures.lost or figures.beyond_noise > 10 else "likely"
    return DeviceVerdict("device fault", figures.label, cause or UNRECOGNISED, sure, evidence)


def _noise(tensors: Sequence[MeasuredTensor], inputs: Inputs, *, on_grid: bool) -> DeviceVerdict:
    figures = [tensor.difference for tensor in tensors]
    first = next(one for one in figures if not one.identical)
    worst = max(figures, key=lambda one: one.beyond_noise)
    dtypes = sorted({dtype for one in figures for dtype in (one.dtype_a, one.dtype_b)})
    figures_in_words = (
        f"at most {worst.beyond_noise:.2g} of the noise bound, in {worst.label} "
        f"({worst.added:.2g} of what it adds; the bound is {worst.noise:.2g})",
        f"{UNSTRUCTURED} ({', '.join(dtypes)})",
    )
    cause = "rounding and the order of sums" + (", and roundings to the grid that flip" if on_grid else "")
    sure: Sure = "certain" if worst.beyond_noise < 0.5 and inputs.status == "same" else "likely"
    evidence = (*figures_in_words, *_in_recipe_errors(tensors), inputs.reason)
    return DeviceVerdict("dtype noise", first.label, cause, sure, evidence)


def _in_recipe_errors(tensors: Sequence[MeasuredTensor]) -> tuple[str, ...]:
    """With a reference: the distance of the device from the recipe in units of the recipe's own error."""
    known = [tensor.difference for tensor in tensors if tensor.difference.recipe_errors is not None]
    if not known:
        return ()
    worst = max(known, key=lambda figures: figures.recipe_errors or 0.0)
    return (
        f"the device is at most {worst.recipe_errors:.2g} of the recipe's own error away from the recipe, in "
        f"{worst.label} ({worst.error:.2g} and {worst.recipe_error:.2g} of its size)",
    )


def _before(tensors: Sequence[MeasuredTensor], suspect: MeasuredTensor) -> tuple[str, ...]:
    """How much the tensors before the suspect differ."""
    before = [tensor.difference for tensor in tensors[: tensors.index(suspect)]]
    if not before:
        return ("it is the first tensor that both have",)
    worst = max(before, key=lambda figures: figures.beyond_noise)
    if worst.error == 0:
        until = f" to {before[-1].label}" if len(before) > 1 else ""
        return (f"all tensors before it are identical: {before[0].label}{until}",)
    return (f"all tensors before it stay below {worst.beyond_noise:.2g} of the noise bound",)
