"""The verdict on two devices: identical, dtype noise, device fault, mismatched capture or not compared.

dtype noise          every layer differs by no more than rounding and the order of sums explain, without a pattern
device fault         a layer differs by more than noise, or with a pattern that noise does not have
mismatched capture   the recordings are of different things: other inputs, other samples, layers under other names
not compared         NaN on both sides, too many infinities on both, or nothing but zeros: agreement means nothing

A fault is certain only if its cause is recognised.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from probe.comparisons.devices.differences import SUFFICIENT, LayerDifference
from probe.comparisons.devices.examination import UNSTRUCTURED, Examination, Suspect
from probe.comparisons.devices.pairs import EMBEDDING, ROUNDINGS, Inputs, MeasuredTensor
from probe.comparisons.selection import label_of

Kind = Literal["identical", "dtype noise", "device fault", "mismatched capture", "not compared"]
Sure = Literal["certain", "likely", "possible"]

UNRECOGNISED = "kind not recognised"
#: A difference is structured if one factor explains this part of it, or one constant for each channel.
FACTOR, CONSTANT = 0.3, 0.6
#: One channel, token or sample differs by this many times the median one.
PEAK = 40.0
#: A device nearer to the float reference than this part of the recipe's own error runs the float model.
NOT_APPLIED = 0.1
#: Noise in a tensor of fewer elements is not certain to be noise.
FEW = 64


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
    tensors: Sequence[MeasuredTensor], inputs: Inputs, *, unit: float, on_grid: bool, recipe_is_float: bool = False
) -> DeviceVerdict | Suspect:
    """The verdict where figures decide; otherwise the first tensor that is beyond noise, to be examined.

    `tensors` are in the order of the data flow, `unit` is that of the coarser device, `on_grid` says whether the
    recipe rounds to a grid, and `recipe_is_float` whether A is the same as the float reference.
    """
    everything = [tensor.difference for tensor in tensors]
    if all(figures.is_zero for figures in everything):
        zeros = f"every value of {_count(len(tensors), 'tensor')} is 0 on both sides"
        return DeviceVerdict("not compared", None, "nothing but zeros was recorded", "certain", (zeros, inputs.reason))
    if all(figures.identical and figures.is_judged and not figures.nan_both for figures in everything):
        agree = f"every bit of {_count(len(tensors), 'tensor')} agrees"
        return DeviceVerdict("identical", None, "", "certain", (agree, *_left_out(everything), inputs.reason))
    if recipe_is_float:
        return mismatched("A is the float reference itself: its recipe was not applied", None, inputs.reason)
    for figures in everything:
        if figures.recipe_error is None or figures.device_error is None:
            continue
        if figures.device_error < NOT_APPLIED * figures.recipe_error:
            distances = (
                f"{figures.label} of B differs from the float reference by {figures.device_error:.2g} of its size, "
                f"the recipe (A) by {figures.recipe_error:.2g}"
            )
            cause = "the recipe was not applied: B gives what the float model gives"
            return DeviceVerdict("device fault", figures.label, cause, "certain", (distances, inputs.reason))
    suspect = first_suspect(tensors, unit=unit, on_grid=on_grid)
    unjudged = next((tensor for tensor in tensors if not tensor.difference.is_judged), None)
    if unjudged and (suspect is None or tensors.index(unjudged) < tensors.index(suspect.tensor)):
        return _not_compared(unjudged, tensors, inputs)
    if suspect:
        return suspect
    with_nan = next((tensor for tensor in tensors if tensor.difference.nan_both), None)
    if with_nan:
        return _not_compared(with_nan, tensors, inputs)
    return _noise(tensors, inputs, on_grid=on_grid)


def first_suspect(tensors: Sequence[MeasuredTensor], *, unit: float, on_grid: bool) -> Suspect | None:
    """The first tensor that differs by more than noise."""
    reasons = ((tensor, _beyond_noise(tensor, unit, on_grid=on_grid)) for tensor in tensors)
    return next((Suspect(tensor, reason) for tensor, reason in reasons if reason), None)


def judge_values(
    found: Examination, tensors: Sequence[MeasuredTensor], inputs: Inputs, *, began: Suspect | None = None
) -> DeviceVerdict:
    """The verdict on an examined suspect: another capture, another precision, or a fault.

    `tensors` are all that both have. `began` is the first of them that is beyond noise, if that is another one, which
    was not selected.
    """
    tensor = found.suspect.tensor
    label = tensor.difference.label
    before = _before(tensors, tensor) if began is None else (_began_before(began),)
    evidence = (found.suspect.reason, *before, *_in_recipe_errors([tensor]), inputs.reason)
    # the embedding is made of the tokens alone; before any other tensor, a fault may have moved samples or tokens
    capture: Sure = "certain" if tensor.name == EMBEDDING else "likely"
    if found.renamed:
        return mismatched(found.renamed, label, *evidence)
    if found.moved_samples and found.each_sample_once and found.is_first:
        return mismatched("the order of the samples differs", label, found.moved_samples, *evidence, sure=capture)
    if found.moved_samples:
        stale = "a sample has what another should have: a stale buffer"
        cause = "samples are swapped" if found.each_sample_once else stale
        return _fault(tensor, f"{cause} ({found.moved_samples})", evidence)
    if found.token_shift:
        later = "later" if found.token_shift > 0 else "earlier"
        if not found.is_first:
            return _fault(tensor, f"what it adds comes one token {later} than on A", evidence)
        cause = f"the tokens of B come one place {later} than A's: padding or a begin token"
        return mismatched(cause, label, *evidence, sure=capture)
    if inputs.status != "same" and found.other_prompt:
        return mismatched("the inputs differ: another prompt", label, found.other_prompt, *evidence, sure="likely")
    if found.precision is not None:
        hidden = found.precision
        return DeviceVerdict("dtype noise", label, hidden.cause, hidden.sure, (*hidden.evidence, inputs.reason))
    return _fault(tensor, found.pattern.words, evidence, is_cause=found.pattern.is_cause)


def _beyond_noise(tensor: MeasuredTensor, unit: float, *, on_grid: bool) -> str:
    """Why a difference is more than noise, in words; empty if it is not."""
    figures, spread = tensor.difference, tensor.structure
    label = figures.label
    if figures.lost:
        unlike = figures.nan_a + figures.inf_a + figures.nan_b + figures.inf_b
        unlike -= 2 * (figures.nan_both + figures.inf_both) + figures.lost  # not finite on both, but not the same
        how = "are finite on one device only" if unlike < figures.lost else "are NaN or Inf on both, but not the same"
        return f"{label} has {figures.lost} of {math.prod(figures.shape)} values that {how}"
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
    if on_grid:  # a few flips are all there is
        return ""
    alone = "times as much as the others: noise is spread evenly"
    place, peak = spread.channel_peak()
    if peak > PEAK:
        return f"channel {place} of {label} differs {peak:.3g} {alone}"
    place, peak = spread.sample_peak()
    if peak > PEAK and spread.added_in(place) > figures.noise:  # noise may begin in one sample, if in few elements
        return f"sample {place} of {label} differs {peak:.3g} {alone}"
    return ""


def _fault(tensor: MeasuredTensor, cause: str, evidence: tuple[str, ...], *, is_cause: bool = True) -> DeviceVerdict:
    figures = tensor.difference
    sure: Sure = "certain" if cause and is_cause and (figures.lost or figures.beyond_noise > 10) else "likely"
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
    few = min(math.prod(one.shape) for one in figures if not one.identical) < FEW
    sure: Sure = "certain" if worst.beyond_noise < 0.5 and inputs.status == "same" and not few else "likely"
    more = (*_left_out(figures), *_differing_inputs(tensors), *_in_recipe_errors(tensors))
    evidence = (*figures_in_words, *more, inputs.reason)
    return DeviceVerdict("dtype noise", first.label, cause, sure, evidence)


def _not_compared(tensor: MeasuredTensor, tensors: Sequence[MeasuredTensor], inputs: Inputs) -> DeviceVerdict:
    """A tensor with NaN on both sides, or with too few values that are finite on both."""
    figures, size = tensor.difference, math.prod(tensor.difference.shape)
    kinds = [name for name, count in (("NaN", figures.nan_both), ("Inf", figures.inf_both)) if count]
    both = f"{' or '.join(kinds)} on both sides"
    if not figures.compared:
        cause = f"not finite on both sides: nothing was compared ({both} in all of {size} values)"
    else:
        left = f"{both} in {figures.nan_both + figures.inf_both} of {size} values"
        rest = "the rest was compared" if figures.is_judged else "too little is left to compare"
        cause = f"not finite on both sides: {left}, {rest}"
    others = [one.difference for one in tensors if one.difference.is_judged]
    judged = [f"of {len(others)} of {len(tensors)} tensors at least {SUFFICIENT:.0%} was compared"]
    if others and figures.is_judged:
        worst = max(others, key=lambda one: one.beyond_noise)
        judged += [f"what was compared differs by at most {worst.beyond_noise:.2g} of the noise bound ({worst.label})"]
    evidence = (*_left_out([one.difference for one in tensors]), *judged, inputs.reason)
    return DeviceVerdict("not compared", figures.label, cause, "certain", evidence)


def _left_out(figures: Sequence[LayerDifference]) -> tuple[str, ...]:
    """Tensors with values that are not finite on both sides, and tensors of zeros."""
    lines = []
    some = [one for one in figures if one.nan_both or one.inf_both]
    if some:
        worst = min(some, key=lambda one: one.compared)
        size = math.prod(worst.shape)
        counts = f"{worst.nan_both} NaN and {worst.inf_both} Inf on both sides"
        lines.append(
            f"{_count(len(some), 'tensor')} not finite on both sides, most of all {worst.label}: {counts} of {size} "
            f"values, {_share(worst.compared)} compared"
        )
    zeros = [one.label for one in figures if one.is_zero]
    if zeros:
        lines.append(f"all zeros on both sides: {', '.join(zeros)}")
    return tuple(lines)


def _differing_inputs(tensors: Sequence[MeasuredTensor]) -> tuple[str, ...]:
    """A tensor that was not selected, and of which the first selected one that differs was made."""
    names = [tensor.name for tensor in tensors]
    first = next(tensor for tensor in tensors if not tensor.difference.identical)
    if first.given is None or first.given in names or not first.given_error:
        return ()
    made = f"{first.difference.label} was made of {label_of(first.given)}, which was not selected"
    return (f"{made} and differs by {first.given_error:.2g} of its size",)


def _began_before(began: Suspect) -> str:
    return f"the difference began before it, in {began.tensor.difference.label}, which was not selected: {began.reason}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _share(share: float) -> str:
    """In percent; 100 % only if it is all."""
    return f"{share:.2%}" if share == 1 or share < 0.99995 else "> 99.99%"


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
