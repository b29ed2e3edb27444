"""The selective scan, twice: `sequential` is the definition, `fast` does the work.

    h[t] = exp(delta[t] * A) * h[t-1] + delta[t] * B[t] * u[t]
    y[t] = sum over states of C[t] * h[t]

u, delta: [batch, time, channel]; A: [channel, state]; B, C: [batch, time, state]; the state h: [batch, channel,
state], zero unless one is carried over from earlier tokens. Everything is float32 inside; y comes back in the dtype
of u, the last state in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]

#: Steps whose discretized matrices are made at once, and whose outputs are one matrix product.
CHUNK = 32


def sequential(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loop over time, step by step."""
    batch, time, channels = u.shape
    h = torch.zeros(batch, channels, A.shape[1], device=u.device) if state is None else state.float()
    outputs = []
    for t in range(time):
        step = delta[:, t].float()
        decay = torch.exp(step[:, :, None] * A.float())
        drive = (step * u[:, t].float())[:, :, None] * B[:, t].float()[:, None, :]
        h = decay * h + drive
        outputs.append((h * C[:, t].float()[:, None, :]).sum(-1))
    y = torch.stack(outputs, 1) if outputs else torch.zeros(batch, 0, channels, device=u.device)
    return y.to(u.dtype), h


def fast(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same recurrence with the state laid out [state, channel]: one addcmul a step, one product a chunk.

    Differs from `sequential` in the order of the sums over states only.
    """
    batch, time, channels = u.shape
    states = A.shape[1]
    rates = A.float().t().contiguous()
    delta, B, C = delta.float(), B.float(), C.float()
    drive = delta * u.float()
    h = torch.zeros(batch, states, channels, device=u.device)
    if state is not None:
        h.copy_(state.float().transpose(1, 2))
    y = torch.empty(batch, time, channels, device=u.device)
    for start in range(0, time, CHUNK):
        piece = slice(start, min(start + CHUNK, time))
        decays = torch.exp_(delta[:, piece, None, :] * rates)
        trail = drive[:, piece, None, :] * B[:, piece, :, None]
        for t in range(trail.shape[1]):
            h = trail[:, t].addcmul_(decays[:, t], h)
        torch.matmul(C[:, piece, None, :], trail, out=y[:, piece].unsqueeze(2))
    return y.to(u.dtype), h.transpose(1, 2).contiguous()


SCANS: dict[str, Scan] = {"sequential": sequential, "fast": fast}
