"""The kernels for tensors: their bits as flat arrays, the layout of their blocks, their work on threads."""

from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from probe.formats import FORMATS, Format
from probe.numerics.blocks import Blocks
from probe.numerics.fast import FLOAT32, FLOAT64, Plan, plan_for
from probe.numerics.integers import SMALLEST_SCALE
from probe.numerics.kernels import decoding, elements, integers, mx, nvfp4
from probe.numerics.kernels.bits import BFLOAT16, FLOAT16, Bits
from probe.numerics.kernels.tiles import BESIDE, TILE, Layout
from probe.numerics.native import in_threads, new_tensor
from probe.numerics.reference import BYTE_BIAS, SMALLEST_BLOCK_SCALE

_ROUNDINGS = {
    "half_even": None,
    "half_away": elements.HALF_AWAY,
    "toward_zero": elements.TOWARD_ZERO,
    "floor": elements.FLOOR,
    "stochastic": elements.STOCHASTIC,
}
#: Elements whose largest one is found at a time, where all of a tensor shares a scale.
_STRETCH = 8192
_KINDS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_INT32, _INT64, _NO_BYTES = np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.uint8)


def bits_of(x: Tensor) -> Bits:
    """The bits of a contiguous tensor as a flat array that shares its memory."""
    if x.dtype == torch.float32:
        return x.numpy().reshape(-1).view(np.int32)
    if x.dtype == torch.float64:
        return x.numpy().reshape(-1).view(np.int64)
    return x.view(torch.int16).numpy().reshape(-1)


def _bytes_of(codes: Tensor) -> elements.Bytes:
    return codes.view(torch.uint8).numpy().reshape(-1)


@lru_cache(maxsize=1024)
def layout_of(shape: tuple[int, ...], axis: int, size: int) -> tuple[Layout, int]:
    """Where the blocks of a tensor lie, and how many units of work they are."""
    outer, line, inner = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
    if inner == 1:
        if line % size == 0:
            outer, line = 1, outer * line
        count = -(-line // size)
        return np.array([line, 1, size, count, max(1, TILE // size)]), outer * count
    count = -(-line // size)
    width = min(inner, max(BESIDE, TILE // size))
    return np.array([line, inner, size, count, width]), outer * count * -(-inner // width)


@cache
def _constants(plan: Plan, dtype: torch.dtype) -> elements.Constants:
    fmt, machine = plan.format, plan.machine
    rows = {
        elements.SIZES: ~machine.sign_mask,
        elements.EXPONENTS: machine.exponent_mask,
        elements.MAX_EXPONENT: plan.max_exponent,
        elements.MIN_EXPONENT: plan.min_exponent,
        elements.MAX: plan.max,
        elements.CEILING: machine.bits(4 * fmt.max),
        elements.MAGIC: machine.bits(plan.magic),
        elements.STEP: machine.bits(2.0**-fmt.mantissa_bits),
        elements.LOWEST: plan.scale_range[0],
        elements.HIGHEST: plan.scale_range[1],
        elements.CARRY: plan.carry,
        elements.STILL_ZERO: -1 if plan.still_zero is None else plan.still_zero,
        elements.LIMIT: machine.bits(torch.finfo(dtype).max),
        elements.UNSIGNED: 0 if fmt.is_integer else -1,
        elements.CODE_SHIFT: machine.mantissa_bits - fmt.mantissa_bits,
        elements.CODE_OFFSET: (machine.bias - fmt.bias) << fmt.mantissa_bits,
        elements.CODE_STEPS: machine.bits(1 / fmt.min_subnormal),
        elements.CODE_SIGN: 0 if fmt.is_integer else 1 << (fmt.bits - 1),
        elements.BYTE_SHIFT: machine.mantissa_bits,
        elements.BYTE_OFFSET: machine.bias - BYTE_BIAS,
    }
    return np.array([rows[place] for place in range(elements.CONSTANTS)], np.int64)


class Operands(NamedTuple):
    """A tensor for a kernel: its bits, and what they are computed with."""

    bits: Bits
    machine: Bits  # an empty array of the integers to compute with
    kind: int  # which 16-bit dtype it is, if it is one


def _operands(x: Tensor) -> Operands:
    return Operands(bits_of(x), _INT64 if x.dtype == torch.float64 else _INT32, _KINDS.get(x.dtype, 0))


def _flat(noise: Tensor | None) -> elements.Noise | None:
    return None if noise is None else noise.numpy().reshape(-1)


def mx_values(x: Tensor, out: Tensor, blocks: Blocks, plan: Plan, rounding: str, noise: Tensor | None) -> None:
    """Quantize and dequantize `x` into `out`; both are contiguous and share no memory. `noise` is in rows of blocks."""
    layout, units = layout_of(blocks.shape, blocks.axis, blocks.size)
    (bits, machine, kind), target = _operands(x), bits_of(out)
    how = _constants(plan, x.dtype), True if plan.rule == "mse" else None, _ROUNDINGS[rounding], _flat(noise)
    in_threads(
        lambda first, last: mx.write_values(bits, target, machine, kind, layout, first, last, *how), units, bits.size
    )


def mx_codes(x: Tensor, blocks: Blocks, plan: Plan, rounding: str, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """(codes of the shape of `x`, scale bytes with the axis replaced by its blocks), both uint8; `x` is contiguous."""
    layout, units = layout_of(blocks.shape, blocks.axis, blocks.size)
    bits, machine, kind = _operands(x)
    codes, scales = _room_for_codes(x, blocks)
    targets = _bytes_of(codes), _bytes_of(scales)
    how = _constants(plan, x.dtype), True if plan.rule == "mse" else None, _ROUNDINGS[rounding], _flat(noise)
    in_threads(
        lambda first, last: mx.write_codes(bits, *targets, machine, kind, layout, first, last, *how), units, bits.size
    )
    return codes.view(torch.int8) if plan.format.is_integer else codes, scales


def _room_for_codes(x: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    return new_tensor(x.shape, torch.uint8), torch.empty(blocks.scales_shape, dtype=torch.uint8)


def nvfp4_values(
    x: Tensor, out: Tensor, blocks: Blocks, tensor_scale: Tensor, fmt: Format, rounding: str, noise: Tensor | None
) -> None:
    """As `mx_values`, for nvfp4."""
    _nvfp4(x, bits_of(out), _NO_BYTES, _NO_BYTES, blocks, tensor_scale, fmt, rounding, noise)


def nvfp4_codes(
    x: Tensor, blocks: Blocks, tensor_scale: Tensor, fmt: Format, rounding: str, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `mx_codes`, for nvfp4: the scales are e4m3 codes."""
    codes, scales = _room_for_codes(x, blocks)
    targets = _bytes_of(codes), _bytes_of(scales)
    _nvfp4(x, bits_of(x), *targets, blocks, tensor_scale, fmt, rounding, noise)
    return codes, scales


def _nvfp4(
    x: Tensor,
    target: Bits,
    codes: elements.Bytes,
    scales: elements.Bytes,
    blocks: Blocks,
    tensor_scale: Tensor,
    fmt: Format,
    rounding: str,
    noise: Tensor | None,
) -> None:
    layout, units = layout_of(blocks.shape, blocks.axis, blocks.size)
    bits, machine, kind = _operands(x)
    plans = [plan_for(one, torch.float64, "floor") for one in (fmt, FORMATS["fp8_e4m3"])]
    infinite = (FLOAT64 if x.dtype == torch.float64 else FLOAT32).exponent_mask
    numbers = (np.float32(tensor_scale.item()), infinite, fmt.max, SMALLEST_BLOCK_SCALE, torch.finfo(x.dtype).max)
    how = numbers, *(_constants(plan, torch.float64) for plan in plans), _ROUNDINGS[rounding], _flat(noise)
    in_threads(
        lambda first, last: nvfp4.quantize(bits, target, codes, scales, machine, kind, layout, first, last, *how),
        units,
        bits.size,
    )


def decoded(codes: Tensor, out: Tensor, blocks: Blocks, table: Tensor, factors: Tensor) -> None:
    """Elements, by their codes in the table, times the factors of their blocks into `out`.

    Codes and `out` are contiguous, `table` and `factors` float64.
    """
    shape, axis, size = blocks.shape, blocks.axis, blocks.size
    if factors.numel() == 1:
        shape, axis, size = (codes.numel(),), 0, TILE
    layout, units = layout_of(shape, axis, size)
    target, machine, kind = _operands(out)
    how = table.numpy(), factors.numpy().reshape(-1), torch.finfo(out.dtype).max
    given = _bytes_of(codes)
    in_threads(
        lambda first, last: decoding.write_values(given, target, machine, kind, layout, first, last, *how),
        units,
        given.size,
    )


def largest_magnitudes(x: Tensor, blocks: Blocks) -> Tensor:
    """max |x| of each block, float32 or float64, flat in the order of scales; Inf or NaN where it is not finite."""
    layout, units = layout_of(blocks.shape, blocks.axis, blocks.size)
    bits, machine, kind = _operands(x)
    found = np.empty(blocks.rows_shape[0], machine.dtype)
    in_threads(lambda first, last: integers.largest(bits, found, machine, kind, layout, first, last), units, bits.size)
    return torch.from_numpy(found).view(torch.float64 if machine is _INT64 else torch.float32)


def largest_magnitude(x: Tensor) -> Tensor:
    """max |x| of all, 0-d; Inf or NaN if it is not finite."""
    return largest_magnitudes(x, Blocks((x.numel(),), 0, min(x.numel(), _STRETCH))).amax()


class Sharing(NamedTuple):
    """Which elements share a scale: block b of these blocks has scale (b // each) % scales."""

    shape: tuple[int, ...]
    axis: int
    size: int
    each: int
    scales: int


def integer_scales(x: Tensor, blocks: Blocks, high: int) -> tuple[Tensor, Sharing]:
    """(the float32 scale of each block for codes up to `high`, flat; who shares them); NaN where not all is finite."""
    if blocks.rows_shape[0] == 1:
        amax, sharing = largest_magnitude(x)[None], sharing_of(tuple(x.shape), ())
    else:
        amax = largest_magnitudes(x, blocks)
        sharing = Sharing(blocks.shape, blocks.axis, blocks.size, 1, amax.numel())
    assert sharing is not None
    wide = amax.double().numpy()
    scales = np.clip(wide / high, SMALLEST_SCALE, np.finfo(np.float32).max).astype(np.float32)
    return torch.from_numpy(np.where(np.isfinite(wide), scales, np.float32(np.nan))), sharing


@lru_cache(maxsize=1024)
def sharing_of(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> Sharing | None:
    """How scales of a shape that broadcasts to `shape` are shared; None if not by consecutive axes."""
    padded = (1,) * (len(shape) - len(scale_shape)) + scale_shape
    own = [d for d, (n, count) in enumerate(zip(shape, padded, strict=True)) if count != 1 and n != 1]
    if not own:
        return Sharing((prod(shape),), 0, TILE, 1, 1)
    first, last = own[0], own[-1]
    if len(own) != sum(n != 1 for n in shape[first : last + 1]):
        return None
    before, scales, rest = prod(shape[:first]), prod(shape[first : last + 1]), prod(shape[last + 1 :])
    if rest == 1:
        return Sharing((before, scales), 0, min(before, 32), 1, scales)
    size = min(rest, TILE)
    return Sharing((before * scales, rest), 1, size, -(-rest // size), scales)


def integer_results(
    x: Tensor,
    out: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    sharing: Sharing,
    code_range: tuple[int, int],
    rounding: str,
    noise: Tensor | None,
) -> None:
    """`x` on an integer grid into `out`: values if that is of floats, else codes, int8 or uint8.

    All tensors are contiguous; `noise` is as `x`. Codes are 0 where the scale is NaN, and `x` has no NaN elsewhere.
    """
    layout, units = layout_of(sharing.shape, sharing.axis, sharing.size)
    bits, machine, kind = _operands(x)
    coded = not out.is_floating_point()
    target, written = (_bytes_of(out), _NO_BYTES) if coded else (bits_of(out), machine)
    scales, zeros = (one.numpy().reshape(-1) for one in (scale, zero_point))
    limits = (float(code_range[0]), float(code_range[1]), torch.finfo(x.dtype).max)
    grid = scales, zeros, (sharing.each, sharing.scales), limits
    how = _ROUNDINGS[rounding], None if noise is None else bits_of(noise)
    in_threads(
        lambda first, last: integers.quantize(bits, target, machine, written, kind, layout, first, last, *grid, *how),
        units,
        bits.size,
    )
