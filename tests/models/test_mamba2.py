"""The Mamba-2 mixer: both the stock one and the stand-in give its formula, a plain loop over heads in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.data.library_logs import quietly
from probe.models.mamba2 import MAMBA2, Mamba2SiteMixer
from probe.models.mamba_blocks import mamba_blocks
from tests.models.random_models import make_bamba, make_mamba2

FAMILY = pytest.mark.parametrize("make", [make_mamba2, make_bamba], ids=["mamba2", "bamba"])


def formula(mixer: Any, hidden: Tensor) -> Tensor:
    """The block in float64, head by head and token by token."""
    weights = {name: value.double() for name, value in mixer.named_parameters()}
    inner, heads, size = mixer.intermediate_size, mixer.num_heads, mixer.head_dim
    groups, states = mixer.n_groups, mixer.ssm_state_size
    projected = hidden.double() @ weights["in_proj.weight"].T
    z, xbc, dt = torch.split(projected, [inner, inner + 2 * groups * states, heads], dim=-1)
    taps, convolved = weights["conv1d.weight"].squeeze(1), torch.zeros_like(xbc)
    for t in range(hidden.shape[1]):
        for k in range(taps.shape[1]):
            if t - k >= 0:
                convolved[:, t] += taps[:, -1 - k] * xbc[:, t - k]
    convolved = functional.silu(convolved + weights["conv1d.bias"])
    x, B, C = torch.split(convolved, [inner, groups * states, groups * states], dim=-1)
    y = torch.zeros_like(x)
    for head in range(heads):
        own, group = slice(head * size, (head + 1) * size), head * groups // heads
        part = slice(group * states, (group + 1) * states)
        h = torch.zeros(len(hidden), size, states, dtype=torch.float64)
        for t in range(hidden.shape[1]):
            delta = torch.log1p(torch.exp(dt[:, t, head] + weights["dt_bias"][head]))[:, None, None]
            drive = x[:, t, own, None] * B[:, t, None, part]
            h = torch.exp(-delta * weights["A_log"][head].exp()) * h + delta * drive
            y[:, t, own] = (h * C[:, t, None, part]).sum(-1) + weights["D"][head] * x[:, t, own]
    y = y * functional.silu(z)
    y = weights["norm.weight"] * y / (y.square().mean(-1, keepdim=True) + mixer.norm.variance_epsilon).sqrt()
    found: Tensor = y @ weights["out_proj.weight"].T
    return found


@FAMILY
@pytest.mark.parametrize("time", [1, 16, 37])
def test_stock_mixer_and_stand_in_give_the_formula(make: Callable[[], nn.Module], time: int) -> None:
    """float32 against float64: 1e-6 of the largest value, several times what either differs by."""
    stock: Any = next(mamba_blocks(make())).mixer
    hidden = torch.randn(2, time, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), quietly():
        expected = formula(stock, hidden)
        made = [stock(hidden), *(Mamba2SiteMixer(stock, scan=scan)(hidden) for scan in ("sequential", "fast"))]
    for one in made:
        assert (one - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_every_site_can_be_put_on_a_grid() -> None:
    stock = next(mamba_blocks(make_mamba2())).mixer
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        plain = Mamba2SiteMixer(stock)(hidden)
        for site in MAMBA2.sites:
            mixer = Mamba2SiteMixer(stock)
            mixer.site(site).grid = lambda x: x * 1.01
            if site != "scan.state":  # leaves the block only for decode
                assert not torch.equal(mixer(hidden), plain), site


def test_the_width_of_a_site_is_that_of_its_tensor() -> None:
    mixer = Mamba2SiteMixer(next(mamba_blocks(make_mamba2())).mixer)
    widths: dict[str, int] = {}
    for name in MAMBA2.sites:
        mixer.site(name).register_forward_hook(
            lambda module, args, output, name=name: widths.__setitem__(name, output.shape[-1])
        )
    with torch.no_grad():
        mixer(torch.randn(1, 4, 32))
    assert {name: mixer.width(name) for name in widths} == widths
    assert set(widths) == {*MAMBA2.sites} - {"scan.state"}
