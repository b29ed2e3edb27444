"""Corner values of a grid: inputs that text seldom or never produces.

Ties, both ends of the grid and values beyond them, subnormals and half of the smallest, blocks of unlike size side by
side. A fault that shows only there moves no figure of a layer until a text happens to reach it.
"""

from functools import lru_cache

import torch
from torch import Tensor

from probe.formats import Format


@lru_cache(maxsize=512)
def corner_values(format: Format, width: int, *, amax: float | None = None, per_sequence: bool = False) -> Tensor:
    """An activation [1, token, channel] of the corner values of a grid; `width` is the number of channels.

    `amax` is the calibrated one, which integers and nvfp4 need. With `per_sequence` the scale comes from the tensor.
    The tensor is cached: copy it before changing it.
    """
    elements = _integer_corners(format) if format.scale == "float32" else _block_corners(format)
    if per_sequence:
        elements = elements.clamp(-format.max, format.max)
        return _rows(elements, width).unsqueeze(0) / 8
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
    """The values over rows of this width, repeated to fill them; each row starts at another value."""
    count = max(4, -(-values.numel() // width))
    return torch.stack([values.roll(-row * width).repeat(-(-width // values.numel()))[:width] for row in range(count)])
