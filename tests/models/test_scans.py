"""The two scans: against a float64 loop of their own formula, with each other, and carried on in pieces."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
from torch import Tensor

from probe.models import scans
from probe.models.scans import CHUNK, SCANS, in_pieces, sequential

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


def same(made: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Whether outputs and states have the same bits, and NaN in the same places."""
    pairs = zip(made, expected, strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    "shape",
    [
        *(
            (8, 64, 256, 16),
            (3, 60, 256, 16),
            (2, 40, 256, 16),
            (1, 93, 256, 16),
            (1, 1, 256, 16),
            (3, 70, 12, 5),
            (1, 9, 6000, 16),
        ),
        *((2, 5, 1, 1), (0, 5, 4, 4), (2, 0, 4, 4), (1, 50, 33, 8), (1, 300, 40, 24), (2, 20, 9, 12), (2, 20, 9, 64)),
    ],
    ids=str,
)
def test_the_scan_in_pieces_has_the_bits_of_the_sequential_one(shape: tuple[int, int, int, int]) -> None:
    given = inputs(*shape)
    made, expected = in_pieces(*given), sequential(*given)
    assert same(made, expected)
    assert same(in_pieces(*given, made[1]), sequential(*given, expected[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_scan_in_pieces_has_the_bits_of_the_sequential_one_in_every_dtype(dtype: torch.dtype) -> None:
    u, delta, rates, into, out = (x.to(dtype) for x in inputs())
    state = torch.randn(2, 12, 5, dtype=dtype)
    assert same(in_pieces(u, delta, rates, into, out, state), sequential(u, delta, rates, into, out, state))


def hostile() -> Inputs:
    u, delta, rates, into, out = inputs(4, 70, 256, 16)
    u[0, 3, :7] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-45, -0.0, 3e38, -3e38])
    delta[1, 5, :6] = torch.tensor([0.0, 1e38, -1e30, torch.nan, 1e-45, torch.inf])
    into[2, 9, :3] = torch.tensor([torch.nan, 3e38, 1e-40])
    out[3, 9, :3] = torch.tensor([torch.inf, 0.0, -1e-42])
    rates[0], rates[1], rates[2] = 0.0, -torch.inf, 90.0
    return u, delta, rates, into, out


def test_the_scan_in_pieces_has_the_bits_of_the_sequential_one_for_hostile_values() -> None:
    given = hostile()
    assert same(in_pieces(*given), sequential(*given))


def test_the_scan_in_pieces_reads_tensors_of_any_layout() -> None:
    """B and C are parts of x_proj's output, and a state may be any view."""
    u, delta, rates, *_ = inputs(2, 40, 12, 5)
    both = torch.randn(2, 40, 16)
    u, delta, rates = (x.mT.contiguous().mT for x in (u, delta, rates))
    given = (u, delta, rates, both[..., 3:8], both[..., ::3][..., :5])
    state = torch.randn(12, 5, 2).permute(2, 0, 1)
    kept = state.clone()
    assert same(in_pieces(*given, state), sequential(*given, state))
    assert torch.equal(state, kept)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    "shape",
    [(8, 70, 256, 16), (1, 93, 256, 16), (3, 70, 13, 5), (1, 9, 6000, 16), (2, 5, 1, 1), (0, 5, 4, 4), (2, 0, 4, 4)],
    ids=str,
)
def test_the_fast_scan_has_the_bits_of_its_torch_operations(shape: tuple[int, int, int, int]) -> None:
    given = inputs(*shape)
    state = torch.randn(shape[0], shape[2], shape[3])
    made = scans.fast(*given, state)
    with mock.patch.object(scans, "_fused_steps", return_value=None):
        assert same(made, scans.fast(*given, state))


def test_the_fast_scan_has_the_bits_of_its_torch_operations_for_hostile_values() -> None:
    given = hostile()
    made = scans.fast(*given)
    with mock.patch.object(scans, "_fused_steps", return_value=None):
        assert same(made, scans.fast(*given))


def test_a_loop_that_rounds_otherwise_than_torch_is_not_used() -> None:
    """The check is what keeps the bits where torch was built without fused multiply-add."""
    with mock.patch.object(torch.Tensor, "addcmul", lambda x, a, b: x + a * b):
        assert scans._fused_steps.__wrapped__() is None
    with mock.patch.object(torch.Tensor, "sum", lambda x, _: x.double().cumsum(-1)[..., -1].float()):
        assert scans._lanes.__wrapped__(16) == 0


def test_a_scan_that_needs_a_gradient_has_one() -> None:
    u, *rest = inputs(time=5)
    u.requires_grad_()
    (gradient,) = torch.autograd.grad(in_pieces(u, *rest)[0].sum(), u)
    assert float(gradient.abs().sum()) > 0


@SCAN
@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    ("mode", "prepare"),
    [(torch.no_grad, lambda x: x), (torch.inference_mode, torch.clone)],
    ids=["no_grad", "inference"],
)
def test_a_scan_on_several_threads_is_of_the_mode_of_its_caller(
    name: str, mode: Callable[[], AbstractContextManager[object]], prepare: Callable[[Tensor], Tensor]
) -> None:
    """Gradients and inference mode are settings of a thread."""
    given = inputs(3, 60, 256, 16)
    expected = SCANS[name](*given, None)
    given[0].requires_grad_()
    given[1].requires_grad_()
    with mode():
        u, delta, rates, into, out = map(prepare, given)
        made = SCANS[name](u, delta, rates, into, out, None)
    assert same(made, expected)
    assert not made[0].requires_grad


def test_without_numba_the_scan_is_the_sequential_one() -> None:
    given = inputs()
    with mock.patch.object(scans, "numba_twin", return_value=None):
        made = in_pieces(*given)
    assert same(made, sequential(*given))
