"""The steps of a quantized Mamba block, each with its expected output, in the order of the data flow.

Every expectation is computed from the tensors that really entered the step, so that only the step with the fault
disagrees, and not all steps after it. Weights are expected from the float model, sites from their calibrated scale.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from probe.diagnosis.conv_step import conv_step
from probe.diagnosis.linear_steps import (
    NARROW,
    Suspects,
    grid_step,
    linear_step,
    narrow,
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
    # a block inside a layer, as of Zamba, may be given more than hidden states to add up before its norm
    h, eps = block.given("norm" if block.twin.name else "block").double(), _eps(block.stock.norm)
    n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    gamma = block.stock.gamma.double()
    twice: Suspects = {"gamma is applied, and folded too": lambda: n * gamma, "the norm is left out": lambda: h}
    yield norm_step("the norm", h, block.given("mixer"), eps, None, twice)
    normed = block.given("mixer").double()
    left_out: Suspects = {"the Hadamard rotation is left out": lambda: normed, **narrow(rotated, normed)}
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
    swapped: Suspects = {words: partial(Tensor.clone, x) for words, x in block.wrong_splits(before).items()}
    yield sums_step("the split into x and z", block.given("conv1d.input"), block.split(before)[0], swapped)
    if not static:
        yield _site(block, "conv1d.input")
    yield _weight(block, "conv1d.weight")
    if "conv1d.bias" in {name for one in (block.mixer, block.stock.mixer) for name, _ in one.named_parameters()}:
        yield _weight(block, "conv1d.bias")
    yield conv_step(block)
    yield _site(block, "conv1d.output")


def _to_scan(block: Block) -> Iterator[Step]:
    """conv1d.output goes to scan.u and x_proj.input, or, where B and C are in it, x to scan.u and these to scan.BC."""
    width = block.width
    other = ("scan.BC", slice(width, None)) if block.layout.convolves_all else ("x_proj.input", slice(None))
    for site, part in (("scan.u", slice(width)), other):
        conv, unrounded = (one[..., part] for one in (block.made("conv1d.output"), block.given("conv1d.output")))
        reads: Suspects = {"it reads the unrounded conv1d output": partial(Tensor.clone, unrounded)}
        yield sums_step(f"input of site {site}", block.given(site), conv, reads)
        yield _site(block, site, reads)
    if not block.layout.convolves_all:
        yield from _projections(block)
    yield _weight(block, "dt_proj.bias")
    yield _weight(block, "A_log")
    yield from scan_steps(block)


def _projections(block: Block) -> Iterator[Step]:
    """x_proj and dt_proj."""
    given, made = block.made("x_proj.input"), block.given("x_proj.output")
    yield _weight(block, "x_proj.weight")
    plain = _matrix(_folded(block, "x_proj.weight")[0])
    unquantized = {"its weight is not quantized": lambda: given.double() @ plain.T}
    yield product_step("x_proj", _matrix(block.weight("x_proj.weight")), None, given, made, unquantized)
    yield _site(block, "x_proj.output")
    dt = block.scan_parameters(block.made("x_proj.output"))[0]
    yield _weight(block, "dt_proj.weight")
    bias, weight = block.by_channel("dt_proj.bias"), _matrix(block.weight("dt_proj.weight"))
    biased = {"its bias is added too": lambda: dt.double() @ weight.T + bias}
    yield product_step("dt_proj", weight, None, dt, block.given("dt_proj.output"), biased)
    yield _site(block, "dt_proj.output")


def _matrix(weight: Tensor) -> Tensor:
    """In float64, [out, in]; the matrices of heads, [head, out, in], along the diagonal."""
    if weight.dim() == 2:
        return weight.double()
    matrix: Tensor = torch.block_diag(*weight.double())  # type: ignore[no-untyped-call]
    return matrix


def _to_output(block: Block) -> Iterator[Step]:
    yield _weight(block, "D")
    y, u, D = block.made("scan.y").double(), block.made("scan.u").double(), block.by_channel("D")
    x, z = block.split(block.made("in_proj.output").double())
    x, z_float = x[..., : block.width], block.split(block.given("in_proj.output").double())[1]
    gate, whole = functional.silu(z), y + D * u
    has_norm = "norm.output" in block.layout.sites
    finished = _gated_norm(block) if has_norm else rotated
    replays: dict[str, Replay] = {
        f"the {'norm' if has_norm else 'Hadamard rotation'} is left out": lambda: whole * gate,
        "D u is left out": lambda: finished(y * gate),
        "the gate SiLU(z) is left out": lambda: finished(whole),
        "the gate is z, SiLU is left out": lambda: finished(whole * z),
        "the gate is sigmoid(z), not SiLU(z)": lambda: finished(whole * torch.sigmoid(z)),
        "the gate is SiLU(x), x and z are swapped": lambda: finished(whole * functional.silu(x)),
        "z is not on its grid": lambda: finished(whole * functional.silu(z_float)),
        "the gate is applied before D u": lambda: finished(y * gate + D * u),
        "D u is added twice": lambda: finished((whole + D * u) * gate),
        "the gate is applied twice": lambda: finished(whole * gate * gate),
    }
    for dtype in NARROW:
        replays |= _narrow_gates(whole, z, dtype, finished, "norm" if has_norm else "rotation")
    if has_norm:
        replays["the gate is applied after the norm"] = lambda: finished(whole) * gate
        yield _weight(block, "norm.weight")
        yield sums_step("D u, gate and norm", block.given("norm.output"), finished(whole * gate), replays)
        yield _site(block, "norm.output")
        normed = block.made("norm.output").double()
        unrotated: Suspects = {"the Hadamard rotation is left out": lambda: normed, **narrow(rotated, normed)}
        yield sums_step("rotation before out_proj", block.given("out_proj.input"), rotated(normed), unrotated)
    else:
        yield sums_step("D u, gate and rotation", block.given("out_proj.input"), finished(whole * gate), replays)
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
        **narrow(torch.add, h, added),
    }
    yield sums_step("the residual", block.made("block"), h + added, skipped)


def _gated_norm(block: Block) -> Callable[[Tensor], Tensor]:
    """gamma x / sqrt(mean x^2 + eps), of the norm inside the float mixer."""
    norm = block.stock.mixer.get_submodule("norm")
    gamma, eps = norm.get_parameter("weight").detach().double(), _eps(norm)
    return lambda x: gamma * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon)


def _narrow_gates(
    whole: Tensor, z: Tensor, dtype: torch.dtype, finished: Callable[[Tensor], Tensor], last: str
) -> dict[str, Replay]:
    """The gate, what it gates, or what is last, in a narrower float; `whole` is y + D u."""
    gate, name = functional.silu(z), str(dtype).removeprefix("torch.")

    def n(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    return {
        f"the gate is computed in {name}": lambda: finished(whole * n(functional.silu(n(z)))),
        f"y is rounded to {name}": lambda: finished(n(whole) * gate),
        f"the product is rounded to {name}": lambda: finished(n(whole * gate)),
        f"the {last} is computed in {name}": lambda: n(finished(n(whole * gate))),
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
    if site not in gridded_sites(block.mode, block.format, block.layout, block.name):
        grid = PlainGrid(block.format, block.amax(source))
        more = {**(more or {}), "put on a grid, though values should flow on": lambda: grid(given)}
        return grid_step(f"site {site}", None, given, made, more=more)
    has_quantile = source == "conv1d.output" and block.amax(source) is not None
    largest = max(float(block.amax(one) or 0) for one in _unrounded(block)) if has_quantile else None
    plain = replace(PlainGrid.at(site_grid(block.format, site, block.amax)), lengths=block.lengths)
    return grid_step(f"site {site}", plain, given, made, largest=largest, more=more)


def _unrounded(block: Block) -> list[str]:
    """Sites that together see all of the output of conv1d, calibrated with its largest value."""
    return ["scan.u", "scan.BC"] if block.layout.convolves_all else ["scan.u"]


def _weight(block: Block, name: str) -> Step:
    """A weight on its grid; the norm's gamma and the rotations are folded into those of the projections first."""
    name = block.own(name)
    actual, plain = (mixer.get_parameter(name).detach() for mixer in (block.mixer, block.stock.mixer))
    grid, others = PlainGrid(block.format), dict[str, Replay]()
    folded, unrotated = _folded(block, name)
    if name in ROTATED:
        others["the Hadamard rotation is not folded in"] = lambda: grid(unrotated)
        others["on the grid first, rotated afterwards"] = lambda: rotated(grid(unrotated)).float()
    if name == "in_proj.weight":
        others["the norm's gamma is not folded in"] = lambda: grid(rotated(plain).float())
    if name not in gridded_weights(block.mode, block.layout, block.name):
        more: Suspects = {"put on a grid, though it is declared float": lambda: grid(folded)}
        return grid_step(f"weight {name}", None, folded, actual, more=more, noise=GRIDS)
    noise = GRIDS if name in ROTATED else 0.0  # folded with another order of sums
    return weight_step(name, block.format, folded, actual, others, noise=noise)


def _folded(block: Block, name: str) -> tuple[Tensor, Tensor]:
    """A float weight as it is put on the grid, and without its rotation."""
    unrotated = plain = block.stock.mixer.get_parameter(block.own(name)).detach()
    if name == "in_proj.weight":
        unrotated = (plain.double() * block.stock.gamma.detach().double()).to(plain.dtype)
    return rotated(unrotated).to(plain.dtype) if name in ROTATED else unrotated, unrotated


def rotated(x: Tensor) -> Tensor:
    """x H / sqrt(n) along the last axis, as a matrix product in float64; only the matrix is shared with the modes."""
    n = x.shape[-1]
    return x.double() @ (hadamard_matrix(n, torch.float64) / math.sqrt(n)).to(x.device)
