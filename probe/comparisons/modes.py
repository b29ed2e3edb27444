"""A mode against its reference, layer by layer, from their recordings: `compare`, its result and its limits.

Nothing is cropped or broadcast: tensors that cannot be compared element by element are an error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from probe.comparisons.selection import Side, bands, find_reference, find_side, opened, pick_labels, place_of
from probe.files.checked_json import Node, finite
from probe.files.defects import DefectError
from probe.metrics import Comparison, Metrics, label_correlation, label_mse, label_relative_mse
from probe.recordings import Recording
from probe.running.weights import Weights
from probe.words import first_few, natural_key

#: Where a figure of Metrics stands in the JSON of a layer, if not under its own name.
GROUPS: dict[str, tuple[str, str]] = {
    **{f"{figure}_reference": ("reference", figure) for figure in ("mean", "std", "min", "max")},
    **{f"{figure}_output": ("output", figure) for figure in ("mean", "std", "min", "max")},
    "mean_difference": ("difference", "mean"),
    "std_difference": ("difference", "std"),
    "max_abs": ("difference", "max_abs"),
    **{f"p{n}": ("percentiles", str(n)) for n in (50, 90, 95, 99)},
}
#: What a layer is called, the best first.
QUALITIES = ("excellent", "good", "fair", "poor", "undefined")
#: Limits by option: the figure that is limited, and whether the limit is the largest value (True) or the smallest.
LIMITS: dict[str, tuple[str, bool]] = {
    "max_mse": ("mse", True),
    "max_mae": ("mae", True),
    "max_abs": ("max_abs", True),
    "max_relative_mse": ("relative_mse", True),
    "max_relative_mae": ("relative_mae", True),
    "min_correlation": ("correlation", False),
    "min_cosine": ("cosine", False),
}


@dataclass(frozen=True)
class LayerComparison:
    """One layer: its shape and all figures."""

    name: str
    shape: tuple[int, ...]
    metrics: Metrics

    @property
    def label(self) -> str:
        """As the users' scripts judge: the worse of the labels of mse, which has a unit, and correlation."""
        return self._worse(label_mse(self.metrics.mse))

    @property
    def quality(self) -> str:
        """One of QUALITIES: the worse of the labels of relative mse and correlation, whatever the unit of the layer."""
        return self._worse(label_relative_mse(self.metrics.relative_mse))

    def _worse(self, error: str) -> str:
        if self.metrics.correlation is None and self.metrics.mse is not None:  # a constant has none
            return error
        return max(error, label_correlation(self.metrics.correlation), key=QUALITIES.index)

    @property
    def first_nonfinite(self) -> tuple[int, ...] | None:
        """Where the output is first NaN or Inf while the reference is finite: (sample, token, feature)."""
        return place_of(self.metrics.first_nonfinite, self.shape)

    def as_dict(self) -> dict[str, Any]:
        """As JSON: figures in the groups reference, output, difference and percentiles, the others by name."""
        found: dict[str, Any] = {"shape": list(self.shape), "label": self.label, "quality": self.quality}
        for name, value in self.metrics.as_dict().items():
            group, key = GROUPS.get(name, ("", name))
            (found.setdefault(group, {}) if group else found)[key] = finite(value)
        found["difference"]["mean_abs"] = self.metrics.mae
        return found | {"first_nonfinite": self.first_nonfinite and list(self.first_nonfinite)}

    @classmethod
    def from_dict(cls, name: str, found: Mapping[str, Any]) -> Self:
        """The inverse of as_dict. Without loss (max_abs is 0) psnr and sqnr are infinite, which JSON cannot hold."""
        figures = {}
        for field in fields(Metrics):
            group, key = GROUPS.get(field.name, ("", field.name))
            figures[field.name] = found[group][key] if group else found[key]
        shape = tuple(found["shape"])
        if figures["first_nonfinite"] is not None:
            figures["first_nonfinite"] = int(np.ravel_multi_index(figures["first_nonfinite"], shape))
        if figures["max_abs"] == 0:
            figures |= {"psnr": math.inf, "sqnr": math.inf}
        return cls(name, shape, Metrics(**figures))


@dataclass(frozen=True)
class ModeComparison:
    """A mode against its reference: the result of `probe compare`."""

    reference_mode: str
    """By its name in the users' scripts: fp32."""
    compared_mode: str
    """2-1, or with the format if that is not int8: 2-1-fp8_e4m3."""
    recordings: tuple[str, str]
    """The folders of the reference and of the mode."""
    layers: dict[str, LayerComparison]
    notes: tuple[str, ...] = ()
    """Facts that could not be verified."""
    weights: Weights | None = None
    """How much the mode put on a grid; None where the recording does not say."""
    definition: str = ""
    """The mode, with its format, that gives the same bits by definition; its own name if none does."""
    reference_definition: str = ""
    """The same of the reference."""
    is_exact: bool = False
    """Whether equal modes must give the same bits here: both sides were run by probe, uncompiled, on one device."""
    may_be_identical: tuple[str, ...] = ()
    """The layers that the mode or the reference declares float; all, if the two differ only in the order of sums."""

    @property
    def is_equal(self) -> bool:
        """Whether the mode and the reference are equal by definition."""
        return bool(self.definition) and self.definition == self.reference_definition

    @property
    def worst(self) -> tuple[LayerComparison, ...]:
        """All layers, the worst by quality and then by relative mse first."""

        def rank(layer: LayerComparison) -> tuple[int, float]:
            m = layer.metrics
            return QUALITIES.index(layer.quality), math.inf if m.relative_mse is None else m.relative_mse

        return tuple(sorted(self.layers.values(), key=rank, reverse=True))

    @property
    def summary(self) -> dict[str, float | None]:
        """avg_mse, avg_mae and avg_correlation: means over the layers that have the figure."""
        averages: dict[str, float | None] = {}
        for name in ("mse", "mae", "correlation"):
            known = [x for layer in self.layers.values() if (x := getattr(layer.metrics, name)) is not None]
            averages[f"avg_{name}"] = sum(known) / len(known) if known else None
        return averages

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        layers = {name: layer.as_dict() for name, layer in self.layers.items()}
        return asdict(self) | {"layers": layers, "summary": self.summary}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """The inverse of as_dict."""
        try:
            modes, folders = (found["reference_mode"], found["compared_mode"]), tuple(found["recordings"])
            layers = {name: LayerComparison.from_dict(name, layer) for name, layer in found["layers"].items()}
            weights = Weights.from_json(Node("weights", found["weights"])) if found.get("weights") else None
            more = {name: found.get(name, "") for name in ("definition", "reference_definition")}
            more |= {
                "is_exact": bool(found.get("is_exact")),
                "may_be_identical": tuple(found.get("may_be_identical", ())),
            }
            return cls(*modes, folders, layers, tuple(found["notes"]), weights, **more)
        except (KeyError, TypeError, ValueError, DefectError) as problem:
            raise ValueError(
                f"this is no comparison of a mode ({type(problem).__name__}: {problem}). Expected the output of "
                "ModeComparison.as_dict, which probe compare saves."
            ) from None


def compare(
    recording: Recording | Path | str,
    mode: str,
    *,
    reference: str = "fp32",
    reference_recording: Recording | Path | str | None = None,
    layers: Sequence[str | int] | None = None,
    format: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModeComparison:
    """Compare a recorded mode with its reference, in the same recording or in another one.

    `layers` are 0, first, last, all, layer_0 or a regular expression; by default all outputs of layers. A folder is
    read without verifying its sha256: give read_recording(folder) to have every byte checked first.
    """
    here = opened(recording)
    there = here if reference_recording is None else opened(reference_recording)
    sides = find_side(here, mode, format), find_reference(there, reference, format)
    return compare_sides(*sides, layers=None if layers is None else [*map(str, layers)], progress=progress)


def compare_sides(
    side: Side, reference: Side, *, layers: Sequence[str] | None = None, progress: Callable[[str], None] | None = None
) -> ModeComparison:
    """As compare, for two sides."""
    labels = _check_sides(side, reference, layers)
    found = {}
    for place, label in enumerate(labels):
        if progress:
            progress(f"{side.name} {label} ({place + 1} of {len(labels)})")
        comparison = Comparison()
        for band in bands(label, side, reference):
            comparison.update(*band)
            del band
        found[label] = LayerComparison(label, side.shape(label), comparison.metrics())
    notes = dict.fromkeys((*side.recording.notes, *reference.recording.notes))
    folders = (str(reference.recording.folder), str(side.recording.folder))
    return ModeComparison(
        reference.name,
        side.name,
        folders,
        found,
        tuple(notes),
        side.recording.manifest.recipes[side.recipe].weights,
        definition=side.definition,
        reference_definition=reference.definition,
        is_exact=side.is_exact
        and reference.is_exact
        and side.recording.manifest.device == reference.recording.manifest.device,
        may_be_identical=tuple(
            label
            for label in found
            if side.up_to_sums == reference.up_to_sums or label in (*side.float_layers, *reference.float_layers)
        ),
    )


def _check_sides(side: Side, reference: Side, wanted: Sequence[str] | None) -> list[str]:
    """The labels to compare; a ValueError if the sides are not of the same model, input, layers and shapes."""
    here, there = side.recording, reference.recording
    if side.recipe == reference.recipe:
        devices = f" Two devices: probe diff {there.folder} {here.folder}." if here.folder != there.folder else ""
        raise ValueError(f"{side.name} is compared with itself. Give another mode, or another --reference.{devices}")
    a, b = here.manifest, there.manifest
    for what, own, other in (
        ("number of samples", a.tokens.samples, b.tokens.samples),
        ("length of a sample", a.tokens.seqlen, b.tokens.seqlen),
        ("fingerprint of the tokens", a.tokens.fingerprint, b.tokens.fingerprint),
        ("fingerprint of the weights", a.fingerprint, b.fingerprint),
    ):
        if own is not None and other is not None and own != other:
            raise ValueError(
                f"the {what} differs: {own} in {here.folder}, {other} in {there.folder}. Only recordings of one "
                "model on the same tokens can be compared: record both on the same input."
            )
    if other := b.other_configuration(a.configuration):
        raise ValueError(
            f"the configuration of the model differs ({there.folder} -> {here.folder}: {other}). Only recordings of "
            "one model can be compared: record both with the same configuration."
        )
    chosen, expected = pick_labels(side, wanted), pick_labels(reference, wanted)
    for label in sorted(set(chosen) ^ set(expected), key=natural_key):
        has, lacks = (side, reference) if label in chosen else (reference, side)
        raise ValueError(
            f"{label} was recorded of {has.name}, but not of {lacks.name}. Record the same layers of both, or choose "
            "with --layers among those that both have."
        )
    for label in chosen:
        if side.shape(label) != reference.shape(label):
            raise ValueError(
                f"the shape of {label} differs: {list(side.shape(label))} in {side.name}, "
                f"{list(reference.shape(label))} in {reference.name}. They are compared element by element and never "
                "cropped: record both on the same input."
            )
    return chosen


def merged(comparisons: Sequence[ModeComparison]) -> tuple[list[ModeComparison], list[str]]:
    """The comparisons with one reference, those of equal modes as one with all their names: `2-1 = 2-2`.

    And a message for each mode that differs from one to which it is equal by definition; it stays apart.
    """
    found: list[ModeComparison] = []
    names: dict[int, list[str]] = {}
    problems = []
    for one in comparisons:
        alike = [place for place, other in enumerate(found) if one.definition and other.definition == one.definition]
        same = next((place for place in alike if found[place].layers == one.layers), None)
        if same is not None:
            names[same].append(one.compared_mode)
            continue
        if alike and one.is_exact and found[alike[0]].is_exact:
            first = found[alike[0]]
            layers = [name for name in one.layers if one.layers[name] != first.layers.get(name)]
            problems.append(
                f"{one.compared_mode} must be identical to {first.compared_mode}, by definition, and differs in "
                f"{first_few(layers)}: one of the two is wrong"
            )
        names[len(found)] = [one.compared_mode]
        found.append(one)
    return [replace(one, compared_mode=" = ".join(names[place])) for place, one in enumerate(found)], problems


def failures(comparison: ModeComparison, limits: Mapping[str, float] | None = None) -> list[str]:
    """The failures of a comparison, layer by layer: not finite, identical with the reference, or beyond a limit.

    Modes that are equal by definition must be identical instead, and the layers of `may_be_identical` may be.
    `limits` are by the names in LIMITS.
    """
    for name in limits or {}:
        if name not in LIMITS:
            raise ValueError(f"there is no limit {name!r}. Known: {', '.join(LIMITS)}.")
    mode, reference = comparison.compared_mode, comparison.reference_mode
    found = []
    for name, layer in comparison.layers.items():
        m = layer.metrics
        if not m.finite:
            first = f", first at {layer.first_nonfinite}" if layer.first_nonfinite else ""
            left = "" if m.compared else ": nothing was compared"
            found.append(
                f"{name} is not finite: {m.nan_output} NaN and {m.inf_output} Inf in {mode}{first}; "
                f"{m.nan_reference} NaN and {m.inf_reference} Inf in {reference}{left}"
            )
        if comparison.is_equal:
            if comparison.is_exact and not m.identical and m.finite:
                found.append(
                    f"{name} differs from {reference} (mse {m.mse:.6g}), though the two modes are equal by definition: "
                    "one of them is wrong"
                )
        elif m.identical and m.compared and name not in comparison.may_be_identical:
            found.append(f"{name} is identical with {reference}, to the bit: was {mode} applied?")
        for limit, bound in (limits or {}).items():
            figure, at_most = LIMITS[limit]
            value = getattr(m, figure)
            if value is None:
                found.append(f"{name}: {figure} is undefined, and the limit is {bound:g}")
            elif not (value <= bound if at_most else value >= bound):
                found.append(f"{name}: {figure} {value:.6g} is {'above' if at_most else 'below'} the limit {bound:g}")
    return found
