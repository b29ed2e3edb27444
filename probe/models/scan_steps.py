"""The recurrence of the selective scan as a numba loop: what `scans.in_pieces` does between its exponentials and sums.

Every product and every sum is rounded to float32 by itself, as torch's operations do.
"""

import numba
import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float32]


@numba.njit(cache=True, nogil=True)
def advance(decays: _Floats, drive: _Floats, into: _Floats, out: _Floats, h: _Floats) -> None:
    """Advance the state `h` [channel, state]; the decays [time, channel, state] are replaced by C h of every step."""
    steps, channels, states = decays.shape
    for t in range(steps):
        for channel in range(channels):
            given = drive[t, channel]
            for n in range(states):
                new = decays[t, channel, n] * h[channel, n] + given * into[t, n]
                h[channel, n] = new
                decays[t, channel, n] = new * out[t, n]
