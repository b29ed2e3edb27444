"""The convolution of a quantized Mamba block, with the faults of it that can be replayed."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from probe.diagnosis.linear_steps import NARROW, Suspects, narrow, sums_step
from probe.diagnosis.mamba_block import Block
from probe.diagnosis.signatures import Replay, Step


def conv_step(block: Block) -> Step:
    """SiLU(conv1d(x)), from the tensor that conv1d was given."""
    x, taps = block.made("conv1d.input").double(), block.weight("conv1d.weight").squeeze(1)
    bias = None if block.mixer.conv1d.bias is None else block.weight("conv1d.bias")
    made = convolved(x, taps, bias)
    replays: Suspects = {
        "the bias is left out": lambda: functional.silu(convolved(x, taps, None)),
        "SiLU is left out": lambda: made,
        "it is one token late": lambda: functional.silu(convolved(x, taps, bias, shift=1)),
        "it looks one token ahead": lambda: functional.silu(convolved(x, taps, bias, shift=-1)),
        "its taps are reversed": lambda: functional.silu(convolved(x, taps.flip(-1), bias)),
        "it begins with the tokens of the sequence before": lambda: functional.silu(leaking(x, taps, bias)),
        **narrow(lambda x, taps: functional.silu(convolved(x, taps, None if bias is None else bias.to(x))), x, taps),
        **_narrow_convolutions(x, taps, bias),
    }
    if bias is not None:
        replays = {**replays, "the bias is added twice": lambda: functional.silu(made + bias)}
    if block.lengths:
        replays = {**replays, **_carried_windows(x, taps, bias, block.lengths)}
    if block.padded:
        whole = block.padded["conv1d.input.made"].double()
        read = partial(lambda whole: block.without_padding(functional.silu(convolved(whole, taps, bias))), whole)
        replays = {**replays, "it reads the padding": read}
    return sums_step("conv1d and SiLU", block.given("conv1d.output"), functional.silu(made), replays)


def _carried_windows(x: Tensor, taps: Tensor, bias: Tensor | None, lengths: tuple[int, ...]) -> dict[str, Replay]:
    """The convolution with faults of the last tokens, which are carried from one forward to the next."""
    first, size = lengths[0], taps.shape[1]

    def alone(*parts: Tensor) -> Tensor:
        return functional.silu(torch.cat([convolved(part, taps, bias) for part in parts], 1))

    def stale() -> Tensor:
        window = x[:, max(0, first - size + 1) : first]
        steps = [torch.cat([window, x[:, t : t + 1]], 1) for t in range(first, x.shape[1])]
        made = [convolved(x[:, :first], taps, bias), *(convolved(step, taps, bias)[:, -1:] for step in steps)]
        return functional.silu(torch.cat(made, 1))

    def narrow(dtype: torch.dtype) -> Tensor:
        before = x.to(dtype).double()
        made = convolved(before, taps, bias) + taps[:, -1] * (x - before)  # the window has only tokens of the past
        return functional.silu(torch.cat([convolved(x[:, :first], taps, bias), made[:, first:]], 1))

    return {
        "the window is empty after the prefill": lambda: alone(x[:, :first], x[:, first:]),
        "the window is not carried on": lambda: alone(*torch.split(x, list(lengths), 1)),
        "the window is not moved on": stale,
        **{f"the window is rounded to {str(dtype).removeprefix('torch.')}": partial(narrow, dtype) for dtype in NARROW},
    }


def _narrow_convolutions(x: Tensor, taps: Tensor, bias: Tensor | None) -> dict[str, Replay]:
    """The convolution alone in narrower floats, SiLU in float32."""

    def replayed(dtype: torch.dtype) -> Tensor:
        operands = (x.to(dtype).double(), taps.to(dtype).double(), None if bias is None else bias.to(dtype).double())
        return functional.silu(convolved(*operands).to(dtype).double())

    return {
        f"the convolution is computed in {str(dtype).removeprefix('torch.')}": partial(replayed, dtype)
        for dtype in NARROW
    }


def leaking(x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution over all sequences in a row, each beginning with the last tokens of the one before."""
    return convolved(x.reshape(1, -1, x.shape[-1]), taps, bias).reshape(x.shape)


def convolved(x: Tensor, taps: Tensor, bias: Tensor | None, *, shift: int = 0) -> Tensor:
    """Causal depthwise convolution over time, taps [channel, tap]; `shift` is how many tokens late it is."""
    size, length, ahead = taps.shape[1], x.shape[1], max(-shift, 0)
    padded = functional.pad(x, (0, 0, size - 1 + max(shift, 0), ahead))
    out = torch.zeros_like(x)
    for k in range(size):
        out = out + padded[:, ahead + k : ahead + k + length] * taps[:, k]
    return out if bias is None else out + bias
