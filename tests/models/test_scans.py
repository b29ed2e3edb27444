"""The two scans: against a float64 loop of their own formula, with each other, and carried on in pieces."""

import pytest
import torch
from torch import Tensor

from probe.models.mamba import CHUNK, SCANS

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
SCAN = pytest.mark.parametrize("name", ["sequential", "fast"], ids=["reference", "fast"])


def inputs(batch: int = 2, time: int = 70, channels: int = 12, states: int = 5, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(batch, time, channels, generator=g)
    delta = torch.rand(batch, time, channels, generator=g) * 0.5
    rates = -torch.exp(torch.randn(channels, states, generator=g))
    return u, delta, rates, torch.randn(batch, time, states, generator=g), torch.randn(batch, time, states, generator=g)


def in_float64(u: Tensor, delta: Tensor, rates: Tensor, into: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    u, delta, rates, into, out = (t.double() for t in (u, delta, rates, into, out))
    h = torch.zeros(u.shape[0], u.shape[2], rates.shape[1], dtype=torch.float64)
    ys = []
    for t in range(u.shape[1]):
        h = torch.exp(torch.einsum("bc,cn->bcn", delta[:, t], rates)) * h
        h = h + torch.einsum("bc,bn,bc->bcn", delta[:, t], into[:, t], u[:, t])
        ys.append(torch.einsum("bcn,bn->bc", h, out[:, t]))
    return torch.stack(ys, 1), h


@SCAN
@pytest.mark.parametrize("time", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_a_scan_equals_its_formula_in_float64(name: str, time: int) -> None:
    given = inputs(time=time)
    y, state = SCANS[name](*given, None)
    expected, last = in_float64(*given)
    assert (y - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert (state - last).abs().max() <= 2e-6 * last.abs().max()


def test_the_two_scans_agree_to_the_order_of_summation() -> None:
    given = inputs(1, 512, 64, 16)
    slow, fast = (SCANS[name](*given, None)[0] for name in ("sequential", "fast"))
    assert (slow - fast).abs().max() <= 7e-7 * slow.abs().max()


@SCAN
@pytest.mark.parametrize("cut", [1, 7, CHUNK, 50])
def test_a_carried_state_goes_on_where_it_stopped(name: str, cut: int) -> None:
    u, delta, rates, into, out = inputs()
    whole, last = SCANS[name](u, delta, rates, into, out, None)
    first, state = SCANS[name](u[:, :cut], delta[:, :cut], rates, into[:, :cut], out[:, :cut], None)
    second, end = SCANS[name](u[:, cut:], delta[:, cut:], rates, into[:, cut:], out[:, cut:], state)
    assert (torch.cat([first, second], 1) - whole).abs().max() <= 1e-6 * whole.abs().max()
    assert (end - last).abs().max() <= 1e-6 * last.abs().max()


@SCAN
def test_a_scan_changes_nothing_it_was_given_and_keeps_the_dtype(name: str) -> None:
    given = inputs(time=5)
    copies = [t.clone() for t in given]
    state = torch.ones(2, 12, 5)
    y, _ = SCANS[name](*given, state)
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    assert torch.equal(state, torch.ones(2, 12, 5))
    assert y.dtype == torch.float32
    assert SCANS[name](given[0].bfloat16(), *given[1:], None)[0].dtype == torch.bfloat16


@SCAN
def test_a_sample_does_not_depend_on_its_batch(name: str) -> None:
    u, delta, rates, into, out = inputs(4)
    whole = SCANS[name](u, delta, rates, into, out, None)[0]
    alone = SCANS[name](u[2:3], delta[2:3], rates, into[2:3], out[2:3], None)[0]
    assert torch.equal(whole[2:3], alone)
