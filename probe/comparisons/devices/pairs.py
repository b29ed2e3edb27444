"""Two recordings side by side: whether their inputs agree, the tensors that both have, and the figures of each.

The noise bound of a tensor is how far two sound devices may differ there: by rounding, by the order of sums, and by
the effect of both on a layer. What a layer adds differs between them, relative to what it adds, by less than

    bound^2 = (GAIN * given)^2 + (ROUNDINGS * unit)^2 + (RESIDUAL * unit / part)^2

    given   the relative difference of the layer's input
    unit    the largest relative error of one rounding to the coarser of the two dtypes: 2^-24 for float32
    part    how much of the tensor the layer added: the rounding of the sum is relative to all of it

float32 has the order of sums in place of ROUNDINGS: SUMS at 128 channels, growing with the root of their number. On
a grid a difference in the last bit can flip a rounding, and a flip the next: the bound of a recipe is at least its
own difference from the float model.

Sound runs stay at 0.4 of the bound or below in bfloat16, float16 and float32 (tests/comparisons/devices).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from probe.comparisons.devices.differences import (
    LEAST_PART,
    SUFFICIENT,
    LayerDifference,
    ReferenceErrors,
    Structure,
    Tolerances,
    measure_difference,
    measure_structure,
    sample_rows,
)
from probe.comparisons.selection import Side
from probe.formats import FORMATS
from probe.recordings import Recording
from probe.words import LOGITS

Progress = Callable[[str], None]
#: Tensors that layers read and write, beside the outputs of layers; each is made of the one before.
EMBEDDING = "embedding.output"
ENDS = (EMBEDDING, "final_norm.output", LOGITS)
#: Half a step, relative: 2^-(mantissa bits + 1).
UNITS = {
    name: torch.finfo(getattr(torch, name)).eps / 2
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
}
GAIN = 4.0
ROUNDINGS = 8.0
RESIDUAL = 2.0
SUMS = 16.0
#: An integer with one scale for a whole tensor spends this many of its steps on outliers.
_OUTLIERS = 16.0


@dataclass(frozen=True)
class Inputs:
    """Whether two recordings are of the same inputs, and how that is known."""

    status: Literal["same", "different", "unknown"]
    reason: str


def compare_inputs(a: Recording, b: Recording, *, names: tuple[str, str] = ("A", "B")) -> Inputs:
    """By the number of samples, their length, and the token ids or their fingerprint. Nothing is cropped."""
    first, second = a.manifest.tokens, b.manifest.tokens
    for what, x, y in (("samples", first.samples, second.samples), ("tokens in a sample", first.seqlen, second.seqlen)):
        if x != y:
            return Inputs("different", f"{names[0]} has {x} {what}, {names[1]} has {y}")
    ids, others = a.input_ids(), b.input_ids()
    if ids is not None and others is not None:
        return _compare_ids(ids, others, names)
    if first.fingerprint is not None and second.fingerprint is not None:
        if first.fingerprint == second.fingerprint:
            return Inputs("same", f"the fingerprints of the token ids agree: {first.fingerprint}")
        prints = f"{first.fingerprint} on {names[0]}, {second.fingerprint} on {names[1]}"
        return Inputs("different", f"the fingerprints of the token ids differ: {prints}")
    silent = [name for name, tokens in zip(names, (first, second), strict=True) if tokens.fingerprint is None]
    return Inputs("unknown", f"{' and '.join(silent)} did not keep the token ids: whether inputs agree is not known")


def _compare_ids(ids: Tensor, others: Tensor, names: tuple[str, str]) -> Inputs:
    if ids.shape != others.shape:
        shapes = f"{list(ids.shape)} on {names[0]}, {list(others.shape)} on {names[1]}"
        return Inputs("different", f"the token ids have other shapes: {shapes}")
    differ = (ids != others).nonzero()
    if not len(differ):
        return Inputs("same", f"the token ids agree: {ids.shape[0]} samples of {ids.shape[1]}")
    sample, position = (int(x) for x in differ[0])
    same = torch.equal(torch.unique(ids, dim=0), torch.unique(others, dim=0))
    order = "; the samples are the same ones in another order" if same else ""
    return Inputs(
        "different",
        f"{len(differ)} of {ids.numel()} token ids differ, the first in sample {sample} at position {position}: "
        f"{int(ids[sample, position])} on {names[0]}, {int(others[sample, position])} on {names[1]}{order}",
    )


@dataclass(frozen=True, eq=False)
class MeasuredTensor:
    """One tensor: its figures, the spread of the difference, and the tensor that it was made of."""

    difference: LayerDifference
    structure: Structure
    given: str | None
    given_error: float
    """The relative difference of that tensor; 0 without one."""
    residual: bool
    """Whether the layer adds to its input."""

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.difference.name


@dataclass(frozen=True, eq=False)
class Pair:
    """One recipe on two devices."""

    a: Side
    b: Side

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors that both have, in the order of the data flow."""
        on_b = set(self.b.names)
        return tuple(name for name in self.a.names if name in on_b)

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each tensor that both have stands in the data flow."""
        return {name: place for place, name in enumerate(self.names)}

    @property
    def alone(self) -> dict[str, list[str]]:
        """The tensors that only A has, and only B."""
        return {what: [n for n in side.names if n not in self.places] for what, side in (("A", self.a), ("B", self.b))}

    @cached_property
    def stream(self) -> tuple[str, ...]:
        """Embedding, layers, final norm and logits that both have in one shape: each is made of the one before."""
        return tuple(n for n in self.names if is_in_stream(n) and self.a.shape(n) == self.b.shape(n))

    @cached_property
    def unit(self) -> float:
        """The relative error of one rounding on the coarser of the two devices."""
        return max(rounding_unit({name: side.dtype(name) for name in side.names}) for side in (self.a, self.b))

    @cached_property
    def recipe_error(self) -> float:
        """About how far the recipe is from the float model, from its format alone; 0 in float."""
        return max(format_error(side.format) for side in (self.a, self.b))

    def tensors(self, name: str) -> tuple[Tensor, Tensor]:
        """On A and on B."""
        return self.a.tensor(name), self.b.tensor(name)

    def given(self, name: str) -> str | None:
        """The recorded tensor that this one is made of: the layer's input, else the one before in the stream."""
        own = f"{name.removesuffix('.output')}.input"
        if is_layer(name) and own in self.places and self.a.shape(own) == self.b.shape(own):
            return own
        before = bisect_left(self.stream, self.places[name], key=self.places.__getitem__)
        return self.stream[before - 1] if before else None

    def bases(self, name: str, a: Tensor) -> tuple[Tensor, Tensor] | None:
        """The inputs on both sides if the layer adds to its input, else None. `a` is the tensor on A.

        A layer is taken to be input + something if subtracting its input leaves less.
        """
        given = self.given(name)
        if given is None or self.a.shape(given) != tuple(a.shape) or not is_in_stream(name):
            return None
        bases = self.tensors(given)
        output, base = sample_rows(a), sample_rows(bases[0])
        good = np.isfinite(output) & np.isfinite(base)
        scale = float(np.abs(output[good]).max(initial=0.0)) or 1.0  # squares stay within float64
        output, base = output[good] / scale, base[good] / scale
        return bases if np.square(output - base).sum() < np.square(output).sum() else None

    def measure(
        self,
        names: Sequence[str],
        tolerances: Tolerances,
        *,
        reference: Mapping[str, ReferenceErrors],
        progress: Progress | None,
    ) -> list[MeasuredTensor]:
        """The figures of the tensors `names`; `reference` has their differences from a float reference, if any."""
        measured: list[MeasuredTensor] = []
        errors: dict[str, float] = {}  # of every tensor so far, and of those that they were made of
        for place, name in enumerate(names):
            if progress is not None:
                progress(f"{place} of {len(names)} tensors: {name}")
            a, b = self.tensors(name)
            given, bases = self.given(name), self.bases(name, a)
            if given is not None and given not in errors:
                errors[given] = measure_structure(*self.tensors(given), None).error
            structure, against = measure_structure(a, b, bases), reference.get(name)
            error = self._error_given(name, given, errors)
            measured_error = against.recipe_added if against else None
            least = self.recipe_error if measured_error is None else measured_error
            noise = noise_bound(self.unit, given=error, part=structure.part, channels=a.shape[-1], at_least=least)
            dtypes = (self.a.dtype(name), self.b.dtype(name))
            difference = measure_difference(
                name, a, b, structure, dtypes=dtypes, tolerances=tolerances, noise=noise, errors=against
            )
            errors[name] = structure.error
            given_error = errors[given] if given is not None else 0.0
            measured.append(MeasuredTensor(difference, structure, given, given_error, bases is not None))
        return measured

    def _error_given(self, name: str, given: str | None, errors: Mapping[str, float]) -> float:
        """The error of the tensor that `name` was made of; inside of a layer, the largest error since then."""
        if is_in_stream(name):
            return errors[given] if given is not None else 0.0
        if given is None:
            return max(errors.values(), default=0.0)
        since = self.names[self.places[given] : self.places[name]]
        return max(errors[other] for other in since if other in errors)


def is_layer(name: str) -> bool:
    """Whether a tensor is the output of a whole layer: `layer_3.output`."""
    return name.startswith("layer_") and name.count(".") == 1 and name.endswith(".output")


def is_in_stream(name: str) -> bool:
    """Whether a tensor is one of those that layers read and write."""
    return is_layer(name) or name in ENDS


def reference_errors(pair: Pair, reference: Side, names: Iterable[str]) -> Iterator[tuple[str, ReferenceErrors]]:
    """How far the recipe (A) and the device (B) are from the float reference, tensor by tensor."""
    floats = Pair(reference, pair.a)
    for name in names:
        if name in floats.places:
            expected, emulated = floats.tensors(name)
            recipe = measure_structure(expected, emulated, floats.bases(name, expected))
            device = measure_structure(expected, pair.b.tensor(name), None)
            judged = recipe.compared >= SUFFICIENT
            yield (
                name,
                ReferenceErrors(
                    recipe=recipe.error if judged else None,
                    recipe_added=recipe.added if judged else None,
                    device=device.error if device.compared >= SUFFICIENT else None,
                ),
            )


def rounding_unit(dtypes: Mapping[str, str]) -> float:
    """The unit of a device: the coarser of its dtypes up to the first layer and of the usual dtype of its layers.

    `dtypes` are by tensor in the order of the data flow. One narrow layer in the middle does not make a device narrow.
    """
    units = [UNITS[dtype] for dtype in dtypes.values()]
    layers = [place for place, name in enumerate(dtypes) if is_layer(name)]
    if not layers:
        return max(units)
    usual = sorted(units[place] for place in layers)[len(layers) // 2]
    return max(*units[: layers[0] + 1], usual)


def noise_bound(unit: float, *, given: float, part: float, channels: int, at_least: float = 0.0) -> float:
    """How far what a layer adds may differ between sound devices, relative to what it adds."""
    roundings = ROUNDINGS * unit
    if unit <= UNITS["float32"]:
        roundings = SUMS * unit * math.sqrt(max(1.0, channels / 128))
    residual = RESIDUAL * unit / max(part, LEAST_PART)
    return max(at_least, math.hypot(GAIN * given, roundings, residual))


def format_error(format: str | None) -> float:
    """About how far a layer of a recipe is from the float layer, from its format alone; 0 in float."""
    if format is None or format not in FORMATS:
        return 0.0
    row = FORMATS[format]
    step = 2.0 ** -(row.mantissa_bits + 1) if not row.is_integer else 2.0 ** -(row.bits - 1)
    return min(0.5, 2 * step * (_OUTLIERS / 2 if row.is_integer and row.block_size is None else 2))
