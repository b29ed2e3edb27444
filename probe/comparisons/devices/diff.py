"""`diff`: one model recorded on two devices, where they begin to differ, and whether that is noise or a fault."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probe.comparisons.devices.differences import LayerDifference, Limits, ReferenceErrors, Tolerances
from probe.comparisons.devices.examination import Suspect, examine
from probe.comparisons.devices.pairs import Inputs, MeasuredTensor, Pair, Progress, compare_inputs, reference_errors
from probe.comparisons.devices.verdict import DeviceVerdict, first_suspect, judge_figures, judge_values, mismatched
from probe.comparisons.selection import Side, find_side, label_of, match_names, opened
from probe.files.checked_json import finite
from probe.recordings import Recording, RecordingError

Recorded = Recording | Path | str
#: The name of the float recipe in a reference.
FLOAT = "fp32"
#: Tensors in a ranking of the worst.
WORST = 5
#: A mismatched capture makes tensors differ by more than this part of their size.
MISMATCHED = 0.1


@dataclass(frozen=True, kw_only=True)
class DeviceComparison:
    """The result of `diff`. `layers` is empty where the inputs differ, because nothing is compared then."""

    a: str
    b: str
    reference: str | None
    recipe_a: str
    recipe_b: str
    device_a: str
    device_b: str
    inputs: Inputs
    verdict: DeviceVerdict
    layers: tuple[LayerDifference, ...]
    limits: Limits
    rtol: float
    atol: float
    only_one_has: dict[str, int]
    """How many tensors only A has, and only B."""
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Every limit is kept, and the verdict is identical or dtype noise."""
        fine = self.verdict.kind in ("identical", "dtype noise")
        return fine and bool(self.layers) and not any(layer.exceeded for layer in self.layers)

    @property
    def worst_by_max_abs(self) -> tuple[LayerDifference, ...]:
        """The five largest differences; tensors with values that are finite on one side only, or NaN, come first."""

        def rank(layer: LayerDifference) -> tuple[bool, bool, float]:
            return layer.lost > 0, layer.nan_both > 0 or not layer.is_judged, layer.max_abs or 0.0

        return tuple(sorted(self.layers, key=rank, reverse=True)[:WORST])

    @property
    def worst_by_cosine(self) -> tuple[LayerDifference, ...]:
        """The five lowest cosines; tensors without one come first, unless they are the same zeros on both sides."""

        def rank(layer: LayerDifference) -> float:
            if layer.cosine is not None:
                return layer.cosine
            return 1.0 if layer.identical and layer.compared else -2.0

        return tuple(sorted(self.layers, key=rank)[:WORST])

    def as_dict(self) -> dict[str, Any]:
        """For JSON: no NaN and no Inf."""
        return {"passed": self.passed, **asdict(self)} | {
            "inputs": {"status": self.inputs.status, "said": self.inputs.reason},
            "layers": {layer.label: finite(asdict(layer)) for layer in self.layers},
            "worst_by_max_abs": [layer.label for layer in self.worst_by_max_abs],
            "worst_by_cosine": [layer.label for layer in self.worst_by_cosine],
        }


def diff(
    a: Recorded,
    b: Recorded,
    *,
    recipe: str | tuple[str, str] | None = None,
    format: str | None = None,
    reference: Recorded | None = None,
    rtol: float = 1e-3,
    atol: float = 1e-3,
    limits: Limits | None = None,
    layers: str | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> DeviceComparison:
    """Compare recording `b` with `a`, tensor by tensor in the order of the data flow, and judge what differs.

    recipe      the recipe or mode of both, or (of A, of B); needed where there are several
    format      the format, where a mode was recorded in several
    reference   the float reference: A is then the emulated recipe and B the device, and errors are in units of the
                recipe's own error
    rtol, atol  an element is within tolerance if |b - a| <= atol + rtol |a|
    limits      the limits that every tensor must keep
    layers      a glob (`layer_*`) or, where that matches nothing, a regular expression of names; whether the
                recordings are of the same capture is judged by all tensors
    verify      check every byte of the recordings against their manifests first (sha256)
    progress    called with a line of text for every tensor
    """
    tolerances = Tolerances(rtol, atol, limits or Limits())
    first, second = (opened(recorded, verify=verify) for recorded in (a, b))
    recipes = _recipes(first, second, recipe, format)
    pair = Pair(Side(first, recipes[0]), Side(second, recipes[1]))
    if not pair.names:
        raise RecordingError(
            f"{first.folder} and {second.folder} have no tensor in common: {', '.join(pair.a.names)} there, "
            f"{', '.join(pair.b.names)} here. Record the same layers on both."
        )
    chosen = _chosen(pair.names, layers)
    third = None if reference is None else _reference(opened(reference, verify=verify), recipes[0])
    inputs, verdict = _check_inputs(pair, third)
    differences: tuple[LayerDifference, ...] = ()
    if verdict is None:
        errors = {} if third is None else dict(reference_errors(pair, third, chosen))
        tensors = pair.measure(chosen, tolerances, reference=errors, progress=progress)
        differences = tuple(tensor.difference for tensor in tensors)
        selected, same = set(chosen), third is not None and _is_reference(pair, third, errors)
        judged = judge_figures(tensors, inputs, unit=pair.unit, on_grid=pair.recipe_error > 0, recipe_is_float=same)
        outside = any(tensor.given not in selected and tensor.given_error > MISMATCHED for tensor in tensors)
        if isinstance(judged, Suspect) or outside:
            rest = [name for name in pair.names if name not in selected]
            others = {} if third is None else dict(reference_errors(pair, third, rest))
            unselected = pair.measure(rest, tolerances, reference=others, progress=progress)
            with np.errstate(over="ignore", invalid="ignore"):  # squares of float64 beyond 1e154
                judged = _judge_all(pair, tensors, unselected, judged, inputs)
        verdict = judged
    return DeviceComparison(
        a=str(first.folder),
        b=str(second.folder),
        reference=None if third is None else str(third.recording.folder),
        recipe_a=recipes[0],
        recipe_b=recipes[1],
        device_a=first.manifest.device,
        device_b=second.manifest.device,
        inputs=inputs,
        verdict=verdict,
        layers=differences,
        limits=tolerances.limits,
        rtol=rtol,
        atol=atol,
        only_one_has={what: len(names) for what, names in pair.alone.items()},
        notes=_notes(pair, third),
    )


def _judge_all(
    pair: Pair,
    selected: Sequence[MeasuredTensor],
    unselected: Sequence[MeasuredTensor],
    judged: DeviceVerdict | Suspect,
    inputs: Inputs,
) -> DeviceVerdict:
    """The verdict on the selected tensors, `judged` by their figures; all that both have show another capture."""
    tensors = sorted((*selected, *unselected), key=lambda tensor: pair.places[tensor.name])
    began = first_suspect(tensors, unit=pair.unit, on_grid=pair.recipe_error > 0)
    if began is None or any(began.tensor is tensor for tensor in selected):
        began = None
    else:
        verdict = judge_values(examine(pair, tensors, began), tensors, inputs)
        if verdict.kind == "mismatched capture":
            return verdict
    if isinstance(judged, DeviceVerdict):
        return judged
    return judge_values(examine(pair, tensors, judged), tensors, inputs, began=began)


def _is_reference(pair: Pair, reference: Side, errors: Mapping[str, ReferenceErrors]) -> bool:
    """Whether A is the same as the float reference, in the tensors that were not selected too."""
    known = [one.recipe for one in errors.values() if one.recipe is not None]
    if not known or any(known):
        return False
    rest = reference_errors(pair, reference, (name for name in pair.names if name not in errors))
    return not any(one.recipe for _, one in rest)


def _recipes(a: Recording, b: Recording, recipe: str | tuple[str, str] | None, format: str | None) -> tuple[str, str]:
    if recipe is not None:
        of_a, of_b = (recipe, recipe) if isinstance(recipe, str) else recipe
        return find_side(a, of_a, format).recipe, find_side(b, of_b, format).recipe
    if format is not None:
        raise ValueError(f"format {format!r} is given without a recipe. Give the mode too.")
    if len(a.recipes) == len(b.recipes) == 1:
        return a.recipes[0], b.recipes[0]
    common = [name for name in a.recipes if name in b.recipes]
    if len(common) == 1:
        return common[0], common[0]
    raise RecordingError(
        f"{a.folder} has {', '.join(a.recipes)}, {b.folder} has {', '.join(b.recipes)}: which are to be compared? "
        "Give --recipe, one for both or one for each."
    )


def _reference(recording: Recording, recipe: str) -> Side:
    """The float recipe of the reference."""
    expected = recording.recipes[0] if len(recording.recipes) == 1 else FLOAT
    if expected in recording.recipes and expected != recipe:
        return Side(recording, expected)
    raise RecordingError(
        f"{recording.folder} has {', '.join(recording.recipes)} and {recipe} is compared: there is no float reference "
        f"of it. Record {FLOAT} into the reference."
    )


def _chosen(names: Sequence[str], pattern: str | None) -> list[str]:
    """The names that match the pattern; all without one."""
    if pattern is None:
        return list(names)
    none = f"matches none of {', '.join(map(label_of, names))}. Give a glob such as 'layer_*', or a regular expression."
    try:
        found = match_names(pattern, names)
    except ValueError as problem:
        raise ValueError(f"{problem} As a glob it {none}") from None
    if not found:
        raise ValueError(f"layers {pattern!r} {none}")
    return found


def _check_inputs(pair: Pair, reference: Side | None) -> tuple[Inputs, DeviceVerdict | None]:
    """Whether the inputs agree, and the verdict if they or the shapes of tensors differ."""
    inputs = compare_inputs(pair.a.recording, pair.b.recording)
    if inputs.status == "different":
        return inputs, mismatched("the inputs differ", None, inputs.reason)
    if reference is not None:
        third = compare_inputs(pair.a.recording, reference.recording, names=("A", "the reference"))
        if third.status == "different":
            return third, mismatched("the inputs of the reference differ", None, third.reason)
    for side, what in ((pair.b, "B"), *([(reference, "the reference")] if reference else [])):
        held = set(side.names)
        for name in pair.names:
            if name in held and side.shape(name) != pair.a.shape(name):
                shapes = f"{label_of(name)} is {list(pair.a.shape(name))} on A, {list(side.shape(name))} on {what}"
                return inputs, mismatched("the shapes differ: nothing is cropped", label_of(name), shapes)
    return inputs, None


def _notes(pair: Pair, reference: Side | None) -> tuple[str, ...]:
    """Notes of the recordings, tensors that only one has, and weights that differ."""
    notes = []
    for side, what in ((pair.a, "A"), (pair.b, "B"), *([(reference, "reference")] if reference else [])):
        notes += [f"{what}: {note}" for note in side.recording.notes]
    notes += [
        f"only {what} has {', '.join(map(label_of, names))}: not compared"
        for what, names in pair.alone.items()
        if names
    ]
    first, second = pair.a.recording.manifest, pair.b.recording.manifest
    if first.fingerprint and second.fingerprint and first.fingerprint != second.fingerprint:
        notes.append(
            f"the weights differ: fingerprint {first.fingerprint} on A, {second.fingerprint} on B "
            "(of another dtype, or of another model)"
        )
    if other := first.other_configuration(second.configuration):
        notes.append(f"the configuration of the model differs (A -> B): {other}")
    return tuple(notes)
