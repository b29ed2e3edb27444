"""The scan of a quantized Mamba block, with the faults of it that can be replayed.

On a path with several forwards each begins with the state that the one before gave to the cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from probe.diagnosis.linear_steps import NARROW, sums_step
from probe.diagnosis.mamba_block import Block
from probe.diagnosis.plain_grids import PlainGrid
from probe.diagnosis.signatures import Replay, Step


def scan_steps(block: Block) -> Iterator[Step]:
    """h = exp(delta A) h + delta B u, y = C h, from the tensors that the scan was given, and the states it leaves."""
    whole = partial(scan, lengths=block.lengths, begin=[made for _, made in block.states])
    sources, bias_of = block.scan_sources(block.made), f"the bias of {block.step_name}"

    def parts(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(x.to(dtype) for x in sources)

    def run(dtype: torch.dtype) -> Tensor:
        u, step, bias, A_log, B, C = parts(dtype)
        return whole(u, softplus(step + bias), -torch.exp(A_log), B, C)

    u, step, bias, A_log, B, C = parts(torch.float32)  # a replay overflows where the real one does
    delta, A = softplus(step + bias), -torch.exp(A_log)
    unrounded, D = block.given("conv1d.output")[..., : block.width].float(), block.by_channel("D").float()
    grid = PlainGrid(block.format)
    actual = block.given("scan.y")

    def late(x: Tensor, dim: int) -> Tensor:
        return functional.pad(x, (0, 0, 1, 0))[:, :-1] if dim == 1 else functional.pad(x, (1, 0))[..., :-1]

    replays: dict[str, Replay] = {
        "B and C are swapped": lambda: whole(u, delta, A, C, B),
        "softplus is left out": lambda: whole(u, step + bias, A, B, C),
        f"{bias_of} is left out": lambda: whole(u, softplus(step), A, B, C),
        f"{bias_of} is added twice": lambda: whole(u, softplus(step + 2 * bias), A, B, C),
        "softplus is replaced by ReLU": lambda: whole(u, (step + bias).relu(), A, B, C),
        "softplus is taken twice": lambda: whole(u, softplus(delta), A, B, C),
        f"{bias_of} is added after softplus": lambda: whole(u, softplus(step) + bias, A, B, C),
        "the scan reads the unrounded conv1d output": lambda: whole(unrounded, delta, A, B, C),
        "A has lost its minus sign": lambda: whole(u, delta, -A, B, C),
        "A is not -exp(A_log) but -A_log": lambda: whole(u, delta, -A_log, B, C),
        "A is put on the grid again, after exp": lambda: whole(u, delta, grid(A), B, C),
        "delta is left out of the drive": lambda: whole(u / delta, delta, A, B, C),
        "delta is left out of the decay": lambda: whole(u, delta, A, B, C, decay=torch.ones_like(delta)),
        "D u is added before site scan.y": lambda: run(torch.float32) + D * u,
        "exp(delta A) is replaced by 1 + delta A": lambda: whole(u, delta, A, B, C, euler=True),
        "B is one token late": lambda: whole(u, delta, A, late(B, 1), C),
        "C is one token late": lambda: whole(u, delta, A, B, late(C, 1)),
        "B and C are one token late": lambda: whole(u, delta, A, late(B, 1), late(C, 1)),
        "B and C are shifted by one state": lambda: whole(u, delta, A, late(B, 2), late(C, 2)),
        "the state is carried from one sequence to the next": lambda: whole(u, delta, A, B, C, carried=True),
        "u is one token late": lambda: whole(late(u, 1), delta, A, B, C),
    }
    for limit in (0.0, 1.0, 2.0, 5.0, 10.0):
        words = f"softplus is the identity above {limit:g}, not above 20"
        replays[words] = partial(lambda limit: whole(u, softplus(step + bias, limit), A, B, C), limit)
    if block.lengths:
        replays |= _carried_states(block, partial(whole, u, delta, A, B, C))
        fresh = torch.arange(u.shape[1]) < block.lengths[0]
        replays["the state does not decay"] = lambda: whole(u, delta, A, B, C, decay=delta * fresh[:, None])
    if block.padded:
        replays["it reads the padding"] = lambda: _over_padding(block)
    for dtype in NARROW:
        replays |= _narrow_scans(whole, u, step, bias, A_log, B, C, dtype)
    expected = run(torch.float64)
    first = _first_token(actual, expected)
    if first:
        once, often = f"the state is lost at token {first}", f"the state is lost every {first} tokens"
        if block.lengths:
            often = once  # what is decoded has no blocks
        elif 2 * first >= u.shape[1]:  # the text is too short to tell
            once = often = f"{often}, or at token {first}"
        replays[once] = lambda: whole(u, delta, A, B, C, lost_at=first)
        replays.setdefault(often, lambda: whole(u, delta, A, B, C, every=first))
        replays[f"it ends at token {first}"] = lambda: run(torch.float32) * (torch.arange(u.shape[1]) < first)[:, None]
    if actual.shape == expected.shape and (lost := _lost_state(u, delta, A, B, C, actual - expected)) is not None:
        kept = (torch.arange(C.shape[-1]) % A.shape[1] != lost).to(C)
        replays[f"state {lost} of {A.shape[1]} is lost"] = lambda: whole(u, delta, A, B, C * kept)
    yield sums_step("the scan", actual, expected, replays)
    if block.lengths:
        ends, before = list[Tensor](), list[Tensor]()
        whole(*(x.double() for x in (u, delta, A, B, C)), ends=ends, before=before)
        short = {"after the prefill it is that before its last token": lambda: torch.stack([before[0], *ends[1:]], 1)}
        given = torch.stack([given for given, _ in block.states], 1)
        carried = sums_step("the carried state", given, torch.stack(ends, 1), short)
        yield replace(carried, axes=("sequence", "forward", "channel", "state"))


def _carried_states(block: Block, run: Callable[..., Tensor]) -> dict[str, Replay]:
    """The scan with faults of what is carried from one forward to the next."""
    given, made = ([pair[side] for pair in block.states] for side in (0, 1))
    size = block.mixer.state_size

    def after(change: Callable[[Tensor], Tensor]) -> Replay:
        return lambda: run(begin=[change(state) for state in made])

    def without(index: int) -> Replay:
        return after(lambda state: state * (torch.arange(size) != index))

    found: dict[str, Replay] = {
        "the state is not carried on": after(torch.zeros_like),
        "the carried state is not put on its grid": lambda: run(begin=given),
        "every sequence is given the state of sequence 0": after(lambda state: state[:1].expand_as(state)),
        "the states of the sequences are shifted by 1": after(lambda state: state.roll(1, 0)),
        "the carried state is not written back": lambda: run(begin=[made[0]] * len(made)),
    }
    for dtype in NARROW:
        words = f"the carried state is rounded to {str(dtype).removeprefix('torch.')}"
        found[words] = after(partial(lambda dtype, state: state.to(dtype).float(), dtype))
    return found | {f"state {index} of {size} is not carried on": without(index) for index in range(size)}


def _over_padding(block: Block) -> Tensor:
    """The scan over all tokens, those of the padding too."""
    tensors = {name: x.float() for name, x in block.padded.items()}
    u, step, bias, A_log, B, C = (x.float() for x in block.scan_sources(lambda site: tensors[f"{site}.made"]))
    return block.without_padding(scan(u, softplus(step + bias), -torch.exp(A_log), B, C))


def _narrow_scans(
    scan: Callable[..., Tensor],
    u: Tensor,
    step: Tensor,
    bias: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    dtype: torch.dtype,
) -> dict[str, Replay]:
    """The scan with its state, or some of its inputs, in a narrower float."""
    delta, A, name = softplus(step + bias), -torch.exp(A_log), str(dtype).removeprefix("torch.")

    def n(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    return {
        f"the state is rounded to {name}": lambda: scan(u, delta, A, B, C, state=dtype),
        f"A is computed in {name}": lambda: scan(u, delta, n(-torch.exp(n(A_log))), B, C),
        f"A is rounded to {name}": lambda: scan(u, delta, n(A), B, C),
        f"delta is rounded to {name}": lambda: scan(u, n(delta), A, B, C),
        f"delta is computed in {name}": lambda: scan(u, n(softplus(n(n(step) + n(bias)))), A, B, C),
        f"B and C are rounded to {name}": lambda: scan(u, delta, A, n(B), n(C)),
        f"its inputs are rounded to {name}": lambda: scan(n(u), n(delta), n(A), n(B), n(C)),
    }


def _first_token(actual: Tensor, expected: Tensor) -> int:
    """The first token from which the outputs differ; 0 also where they never do."""
    if actual.shape != expected.shape:
        return 0
    hit = Step("", actual, expected.to(actual.dtype)).differs().any(2).any(0).nonzero().reshape(-1)
    return int(hit[0]) if hit.numel() else 0


def _lost_state(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, difference: Tensor) -> int | None:
    """The state whose contribution to y is most like what is missing."""
    states = A.shape[1]
    parts = [scan(u, delta, A[:, [n]], B[..., n::states], C[..., n::states]).double() for n in range(states)]
    missing = -difference.double().nan_to_num(0.0)
    alike = [float((part * missing).sum() / part.square().sum().clamp(min=1e-300).sqrt()) for part in parts]
    found = max(range(len(alike)), key=alike.__getitem__) if alike else None
    return found if found is not None and alike[found] > 0 else None


def softplus(x: Tensor, limit: float = 20.0) -> Tensor:
    """log(1 + e^x), the identity above the limit."""
    return torch.where(x > limit, x, torch.log1p(torch.exp(x.clamp(max=limit))))


def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    state: torch.dtype | None = None,
    every: int = 0,
    lost_at: int = -1,
    carried: bool = False,
    decay: Tensor | None = None,
    euler: bool = False,
    lengths: Sequence[int] = (),
    begin: Sequence[Tensor] = (),
    ends: list[Tensor] | None = None,
    before: list[Tensor] | None = None,
) -> Tensor:
    """h = exp(delta A) h + delta B u, y = C h, token by token.

    `state` rounds h; `every` and `lost_at` forget it; `carried` begins with the last one of the sequence before;
    `decay` takes the place of delta in the first term; `euler` replaces the exponential by 1 + delta A. `lengths` are
    the tokens of several forwards, of which each but the first begins with a state of `begin`; the states after them,
    and those before their last token, are appended to `ends` and `before`.
    """
    if carried and u.shape[0] > 1:
        joined = [x.reshape(1, -1, x.shape[-1]) for x in (u, delta, B, C)]
        return scan(joined[0], joined[1], A, joined[2], joined[3]).reshape(u.shape)
    rate = delta if decay is None else decay
    h = torch.zeros(u.shape[0], u.shape[2], A.shape[1], dtype=u.dtype, device=u.device)
    starts = {sum(lengths[:n]): n - 1 for n in range(1, len(lengths))}
    outputs = []
    for t in range(u.shape[1]):
        if t in starts:
            h = begin[starts[t]].to(h)
        if (every and t % every == 0) or t == lost_at:
            h = torch.zeros_like(h)
        power = rate[:, t, :, None] * A
        kept = (1 + power).clamp(min=0) if euler else torch.exp(power)
        last = h
        h = kept * h + (delta[:, t] * u[:, t])[:, :, None] * _of_channels(B[:, t], A)
        if state is not None:
            h = h.to(state).to(u.dtype)
        outputs.append((h * _of_channels(C[:, t], A)).sum(-1))
        if ends is not None and before is not None and (t + 1 in starts or t + 1 == u.shape[1]):
            ends.append(h)
            before.append(last)
    return torch.stack(outputs, 1)


def _of_channels(x: Tensor, A: Tensor) -> Tensor:
    """B or C of one token as [sequence, channel or 1, state]; it is given for all groups of channels in a row."""
    channels, states = A.shape
    groups = x.reshape(len(x), -1, states)
    return groups if groups.shape[1] == 1 else groups.repeat_interleave(channels // groups.shape[1], 1)
