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

The selective scan, of which there are two, is in scans.py.
"""

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.models.layers import blocks_of
from probe.models.offload import at_hand
from probe.models.scans import REFERENCE_SCAN, SCANS
from probe.numerics.hadamard import hadamard_transform

Grid = Callable[[Tensor], Tensor]

#: Every site, in the order of the data flow.
SITES = (
    *("in_proj.input", "in_proj.output", "conv1d.input", "conv1d.output", "x_proj.input", "x_proj.output"),
    *("dt_proj.output", "scan.u", "scan.y", "scan.state", "out_proj.input"),
)
#: The tensors of the mixer that a quantized mode puts on the grid, by name in the stock mixer.
WEIGHTS = (
    *("in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight", "dt_proj.bias"),
    *("A_log", "D", "out_proj.weight"),
)


#: The mixers that SiteMixer stands in for, by the names of their classes.
MIXERS = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer")
#: What a block calls its mixer and the norm before it.
NAMES = (("mixer", "norm"), ("mamba", "input_layernorm"))
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
    """A stand-in for a Mamba-1 mixer of transformers (MIXERS) over copies of its weights.

    In float, unrotated, it equals the stock mixer up to the order of sums. `rotate` turns the input of in_proj and
    of out_proj by a Hadamard matrix, which `fold` undoes in their weights, so that the output keeps its basis.
    """

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
        for name in ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj", "A_log", "D"):
            setattr(self, name, copy.deepcopy(getattr(source, name)))
        self.norms = tuple(name for name in NORMS if hasattr(source, name))
        for name in self.norms:
            setattr(self, name, copy.deepcopy(getattr(source, name)))
        self.layer_idx: int = source.layer_idx
        self.intermediate_size: int = source.intermediate_size
        self.state_size: int = source.ssm_state_size
        self.time_step_rank: int = source.time_step_rank
        self.conv_kernel_size: int = source.conv_kernel_size
        self.activation = copy.deepcopy(source.act)
        self.scan_name = scan
        self.rotated = False
        groups: dict[str, nn.ModuleDict] = {}
        for module, tensor in (site.split(".") for site in SITES):
            groups.setdefault(module, nn.ModuleDict())[tensor] = Site()
        self.sites = nn.ModuleDict(groups)

    def site(self, name: str) -> Site:
        """The site of that name, e.g. `conv1d.output`."""
        module, _, tensor = name.partition(".")
        return cast(Site, cast(nn.ModuleDict, self.sites[module])[tensor])

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
        with at_hand(self.conv1d), at_hand(self.dt_proj):  # offloaded, and read without a call
            return self._mixed(hidden_states, cache_params, attention_mask)

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
        x, z = self.site("in_proj.output")(projected).chunk(2, dim=-1)
        if self.site("conv1d.input").grid is not None:  # a grid of its own, for the unrounded values
            x = projected.chunk(2, dim=-1)[0]
        x = self.site("conv1d.input")(x)

        convolved = self.activation(self._convolve(x, conv_state, cache_params))[:, -length:]
        convolved = self.site("conv1d.output")(_masked(convolved, attention_mask))
        u = self.site("scan.u")(convolved)

        parameters = self.site("x_proj.output")(self.x_proj(self.site("x_proj.input")(convolved)))
        dt, B, C = self.normed(*parameters.split([self.time_step_rank, self.state_size, self.state_size], dim=-1))
        step = self.site("dt_proj.output")(functional.linear(dt, self.dt_proj.weight))
        y, last = SCANS[self.scan_name](u, self.delta(step), self.rates(), B, C, state)
        y = self.site("scan.y")(y)
        if cache_params is not None:
            cache_params.update_recurrent_state(self.site("scan.state")(last), self.layer_idx)
        y = self.gated(y, u, z).to(dtype)
        if self.rotated:
            y = hadamard_transform(y)
        out: Tensor = self.out_proj(self.site("out_proj.input")(y))
        return out

    def normed(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """dt, B and C, each after its norm, in a mixer that has norms."""
        if not self.norms:
            return parameters
        return tuple(self.get_submodule(name)(x) for name, x in zip(NORMS, parameters, strict=True))

    def delta(self, step: Tensor) -> Tensor:
        """softplus(step + dt_bias), the time steps of the scan, in float32."""
        return functional.softplus(step.float() + self.dt_proj.bias.float())

    def rates(self) -> Tensor:
        """A = -exp(A_log), in float32."""
        return -torch.exp(self.A_log.float())

    def gated(self, y: Tensor, u: Tensor, z: Tensor) -> Tensor:
        """(y + D u) SiLU(z), in float32."""
        return (y.float() + self.D.float() * u.float()) * functional.silu(z.float())

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
        padded = functional.pad(lines, (self.conv_kernel_size - 1, 0))
        out = functional.conv1d(padded, self.conv1d.weight, self.conv1d.bias, groups=self.intermediate_size)
        return out.transpose(1, 2)


def _masked(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Padding is zero, as in the stock mixer."""
    if attention_mask is None or attention_mask.shape[1] == 1 or attention_mask.shape[0] == 1:
        return x
    return x * attention_mask[:, : x.shape[1], None].to(x.dtype)


@dataclass(frozen=True, eq=False)
class MambaBlock:
    """A module of a model that has a Mamba-1 mixer and the norm before it, with the names of the three."""

    name: str
    module: nn.Module
    mixer_name: str  # in the model: backbone.layers.0.mixer
    norm_name: str

    @property
    def mixer(self) -> nn.Module:
        """The mixer: that of transformers, or the SiteMixer in its place."""
        return self.module.get_submodule(self.mixer_name.rpartition(".")[2])

    @property
    def sites(self) -> SiteMixer:
        """The mixer of a copy with sites."""
        mixer = self.mixer
        assert isinstance(mixer, SiteMixer)
        return mixer

    @property
    def norm(self) -> nn.Module:
        """The norm before the mixer."""
        return self.module.get_submodule(self.norm_name.rpartition(".")[2])

    @property
    def gamma(self) -> nn.Parameter:
        """The gain of that norm."""
        return self.norm.get_parameter("weight")


def mamba_blocks(model: nn.Module) -> Iterator[MambaBlock]:
    """Every Mamba-1 block of a transformers model, in order."""
    for name, module in model.named_modules():
        start = f"{name}." if name else ""
        for mixer, norm in NAMES:
            if type(getattr(module, mixer, None)).__name__ in (*MIXERS, "SiteMixer") and hasattr(module, norm):
                yield MambaBlock(name, module, f"{start}{mixer}", f"{start}{norm}")


def is_mamba(model: nn.Module) -> bool:
    """Whether the model has Mamba-1 blocks, so that the modes 0 to 3 can be applied to it."""
    return any(True for _ in mamba_blocks(model))


def is_all_mamba(model: nn.Module) -> bool:
    """Whether every layer has a Mamba-1 block, unlike those of a hybrid with attention."""
    mixers = [block.mixer_name for block in mamba_blocks(model)]
    return bool(mixers) and all(any(one.startswith(f"{name}.") for one in mixers) for name in blocks_of(model))


def with_sites(model: nn.Module, *, scan: str = REFERENCE_SCAN) -> nn.Module:
    """A copy of `model` in which every Mamba mixer is a SiteMixer over the same weights."""
    if any(isinstance(module, SiteMixer) for module in model.modules()):
        raise ValueError("this model is already a copy made by a mode. Pass the float model that it was made from.")
    blocks = list(mamba_blocks(model))
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no Mamba-1 blocks, which the modes 0 to 3 quantize. "
            "For other models use the modes linear_w or linear_wa."
        )
    # with these in place of their mixers, no weight is copied twice
    made: dict[int, Any] = {id(block.mixer): SiteMixer(block.mixer, scan=scan) for block in blocks}
    return copy.deepcopy(model, made).eval()


def rotated_twin(model: nn.Module, *, scan: str, unrotated: Collection[str] = ()) -> nn.Module:
    """A float copy with sites, gamma folded and the Hadamard rotations in place: what the modes quantize.

    The blocks of the names in `unrotated` stay as `with_sites` makes them: they give the bits of the reference.
    """
    twin = with_sites(model, scan=scan)
    for block in mamba_blocks(twin):
        if block.name in unrotated:
            block.sites.scan_name = REFERENCE_SCAN
            continue
        block.sites.fold(block.gamma, rotate=True)
        with torch.no_grad():
            block.gamma.fill_(1.0)
    return twin
