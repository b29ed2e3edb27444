"""Corner values: inputs of a grid that text seldom or never produces, where its mistakes show."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from probe.formats import FORMATS, Format
from probe.numerics.integers import integer_parameters
from probe.numerics.reference import combined_scale, tensor_scale_of

#: Channels of the last, ragged block of the narrow corner tensor.
RAGGED = 5
#: Exponents that corner blocks side by side, and corner sequences, are scaled by.
_BLOCK_EXPONENTS = (0, 1, 2, -2, -1)
_SEQUENCE_EXPONENTS = (-3, 2)
#: Scales of nvfp4 blocks that hold all element corners: the smallest two binades, 1, and the largest.
_BLOCK_SCALES = (2.0**-9, 2.0**-6, 1.0, 448.0)


@lru_cache(maxsize=512)
def corner_values(
    format: Format, width: int, *, amax: float | None = None, per_sequence: bool = False
) -> tuple[Tensor, ...]:
    """Activations [sequence, token, channel] that text seldom or never produces, for a grid with `width` channels.

    Every value of the element and every tie between two of them, in both signs, and both float neighbours of each; both
    ends of the grid and values beyond them; subnormals and half of the smallest; zeros of both signs; blocks of unlike
    size side by side, and two sequences of unlike size. Exact ties at a calibrated scale are no float32, so integers
    and nvfp4 are given them in float64; block formats are given a narrower tensor whose last block is ragged.

    `amax` is the calibrated one, which integers and nvfp4 need. With `per_sequence` the scale comes from the tensor.
    The tensors are cached: copy them before changing them.
    """
    if format.scale == "float32" and not per_sequence:
        return _static_integers(format, width, amax)
    if per_sequence:
        return _sequences(format, width, amax)
    if format.scale == "e4m3":
        exact = _nvfp4_blocks(format, _tensor_scale(amax), width)
        whole = torch.cat([_beside(exact.float(), turn) for turn in (0, 1, -1)])
        narrow = width if width % exact.shape[1] else exact.shape[1] + RAGGED
        return _stacked(*_smaller_first(whole), width), _stacked(*_smaller_first(exact), narrow)
    assert format.block_size is not None
    size = min(format.block_size, width)
    first, second = (mx_corner_blocks(format, size, shift, is_open=shift > 0) for shift in _SEQUENCE_EXPONENTS)
    return _laid_out(first, second, width)


def _static_integers(format: Format, width: int, amax: float | None) -> tuple[Tensor, ...]:
    """At one calibrated scale, smaller values in the first sequence: float32, then exact ties in float64."""
    assert amax is not None
    limit = torch.tensor(amax)
    scale = integer_parameters(-limit, limit, bits=format.bits).scale.double()
    codes, ties = _element_corners(format)
    around = torch.cat([_beside((torch.cat([codes, ties]) * scale).float(), turn) for turn in (0, 1, -1)])
    ends = torch.tensor([0.0, -0.0, 1e3, -1e3, 1e6, -1e6]) * scale.float()
    rows = torch.cat([around, ends]), ties * scale
    return tuple(_in_rows(row[row.abs().argsort(stable=True)].tensor_split(2), width) for row in rows)


def _sequences(format: Format, width: int, amax: float | None) -> tuple[Tensor, ...]:
    """At a scale from each sequence: its largest value comes first, and no other is larger."""
    codes, ties = _element_corners(format)
    elements = torch.cat([codes, ties])
    if format.scale == "e4m3":
        scales = [combined_scale(torch.tensor(level), _tensor_scale(amax)) for level in (1.0, 32.0)]
        leads = [format.max] * 2
    else:
        scales = [torch.tensor(2.0**shift, dtype=torch.float64) for shift in _SEQUENCE_EXPONENTS]
        leads = [format.max, format.max if format.scale == "float32" else _largest(format)]
    found = []
    for dtype in (torch.float32, torch.float64) if format.scale == "e4m3" else (torch.float32,):
        rows = []
        for scale, lead in zip(scales, leads, strict=True):
            first = (lead * scale).to(dtype)
            turns = (0, 1, -1) if dtype == torch.float32 else (0,)  # a float64 beside a tie is one once it is divided
            around = torch.cat([_beside((elements * scale).to(dtype), turn) for turn in turns])
            rows.append(torch.cat([first[None], around.clamp(-first, first), torch.tensor([0.0, -0.0], dtype=dtype)]))
        found.append(_in_rows(rows, width))
    return tuple(found)


def _element_corners(format: Format) -> tuple[Tensor, Tensor]:
    """(values, ties) of the elements of a format in both signs, float64, from zero to beyond the ends."""
    if format.scale == "float32":
        codes = torch.arange(-format.max - 4, format.max + 5, dtype=torch.float64)
        return codes, codes + 0.5
    found = {abs(format.decode(code)) for code in range(1 << (format.bits - 1))}
    levels = torch.tensor(sorted(x for x in found if x <= format.max), dtype=torch.float64)
    ties = torch.cat([(levels[1:] + levels[:-1]) / 2, levels[-1:] + (levels[-1:] - levels[-2:-1]) / 2])
    beyond = torch.tensor([format.max * (1 + 2.0**-8), _largest(format)], dtype=torch.float64)
    levels = torch.cat([levels, beyond])
    return torch.cat([levels, -levels]), torch.cat([ties, -ties])


def _largest(format: Format) -> float:
    """A float32 just below 2^(max_exponent + 1), where the scale of a block changes; so is the next one above it."""
    return 2.0 ** (format.max_exponent + 1) * (1 - 2.0**-23)


def mx_corner_blocks(format: Format, size: int, shift: int, *, is_open: bool) -> Tensor:
    """Corner values of an MX format as blocks [block, size], times 2^shift and a power of two that differs by block.

    The first element of a block fixes its scale; with `is_open` it lies beyond the largest element.
    """
    elements = torch.cat(_element_corners(format)).float()
    turns = torch.tensor([0, 1, -1]).repeat_interleave(elements.numel())
    rest = size - 1
    if not rest:
        return torch.ldexp(torch.cat([_beside(elements, turn) for turn in (0, 1, -1)]), torch.tensor(shift))[:, None]
    count = -(-turns.numel() // rest)
    wrapped = torch.arange(count * rest) % turns.numel()
    lead = _largest(format) if is_open else format.max
    blocks = torch.cat([torch.full((count, 1), lead), elements.repeat(3)[wrapped].reshape(count, rest)], 1)
    exponents = torch.tensor(_BLOCK_EXPONENTS).repeat(-(-count // 5))[:count, None] + shift
    blocks = torch.ldexp(blocks, exponents)
    turns = torch.cat([torch.zeros(count, 1, dtype=torch.int64), turns[wrapped].reshape(count, rest)], 1)
    for turn in (1, -1):
        blocks = torch.where(turns == turn, _beside(blocks, turn), blocks)
    powers = torch.stack([_beside(torch.tensor(2.0**shift), turn) for turn in (0, 1, -1)])  # where the scale changes
    at_powers = torch.cat([powers[:, None], powers[:, None] * _between(rest)], 1)
    zeros = torch.tensor([0.0, -0.0]).repeat(size)[:size]
    return torch.cat([blocks, at_powers, zeros[None]])


def _nvfp4_blocks(format: Format, tensor_scale: Tensor, width: int) -> Tensor:
    """Blocks [block, element] in float64: all element corners at a few scales, then scales, their ties and neighbours.

    Of the scales, e4m3 numbers, those of the smallest two binades and of the largest.
    """
    assert format.block_size is not None
    rest = max(2, min(format.block_size, width)) - 1
    elements = torch.cat([*_element_corners(format), torch.tensor([0.0, -0.0])])
    elements = elements[elements.abs() <= format.max]
    count = -(-elements.numel() // rest)
    padded = elements[torch.arange(count * rest) % elements.numel()].reshape(count, rest)
    scales = [combined_scale(torch.tensor(level), tensor_scale) for level in _BLOCK_SCALES]
    found = [torch.cat([torch.full((count, 1), format.max), padded], 1) * scale for scale in scales]
    values, ties = _element_corners(FORMATS["fp8_e4m3"])
    wanted = torch.cat([values, ties])
    wanted = wanted[(wanted > 0) & ((wanted < 2.0**-5) | (wanted > 240))]
    leads = wanted[:, None] * format.max * tensor_scale.double()
    return torch.cat([*found, torch.cat([leads, leads * _between(rest)], 1)])


def _tensor_scale(amax: float | None) -> Tensor:
    assert amax is not None
    return tensor_scale_of(torch.tensor(amax))


def _smaller_first(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Two halves: the blocks with smaller values, and those with larger ones."""
    first, second = blocks[blocks[:, 0].argsort(stable=True)].tensor_split(2)
    return first, second


def _between(count: int) -> Tensor:
    """As many numbers between -1 and 1, by one division: the bits of torch.linspace depend on the instruction set."""
    return (2 * torch.arange(count) + 1 - count) / (count + 1)


def _beside(x: Tensor, turn: int) -> Tensor:
    """The next float above (turn 1) or below (turn -1) each value; turn 0: the values."""
    return x if turn == 0 else torch.nextafter(x, torch.full_like(x, turn * torch.inf))


def _laid_out(first: Tensor, second: Tensor, width: int) -> tuple[Tensor, ...]:
    """Blocks of two sequences in rows of this width; where that is a multiple of the block, a few in narrower rows."""
    size = first.shape[1]
    whole = _stacked(first, second, width)
    return (whole,) if width % size else (whole, _stacked(first[:8], second[:8], size + RAGGED))


def _stacked(first: Tensor, second: Tensor, width: int) -> Tensor:
    """[2, token, width]: every block whole; where the width is no multiple of it, further ones cut off at its end."""
    size = first.shape[1]
    slots, rest = divmod(width, size)
    tokens = max(4, -(-first.shape[0] // max(slots, 1)))
    parts = []
    for blocks in (first, second):
        turn = torch.arange(tokens * slots) % blocks.shape[0]
        row = blocks[turn].reshape(tokens, slots * size)
        cut = blocks[torch.arange(tokens) % blocks.shape[0], :rest]
        parts.append(torch.cat([row, cut], 1))
    return torch.stack(parts)


def _in_rows(sequences: Sequence[Tensor], width: int) -> Tensor:
    """[sequence, token, width], each filled with its values in turn; at least 4 tokens."""
    tokens = max(4, *(-(-values.numel() // width) for values in sequences))
    turn = torch.arange(tokens * width)
    return torch.stack([values[turn % values.numel()].reshape(tokens, width) for values in sequences])
