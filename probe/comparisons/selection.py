"""The sides of a comparison: a recipe of a recording, found by its mode; its tensors, and the choice among them."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from probe.models.layers import compile_pattern, match_layers
from probe.recordings import Recording, read_recording
from probe.recordings.script_formats import script_name
from probe.running.modes import CHECKPOINT, equal_to, find_mode, is_mode
from probe.words import near, near_or_first

#: Elements of a tensor that are mapped at a time: 128 MB of float32.
BAND = 2**25


class NotRecordedError(ValueError):
    """A recipe that a recording does not have."""


def opened(recording: Recording | Path | str, *, verify: bool = False) -> Recording:
    """The recording itself, or the one in a folder; with `verify` every byte is checked against the manifest first."""
    return recording if isinstance(recording, Recording) else read_recording(recording, verify=verify)


@dataclass(frozen=True)
class Side:
    """One recipe of a recording. Its tensors go by label (`layer_0`) or by name (`layer_0.output`)."""

    recording: Recording
    recipe: str

    @property
    def name(self) -> str:
        """The name in the users' scripts: 2-1, 2-1-fp8_e4m3, fp32."""
        return script_name(self.mode, self.format)

    @property
    def mode(self) -> str:
        """The mode as the users' scripts name it: 2-1."""
        return script_name(self.recording.manifest.recipes[self.recipe].mode, None)

    @property
    def format(self) -> str | None:
        """The format, int8; None for a float mode."""
        return self.recording.manifest.recipes[self.recipe].format

    @property
    def definition(self) -> str:
        """The recipe that gives the same bits by definition, mode_2_1-int8 for mode 2-2; else this one."""
        recorded = self.recording.manifest.recipes[self.recipe]
        return "-".join(filter(None, (equal_to(recorded.mode), recorded.format)))

    @property
    def up_to_sums(self) -> tuple[str, str | None]:
        """The mode and the format that give the same but for the order of sums, mode_2_1 for mode 0; else its own."""
        recorded = self.recording.manifest.recipes[self.recipe]
        return equal_to(recorded.mode, up_to_sums=True), recorded.format

    @property
    def is_exact(self) -> bool:
        """Whether probe put the mode into effect and ran it uncompiled, so that equal modes give the same bits."""
        recorded = self.recording.manifest.recipes[self.recipe]
        return recorded.applied == "by probe" and not recorded.compiled

    @property
    def float_layers(self) -> tuple[str, ...]:
        """The labels of the layers that its mode declares float."""
        return self.recording.manifest.recipes[self.recipe].float_layers

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors in the order of the data flow."""
        return self.recording.names(self.recipe)

    @cached_property
    def labels(self) -> dict[str, str]:
        """label -> name in the order of the data flow: `layer_0` -> `layer_0.output`."""
        return {label_of(name): name for name in self.names}

    @property
    def layers(self) -> tuple[str, ...]:
        """The labels that are outputs of whole layers."""
        return self.recording.layers(self.recipe)

    def shape(self, name: str) -> tuple[int, ...]:
        """[samples, tokens, ...]."""
        return self.recording.shape(self.recipe, self._full(name))

    def dtype(self, name: str) -> str:
        """The dtype in which the model produced the tensor."""
        return self.recording.dtype(self.recipe, self._full(name))

    def tensor(self, name: str) -> Tensor:
        """The tensor, mapped from disk anew."""
        return self.recording.tensor(self.recipe, self._full(name))

    def flat(self, name: str) -> Tensor:
        """All values in a row, mapped from disk anew."""
        return self.tensor(name).reshape(-1)

    def _full(self, name: str) -> str:
        return name if name in self._known else self.labels[name]

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.names)


def label_of(name: str) -> str:
    """`layer_0` for the tensor `layer_0.output`."""
    return name.removesuffix(".output")


def bands(label: str, *sides: Side) -> Iterator[tuple[Tensor, ...]]:
    """The values of a tensor on every side, about BAND at a time; an .npz cannot be mapped, and is read whole.

    A band ends where a row of the last axis ends.

    A band is unmapped when the last reference to it is gone: delete it before the next one is read.
    """
    shape = sides[0].shape(label)
    count = math.prod(shape)
    mapped = all(side.recording.manifest.layout != "npz" for side in sides)
    step = max(1, BAND // shape[-1]) * shape[-1] if mapped else count
    for start in range(0, count, step):
        yield tuple(side.flat(label)[start : start + step] for side in sides)


def find_side(recording: Recording, mode: str, format: str | None = None) -> Side:
    """The recipe that `2-1`, `mode_2_1`, `2-1-fp8_e4m3` or `mode_2_1-fp8_e4m3` stands for.

    `format` picks one where a mode was recorded in several; a float mode has none to pick.
    """
    mode = find_mode(mode).id if mode.startswith(CHECKPOINT) else mode
    sides = all_sides(recording)
    exact = [side for side in sides if mode in (side.recipe, f"{side.mode}-{side.format}")]
    found = exact or [side for side in sides if mode in (recording.manifest.recipes[side.recipe].mode, side.mode)]
    picked = [side for side in found if format is None or side.format in (format, None)]
    if len(picked) > 1:
        formats = ", ".join(str(side.format) for side in picked)
        raise ValueError(f"{recording.folder} has mode {mode} in {formats}. Say which with --format, or {mode}-FORMAT.")
    if picked:
        return picked[0]
    close = near(mode, (side.name for side in sides if side.name != mode), count=1)
    hint = f" Nearest: {close[0]}." if close else ""
    what = f"mode {mode!r} in format {format!r}" if found else f"mode {mode!r}"
    if is_mode(mode) and recording.manifest.fingerprint:  # else it is no recording of probe's own
        in_format = f" --formats {format}" if format else ""
        hint += f" Record it: probe record --modes {mode}{in_format} --out {recording.folder}"
    raise NotRecordedError(f"{recording.folder} has no {what}. It has: {_names(recording)}.{hint}")


def all_sides(recording: Recording, format: str | None = None) -> list[Side]:
    """Every recipe, in the order of the table of modes; with `format` the float modes and those in it."""
    sides = [Side(recording, recipe) for recipe in recording.recipes]
    return [side for side in sides if format is None or side.format in (format, None)]


def find_reference(recording: Recording, mode: str, format: str | None = None) -> Side:
    """As find_side; the error of a missing reference says how to record it."""
    try:
        return find_side(recording, mode, format)
    except NotRecordedError:
        raise ValueError(
            f"{recording.folder} has no {mode} to compare with. It has: {_names(recording)}. Record it: probe record "
            f"--modes {mode} --out {recording.folder}, or name another with --reference or --reference-dir."
        ) from None


def pick_labels(side: Side, wanted: Sequence[str] | None) -> list[str]:
    """The chosen labels in the order of the data flow, by 0, first, last, all, layer_0, logits or an expression.

    By default the outputs of layers; the embedding, the logits and tensors inside of layers only by name.
    """
    labels = list(side.labels)
    layers = {label: label for label in side.layers}
    found: set[str] = set()
    for pattern in ("all",) if wanted is None else wanted:
        matching = match_layers(pattern, labels, layers, whole=True)
        if not matching:
            raise ValueError(
                f"{pattern!r} is no layer of {side.name} in {side.recording.folder}. {near_or_first(pattern, labels)} "
                "Expected 0, first, last, all, layer_0 or a regular expression."
            )
        found.update(matching)
    return [label for label in labels if label in found]


def place_of(index: int | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """A flat index as an index along every axis."""
    return None if index is None else tuple(int(place) for place in np.unravel_index(index, shape))


def layer_number(label: str) -> int | None:
    """30 for layer_30; None for labels that are no layer."""
    match = re.fullmatch(r"layer_(\d+)", label)
    return int(match[1]) if match else None


def match_names(pattern: str, names: Sequence[str]) -> list[str]:
    """The tensors whose label or name matches a glob; if none, those whose label contains the regular expression."""
    found = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(label_of(name), pattern)]
    return found or [name for name in names if compile_pattern(pattern).search(label_of(name))]


def _names(recording: Recording) -> str:
    return ", ".join(side.name for side in all_sides(recording))
