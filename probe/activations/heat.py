"""|x| by token and channel of one sample, small enough to draw: the largest of every field of a grid."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: At most so many fields down and across.
TOKENS, CHANNELS = 128, 256

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class HeatGrid:
    """[fields of tokens, fields of channels] of max |x|, and how many tokens and channels there are."""

    module: str
    kind: str
    sample: int
    tokens: int
    channels: int
    values: Floats


def heat_of(x: Tensor, *, module: str, kind: str, sample: int) -> HeatGrid:
    """Of the tokens of one sample, [tokens, channels]; NaN and Inf count as 0."""
    sizes = x.detach().to("cpu", torch.float32).abs().nan_to_num(0.0, 0.0, 0.0).numpy()
    tokens, channels = sizes.shape
    return HeatGrid(module, kind, sample, tokens, channels, pooled(sizes, TOKENS, CHANNELS))


def pooled(values: Floats, most_rows: int, most_columns: int) -> Floats:
    """The largest of every field, where there are more rows or columns than fields."""
    for axis, most in ((0, most_rows), (1, most_columns)):
        size = values.shape[axis]
        if size > most:
            values = np.maximum.reduceat(values, np.arange(most) * size // most, axis=axis)
    return values
