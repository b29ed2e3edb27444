"""Codes and scales back to values, as `codes.Quantized.dequantize`, in float64."""

import numpy as np

from probe.numerics.kernels.bits import kernel, narrow
from probe.numerics.kernels.tiles import INNER, SIZE, WIDTH, load, place, store, tile_at


@kernel
def write_values(codes, out, machine, kind, layout, first, last, table, factors, limit):  # type: ignore[no-untyped-def]
    """The values of the units from `first` to before `last`.

    table    the element of every code
    factors  the scale of every block, or one for all
    limit    the largest number of the dtype; infinite elements stay infinite
    """
    width, inner = layout[WIDTH], layout[INNER]
    length = width * layout[SIZE]
    short, values = np.empty(length if inner > 1 else 0, np.uint8), np.empty(length, machine.dtype)
    odd = out.itemsize == 2
    unit = first
    while unit < last:
        tile, units = tile_at(unit, last, layout)
        unit += units
        here, results = load(codes, short, tile, inner, kind), place(out, values, tile, inner)
        scales = factors[tile.block : tile.block + tile.blocks] if factors.size > 1 else factors
        if tile.apart == 1:
            for b in range(tile.blocks):
                begin, end, scale = b * tile.size, (b + 1) * tile.size, scales[b if factors.size > 1 else 0]
                some, there = here[begin:end], results[begin:end]
                for i in range(some.size):
                    value = table[some[i]] * scale
                    there[i] = narrow(results, value, np.inf if abs(value) == np.inf else limit, odd)
        else:
            for begin in range(0, here.size, tile.blocks):
                some, there = here[begin : begin + tile.blocks], results[begin : begin + tile.blocks]
                for i in range(some.size):
                    value = table[some[i]] * scales[i]
                    there[i] = narrow(results, value, np.inf if abs(value) == np.inf else limit, odd)
        store(results, out, tile, inner, kind)
