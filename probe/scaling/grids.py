"""A recommended scale as something that can be called: for tensors, and for the sites and weights of a mode."""

from dataclasses import dataclass

import torch
from torch import Tensor

from probe.numerics.blocks import Blocks
from probe.numerics.fast import round_elements
from probe.numerics.grids import Grid, IntegerGrid
from probe.numerics.integers import IntegerParameters
from probe.numerics.quantize import fake_quantize, round_to
from probe.numerics.reference import power
from probe.numerics.rounding import narrow
from probe.scaling import blockwise
from probe.scaling.advice import recommend
from probe.scaling.figures import Level
from probe.scaling.levels import element_format, largest_exponent
from probe.scaling.results import ScalingResult


@dataclass(frozen=True)
class ScaledGrid:
    """One scale for the tensor: round_to(x / scale) * scale, the quotient in float64."""

    format: str
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """`x` on the grid."""
        return narrow(round_to(x.double() / self.scale, self.format) * self.scale, x.dtype)


@dataclass(frozen=True)
class ShiftedGrid:
    """Blocks whose exponents, as a scale rule has them, are all moved by the same number."""

    format: str
    rule: str
    shift: int
    axis: int = -1
    block_size: int = 32
    scale_bits: int = 8

    def __call__(self, x: Tensor) -> Tensor:
        """`x` on the grid."""
        fmt, limit = element_format(self.format, "block"), largest_exponent(self.scale_bits)
        if self.shift == 0 and self.scale_bits == 8:
            return fake_quantize(x, fmt.name, axis=self.axis, block_size=self.block_size, scale_rule=self.rule)
        blocks = Blocks.of(x, self.axis, self.block_size)
        rows = blocks.split(x).to(torch.float32)
        exponent = blockwise.rule_exponents(rows, (self.rule,), fmt, limit)[self.rule]
        scale = power((exponent + self.shift).clamp(-limit, limit))
        values = round_elements(rows.double() / scale, fmt, "half_even", None) * scale
        return blocks.join(narrow(values, x.dtype)).reshape(x.shape)


def grid_of(result: ScalingResult, level: Level | None = None) -> Grid:
    """The grid of a level, by default the recommended one: a function tensor -> tensor, as a site of a mode takes it.

    For int8 with one scale it is the static grid of the quantizers: probe.IntegerParameters with that scale.
    """
    level = recommend(result).level if level is None else level
    if level.rule is not None:
        assert result.block_size is not None
        assert result.axis is not None
        shift = int(level.scale_exponent)
        return ShiftedGrid(result.format, level.rule, shift, result.axis, result.block_size, result.scale_bits)
    if result.element.scale == "float32":
        scale = torch.tensor(level.scale, dtype=torch.float32)
        return IntegerGrid(IntegerParameters(scale, torch.zeros((), dtype=torch.int32), result.element.bits, True))
    return ScaledGrid(result.format, level.scale)


def amax_of(result: ScalingResult, level: Level | None = None) -> float:
    """The amax that gives a static int8 grid the scale of a level: what a calibration would hold for it."""
    level = recommend(result).level if level is None else level
    if level.rule is not None:
        raise ValueError("blocks take their scales from the live tensor and have no amax. Use grid_of(result) instead.")
    return result.element.max * level.scale
