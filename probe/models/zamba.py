"""Zamba's mixer with sites: that of Mamba-1 with heads, each of which has an x_proj, a dt_proj, B and C of its own."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.models.mamba import MAMBA, Layout, SiteMixer

ZAMBA = Layout(
    "Mamba-1 with heads",
    mixers=("ZambaMambaMixer",),
    sites=MAMBA.sites,
    weights=(
        *("in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj_weight", "dt_proj_weight", "dt_proj_bias"),
        *("A_log", "D", "out_proj.weight"),
    ),
    interleaves=True,
)


class ZambaSiteMixer(SiteMixer):
    """A stand-in for Zamba's Mamba-1 mixer, over copies of its weights.

    The channels of x and z take turns in the output of in_proj. That of x_proj has the heads one after the other.
    """

    layout = ZAMBA
    x_proj_weight: nn.Parameter
    dt_proj_weight: nn.Parameter
    dt_proj_bias: nn.Parameter

    def _take(self, source: Any) -> None:
        self.time_step_rank = source.time_step_rank
        self.norms = ()
        self.groups = source.n_mamba_heads
        self.state_shape = (source.n_mamba_heads, source.mamba_head_dim, self.state_size)

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """x and z, channel by channel."""
        return projected[..., 0::2], projected[..., 1::2]

    def scan_inputs(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u, the steps before their bias, B and C, of all heads in a row."""
        u = self.site("scan.u")(convolved)
        heads = self.site("x_proj.input")(convolved).chunk(self.groups, -1)
        parameters = self.site("x_proj.output")(_products(heads, self.x_proj_weight)).unflatten(-1, (self.groups, -1))
        dt, B, C = parameters.split([self.time_step_rank, self.state_size, self.state_size], dim=-1)
        step = self.site("dt_proj.output")(_products(dt.unbind(-2), self.dt_proj_weight))
        return u, step, B.flatten(-2), C.flatten(-2)

    @property
    def step_bias(self) -> Tensor:
        """dt_bias, of every channel."""
        return self.dt_proj_bias.flatten()

    def rates(self) -> Tensor:
        """A = -exp(A_log), in float32: [channel, state]."""
        return super().rates().flatten(0, 1)

    def skip(self) -> Tensor:
        """D, in float32: [channel]."""
        return super().skip().flatten()


def _products(heads: Iterable[Tensor], weights: Tensor) -> Tensor:
    """x W^T of every head, one after the other."""
    return torch.cat([functional.linear(x, weight) for x, weight in zip(heads, weights, strict=True)], -1)
