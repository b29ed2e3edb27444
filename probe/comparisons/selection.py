"""What is compared: one recipe of a recording, found by how its mode is called, and its tensors band by band."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from probe.recordings import Recording
from probe.recordings.script_formats import script_name
from probe.words import near, near_or_first

#: Elements of a tensor that are mapped at a time: 128 MB of float32.
BAND = 2**25


class NotRecordedError(ValueError):
    """A recipe that a recording does not have."""


@dataclass(frozen=True)
class Side:
    """One recipe of a recording."""

    recording: Recording
    recipe: str

    @property
    def name(self) -> str:
        """As the users' scripts call it: 2-1, 2-1-fp8_e4m3, fp32."""
        return script_name(self.mode, self.format)

    @property
    def mode(self) -> str:
        """2-1."""
        return script_name(self.recording.manifest.recipes[self.recipe].mode, None)

    @property
    def format(self) -> str | None:
        """int8, or None of a float mode."""
        return self.recording.manifest.recipes[self.recipe].format

    @property
    def labels(self) -> dict[str, str]:
        """Of what can be compared, in the order of the data flow: label -> tensor. `layer_0` is layer_0.output."""
        return {name.removesuffix(".output"): name for name in self.recording.names(self.recipe)}

    @property
    def layers(self) -> tuple[str, ...]:
        """The labels that are outputs of whole layers."""
        return self.recording.layers(self.recipe)

    def shape(self, label: str) -> tuple[int, ...]:
        """[samples, tokens, ...]."""
        return self.recording.shape(self.recipe, self.labels[label])

    def flat(self, label: str) -> Tensor:
        """All values in a row, mapped anew."""
        return self.recording.tensor(self.recipe, self.labels[label]).reshape(-1)


def bands(label: str, *sides: Side) -> Iterator[tuple[Tensor, ...]]:
    """The values of a tensor on every side, some at a time; an .npz cannot be mapped, and comes whole.

    A band is unmapped when the last reference to it is gone: delete it before the next is asked for.
    """
    names = [side.labels[label] for side in sides]
    count = math.prod(sides[0].shape(label))
    mapped = all(side.recording.manifest.layout != "npz" for side in sides)
    step = BAND if mapped else count
    for start in range(0, count, step):
        stop = start + step
        yield tuple(
            side.recording.tensor(side.recipe, name).reshape(-1)[start:stop]
            for side, name in zip(sides, names, strict=True)
        )


def find_side(recording: Recording, mode: str, format: str | None = None) -> Side:
    """The recipe that `2-1`, `mode_2_1`, `2-1-fp8_e4m3` or `mode_2_1-fp8_e4m3` stands for.

    `format` picks one where a mode was recorded in several; a float mode has none to pick.
    """
    sides = [Side(recording, recipe) for recipe in recording.recipes]
    exact = [side for side in sides if mode in (side.recipe, f"{side.mode}-{side.format}")]
    found = exact or [side for side in sides if mode in (recording.manifest.recipes[side.recipe].mode, side.mode)]
    picked = [side for side in found if format is None or side.format in (format, None)]
    if len(picked) > 1:
        formats = ", ".join(str(side.format) for side in picked)
        raise ValueError(f"{recording.folder} has mode {mode} in {formats}. Say which with --format, or {mode}-FORMAT.")
    if picked:
        return picked[0]
    close = near(mode, (name for name in _names(recording) if name != mode), count=1)
    hint = f" Nearest: {close[0]}." if close else ""
    what = f"mode {mode!r} in format {format!r}" if found else f"mode {mode!r}"
    raise NotRecordedError(f"{recording.folder} has no {what}. It has: {_told(recording)}.{hint}")


def all_sides(recording: Recording, format: str | None = None) -> list[Side]:
    """Every recipe, in the order of the table of modes; with `format` the float modes and those in it."""
    sides = [Side(recording, recipe) for recipe in recording.recipes]
    return [side for side in sides if format is None or side.format in (format, None)]


def find_reference(recording: Recording, mode: str, format: str | None = None) -> Side:
    """As find_side; where there is none, how to get it."""
    try:
        return find_side(recording, mode, format)
    except NotRecordedError:
        raise ValueError(
            f"{recording.folder} has no {mode} to compare with. It has: {_told(recording)}. Record it: probe record "
            f"--modes {mode} --out {recording.folder}, or name another with --reference or --reference-dir."
        ) from None


def pick_labels(side: Side, wanted: Sequence[str] | None) -> list[str]:
    """What is asked for, in the order of the data flow: 0, first, last, all, layer_0, logits or an expression.

    By default the outputs of layers; the embedding, the logits and what was tapped inside only by name.
    """
    labels = list(side.labels)
    found: list[str] = []
    for one in ("all",) if wanted is None else wanted:
        some = _matching(one, labels, side.layers)
        if not some:
            raise ValueError(
                f"{one!r} is no layer of {side.name} in {side.recording.folder}. {near_or_first(one, labels)} "
                "Expected 0, first, last, all, layer_0 or a regular expression."
            )
        found += some
    return [label for label in labels if label in found]


def layer_number(label: str) -> int | None:
    """30 of layer_30."""
    match = re.fullmatch(r"layer_(\d+)", label)
    return int(match[1]) if match else None


def _matching(one: str, labels: Sequence[str], layers: Sequence[str]) -> list[str]:
    special = {"all": list(layers), "first": list(layers[:1]), "last": list(layers[-1:])}
    if one in special:
        return special[one]
    if one.isdecimal():
        return [label for label in layers if layer_number(label) == int(one)]
    if one in labels:
        return [one]
    try:
        pattern = re.compile(one)
    except re.error as problem:
        raise ValueError(f"the layer pattern {one!r} is no regular expression ({problem}).") from None
    return [label for label in labels if pattern.fullmatch(label)]


def _names(recording: Recording) -> list[str]:
    return [Side(recording, recipe).name for recipe in recording.recipes]


def _told(recording: Recording) -> str:
    return ", ".join(_names(recording))
