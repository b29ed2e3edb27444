"""Two recordings side by side: the tensors that both have, what each was made from, and the figures of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from probe.comparisons.devices.layers import LayerDifference, Limits, measure_layer
from probe.comparisons.devices.noise import floor_of, is_layer, own_error_of, unit_of
from probe.comparisons.devices.rows import Look, look
from probe.comparisons.devices.structure import Array, Structure, as_rows, is_residual, measure_structure
from probe.comparisons.selection import Side
from probe.words import LOGITS

Progress = Callable[[str], None]
#: Tensors of the stream that layers read and write, beside the layers: each is made of the one before.
ENDS = ("embedding.output", "final_norm.output", LOGITS)


@dataclass(frozen=True)
class DeviceSide(Side):
    """One recipe of one recording, its tensors by their full names."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """In the order of the data flow."""
        return self.recording.names(self.recipe)

    def dtype_of(self, name: str) -> str:
        """As the model gave it."""
        return self.recording.dtype(self.recipe, name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """[samples, tokens, ...]."""
        return self.recording.shape(self.recipe, name)

    def tensor(self, name: str) -> Tensor:
        """Mapped from disk."""
        return self.recording.tensor(self.recipe, name)


@dataclass(frozen=True, eq=False)
class Seen:
    """One tensor: its figures, how the difference is spread, and what the layer was given."""

    difference: LayerDifference
    structure: Structure
    given: str | None
    residual: bool

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.difference.name


@dataclass(frozen=True)
class Own:
    """Against the float reference: how far the recipe is from it, what its layer adds by itself, and the device."""

    error: float
    added: float
    device_error: float


@dataclass(frozen=True, eq=False)
class Pair:
    """`names` are the tensors that are compared, in the order of the data flow."""

    a: DeviceSide
    b: DeviceSide
    names: tuple[str, ...]

    @cached_property
    def unit(self) -> float:
        """The coarser of the two devices."""
        return max(unit_of({name: side.dtype_of(name) for name in side.names}) for side in (self.a, self.b))

    @cached_property
    def own_error(self) -> float:
        """What the recipe about differs from the float model by, from its format alone."""
        return max(own_error_of(side.format) for side in (self.a, self.b))

    def tensors(self, name: str) -> tuple[Tensor, Tensor]:
        """On A and on B."""
        return self.a.tensor(name), self.b.tensor(name)

    def given(self, name: str) -> str | None:
        """The recorded tensor that this one is made of: the layer's input, else the one before in the stream."""
        own = f"{name.removesuffix('.output')}.input"
        if is_layer(name) and self._has(own):
            return own
        before = [other for other in self._stream if self.a.names.index(other) < self.a.names.index(name)]
        return before[-1] if before else None

    @cached_property
    def _stream(self) -> list[str]:
        return [name for name in self.a.names if (is_layer(name) or name in ENDS) and self._has(name)]

    def measure(
        self,
        names: Sequence[str],
        *,
        rtol: float,
        atol: float,
        limits: Limits,
        own: Mapping[str, Own],
        progress: Progress | None = None,
    ) -> list[Seen]:
        """The figures of every tensor; `own` is what is known from a float reference."""
        found: list[Seen] = []
        errors: dict[str, float] = {}
        for place, name in enumerate(names):
            if progress is not None:
                progress(f"{place} of {len(names)} tensors: {name}")
            a, b = self.tensors(name)
            given = self.given(name)
            bases = self.bases(name, a)
            structure = measure_structure(a, b, bases)
            noise = floor_of(
                self.unit,
                given=self._error_given(given, errors, name),
                part=structure.part,
                channels=a.shape[-1],
                own=own[name].added if name in own else self.own_error,
            )
            dtypes = (self.a.dtype_of(name), self.b.dtype_of(name))
            difference = measure_layer(
                name, a, b, dtypes, structure, rtol=rtol, atol=atol, noise=noise, limits=limits
            )  # fmt: skip
            if name in own:
                difference = replace(
                    difference,
                    recipe_error=own[name].error,
                    device_error=own[name].device_error,
                    recipe_errors=structure.error / own[name].error if own[name].error else None,
                )
            errors[name] = structure.error
            found.append(Seen(difference, structure, given, bases is not None))
        return found

    def bases(self, name: str, a: Tensor) -> tuple[Tensor, Tensor] | None:
        """What the layer adds to, on either side; None if it does not."""
        given = self.given(name)
        if given is None or self.a.shape_of(given) != tuple(a.shape) or not (is_layer(name) or name in ENDS):
            return None
        bases = self.tensors(given)
        some = [some_rows(x) for x in (a, bases[0])]
        finite = np.isfinite(some[0]).all(1) & np.isfinite(some[1]).all(1)
        return bases if is_residual(some[0][finite], some[1][finite]) else None

    def look(self, seen: Seen) -> Look:
        """The values of a tensor, some of them, for patterns."""
        a, b = self.tensors(seen.name)
        given = self.tensors(seen.given) if seen.given else None
        if given is not None and as_rows(given[0]).shape[0] != as_rows(a).shape[0]:
            given = None
        residual = seen.residual and given is not None
        return look(seen.name, a, b, given, residual=residual, unit=self.unit, structure=seen.structure)

    def _has(self, name: str) -> bool:
        return name in self.a.names and name in self.b.names and self.a.shape_of(name) == self.b.shape_of(name)

    def _error_given(self, given: str | None, errors: dict[str, float], name: str) -> float:
        """Of what the tensor was made of; inside a layer, of all that came since."""
        if given is None:
            return max(errors.values(), default=0.0) if not (is_layer(name) or name in ENDS) else 0.0
        if given not in errors:  # not among those that were asked for
            errors[given] = measure_structure(*self.tensors(given), None).error
        if is_layer(name) or name in ENDS:
            return errors[given]
        places = self.a.names
        since = places[places.index(given) : places.index(name)]
        return max(errors[other] for other in since if other in errors)


def against_reference(pair: Pair, reference: DeviceSide, names: Sequence[str]) -> dict[str, Own]:
    """What the recipe (A) and the device (B) differ from the float reference by, tensor by tensor."""
    floats = Pair(reference, pair.a, pair.names)
    found = {}
    for name in names:
        if name in reference.names:
            expected, emulated = floats.tensors(name)
            recipe = measure_structure(expected, emulated, floats.bases(name, expected))
            device = measure_structure(expected, pair.b.tensor(name), None)
            found[name] = Own(recipe.error, recipe.added, device.error)
    return found


def some_rows(tensor: Tensor, *, count: int = 256) -> Array:
    """Rows spread over the tensor, for a quick comparison of many."""
    rows = as_rows(tensor)
    picked = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), count)).round().astype(np.int64))
    return rows[torch.from_numpy(picked)].double().numpy()
