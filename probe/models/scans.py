"""The selective scan of Mamba-1, in two orders of summation.

    h[t] = exp(delta[t] * A) * h[t-1] + delta[t] * B[t] * u[t]
    y[t] = sum over states of C[t] * h[t]

u, delta: [batch, time, channel]; A: [channel, state]; B, C: [batch, time, state]; the state h: [batch, channel,
state], zero unless one is carried over from earlier tokens. Everything is float32 inside; y comes back in the dtype
of u, the last state in float32.

`sequential` is the definition; on the CPU `in_pieces` gives the same bits. `fast` adds the states in another order.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from probe.numerics.native import is_native, numba_twin

Scanned = tuple[Tensor, Tensor]  # y and the last state
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Scanned]

#: Steps whose discretized matrices are made at once by `fast`, and whose outputs are one matrix product.
CHUNK = 32
#: Elements [time, channel, state] that `in_pieces` works on at a time: 512 KB, which fits the cache.
PIECE = 2**17


def sequential(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None) -> Scanned:
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


def in_pieces(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None) -> Scanned:
    """`sequential` to the bit: exponentials and sums over states by torch for many steps, the recurrence by numba.

    Tensors that the numba loop cannot read, or that need a gradient, go to `sequential`.
    """
    given = (u, delta, A, B, C) if state is None else (u, delta, A, B, C, state)
    twin = numba_twin("probe.models.scan_steps", "scans") if is_native(*given) else None
    if twin is None:
        return sequential(u, delta, A, B, C, state)
    batch, time, channels = u.shape
    rates, states = A.float().contiguous(), A.shape[1]
    h = torch.zeros(batch, channels, states) if state is None else state.to(torch.float32, copy=True).contiguous()
    delta, B, C = delta.float(), B.float().contiguous(), C.float().contiguous()
    drive = (delta * u.float()).contiguous()
    y = torch.empty(batch, time, channels)
    steps = max(1, min(time, PIECE // max(1, channels * states)))
    room = torch.empty(steps, channels, states)
    for row in range(batch):
        arrays = [x[row].numpy() for x in (drive, B, C)]
        for start in range(0, time, steps):
            here = slice(start, min(start + steps, time))
            piece = room[: here.stop - start]
            torch.exp(torch.mul(delta[row, here, :, None], rates, out=piece), out=piece)
            twin.advance(piece.numpy(), *(x[here] for x in arrays), h[row].numpy())
            torch.sum(piece, -1, out=y[row, here])
    return y.to(u.dtype), h


def fast(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None) -> Scanned:
    """The same recurrence with the state laid out [state, channel]: one addcmul a step, one product a chunk.

    Differs from `sequential` in the order of the sums over states only, and in the rounding of addcmul.
    """
    batch, time, channels = u.shape
    rates = A.float().t().contiguous()
    states, device = len(rates), u.device
    h = torch.zeros(batch, states, channels, device=device)
    if state is not None:
        h.copy_(state.float().transpose(1, 2))
    delta, u_by_time, into, out = (x.float().transpose(0, 1) for x in (delta, u, B, C))  # time first
    drive = delta * u_by_time
    y = torch.empty(time, batch, channels, device=device)
    steps = min(CHUNK, time)
    decays, trail = (torch.empty(steps, batch, states, channels, device=device) for _ in range(2))
    for start in range(0, time, CHUNK):
        here = slice(start, min(start + CHUNK, time))
        decay, states_of = (room[: here.stop - start] for room in (decays, trail))
        torch.exp(torch.mul(delta[here, :, None, :], rates, out=decay), out=decay)
        torch.mul(drive[here, :, None, :], into[here, :, :, None], out=states_of)
        for one, step in zip(states_of.unbind(), decay.unbind(), strict=True):
            h = one.addcmul_(step, h)
        torch.matmul(out[here, :, None, :], states_of, out=y[here].unsqueeze(2))
        h = h.clone()  # the next chunk overwrites it
    return y.transpose(0, 1).contiguous().to(u.dtype), h.transpose(1, 2).contiguous()


SCANS: dict[str, Scan] = {"sequential": in_pieces, "fast": fast}
#: The scan of the float reference.
REFERENCE_SCAN = "sequential"
