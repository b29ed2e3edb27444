"""The call of a layer, taken apart: the activation that flows from layer to layer, and everything else it is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class CannotRestartError(ValueError):
    """The runs of this model cannot be started in the middle; the message says why."""


@dataclass(frozen=True, eq=False)
class Call:
    """What a layer was given. `leaves[place]` is the activation: the first tensor, as everywhere in probe."""

    leaves: list[Any]
    spec: TreeSpec
    place: int

    @classmethod
    def of(cls, layer: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        """Take a call apart; an object in it that could carry state from layer to layer is a CannotRestartError."""
        leaves, spec = tree_flatten((args, kwargs))
        odd = next((leaf for leaf in leaves if not isinstance(leaf, (*_PLAIN, Tensor))), None)
        if odd is not None:
            raise CannotRestartError(f"{layer} is given a {type(odd).__name__}, which may carry more than one tensor")
        place = next((index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        if place is None:
            raise CannotRestartError(f"{layer} is called without a tensor")
        return cls(leaves, spec, place)

    @property
    def activation(self) -> Tensor:
        """The tensor that the layer before gave."""
        found = self.leaves[self.place]
        assert isinstance(found, Tensor)
        return found

    def with_rows(
        self, activation: Tensor, rows: slice, by_row: Sequence[bool]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for `activation`, which takes the place of these rows; what is one per sample is cut likewise."""
        leaves = [
            leaf[rows] if mine and isinstance(leaf, Tensor) else leaf
            for leaf, mine in zip(self.leaves, by_row, strict=True)
        ]
        leaves[self.place] = activation
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def rows_of(self, layer: str, single: "Call", times: int) -> list[bool]:
        """Which tensors hold one row per sample: those that this call, of a batch repeated, has repeated too.

        Everything but the activation must be what it was in the `single` call, or it depends on the layers before.
        """
        if self.spec != single.spec:
            raise CannotRestartError(f"{layer} is not called in the same way when the layers before it are left out")
        found = []
        for index, (mine, first) in enumerate(zip(self.leaves, single.leaves, strict=True)):
            if index == self.place:
                found.append(False)
            elif not isinstance(mine, Tensor):
                found.append(False)
                if mine != first:
                    raise CannotRestartError(f"{layer} is given {first!r} or {mine!r}, as the layers before it ran")
            elif _same(mine, first):
                found.append(False)
            elif times > 1 and _same(mine, torch.cat([first] * times)):
                found.append(True)
            else:
                raise CannotRestartError(
                    f"{layer} is given a second tensor {list(first.shape)} that the layers before it have made"
                )
        return found


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def tensor_of(layer: str, output: Any) -> Tensor:
    """The activation in what a layer returned: the tensor, or the only one, first in a tuple or list."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        extra = next((one for one in output[1:] if one is not None), None)
        if extra is None:
            return output[0]
        raise CannotRestartError(f"{layer} returns a {type(extra).__name__} beside its activation")
    raise CannotRestartError(f"{layer} returns a {type(output).__name__}")


def like(output: Any, tensor: Tensor) -> Any:
    """`tensor` in the place of the activation in what the layer returned."""
    if isinstance(output, Tensor):
        return tensor
    kind = type(output)
    members = [tensor, *output[1:]]
    return kind(*members) if hasattr(output, "_fields") else kind(members)
