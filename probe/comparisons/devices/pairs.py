"""Two recordings side by side: whether their inputs agree, the tensors that both have, and the figures of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from probe.comparisons.devices.differences import (
    Array,
    LayerDifference,
    ReferenceErrors,
    Structure,
    Tolerances,
    as_rows,
    is_residual,
    measure_difference,
    measure_structure,
    sample_rows,
)
from probe.comparisons.devices.noise import floor_of, is_layer, own_error_of, unit_of
from probe.comparisons.selection import Side
from probe.recordings import Recording
from probe.words import LOGITS

Progress = Callable[[str], None]
#: Tensors of the stream that layers read and write, beside the layers: each is made of the one before.
ENDS = ("embedding.output", "final_norm.output", LOGITS)
#: Rows of a tensor that are read for a quick comparison of many.
SOME = 256


@dataclass(frozen=True)
class Inputs:
    """Whether two recordings are of the same inputs, and the reason for saying so."""

    status: Literal["same", "different", "unknown"]
    reason: str


def compare_inputs(a: Recording, b: Recording, *, names: tuple[str, str] = ("A", "B")) -> Inputs:
    """By the number of samples, their length, and the token ids or their fingerprint. Nothing is cropped."""
    first, second = a.manifest.tokens, b.manifest.tokens
    for what, x, y in (
        ("samples", first.samples, second.samples),
        ("tokens in a sample", first.seqlen, second.seqlen),
    ):
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
    order = ""
    if torch.equal(torch.unique(ids, dim=0), torch.unique(others, dim=0)):
        order = "; the samples are the same ones in another order"
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
    residual: bool
    """Whether the layer adds to what it was given."""

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.difference.name

    @property
    def label(self) -> str:
        """`layer_0` for `layer_0.output`."""
        return self.difference.label


@dataclass(frozen=True, eq=False)
class Pair:
    """One recipe on two devices."""

    a: Side
    b: Side

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors that both have, in the order of the data flow."""
        return tuple(name for name in self.a.names if name in self.b.names)

    @cached_property
    def stream(self) -> tuple[str, ...]:
        """Embedding, layers, final norm and logits that both have in one shape: each is made of the one before."""
        return tuple(n for n in self.names if is_in_stream(n) and self.a.shape(n) == self.b.shape(n))

    @cached_property
    def unit(self) -> float:
        """The relative error of one rounding on the coarser of the two devices."""
        return max(unit_of({name: side.dtype(name) for name in side.names}) for side in (self.a, self.b))

    @cached_property
    def own_error(self) -> float:
        """About how far the recipe is from the float model, from its format alone; 0 in float."""
        return max(own_error_of(side.format) for side in (self.a, self.b))

    def tensors(self, name: str) -> tuple[Tensor, Tensor]:
        """On A and on B."""
        return self.a.tensor(name), self.b.tensor(name)

    def given(self, name: str) -> str | None:
        """The recorded tensor that this one is made of: the layer's input, else the one before in the stream."""
        own = f"{name.removesuffix('.output')}.input"
        if is_layer(name) and own in self.names and self.a.shape(own) == self.b.shape(own):
            return own
        before = [other for other in self.stream if self.a.names.index(other) < self.a.names.index(name)]
        return before[-1] if before else None

    def bases(self, name: str, a: Tensor) -> tuple[Tensor, Tensor] | None:
        """The tensors that the layer adds to, on either side; None if it does not. `a` is the tensor on A."""
        given = self.given(name)
        if given is None or self.a.shape(given) != tuple(a.shape) or not is_in_stream(name):
            return None
        bases = self.tensors(given)
        output, base = some_rows(a), some_rows(bases[0])
        finite = np.isfinite(output).all(1) & np.isfinite(base).all(1)
        return bases if is_residual(output[finite], base[finite]) else None

    def measure(
        self,
        names: Sequence[str],
        tolerances: Tolerances,
        *,
        reference: Mapping[str, ReferenceErrors] | None = None,
        progress: Progress | None = None,
    ) -> list[MeasuredTensor]:
        """The figures of the tensors `names`; `reference` is what is known from a float reference."""
        found: list[MeasuredTensor] = []
        errors: dict[str, float] = {}  # of every tensor so far, and of those that they were made of
        for place, name in enumerate(names):
            if progress is not None:
                progress(f"{place} of {len(names)} tensors: {name}")
            a, b = self.tensors(name)
            given, bases = self.given(name), self.bases(name, a)
            if given is not None and given not in errors:
                errors[given] = measure_structure(*self.tensors(given), None).error
            structure = measure_structure(a, b, bases)
            against = (reference or {}).get(name)
            noise = floor_of(
                self.unit,
                given=self._error_given(name, given, errors),
                part=structure.part,
                channels=a.shape[-1],
                own=against.recipe_added if against else self.own_error,
            )
            dtypes = (self.a.dtype(name), self.b.dtype(name))
            difference = measure_difference(
                name, a, b, structure, dtypes=dtypes, tolerances=tolerances, noise=noise, errors=against
            )
            errors[name] = structure.error
            found.append(MeasuredTensor(difference, structure, given, bases is not None))
        return found

    def _error_given(self, name: str, given: str | None, errors: Mapping[str, float]) -> float:
        """The error of what the tensor was made of; inside of a layer, the largest since."""
        if is_in_stream(name):
            return errors[given] if given is not None else 0.0
        if given is None:
            return max(errors.values(), default=0.0)
        places = self.a.names
        since = places[places.index(given) : places.index(name)]
        return max(errors[other] for other in since if other in errors)


def is_in_stream(name: str) -> bool:
    """Whether a tensor is one of those that layers read and write."""
    return is_layer(name) or name in ENDS


def reference_errors(pair: Pair, reference: Side, names: Sequence[str]) -> dict[str, ReferenceErrors]:
    """How far the recipe (A) and the device (B) are from the float reference, tensor by tensor."""
    floats = Pair(reference, pair.a)
    found = {}
    for name in names:
        if name in reference.names:
            expected, emulated = floats.tensors(name)
            recipe = measure_structure(expected, emulated, floats.bases(name, expected))
            device = measure_structure(expected, pair.b.tensor(name), None)
            found[name] = ReferenceErrors(recipe.error, recipe.added, device.error)
    return found


def some_rows(tensor: Tensor, *, count: int = SOME) -> Array:
    """Rows spread evenly over the tensor, in float64."""
    return sample_rows(as_rows(tensor), count)
