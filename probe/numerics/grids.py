"""Grids for tensors inside a model: a format with its scale, as a callable; and the corner values of a grid.

Integers need a scale from calibration (`amax`), nvfp4 its second scale, MX formats nothing. NaN and Inf stay visible.
`by_codes` computes the same bits by encoding to stored codes and decoding them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from probe.formats import FORMATS, Format
from probe.numerics.integers import (
    IntegerParameters,
    dequantize_integer,
    fake_quantize_integer,
    integer_parameters,
    quantize_integer,
)
from probe.numerics.quantize import fake_quantize, quantize
from probe.numerics.reference import tensor_scale_of

Grid = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class IntegerGrid:
    """One static symmetric scale for the tensor."""

    parameters: IntegerParameters
    rounding: str = "half_even"
    by_codes: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """`x` on the grid."""
        if self.by_codes and not bool(x.isnan().any()):
            codes = quantize_integer(x, self.parameters, rounding=self.rounding)
            return dequantize_integer(codes, self.parameters, x.dtype)
        return fake_quantize_integer(x, parameters=self.parameters, rounding=self.rounding)


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """A block format, along the last axis; nvfp4 with its tensor scale."""

    format: str
    tensor_scale: Tensor | None = None
    by_codes: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """`x` on the grid."""
        if self.by_codes:
            return quantize(x, self.format, tensor_scale=self.tensor_scale).dequantize()
        return fake_quantize(x, self.format, tensor_scale=self.tensor_scale)


@dataclass(frozen=True, eq=False)
class SequenceGrid:
    """A scale from the live tensor, one for each sequence [batch, time, channel], whatever the format."""

    format: str
    tensor_scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` on the grid."""
        lines = x.reshape(x.shape[0], -1)
        size = max(1, lines.shape[1])
        return fake_quantize(lines, self.format, block_size=size, tensor_scale=self.tensor_scale).reshape(x.shape)


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


@lru_cache(maxsize=512)
def corner_values(format: Format, width: int, *, amax: float | None = None, per_sequence: bool = False) -> Tensor:
    """An activation [1, token, channel] of inputs that text seldom or never produces; `width` counts the channels.

    Ties, both ends of the grid and values beyond them, subnormals and half of the smallest, blocks of unlike size side
    by side. A fault that shows only there moves no figure of a layer until a text happens to reach it.

    `amax` is the calibrated one, which integers and nvfp4 need. With `per_sequence` the scale comes from the tensor.
    The tensor is cached: copy it before changing it.
    """
    elements = _integer_corners(format) if format.scale == "float32" else _block_corners(format)
    if per_sequence:
        return _rows(elements.clamp(-format.max, format.max), width).unsqueeze(0) / 8
    if format.scale == "float32":
        assert amax is not None
        scale = (torch.tensor(amax).double() / format.max).float()
        return (_rows(elements, width) * scale).unsqueeze(0)
    rows = _rows(elements, width)
    starts = torch.arange(0, width, format.block_size or width)
    rows[:, starts] = format.max  # so that the scale of every block is known
    rows[::2, starts] = 2.0 ** (format.max_exponent + 1) * (1 - 2.0**-10)  # so that the following values may saturate
    exponents = torch.arange(rows.shape[0]).remainder(5) - 2
    scale = torch.ldexp(torch.ones(rows.shape[0], 1), exponents[:, None])
    if format.scale == "e4m3":
        assert amax is not None
        scale = scale * amax / 64
    return (rows * scale).unsqueeze(0)


def _integer_corners(format: Format) -> Tensor:
    """Every code and four beyond either end, with values just beside the ties."""
    top = int(format.max)
    codes = torch.arange(-top - 4, top + 5).float()
    beside = torch.cat([codes + 0.49, codes - 0.49, codes])
    return torch.cat([torch.tensor([0.5, -0.5, 0.0, 1e3, -1e3, top + 1e4]), beside])


def _block_corners(format: Format) -> Tensor:
    """Every value of the element, the ties between them and values just beside the ties, in both signs."""
    codes = range(1 << (format.bits - 1))
    levels = torch.tensor(sorted({abs(format.decode(c)) for c in codes if abs(format.decode(c)) <= format.max}))
    ties = (levels[1:] + levels[:-1]) / 2
    beyond = torch.tensor([format.max * (1 + 2.0**-8), 2.0 ** (format.max_exponent + 1) * (1 - 2.0**-9)])
    positive = torch.cat([levels, ties, ties * (1 + 2.0**-12), ties * (1 - 2.0**-12), beyond])
    return torch.cat([positive, -positive]).float()


def _rows(values: Tensor, width: int) -> Tensor:
    """Rows of this width, filled with the values in turn; each row starts at another value."""
    count = max(4, -(-values.numel() // width))
    return torch.stack([values.roll(-row * width).repeat(-(-width // values.numel()))[:width] for row in range(count)])
