"""Tiles: the pieces of a tensor that a kernel works on while they are in the cache.

A tensor is [outer, line, inner] with blocks along the line. Blocks of consecutive elements (`inner` is 1) are taken in
place. Others lie beside each other, and a tile of them is copied to a dense array [element, block]: rows of a large
tensor are often a multiple of 4 KB apart, which only few lines of the cache can hold.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.extending import overload

from probe.numerics.kernels.bits import Bits, fetch, shorten, widen
from probe.numerics.machine_code import kernel

#: Elements of a tile, unless a block is larger: 8 KB of float32.
TILE = 2048
#: Blocks beside each other in a tile: 1 KB of float32, which the processor fetches well.
BESIDE = 256


#: Where blocks lie, as an array, which kernels take faster than a tuple: the length of a line, the inner axis, the size
#: of a block, the blocks of a line (the last may be short), and the blocks of a tile.
LINE, INNER, SIZE, PER_LINE, WIDTH = range(5)
Layout = npt.NDArray[np.int64]


class Tile(NamedTuple):
    """Blocks of consecutive elements if `apart` is 1, else [element, block]; and where they lie in the tensor."""

    blocks: int
    size: int
    apart: int
    start: int  # the first element in the tensor
    block: int  # the first block, in the order of scales
    noise: int  # the first random number: noise is in rows, block after block along a line
    noise_between: int


@kernel
def tile_at(unit: int, last: int, layout: Layout) -> tuple[Tile, int]:
    """The tile that begins with a unit, and how many units it is: blocks, or tiles of blocks beside each other."""
    line, inner, size = layout[LINE], layout[INNER], layout[SIZE]
    count, width = layout[PER_LINE], layout[WIDTH]
    if inner == 1:
        place = unit % count
        full = count - place if line % size == 0 else count - place - 1
        blocks = max(1, min(width, last - unit, full))
        start = unit // count * line + place * size
        return Tile(blocks, min(size, line - place * size), 1, start, unit, unit * size, size), blocks
    columns = -(-inner // width)
    block, column = unit // columns, unit % columns * width
    outer, place = block // count, block % count
    blocks = min(width, inner - column)
    start = (outer * line + place * size) * inner + column
    noise = ((outer * inner + column) * count + place) * size
    height = min(size, line - place * size)
    return Tile(blocks, height, blocks, start, block * inner + column, noise, count * size), 1


@kernel
def fetch_ahead(x: Bits, out: Bits, begin: int) -> None:
    """Have the processor fetch what lies one tile behind a block of `x` and `out`, while it works on the block.

    Otherwise memory is idle during the work, and the work waits for each tile. Two lines of 16 float32 each are a block
    of 32; more than these few instructions would cost more than they bring.
    """
    fetch(x, begin + TILE)
    fetch(x, begin + TILE + 16)
    fetch(out, begin + TILE)
    fetch(out, begin + TILE + 16)


@kernel
def copy(source: Bits, target: Bits) -> None:
    """As an assignment of slices, which takes longer: numba checks shapes and overlaps."""
    for i in range(source.size):
        target[i] = source[i]


def load(x: Bits, room: Bits, tile: Tile, inner: int, kind: int) -> Bits:
    """The elements of a tile, dense: in place, or in `room` where they lie apart or are widened from 16 bits."""
    raise NotImplementedError("for kernels")


def place(out: Bits, room: Bits, tile: Tile, inner: int) -> Bits:
    """Where the results of a tile are to be written: in place, or to `room`, from where `store` takes them."""
    raise NotImplementedError("for kernels")


def store(results: Bits, out: Bits, tile: Tile, inner: int, kind: int) -> None:
    """Bring the results of a tile to their places, unless they are there."""
    raise NotImplementedError("for kernels")


@overload(load)
def _load(x: Any, room: Any, tile: Any, inner: Any, kind: Any) -> Any:
    def wide(x: Any, room: Any, tile: Any, inner: Any, kind: Any) -> Any:
        length = tile.blocks * tile.size
        if inner == 1:
            return x[tile.start : tile.start + length]
        for i in range(tile.size):
            begin = tile.start + i * inner
            copy(x[begin : begin + tile.blocks], room[i * tile.blocks : (i + 1) * tile.blocks])
        return room[:length]

    def short(x: Any, room: Any, tile: Any, inner: Any, kind: Any) -> Any:
        length = tile.blocks * tile.size
        if inner == 1:
            widen(x[tile.start : tile.start + length], room[:length], kind)
        else:
            for i in range(tile.size):
                begin = tile.start + i * inner
                widen(x[begin : begin + tile.blocks], room[i * tile.blocks : (i + 1) * tile.blocks], kind)
        return room[:length]

    return wide if x.dtype == room.dtype else short


@overload(place)
def _place(out: Any, room: Any, tile: Any, inner: Any) -> Any:
    def wide(out: Any, room: Any, tile: Any, inner: Any) -> Any:
        length = tile.blocks * tile.size
        return out[tile.start : tile.start + length] if inner == 1 else room[:length]

    def short(out: Any, room: Any, tile: Any, inner: Any) -> Any:
        return room[: tile.blocks * tile.size]

    return wide if out.dtype == room.dtype else short


@overload(store)
def _store(results: Any, out: Any, tile: Any, inner: Any, kind: Any) -> Any:
    def wide(results: Any, out: Any, tile: Any, inner: Any, kind: Any) -> Any:
        if inner > 1:
            for i in range(tile.size):
                begin = tile.start + i * inner
                copy(results[i * tile.blocks : (i + 1) * tile.blocks], out[begin : begin + tile.blocks])

    def short(results: Any, out: Any, tile: Any, inner: Any, kind: Any) -> Any:
        if inner == 1:
            shorten(results, out[tile.start : tile.start + results.size], kind)
        else:
            for i in range(tile.size):
                begin = tile.start + i * inner
                shorten(results[i * tile.blocks : (i + 1) * tile.blocks], out[begin : begin + tile.blocks], kind)

    return wide if out.dtype == results.dtype else short
