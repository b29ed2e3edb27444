"""Grids for tensors inside a model: a format with its scale, as a callable.

Integers need a scale from calibration (`amax`), nvfp4 its second scale, MX formats nothing. NaN and Inf stay visible.
`by_codes` computes the same bits by encoding to stored codes and decoding them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probe.formats import FORMATS
from probe.numerics.integers import (
    IntegerImplementation,
    IntegerParameters,
    dequantize_integer,
    fake_quantize_integer,
    integer_parameters,
    quantize_integer,
)
from probe.numerics.quantize import Implementation, fake_quantize, quantize
from probe.numerics.reference import tensor_scale_of

Grid = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class IntegerGrid:
    """One static symmetric scale for the tensor."""

    parameters: IntegerParameters
    rounding: str = "half_even"
    by_codes: bool = False
    implementation: IntegerImplementation = "auto"

    def __call__(self, x: Tensor) -> Tensor:
        """`x` on the grid."""
        if self.by_codes and not bool(x.isnan().any()):
            codes = quantize_integer(x, self.parameters, rounding=self.rounding)
            return dequantize_integer(codes, self.parameters, x.dtype)
        how = self.implementation
        return fake_quantize_integer(x, parameters=self.parameters, rounding=self.rounding, implementation=how)


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """A block format, along the last axis; nvfp4 with its tensor scale."""

    format: str
    tensor_scale: Tensor | None = None
    by_codes: bool = False
    implementation: Implementation = "auto"

    def __call__(self, x: Tensor) -> Tensor:
        """`x` on the grid."""
        if self.by_codes:
            return quantize(x, self.format, tensor_scale=self.tensor_scale).dequantize()
        return fake_quantize(x, self.format, tensor_scale=self.tensor_scale, implementation=self.implementation)


@dataclass(frozen=True, eq=False)
class SequenceGrid:
    """A scale from the live tensor, one for each sequence [batch, time, channel], whatever the format."""

    format: str
    tensor_scale: Tensor | None = None
    implementation: Implementation = "auto"

    def __call__(self, x: Tensor) -> Tensor:
        """`x` on the grid."""
        lines = x.reshape(x.shape[0], -1)
        size, scale, how = max(1, lines.shape[1]), self.tensor_scale, self.implementation
        return fake_quantize(lines, self.format, block_size=size, tensor_scale=scale, implementation=how).reshape(
            x.shape
        )


def twins_of(grid: IntegerGrid | BlockGrid | SequenceGrid) -> dict[str, Grid]:
    """By implementation, the grid as those compute it that do no work on the CPU: they must give the same bits."""
    if isinstance(grid, IntegerGrid):
        return {"reference": replace(grid, by_codes=False, implementation="reference")}
    plain = replace(grid, by_codes=False) if isinstance(grid, BlockGrid) else grid
    return {"reference": replace(plain, implementation="reference"), "torch": replace(plain, implementation="torch")}


def activation_grid(
    format: str, amax: float | None, *, rounding: str = "half_even", by_codes: bool = False
) -> IntegerGrid | BlockGrid:
    """The grid of an activation; `rounding` is for integers, MX and nvfp4 round half to even."""
    fmt = FORMATS[format]
    if not fmt.needs_calibration:
        return BlockGrid(format, by_codes=by_codes)
    if amax is None:
        raise ValueError(
            f"format {format} needs calibrated scales and none were given. "
            "Make them with probe.calibrate_on(loaded, 'calibration', 16, 256) and pass calibration=."
        )
    if fmt.scale == "e4m3":
        return BlockGrid(format, tensor_scale_of(torch.tensor(amax)), by_codes)
    limit = torch.tensor(amax)
    return IntegerGrid(integer_parameters(-limit, limit, bits=fmt.bits), rounding, by_codes)


def sequence_grid(format: str, amax: float | None) -> SequenceGrid:
    """The dynamic grid of mode 3; nvfp4 keeps its calibrated tensor scale."""
    grid = activation_grid(format, amax)
    return SequenceGrid(format, grid.tensor_scale if isinstance(grid, BlockGrid) else None)


def weight_on_grid(weight: Tensor, format: str) -> Tensor:
    """A weight on the grid, with scales from the weight: one for integers, else one per block along the last axis."""
    return fake_quantize(weight, format)
