"""The steps of a quantized Mamba block, each with its expected output, in the order of the data flow.

Every expectation is computed from the tensors that really entered the step, so that only the step with the fault
disagrees, and not all steps after it. Weights are expected from the float model, sites from their calibrated scale.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from probe.diagnosis.linear_steps import (
    NARROW,
    Suspects,
    grid_step,
    linear_step,
    norm_step,
    product_step,
    sums_step,
    weight_step,
)
from probe.diagnosis.mamba_block import Block
from probe.diagnosis.plain_grids import PlainGrid
from probe.diagnosis.scan_step import scan_steps
from probe.diagnosis.signatures import GRIDS, Replay, Step
from probe.numerics.hadamard import hadamard_matrix
from probe.running.recipes import SHARED_SCALE, gridded_sites, gridded_weights, site_grid

#: Weights into which the inverse of a rotation is folded.
ROTATED = ("in_proj.weight", "out_proj.weight")


def mamba_steps(block: Block) -> Iterator[Step]:
    """All steps of the block."""
    yield from _to_in_proj(block)
    yield from _to_conv1d(block)
    yield from _to_scan(block)
    yield from _to_output(block)


def _to_in_proj(block: Block) -> Iterator[Step]:
    h, eps = block.given("block").double(), float(cast(Any, block.stock.norm).variance_epsilon)
    n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    gamma = block.stock.gamma.double()
    twice: Suspects = {"gamma is applied, and folded too": lambda: n * gamma, "the norm is left out": lambda: h}
    yield norm_step("the norm", h, block.given("mixer"), eps, None, twice)
    normed = block.given("mixer").double()
    left_out: Suspects = {"the Hadamard rotation is left out": lambda: normed, **_narrow(rotated, normed)}
    if block.padded:
        left_out = {**left_out, "masked, as padding is": lambda: torch.zeros_like(normed)}
    yield sums_step("rotation before in_proj", block.given("in_proj.input"), rotated(normed), left_out)
    yield _site(block, "in_proj.input")
    yield _weight(block, "in_proj.weight")
    yield _linear(block, "in_proj", block.made("in_proj.input"), block.given("in_proj.output"))
    yield _site(block, "in_proj.output")


def _to_conv1d(block: Block) -> Iterator[Step]:
    static = block.mode.conv_input == "static"
    before = block.made("in_proj.output") if static else block.given("in_proj.output")
    first, second = before.chunk(2, dim=-1)
    swapped = {"x and z are swapped": lambda: second}
    yield sums_step("the split into x and z", block.given("conv1d.input"), first, swapped)
    if not static:
        yield _site(block, "conv1d.input")
    yield _weight(block, "conv1d.weight")
    if "conv1d.bias" in {name for one in (block.mixer, block.stock.mixer) for name, _ in one.named_parameters()}:
        yield _weight(block, "conv1d.bias")
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
        **_narrow(lambda x, taps: functional.silu(convolved(x, taps, None if bias is None else bias.to(x))), x, taps),
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
    yield sums_step("conv1d and SiLU", block.given("conv1d.output"), functional.silu(made), replays)
    yield _site(block, "conv1d.output")


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


def _to_scan(block: Block) -> Iterator[Step]:
    conv = block.made("conv1d.output")
    unrounded = {"it reads the unrounded conv1d output": lambda: block.given("conv1d.output")}
    yield sums_step("input of site scan.u", block.given("scan.u"), conv, unrounded)
    yield _site(block, "scan.u", unrounded)
    yield sums_step("input of site x_proj.input", block.given("x_proj.input"), conv, unrounded)
    yield _site(block, "x_proj.input", unrounded)
    yield _weight(block, "x_proj.weight")
    yield _linear(block, "x_proj", block.made("x_proj.input"), block.given("x_proj.output"))
    yield _site(block, "x_proj.output")
    dt = block.scan_parameters(block.made("x_proj.output"))[0]
    yield _weight(block, "dt_proj.weight")
    bias = block.weight("dt_proj.bias")
    weight = block.weight("dt_proj.weight")
    biased = {"its bias is added too": lambda: dt.double() @ weight.T + bias}
    yield product_step("dt_proj", weight, None, dt, block.given("dt_proj.output"), biased)
    yield _site(block, "dt_proj.output")
    yield _weight(block, "dt_proj.bias")
    yield _weight(block, "A_log")
    yield from scan_steps(block)


def _narrow(function: Callable[..., Tensor], *tensors: Tensor) -> dict[str, Replay]:
    """The function in narrower floats."""
    return {
        f"computed in {str(dtype).removeprefix('torch.')}": partial(
            lambda dtype: function(*(x.to(dtype) for x in tensors)).to(dtype).double(), dtype
        )
        for dtype in NARROW
    }


def _to_output(block: Block) -> Iterator[Step]:
    yield _weight(block, "D")
    y, u, D = block.made("scan.y").double(), block.made("scan.u").double(), block.weight("D")
    x, z = block.made("in_proj.output").double().chunk(2, dim=-1)
    z_float = block.given("in_proj.output").double().chunk(2, dim=-1)[1]
    gate, whole = functional.silu(z), y + D * u
    replays: dict[str, Replay] = {
        "the Hadamard rotation is left out": lambda: whole * gate,
        "D u is left out": lambda: rotated(y * gate),
        "the gate SiLU(z) is left out": lambda: rotated(whole),
        "the gate is z, SiLU is left out": lambda: rotated(whole * z),
        "the gate is sigmoid(z), not SiLU(z)": lambda: rotated(whole * torch.sigmoid(z)),
        "the gate is SiLU(x), x and z are swapped": lambda: rotated(whole * functional.silu(x)),
        "z is not on its grid": lambda: rotated(whole * functional.silu(z_float)),
        "the gate is applied before D u": lambda: rotated(y * gate + D * u),
        "D u is added twice": lambda: rotated((whole + D * u) * gate),
        "the gate is applied twice": lambda: rotated(whole * gate * gate),
    }
    for dtype in NARROW:
        replays |= _narrow_gates(whole, z, dtype)
    yield sums_step("D u, gate and rotation", block.given("out_proj.input"), rotated(whole * gate), replays)
    yield _site(block, "out_proj.input")
    yield _weight(block, "out_proj.weight")
    yield _linear(block, "out_proj", block.made("out_proj.input"), block.made("mixer"))
    if not block.ends_with_mixer:
        return
    h, added = block.given("block").double(), block.made("mixer").double()
    skipped: Suspects = {
        "the residual is left out": lambda: added,
        "the mixer's output is left out": lambda: h,
        "the residual is added twice": lambda: 2 * h + added,
        "the mixer's output is added twice": lambda: h + 2 * added,
        **_narrow(torch.add, h, added),
    }
    yield sums_step("the residual", block.made("block"), h + added, skipped)


def _narrow_gates(whole: Tensor, z: Tensor, dtype: torch.dtype) -> dict[str, Replay]:
    """The gate, what it gates, or the rotation, in a narrower float; `whole` is y + D u."""
    gate, name = functional.silu(z), str(dtype).removeprefix("torch.")

    def n(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    return {
        f"the gate is computed in {name}": lambda: rotated(whole * n(functional.silu(n(z)))),
        f"y is rounded to {name}": lambda: rotated(n(whole) * gate),
        f"the product is rounded to {name}": lambda: rotated(n(whole * gate)),
        f"the rotation is computed in {name}": lambda: n(rotated(n(whole * gate))),
    }


def _linear(block: Block, name: str, given: Tensor, made: Tensor) -> Step:
    plain = _folded(block, f"{name}.weight")[0].double()
    return linear_step(
        name,
        block.mixer.get_submodule(name),
        given,
        made,
        {"its weight is not quantized": lambda: given.double() @ plain.T},
    )


def _site(block: Block, site: str, more: Suspects | None = None) -> Step:
    given, made, source = block.given(site), block.made(site), SHARED_SCALE.get(site, site)
    if site not in gridded_sites(block.mode, block.format, block.name):
        grid = PlainGrid(block.format, block.amax(source))
        more = {**(more or {}), "put on a grid, though values should flow on": lambda: grid(given)}
        return grid_step(f"site {site}", None, given, made, more=more)
    has_quantile = source == "conv1d.output" and block.amax(source) is not None
    largest = block.amax("scan.u") if has_quantile else None
    plain = replace(PlainGrid.at(site_grid(block.format, site, block.amax)), lengths=block.lengths)
    return grid_step(f"site {site}", plain, given, made, largest=largest, more=more)


def _weight(block: Block, name: str) -> Step:
    """A weight on its grid; the norm's gamma and the rotations are folded into those of the projections first."""
    actual, plain = (mixer.get_parameter(name).detach() for mixer in (block.mixer, block.stock.mixer))
    grid, others = PlainGrid(block.format), dict[str, Replay]()
    folded, unrotated = _folded(block, name)
    if name in ROTATED:
        others["the Hadamard rotation is not folded in"] = lambda: grid(unrotated)
        others["on the grid first, rotated afterwards"] = lambda: rotated(grid(unrotated)).float()
    if name == "in_proj.weight":
        others["the norm's gamma is not folded in"] = lambda: grid(rotated(plain).float())
    if name not in gridded_weights(block.mode, block.name):
        more: Suspects = {"put on a grid, though it is declared float": lambda: grid(folded)}
        return grid_step(f"weight {name}", None, folded, actual, more=more, noise=GRIDS)
    noise = GRIDS if name in ROTATED else 0.0  # folded with another order of sums
    return weight_step(name, block.format, folded, actual, others, noise=noise)


def _folded(block: Block, name: str) -> tuple[Tensor, Tensor]:
    """A float weight as it is put on the grid, and without its rotation."""
    unrotated = plain = block.stock.mixer.get_parameter(name).detach()
    if name == "in_proj.weight":
        unrotated = (plain.double() * block.stock.gamma.detach().double()).to(plain.dtype)
    return rotated(unrotated).to(plain.dtype) if name in ROTATED else unrotated, unrotated


def rotated(x: Tensor) -> Tensor:
    """x H / sqrt(n) along the last axis, as a matrix product in float64; only the matrix is shared with the modes."""
    n = x.shape[-1]
    return x.double() @ (hadamard_matrix(n, torch.float64) / math.sqrt(n)).to(x.device)


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
