"""The selective scan of Mamba-1, in two orders of summation.

    h[t] = exp(delta[t] * A) * h[t-1] + delta[t] * B[t] * u[t]
    y[t] = sum over states of C[t] * h[t]

u, delta: [batch, time, channel]; A: [channel, state]; B, C: [batch, time, state]; the state h: [batch, channel,
state], zero unless one is carried over from earlier tokens. Everything is float32 inside; y comes back in the dtype
of u, the last state in float32.

`sequential` is the definition; on the CPU `in_pieces` gives the same bits. `fast` adds the states in another order.
"""

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType

import torch
from torch import Tensor

from probe.numerics.native import in_threads, is_native, numba_twin

Scanned = tuple[Tensor, Tensor]  # y and the last state
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Scanned]

#: The most steps whose discretized matrices are made at once by `fast`, and whose outputs are one matrix product.
CHUNK = 32
#: Elements of all states of some steps that are worked on at a time: 512 KB, which fits the cache.
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
    """`sequential` to the bit: the exponentials by torch for many steps, recurrence and sums over states by numba.

    Tensors that the numba loop cannot read, or that need a gradient, go to `sequential`; so do numbers of states that
    torch adds in an order of its own.
    """
    given = (u, delta, A, B, C) if state is None else (u, delta, A, B, C, state)
    twin = numba_twin("probe.models.scan_steps", "scans") if is_native(*given) else None
    lanes = _lanes(A.shape[1]) if twin is not None else 0
    if twin is None or not lanes:
        return sequential(u, delta, A, B, C, state)
    return _in_threads(partial(_pieces, twin, lanes), u, delta, A, B, C, state)


def _in_threads(scan: Scan, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> Scanned:
    """The sequences of a batch divided among torch's threads: each takes the same steps as alone."""

    @torch.no_grad()  # which is of a thread, as all such modes are
    def some(first: int, last: int) -> Scanned:
        carried = None if state is None else state[first:last]
        return scan(u[first:last], delta[first:last], A, B[first:last], C[first:last], carried)

    parts = in_threads(some, len(u), u.numel() * A.shape[1])
    return parts[0] if len(parts) == 1 else (torch.cat([y for y, _ in parts]), torch.cat([last for _, last in parts]))


def _pieces(
    twin: ModuleType, lanes: int, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> Scanned:
    batch, time, channels = u.shape
    rates, states = A.float().t().contiguous(), A.shape[1]
    h = torch.zeros(batch, states, channels)
    if state is not None:
        h.copy_(state.transpose(1, 2))
    delta, B, C = delta.float(), B.float().contiguous(), C.float().contiguous()
    y, drive = torch.empty(batch, time, channels), (delta * u.float()).contiguous()
    steps = max(1, min(time, PIECE // max(1, channels * states)))
    room = torch.empty(steps, states, channels)
    decays = room.numpy()
    for row, arrays in enumerate(zip(*(x.numpy() for x in (drive, B, C, y, h)), strict=True)):
        *by_time, last = arrays
        for start in range(0, time, steps):
            stop = min(start + steps, time)
            piece = room[: stop - start]
            torch.exp(torch.mul(delta[row, start:stop, None], rates, out=piece), out=piece)
            twin.advance(decays[: stop - start], *(x[start:stop] for x in by_time), last, lanes)
    return y.to(u.dtype), h.transpose(1, 2).contiguous()


@cache
def _lanes(states: int) -> int:
    """The `lanes` of `scan_steps.advance` that give torch's sums of so many states, bit for bit; 0 if there are none.

    torch's order depends on the vector instructions that it uses: rows of random values show it.
    """
    twin = numba_twin("probe.models.scan_steps", "scans")
    assert twin is not None
    channels = 4096
    h = torch.randn(states, channels, generator=torch.Generator().manual_seed(0))
    keep, ones = torch.ones(1, states, channels), torch.ones(1, states)
    nothing, y = torch.zeros(1, channels), torch.empty(1, channels)
    for lanes in (1, 2, 4, 8, 16):
        twin.advance(*(x.numpy() for x in (keep, nothing, ones, ones, y, h)), lanes)
        if torch.equal(y[0], h.t().contiguous().sum(-1)):
            return lanes
    return 0


def fast(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None) -> Scanned:
    """The same recurrence with the state laid out [state, channel]: one addcmul a step, one product for some steps.

    Differs from `sequential` in the order of the sums over states only, and in the rounding of addcmul.
    """
    given = (u, delta, A, B, C) if state is None else (u, delta, A, B, C, state)
    twin = _fused_steps() if is_native(*given) else None
    if twin is None:
        return _chunks(None, u, delta, A, B, C, state)
    return _in_threads(partial(_chunks, twin), u, delta, A, B, C, state)


def _chunks(
    twin: ModuleType | None, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> Scanned:
    batch, time, channels = u.shape
    rates = A.float().t().contiguous()
    states, device = len(rates), u.device
    h = torch.zeros(batch, states, channels, device=device)
    if state is not None:
        h.copy_(state.float().transpose(1, 2))
    delta, u_by_time, into, out = (x.float().transpose(0, 1) for x in (delta, u, B, C))  # time first
    drive, into = (delta * u_by_time).contiguous(), into.contiguous()
    y = torch.empty(time, batch, channels, device=device)
    steps = max(1, min(CHUNK, time, 2 * PIECE // max(1, h.numel())))
    decays, trail = (torch.empty(steps, batch, states, channels, device=device) for _ in range(2))
    for start in range(0, time, steps):
        here = slice(start, min(start + steps, time))
        decay, states_of = (room[: here.stop - start] for room in (decays, trail))
        torch.exp(torch.mul(delta[here, :, None, :], rates, out=decay), out=decay)
        if twin is not None:
            twin.advance_fused(*(x.numpy() for x in (decay, drive[here], into[here], states_of, h)))
        else:
            torch.mul(drive[here, :, None, :], into[here, :, :, None], out=states_of)
            for one, step in zip(states_of.unbind(), decay.unbind(), strict=True):
                h = one.addcmul_(step, h)
            h = h.clone()  # the next chunk overwrites it
        torch.matmul(out[here, :, None, :], states_of, out=y[here].unsqueeze(2))
    return y.transpose(0, 1).contiguous().to(u.dtype), h.transpose(1, 2).contiguous()


@cache
def _fused_steps() -> ModuleType | None:
    """The numba loops, if torch rounds addcmul once, as they do: it depends on how torch was built."""
    twin = numba_twin("probe.models.scan_steps", "scans")
    if twin is None:
        return None
    g = torch.Generator().manual_seed(0)
    decay, trail = torch.randn(2, 1, 1, 1, 4099, generator=g)
    drive, h, one = torch.randn(1, 1, 4099, generator=g), torch.randn(1, 1, 4099, generator=g), torch.ones(1, 1, 1)
    expected = drive.addcmul(decay[0], h)
    twin.advance_fused(*(x.numpy() for x in (decay, drive, one, trail, h)))
    return twin if torch.equal(h, expected) else None


SCANS: dict[str, Scan] = {"sequential": in_pieces, "fast": fast}
#: The scan of the float reference.
REFERENCE_SCAN = "sequential"
