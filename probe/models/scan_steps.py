"""The recurrences of the selective scan as numba loops: what `scans` does between its exponentials and its products.

They are apart from `scans` because loading them loads numba. A state lies as [state, channel]: the loop over channels
is the inner one and becomes vector instructions.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from probe.numerics.machine_code import kernel

_Floats = npt.NDArray[np.float32]


def _multiply_add(_: Any, a: Any, b: Any, c: Any) -> tuple[Signature, Any]:
    """a b + c with one rounding."""

    def code(context: Any, builder: ir.IRBuilder, signature: Signature, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), code


_fused: Any = intrinsic(_multiply_add)


@kernel
def advance(decays: _Floats, drive: _Floats, into: _Floats, out: _Floats, y: _Floats, h: _Floats, lanes: int) -> None:
    """Advance the state `h`; `y` [time, channel] becomes the sum of C h over the states in this order.

        y = (s[0] + s[1]) + s[2] ...,   s[k] = (p[k] + p[k + lanes]) + p[k + 2 lanes] ...,   p[n] = C[n] h[n]

    Every product and every sum is rounded to float32 by itself.
    """
    steps, states, channels = decays.shape
    sums = np.empty(channels, np.float32)
    for t in range(steps):
        for n in range(states):
            scale = into[t, n]
            for channel in range(channels):
                h[n, channel] = decays[t, n, channel] * h[n, channel] + drive[t, channel] * scale
        y[t] = 0
        for lane in range(lanes):
            sums[:] = 0
            for n in range(lane, states, lanes):
                scale = out[t, n]
                for channel in range(channels):
                    sums[channel] += h[n, channel] * scale
            for channel in range(channels):
                y[t, channel] += sums[channel]


@kernel
def advance_fused(decays: _Floats, drive: _Floats, into: _Floats, trail: _Floats, h: _Floats) -> None:
    """Advance the states `h` of a batch, by time first; `trail` [time, batch, state, channel] has all of them."""
    steps, batch, states, channels = decays.shape
    for t in range(steps):
        for row in range(batch):
            for n in range(states):
                scale = into[t, row, n]
                for channel in range(channels):
                    new = _fused(decays[t, row, n, channel], h[row, n, channel], drive[t, row, channel] * scale)
                    h[row, n, channel] = new
                    trail[t, row, n, channel] = new
