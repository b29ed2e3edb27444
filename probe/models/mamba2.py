"""The Mamba-2 mixer with every tensor inside it as a `Site`: that of Mamba-2 itself and of Bamba.

    h -- RMSNorm, rotation --> [in_proj.input] -- in_proj --> [in_proj.output] --> z | x B C | dt
    x B C --> [conv1d.input] -- conv1d, SiLU --> F --> [conv1d.output] --> x | B C
    x --> [scan.u];  B C --> [scan.BC] --> B | C
    delta = softplus(dt + dt_bias)
    scan(u, delta, A, B, C) --> [scan.y];  RMSNorm of (y + D u) SiLU(z) --> [norm.output]
    norm.output -- rotation --> [out_proj.input] -- out_proj --> out

A, D, dt and its bias are one number a head; B and C are shared by the heads of a group. The scan is that of Mamba-1,
whose A, D and delta are those of its head for every channel.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from probe.models.mamba import Layout, SiteMixer

MAMBA2 = Layout(
    "Mamba-2",
    mixers=("Mamba2Mixer", "BambaMixer"),
    sites=(
        *("in_proj.input", "in_proj.output", "conv1d.input", "conv1d.output", "scan.u", "scan.BC", "scan.y"),
        *("scan.state", "norm.output", "out_proj.input"),
    ),
    weights=("in_proj.weight", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "out_proj.weight"),
    convolves_all=True,
)


class Mamba2SiteMixer(SiteMixer):
    """A stand-in for a Mamba-2 mixer of transformers, over copies of its weights.

    The gain of its gated norm stays in the norm, and float.
    """

    layout = MAMBA2
    dt_bias: nn.Parameter
    norm: nn.Module

    @classmethod
    def refusal(cls, source: Any) -> str:
        """Limited time steps: transformers limits them in prefill and not in decode."""
        low, high = source.time_step_limit
        if low <= 0 and high == torch.inf:
            return ""
        return f"{type(source).__name__} limits its time steps to ({low:g}, {high:g}), in prefill and not in decode"

    def _take(self, source: Any) -> None:
        self.norm = copy.deepcopy(source.norm)
        self.groups = source.n_groups
        self.head_dim: int = source.head_dim
        self.state_shape = (source.num_heads, source.head_dim, self.state_size)

    def _widths(self) -> dict[str, int]:
        return {"scan.BC": 2 * self.groups * self.state_size}

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """x, B and C, which conv1d reads; z; and dt, a number a head."""
        sizes = [self.intermediate_size, len(self.conv1d.weight), len(self.dt_bias)]
        z, convolved, dt = torch.split(projected, sizes, dim=-1)
        return convolved, z, dt

    def scan_inputs(self, convolved: Tensor, *dt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u, the steps before their bias, B and C, of all groups in a row."""
        x, shared = convolved.tensor_split([self.intermediate_size], dim=-1)
        B, C = self.site("scan.BC")(shared).chunk(2, dim=-1)
        return self.site("scan.u")(x), dt[0], B, C

    def scanned(self, u: Tensor, delta: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The scan with delta of every channel instead of every head."""
        return super().scanned(u, delta.repeat_interleave(self.head_dim, -1), B, C, state)

    @property
    def step_bias(self) -> Tensor:
        """dt_bias, of every head."""
        return self.dt_bias

    def rates(self) -> Tensor:
        """A = -exp(A_log), in float32: [channel, state], the same for all of a head."""
        return super().rates().repeat_interleave(self.head_dim)[:, None].expand(-1, self.state_size)

    def skip(self) -> Tensor:
        """D, in float32: [channel], the same for all of a head."""
        return super().skip().repeat_interleave(self.head_dim)

    def finished(self, y: Tensor, u: Tensor, z: Tensor) -> Tensor:
        """RMSNorm of (y + D u) SiLU(z)."""
        made: Tensor = self.site("norm.output")(self.norm(self.gated(y, u, z)))
        return made
