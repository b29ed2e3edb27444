"""The steps of a quantized Mamba block, each with its expected output, in the order of the data flow.

Every expectation is computed from the tensors that really entered the step, so that only the step with the fault
disagrees, and not all steps after it. Weights are expected from the float model, sites from their calibrated scale.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from probe.diagnosis.plain_grids import PlainGrid
from probe.diagnosis.signatures import GRIDS, Replay, Step
from probe.formats import Format
from probe.models.mamba import SITES, SiteMixer
from probe.numerics.hadamard import hadamard_matrix
from probe.running.calibration import Amax
from probe.running.modes import Mode
from probe.running.recipes import SHARED_SCALE, gridded_sites, gridded_weights, site_grid

#: Weights into which the inverse of a rotation is folded.
ROTATED = ("in_proj.weight", "out_proj.weight")


class NeverRanError(ValueError):
    """A part of the block that was not called."""


@dataclass(frozen=True, eq=False)
class Block:
    """A block that ran, with the tensors of its sites (`conv1d.output.given`, `conv1d.output.made`)."""

    tensors: Mapping[str, Tensor]
    twin: Any  # the quantized block
    stock: Any  # the float block
    mode: Mode
    format: Format
    amax: Amax  # calibrated, by site
    name: str = ""  # of the mixer, which says what a mode keeps float

    @property
    def mixer(self) -> SiteMixer:
        """The quantized mixer."""
        mixer = self.twin.mixer
        if not isinstance(mixer, SiteMixer):
            raise ValueError(f"the mixer is a {type(mixer).__name__}, not a SiteMixer")
        return mixer

    def given(self, site: str) -> Tensor:
        """The input of a site; a NeverRanError if it never ran."""
        return self._of(site, "given")

    def made(self, site: str) -> Tensor:
        """The output of a site; a NeverRanError if it never ran."""
        return self._of(site, "made")

    def _of(self, site: str, side: str) -> Tensor:
        if f"{site}.{side}" not in self.tensors:
            raise NeverRanError(f"{'site ' if site in SITES else ''}{site}; it never ran")
        return self.tensors[f"{site}.{side}"]

    def weight(self, name: str) -> Tensor:
        """A weight of the quantized mixer in float64."""
        return self.mixer.get_parameter(name).detach().double()


def mamba_steps(block: Block) -> Iterator[Step]:
    """All steps of the block."""
    yield from _to_in_proj(block)
    yield from _to_conv1d(block)
    yield from _to_scan(block)
    yield from _to_output(block)


def _to_in_proj(block: Block) -> Iterator[Step]:
    h, eps = block.given("block").double(), float(block.stock.norm.variance_epsilon)
    n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    gamma = block.stock.norm.weight.double()
    twice: Suspects = {"gamma is applied, and folded too": lambda: n * gamma, "the norm is left out": lambda: h}
    yield norm_step("the norm", h, block.given("mixer"), eps, None, twice)
    normed = block.given("mixer").double()
    left_out: Suspects = {"the Hadamard rotation is left out": lambda: normed, **_narrow(rotated, normed)}
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
    if block.mixer.conv1d.bias is not None or block.stock.mixer.conv1d.bias is not None:
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
    yield sums_step("conv1d and SiLU", block.given("conv1d.output"), functional.silu(made), replays)
    yield _site(block, "conv1d.output")


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
    dt = block.made("x_proj.output")[..., : block.mixer.time_step_rank]
    yield _weight(block, "dt_proj.weight")
    bias = block.weight("dt_proj.bias")
    weight = block.weight("dt_proj.weight")
    biased = {"its bias is added too": lambda: dt.double() @ weight.T + bias}
    yield product_step("dt_proj", weight, None, dt, block.given("dt_proj.output"), biased)
    yield _site(block, "dt_proj.output")
    yield _weight(block, "dt_proj.bias")
    yield _weight(block, "A_log")
    yield _scan(block)


def _scan(block: Block) -> Step:
    mixer = block.mixer
    sizes = [mixer.time_step_rank, mixer.state_size, mixer.state_size]
    _, *B_and_C = torch.split(block.made("x_proj.output"), sizes, dim=-1)
    sources = (block.made("scan.u"), block.made("dt_proj.output"), block.weight("dt_proj.bias"), block.weight("A_log"))

    def parts(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(x.to(dtype) for x in (*sources, *B_and_C))

    def run(dtype: torch.dtype) -> Tensor:
        u, step, bias, A_log, B, C = parts(dtype)
        return scan(u, softplus(step + bias), -torch.exp(A_log), B, C)

    u, step, bias, A_log, B, C = parts(torch.float32)  # a replay overflows where the real one does
    delta, A = softplus(step + bias), -torch.exp(A_log)
    unrounded, D = block.given("conv1d.output").float(), block.weight("D").float()
    grid = PlainGrid(block.format)
    actual = block.given("scan.y")

    def late(x: Tensor, dim: int) -> Tensor:
        return functional.pad(x, (0, 0, 1, 0))[:, :-1] if dim == 1 else functional.pad(x, (1, 0))[..., :-1]

    replays: dict[str, Replay] = {
        "B and C are swapped": lambda: scan(u, delta, A, C, B),
        "softplus is left out": lambda: scan(u, step + bias, A, B, C),
        "the bias of dt_proj is left out": lambda: scan(u, softplus(step), A, B, C),
        "the bias of dt_proj is added twice": lambda: scan(u, softplus(step + 2 * bias), A, B, C),
        "softplus is taken twice": lambda: scan(u, softplus(delta), A, B, C),
        "the bias of dt_proj is added after softplus": lambda: scan(u, softplus(step) + bias, A, B, C),
        "the scan reads the unrounded conv1d output": lambda: scan(unrounded, delta, A, B, C),
        "A has lost its minus sign": lambda: scan(u, delta, -A, B, C),
        "A is not -exp(A_log) but -A_log": lambda: scan(u, delta, -A_log, B, C),
        "A is put on the grid again, after exp": lambda: scan(u, delta, grid(A), B, C),
        "delta is left out of the drive": lambda: scan(u / delta, delta, A, B, C),
        "delta is left out of the decay": lambda: scan(u, delta, A, B, C, decay=torch.ones_like(delta)),
        "D u is added before site scan.y": lambda: run(torch.float32) + D * u,
        "exp(delta A) is replaced by 1 + delta A": lambda: scan(u, delta, A, B, C, euler=True),
        "B is one token late": lambda: scan(u, delta, A, late(B, 1), C),
        "C is one token late": lambda: scan(u, delta, A, B, late(C, 1)),
        "B and C are one token late": lambda: scan(u, delta, A, late(B, 1), late(C, 1)),
        "B and C are shifted by one state": lambda: scan(u, delta, A, late(B, 2), late(C, 2)),
        "the state is carried from one sequence to the next": lambda: scan(u, delta, A, B, C, carried=True),
        "u is one token late": lambda: scan(late(u, 1), delta, A, B, C),
    }
    for limit in (0.0, 1.0, 2.0, 5.0, 10.0):
        words = f"softplus is the identity above {limit:g}, not above 20"
        replays[words] = partial(lambda limit: scan(u, softplus(step + bias, limit), A, B, C), limit)
    for dtype in NARROW:
        replays |= _narrow_scans(u, step, bias, A_log, B, C, dtype)
    expected = run(torch.float64)
    first = _first_token(actual, expected)
    if first:
        replays[f"the state is lost at token {first}"] = lambda: scan(u, delta, A, B, C, lost_at=first)
        replays[f"the state is lost every {first} tokens"] = lambda: scan(u, delta, A, B, C, every=first)
        replays[f"it ends at token {first}"] = lambda: run(torch.float32) * (torch.arange(u.shape[1]) < first)[:, None]
    if actual.shape == expected.shape and (lost := _lost_state(u, delta, A, B, C, actual - expected)) is not None:
        kept = (torch.arange(A.shape[1]) != lost).to(C)
        replays[f"state {lost} of {A.shape[1]} is lost"] = lambda: scan(u, delta, A, B, C * kept)
    return sums_step("the scan", actual, expected, replays)


def _narrow_scans(
    u: Tensor, step: Tensor, bias: Tensor, A_log: Tensor, B: Tensor, C: Tensor, dtype: torch.dtype
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
    parts = [scan(u, delta, A[:, [n]], B[..., [n]], C[..., [n]]).double() for n in range(A.shape[1])]
    missing = -difference.double().nan_to_num(0.0)
    alike = [float((part * missing).sum() / part.square().sum().clamp(min=1e-300).sqrt()) for part in parts]
    found = max(range(len(alike)), key=alike.__getitem__) if alike else None
    return found if found is not None and alike[found] > 0 else None


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
    return linear_step(name, block.mixer.get_submodule(name), given, made)


def _site(block: Block, site: str, more: Suspects | None = None) -> Step:
    given, made, source = block.given(site), block.made(site), SHARED_SCALE.get(site, site)
    if site not in gridded_sites(block.mode, block.format, block.name):
        grid = PlainGrid(block.format, block.amax(source))
        more = {**(more or {}), "put on a grid, though values should flow on": lambda: grid(given)}
        return grid_step(f"site {site}", None, given, made, more=more)
    has_quantile = source == "conv1d.output" and block.amax(source) is not None
    largest = block.amax("scan.u") if has_quantile else None
    plain = PlainGrid.at(site_grid(block.format, site, block.amax))
    return grid_step(f"site {site}", plain, given, made, largest=largest, more=more)


def _weight(block: Block, name: str) -> Step:
    """A weight on its grid; the norm's gamma and the rotations are folded into those of the projections first."""
    actual, plain = (mixer.get_parameter(name).detach() for mixer in (block.mixer, block.stock.mixer))
    grid = PlainGrid(block.format)
    unrotated, others = plain, dict[str, Replay]()
    if name == "in_proj.weight":
        unrotated = (plain.double() * block.stock.norm.weight.detach().double()).to(plain.dtype)
    folded = rotated(unrotated).to(plain.dtype) if name in ROTATED else unrotated
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


def rotated(x: Tensor) -> Tensor:
    """x H / sqrt(n) along the last axis, as a matrix product in float64; only the matrix is shared with the modes."""
    n = x.shape[-1]
    return x.double() @ (hadamard_matrix(n, torch.float64) / math.sqrt(n)).to(x.device)


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
) -> Tensor:
    """h = exp(delta A) h + delta B u, y = C h, token by token.

    `state` rounds h; `every` and `lost_at` forget it; `carried` begins with the last one of the sequence before;
    `decay` takes the place of delta in the first term; `euler` replaces the exponential by 1 + delta A.
    """
    if carried and u.shape[0] > 1:
        joined = [x.reshape(1, -1, x.shape[-1]) for x in (u, delta, B, C)]
        return scan(joined[0], joined[1], A, joined[2], joined[3]).reshape(u.shape)
    rate = delta if decay is None else decay
    h = torch.zeros(u.shape[0], u.shape[2], A.shape[1], dtype=u.dtype, device=u.device)
    outputs = []
    for t in range(u.shape[1]):
        if (every and t % every == 0) or t == lost_at:
            h = torch.zeros_like(h)
        power = rate[:, t, :, None] * A
        kept = (1 + power).clamp(min=0) if euler else torch.exp(power)
        h = kept * h + (delta[:, t] * u[:, t])[:, :, None] * B[:, t, None, :]
        if state is not None:
            h = h.to(state).to(u.dtype)
        outputs.append((h * C[:, t, None, :]).sum(-1))
    return torch.stack(outputs, 1)


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
