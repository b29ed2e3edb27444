"""Codes: how a quantized tensor is stored, one element per byte, and how codes become numbers again."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from probe.formats import FORMATS, Format
from probe.numerics.blocks import Blocks
from probe.numerics.native import can_read, new_tensor, numba_twin
from probe.numerics.reference import BYTE_BIAS, NAN_BYTE, combined_scale, power
from probe.numerics.rounding import FLOAT_DTYPES, narrow

#: The dtypes of the formats that are plain casts; their codes are the bits of the number.
_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class Quantized:
    """A tensor as codes and scales; `dequantize()` gives what `fake_quantize` gives, bit for bit.

    codes         of the tensor's shape. uint8 for float elements (sign, exponent, mantissa in the low bits),
                  int8 for integers, and the 16-bit pattern as int16 for bf16 and fp16
    scales        one per block: uint8 E8M0 bytes (2^(byte - 127), 255 is NaN) of the MX formats, uint8 E4M3
                  codes of nvfp4, float32 of plain integers, None for the casts
    tensor_scale  nvfp4's second, float32 scale; None for the others
    """

    codes: Tensor
    scales: Tensor | None
    tensor_scale: Tensor | None
    format: Format
    blocks: Blocks
    dtype: torch.dtype
    shape: torch.Size

    @property
    def axis(self) -> int:
        """The axis that the blocks lie along, counted from the front."""
        return self.blocks.axis

    @property
    def block_size(self) -> int:
        """Elements that share a scale."""
        return self.blocks.size

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The grid values in the dtype of the original, or in `dtype`.

        Each is the exact product of element and scale, rounded once and saturating: no finite value becomes Inf.
        """
        target = self.dtype if dtype is None else dtype
        if self.scales is None:
            return narrow(decode(self.codes, self.format), target)
        kernels = self._kernels(target)
        scales = self.scales.reshape(-1) if kernels is not None else self.blocks.split_scales(self.scales)
        if self.format.scale == "e8m0":
            factors = scale_values(scales)
        elif self.tensor_scale is not None:
            factors = combined_scale(decode(scales, FORMATS["fp8_e4m3"]), self.tensor_scale)
        else:
            factors = scales.to(torch.float64)
        if kernels is not None:
            out = new_tensor(self.shape, target)
            kernels.decoded(self.codes.contiguous(), out, self.blocks, _values(self.format), factors)
            return out
        values = narrow(self.blocks.split(decode(self.codes, self.format)) * factors, target)
        return self.blocks.join(values).reshape(self.shape)

    def _kernels(self, dtype: torch.dtype) -> Any:
        """The kernels, where they can do the work; None where torch does it."""
        no_place = dtype == torch.float16 and bool(_values(self.format).isinf().any())  # for the infinite codes
        if no_place or dtype not in FLOAT_DTYPES or not self.codes.numel() or not can_read(self.codes):
            return None
        return numba_twin("probe.numerics.kernels.calls", "values")


def scale_values(bytes_: Tensor) -> Tensor:
    """2^(byte - 127) in float64; byte 255 is NaN."""
    exponents = bytes_.to(torch.int64) - BYTE_BIAS
    return torch.where(exponents == NAN_BYTE - BYTE_BIAS, torch.nan, power(exponents))


@cache
def _values(fmt: Format) -> Tensor:
    """The value of every code, by code; of integers by their byte."""
    if fmt.is_integer:
        return decode(torch.arange(256).to(torch.uint8).view(torch.int8), fmt)
    return torch.tensor([fmt.decode(code) for code in range(2**fmt.bits)], dtype=torch.float64)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Element values, float64, of codes as `encode` makes them."""
    if fmt.bits == 16:
        return codes.view(_CASTS[fmt.name]).to(torch.float64)
    if fmt.is_integer:
        return codes.to(torch.float64) * 2.0**-fmt.mantissa_bits
    return _values(fmt).to(codes.device)[codes.to(torch.int64)]


def encode(elements: Tensor, fmt: Format) -> Tensor:
    """The codes of values that lie on the element grid; NaN becomes the NaN code where there is one."""
    if fmt.bits == 16:
        return elements.to(_CASTS[fmt.name]).view(torch.int16)
    if fmt.is_integer:
        return (elements * 2.0**fmt.mantissa_bits).to(torch.int8)
    top = 2 ** (fmt.bits - 1)
    values = _values(fmt)[:top]  # of the non-negative codes: ascending, the special ones last
    numbers = values[values.isfinite()].to(elements.device)
    magnitude = torch.searchsorted(numbers, elements.to(torch.float64).abs().contiguous())
    magnitude = torch.where(elements.isnan(), top - 1, magnitude)
    codes: Tensor = magnitude + top * torch.signbit(elements)
    return codes.to(torch.uint8)
