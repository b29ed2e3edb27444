"""The Mamba-1 mixer with every tensor inside it as a `Site`, which hooks can see and a mode can put on a grid.

The stock mixer reads the weights of conv1d, act and dt_proj without calling them, so hooks there never fire, and
the inputs and outputs of its scan cannot be reached at all. SiteMixer computes the same from the same weights, and
each site is a module of its own: a forward hook on `layers.0.mixer.sites.scan.u` sees that tensor.

    h -- RMSNorm, rotation --> [in_proj.input] -- in_proj --> [in_proj.output] --> x | z
    x --> [conv1d.input] -- conv1d, SiLU --> F --> [conv1d.output]
    conv1d.output --> [x_proj.input] -- x_proj --> [x_proj.output] --> dt | B | C
    conv1d.output --> [scan.u]
    FalconMamba and Jamba: RMSNorm of dt, of B and of C
    dt -- dt_proj --> [dt_proj.output];  delta = softplus(dt + dt_bias)
    scan(u, delta, A, B, C) --> [scan.y];  (y + D u) SiLU(z), rotation --> [out_proj.input] -- out_proj --> out

The selective scan, of which there are two, is in scans.py. Zamba's mixer (zamba.py) is one of these with heads; Mamba-2
(mamba2.py) goes another way from conv1d.output to the scan, and from there to out_proj.input.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.models.offload import at_hand
from probe.models.scans import REFERENCE_SCAN, SCANS, Scanned
from probe.numerics.hadamard import hadamard_transform

Grid = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """A kind of mixer, by the names that modes, calibration and diagnosis know it by.

    sites     in the order of the data flow
    weights   the parameters that a quantized mode puts on the grid, by name in the mixer of transformers; one that a
              mixer lacks, such as the bias of a convolution, is passed over
    read      modules whose weights are read without a call
    convolves_all   whether B and C pass through conv1d too, behind x
    interleaves     whether x and z take turns in the output of in_proj, so that a block there is none of x
    """

    name: str
    mixers: tuple[str, ...]  # the classes of transformers that are laid out like this
    sites: tuple[str, ...]
    weights: tuple[str, ...]
    read: tuple[str, ...] = ("conv1d",)
    convolves_all: bool = False
    interleaves: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules and parameters of the mixer that hold the weights."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.weights))

    @property
    def own_weights(self) -> tuple[str, ...]:
        """The weights that are parameters of the mixer itself: A_log and D, among others."""
        return tuple(name for name in self.weights if "." not in name)


MAMBA = Layout(
    "Mamba-1",
    mixers=("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"),
    sites=(
        *("in_proj.input", "in_proj.output", "conv1d.input", "conv1d.output", "x_proj.input", "x_proj.output"),
        *("dt_proj.output", "scan.u", "scan.y", "scan.state", "out_proj.input"),
    ),
    weights=(
        *("in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight", "dt_proj.bias"),
        *("A_log", "D", "out_proj.weight"),
    ),
    read=("conv1d", "dt_proj"),
)
#: The norms of dt, B and C that some mixers have.
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class Site(nn.Module):
    """A named tensor: the identity, or a grid. Hooks on it see the value that flows on."""

    def __init__(self) -> None:
        super().__init__()
        self.grid: Grid | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`x` on the grid, if there is one."""
        return x if self.grid is None else self.grid(x)


class SiteMixer(nn.Module):
    """A stand-in for a Mamba-1 mixer of transformers, over copies of its weights; its subclasses, for other mixers.

    In float, unrotated, it equals the stock mixer up to the order of sums. `rotate` turns the input of in_proj and
    of out_proj by a Hadamard matrix, which `fold` undoes in their weights, so that the output keeps its basis.
    """

    layout: ClassVar[Layout] = MAMBA
    in_proj: nn.Linear
    conv1d: nn.Conv1d
    x_proj: nn.Linear
    dt_proj: nn.Linear
    out_proj: nn.Linear
    A_log: nn.Parameter
    D: nn.Parameter

    def __init__(self, stock: nn.Module, *, scan: str = REFERENCE_SCAN) -> None:
        super().__init__()
        source: Any = stock
        for name in self.layout.modules:
            setattr(self, name, copy.deepcopy(getattr(source, name)))
        self.layer_idx: int = source.layer_idx
        self.intermediate_size: int = source.intermediate_size
        self.state_size: int = source.ssm_state_size
        self.conv_kernel_size: int = source.conv_kernel_size
        self.activation = copy.deepcopy(source.act)
        self.scan_name = scan
        self.rotated = False
        sites: dict[str, nn.ModuleDict] = {}
        for module, tensor in (site.split(".") for site in self.layout.sites):
            sites.setdefault(module, nn.ModuleDict())[tensor] = Site()
        self.sites = nn.ModuleDict(sites)
        self.groups = 1  # of channels: those of one share B and C
        self.state_shape: tuple[int, ...] = (self.intermediate_size, self.state_size)  # of one sequence, in a cache
        self._take(source)

    @classmethod
    def refusal(cls, source: Any) -> str:
        """Why this cannot stand in for a mixer of its layout; empty where it can."""
        return ""

    def _take(self, source: Any) -> None:
        """What only this kind of mixer has."""
        self.time_step_rank: int = source.time_step_rank
        self.norms = tuple(name for name in NORMS if hasattr(source, name))
        for name in self.norms:
            setattr(self, name, copy.deepcopy(getattr(source, name)))

    def site(self, name: str) -> Site:
        """The site of that name, e.g. `conv1d.output`."""
        module, _, tensor = name.partition(".")
        return cast(Site, cast(nn.ModuleDict, self.sites[module])[tensor])

    def width(self, site: str) -> int:
        """The channels of a site."""
        widths = {
            "in_proj.input": self.in_proj.weight.shape[1],
            "in_proj.output": self.in_proj.weight.shape[0],
            "conv1d.input": self.conv1d.weight.shape[0],
            "conv1d.output": self.conv1d.weight.shape[0],
            "scan.state": self.state_size,
        }
        return {**widths, **self._widths()}.get(site, self.intermediate_size)

    def _widths(self) -> dict[str, int]:
        return {"x_proj.output": self.groups * (self.time_step_rank + 2 * self.state_size)}

    @torch.no_grad()
    def fold(self, gamma: Tensor | None, *, rotate: bool) -> None:
        """Take the norm's gamma into in_proj, and, with `rotate`, the Hadamard matrices into in_proj and out_proj.

        in_proj(gamma * n) = W diag(gamma) n = (W diag(gamma) H) (H n),   H H = I
        """
        into, out = self.in_proj.weight, self.out_proj.weight
        if gamma is not None:
            into.copy_((into.double() * gamma.double()).to(into.dtype))
        if rotate:
            into.copy_(hadamard_transform(into.double()).to(into.dtype))
            out.copy_(hadamard_transform(out.double()).to(out.dtype))
            self.rotated = True

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """The block without its norm and residual; prefill, and decode with a carried state."""
        if not self.conv1d.weight.is_meta:
            return self._mixed(hidden_states, cache_params, attention_mask)
        with self.weights_at_hand():
            return self._mixed(hidden_states, cache_params, attention_mask)

    def weights_at_hand(self) -> AbstractContextManager[object]:
        """While it lasts, the weights of an offloaded mixer that are read without a call are loaded."""
        stack = ExitStack()
        for name in self.layout.read:
            stack.enter_context(at_hand(self.get_submodule(name)))
        return stack

    def _mixed(self, hidden_states: Tensor, cache_params: Any, attention_mask: Tensor | None) -> Tensor:
        dtype, length = hidden_states.dtype, hidden_states.shape[1]
        conv_state = state = None
        if cache_params is not None:
            conv_state = cache_params.get_conv_state(self.layer_idx, state_idx=0)
            state = cache_params.get_recurrent_state(self.layer_idx, state_idx=0)
        hidden_states = _masked(hidden_states, attention_mask)
        if self.rotated:
            hidden_states = hadamard_transform(hidden_states)
        projected = self.in_proj(self.site("in_proj.input")(hidden_states))
        x, z, *dt = self.split(self.site("in_proj.output")(projected))
        if self.site("conv1d.input").grid is not None:  # a grid of its own, for the unrounded values
            x = self.split(projected)[0]
        x = self.site("conv1d.input")(x)

        convolved = self.activation(self._convolve(x, conv_state, cache_params))[:, -length:]
        convolved = self.site("conv1d.output")(_masked(convolved, attention_mask))
        u, step, B, C = self.scan_inputs(convolved, *dt)
        y, last = self.scanned(u, self.delta(step), B, C, state)
        y = self.site("scan.y")(y)
        if cache_params is not None:
            kept = self.site("scan.state")(last).reshape(-1, *self.state_shape)
            cache_params.update_recurrent_state(kept, self.layer_idx)
        y = self.finished(y, u, z).to(dtype)
        if self.rotated:
            y = hadamard_transform(y)
        out: Tensor = self.out_proj(self.site("out_proj.input")(y))
        return out

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """What conv1d reads and the gate z, and in Mamba-2 dt, in an output of in_proj."""
        return projected.chunk(2, dim=-1)

    def scan_inputs(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u, the steps before their bias, B and C, from the output of conv1d."""
        u = self.site("scan.u")(convolved)
        parameters = self.site("x_proj.output")(self.x_proj(self.site("x_proj.input")(convolved)))
        dt, B, C = self.normed(*parameters.split([self.time_step_rank, self.state_size, self.state_size], dim=-1))
        return u, self.site("dt_proj.output")(functional.linear(dt, self.dt_proj.weight)), B, C

    def normed(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """dt, B and C, each after its norm, in a mixer that has norms."""
        if not self.norms:
            return parameters
        return tuple(self.get_submodule(name)(x) for name, x in zip(NORMS, parameters, strict=True))

    def scanned(self, u: Tensor, delta: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> Scanned:
        """The scan of every group of channels, each with B and C of its own."""
        scan, A, count = SCANS[self.scan_name], self.rates(), self.groups
        before = None if state is None else state.reshape(len(u), *A.shape)
        if count == 1:
            return scan(u, delta, A, B, C, before)
        states = [None] * count if before is None else before.chunk(count, 1)
        parts = (u.chunk(count, -1), delta.chunk(count, -1), A.chunk(count), B.chunk(count, -1), C.chunk(count, -1))
        made = [scan(*one) for one in zip(*parts, states, strict=True)]
        return torch.cat([y for y, _ in made], -1), torch.cat([last for _, last in made], 1)

    @property
    def step_bias(self) -> Tensor:
        """dt_bias, of every time step."""
        return self.dt_proj.bias

    def delta(self, step: Tensor) -> Tensor:
        """softplus(step + dt_bias), the time steps of the scan, in float32."""
        return functional.softplus(step.float() + self.step_bias.float())

    def rates(self) -> Tensor:
        """A = -exp(A_log), in float32: [channel, state]."""
        return -torch.exp(self.A_log.float())

    def skip(self) -> Tensor:
        """D, in float32: [channel]."""
        return self.D.float()

    def gated(self, y: Tensor, u: Tensor, z: Tensor) -> Tensor:
        """(y + D u) SiLU(z), in float32."""
        return (y.float() + self.skip() * u.float()) * functional.silu(z.float())

    def finished(self, y: Tensor, u: Tensor, z: Tensor) -> Tensor:
        """What out_proj reads, before its rotation."""
        return self.gated(y, u, z)

    def _convolve(self, x: Tensor, conv_state: Tensor | None, cache_params: Any) -> Tensor:
        """Causal depthwise convolution over time; the cache keeps the last inputs for decode."""
        lines = x.transpose(1, 2)
        if cache_params is not None:
            if conv_state is not None and x.shape[1] == 1:
                window = torch.cat([conv_state, lines], -1)[..., -self.conv_kernel_size :]
                conv_state.copy_(window[..., -conv_state.shape[-1] :])
                taps = self.conv1d.weight.squeeze(1)
                out = (window * taps).sum(-1, keepdim=True)
                return (out if self.conv1d.bias is None else out + self.conv1d.bias[:, None]).transpose(1, 2)
            lines = cache_params.update_conv_state(lines, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        # padded as they lie in memory, a token's channels side by side, and then transposed: half the time
        by_time = functional.pad(lines.transpose(1, 2), (0, 0, self.conv_kernel_size - 1, 0))
        padded = by_time.transpose(1, 2).contiguous()
        out = functional.conv1d(padded, self.conv1d.weight, self.conv1d.bias, groups=len(self.conv1d.weight))
        return out.transpose(1, 2)


def _masked(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Padding is zero, as in the stock mixer."""
    return x if attention_mask is None else x * attention_mask[:, -x.shape[1] :, None].to(x.dtype)
