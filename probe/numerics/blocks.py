"""Blocks: a tensor cut into rows along one axis and joined again; sums in a fixed order; axes from the front."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """How a tensor of `shape` is cut into rows of `size` along `axis`.

    The last block of a line may be shorter: it is padded with zeros, which change neither its largest
    magnitude nor any element of it, and the padding is dropped by `join`.
    """

    shape: tuple[int, ...]
    axis: int
    size: int

    @classmethod
    def of(cls, x: Tensor, axis: int, size: int | None) -> "Blocks":
        """The cut of `x`; a size of None is one block for the whole line. A 0-d tensor is a line of one."""
        shape = tuple(x.shape) or (1,)
        place = resolve_axis(axis, len(shape))
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"block_size {size!r} is not a whole number of at least 1. OCP MX uses 32.")
        line = shape[place]
        return cls(shape, place, max(1, line if size is None else min(size, line)))

    @property
    def count(self) -> int:
        """Blocks in one line along the axis."""
        return -(-self.shape[self.axis] // self.size)

    @property
    def padding(self) -> int:
        """Zeros that complete the last block of a line."""
        return self.count * self.size - self.shape[self.axis]

    @property
    def rows_shape(self) -> tuple[int, int]:
        """The shape of the rows that `split` makes."""
        lines = prod(self.shape[: self.axis]) * prod(self.shape[self.axis + 1 :])
        return lines * self.count, self.size

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """The shape of one number per block: `shape` with the axis replaced by the count of blocks."""
        return *self.shape[: self.axis], self.count, *self.shape[self.axis + 1 :]

    @property
    def in_rows(self) -> bool:
        """Whether a contiguous tensor holds its blocks one after the other: last axis, no short block."""
        return self.axis == len(self.shape) - 1 and self.shape[-1] % self.size == 0

    def split(self, x: Tensor) -> Tensor:
        """Rows of one block each, [blocks, size]; a view where the memory allows it."""
        if self.in_rows:
            return x.reshape(-1, self.size)
        lines = x.reshape(self.shape).movedim(self.axis, -1)
        padded = torch.nn.functional.pad(lines, (0, self.padding)) if self.padding else lines
        return padded.reshape(-1, self.size)

    def join(self, rows: Tensor) -> Tensor:
        """The inverse of `split`, contiguous."""
        if self.in_rows:
            return rows.view(self.shape)
        lead = self.shape[: self.axis] + self.shape[self.axis + 1 :]
        lines = rows.reshape(*lead, self.count * self.size)[..., : self.shape[self.axis]]
        return lines.movedim(-1, self.axis).contiguous()

    def join_scales(self, per_block: Tensor) -> Tensor:
        """One number per block, from [blocks, 1] to `shape` with the axis replaced by the count of blocks."""
        lead = self.shape[: self.axis] + self.shape[self.axis + 1 :]
        return per_block.reshape(*lead, self.count).movedim(-1, self.axis).contiguous()

    def split_scales(self, scales: Tensor) -> Tensor:
        """The inverse of `join_scales`."""
        return scales.movedim(self.axis, -1).reshape(-1, 1)


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last axis in one fixed order: halves are added until one element is left.

    Every implementation that adds in this order gets the same bits, whatever its vector width.
    """
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def resolve_axis(axis: int, ndim: int) -> int:
    """`axis` counted from the front, or a ValueError that says which axes there are."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise ValueError(f"axis is {axis!r}. Give one whole number.")
    if -ndim <= axis < ndim:
        return axis % ndim
    raise ValueError(
        f"axis {axis} is out of range for a tensor of {ndim} dimensions. "
        + (f"Give one from {-ndim} to {ndim - 1}." if ndim else "A single number has no axis.")
    )
