"""Corners of the quantizers: padding, `out`, pieces, underflow counts, noise, scales at the ends of their range."""

import math

import pytest
import torch

from probe import fake_quantize, quantize, round_to
from probe.numerics import fast
from probe.numerics.blocks import tree_sum
from probe.numerics.quantize import Options
from tests.numerics.tensors import MX, ROUNDERS, TWINS, Rounder, Twin, assert_same_bits, scales_of
from tests.numerics.test_quantize import nothing_compiled  # noqa: F401


@pytest.mark.parametrize("name", [*MX, "nvfp4"])
@TWINS
def test_padding_does_not_reach_the_scale(name: str, implementation: Twin) -> None:
    options: Options = {"implementation": implementation}
    if name == "nvfp4":
        options["tensor_scale"] = 2.0**-66
    x = torch.full((2, 33), 2.0**-60)
    assert_same_bits(fake_quantize(x, name, **options)[:, 32:], fake_quantize(x[:, 32:].contiguous(), name, **options))


def test_scales_lie_where_their_blocks_do() -> None:
    x = torch.ones(64, 3)
    x[32:, 1] = 2.0**10
    scales = scales_of(quantize(x, "fp8_e4m3", axis=0))
    assert scales.tolist() == [[119, 119, 119], [119, 129, 119]]
    assert scales.is_contiguous()


def test_tree_sum_adds_halves_and_forgets_nothing() -> None:
    for n in range(1, 70):
        assert tree_sum(torch.arange(1.0, n + 1)).item() == n * (n + 1) / 2
    big = 2.0**53  # halves: (big - big) + (1 + 1); neighbours first, or one after the other: 1
    assert tree_sum(torch.tensor([big, 1.0, -big, 1.0], dtype=torch.float64)).item() == 2


@TWINS
def test_ties_of_the_mse_rule_go_to_floor_then_above_then_below(implementation: Twin) -> None:
    one = quantize(torch.tensor([1.0]), "fp8_e4m3", scale_rule="mse", implementation=implementation)
    assert scales_of(one).item() == 127 - 8  # exact under floor and one above
    tie = torch.cat([torch.tensor([7.5]), torch.full((320,), 0.25)])  # floor 22.25, above 20.25, below 20.25
    got = quantize(tie, "fp4_e2m1", scale_rule="mse", block_size=321, implementation=implementation)
    assert scales_of(got).item() == 128
    lost = torch.tensor([2.0**8, 2.0**-149])  # the error of the second is the same at every scale, in exact arithmetic
    got = quantize(lost, "fp8_e4m3", scale_rule="mse", implementation=implementation)
    assert scales_of(got).item() == 127


def test_block_size_true() -> None:
    with pytest.raises(ValueError, match="block_size True is not a whole number"):
        fake_quantize(torch.ones(4), "fp4_e2m1", block_size=True)


@pytest.mark.parametrize("width", [64, 70])
def test_out_receives_the_result_also_when_it_is_the_input(width: int) -> None:
    x = torch.randn(20, width)
    expected = fake_quantize(x, "fp8_e4m3")
    for out in (torch.empty_like(x), torch.full((width, 20), math.nan).t(), x.clone()):
        assert fake_quantize(x, "fp8_e4m3", out=out) is out
        assert_same_bits(out.contiguous(), expected)
    assert fake_quantize(x, "fp8_e4m3", out=x) is x
    assert_same_bits(x, expected)


def test_out_may_be_a_parameter() -> None:
    x, out = torch.randn(4, 64), torch.empty(4, 64, requires_grad=True)
    fake_quantize(x, "fp8_e4m3", out=out)
    assert_same_bits(out.detach(), fake_quantize(x, "fp8_e4m3"))


@pytest.mark.parametrize("rounding", ["half_even", "stochastic"])
def test_chunk_size_does_not_matter(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> torch.Tensor:
        g = torch.Generator().manual_seed(1) if rounding == "stochastic" else None
        room = torch.full_like(x, math.nan)
        return fake_quantize(x, "fp8_e4m3", rounding=rounding, generator=g, out=room, implementation="torch")

    x = torch.linspace(-5, 7, 100 * 96).reshape(100, 96)
    expected = run()
    for chunk in (1, 64, 31 * 32):  # less than a block, a few blocks, a number that does not divide
        monkeypatch.setattr(fast, "CHUNK", chunk)
        assert_same_bits(run(), expected)


@TWINS
def test_noise_is_never_zero(implementation: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))
    x = torch.tensor([1.0, 2.0**-149])
    got = fake_quantize(
        x, "fp8_e4m3", rounding="stochastic", generator=torch.Generator(), implementation=implementation
    )
    assert got.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("bad", [math.inf, math.nan, -1.0, [1.0, 2.0]])
def test_bad_tensor_scales(bad: float | list[float]) -> None:
    with pytest.raises(ValueError, match="nvfp4 takes one finite number above 0"):
        fake_quantize(torch.ones(16), "nvfp4", tensor_scale=torch.tensor(bad))


def test_out_of_another_dtype() -> None:
    with pytest.raises(ValueError, match=r"out is torch\.float64"):
        fake_quantize(torch.ones(4, 32), "mxint8", out=torch.empty(4, 32, dtype=torch.float64))


def test_an_empty_result_is_new() -> None:
    x = torch.empty(0, 32, requires_grad=True)
    assert fake_quantize(x, "fp8_e4m3") is not x
    out = torch.empty(0, 32)
    assert fake_quantize(x, "fp8_e4m3", out=out) is out


def test_round_to_errors() -> None:
    with pytest.raises(ValueError, match="int8 is nothing without a scale"):
        round_to(torch.ones(2), "int8")
    with pytest.raises(ValueError, match="unknown implementation 'compiled'"):
        round_to(torch.ones(2), "fp8_e4m3", implementation="compiled")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no generator was given"):
        round_to(torch.ones(2), "fp8_e4m3", rounding="stochastic")


def test_nvfp4_tensor_scale_at_the_ends() -> None:
    from probe.numerics.reference import tensor_scale_of

    limits = torch.finfo(torch.float32)
    assert tensor_scale_of(torch.full((16,), 2.0**-149)).item() == limits.tiny
    assert tensor_scale_of(torch.zeros(16)).item() == 1
    top = torch.full((16,), 1e300, dtype=torch.float64)
    assert tensor_scale_of(top).item() == torch.tensor(limits.max / 896).item()
    assert math.isfinite(fake_quantize(top, "nvfp4")[0].item())
    for bad in (math.nan, math.inf):
        assert tensor_scale_of(torch.tensor([bad, 2 * 2688.0])).item() == 2


@pytest.mark.usefixtures("nothing_compiled")
def test_one_kernel_compiles_once() -> None:
    with torch._dynamo.config.patch(error_on_recompile=True):  # the first call builds on 4 rows
        for count in (5, 1, 2, 3, 7, 1000):
            x = torch.randn(count, 32)
            assert_same_bits(fake_quantize(x, "fp4_e2m1", implementation="compiled"), fake_quantize(x, "fp4_e2m1"))


@TWINS
def test_nvfp4_scales_are_rounded_to_nearest_whatever_the_rounding(implementation: Twin) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    expected = scales_of(quantize(x, "nvfp4"))
    for rounding in ("half_away", "toward_zero", "floor", "stochastic"):
        g = torch.Generator().manual_seed(0) if rounding == "stochastic" else None
        got = quantize(x, "nvfp4", rounding=rounding, generator=g, implementation=implementation)
        assert torch.equal(scales_of(got), expected)


def test_codes_name_their_axis_and_block_size() -> None:
    got = quantize(torch.ones(64, 3), "fp8_e4m3", axis=-2)
    assert (got.axis, got.block_size) == (0, 32)


@ROUNDERS
def test_stochastic_goes_up_only_where_the_noise_is_below_the_fraction_and_draws_once(
    implementation: Rounder, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.full((1,), 1 + 1 / 16)  # fp8_e4m3: half way from 1 to 1.125
    used, fresh = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    round_to(x, "fp8_e4m3", rounding="stochastic", generator=used, implementation=implementation)
    torch.rand(x.shape, generator=fresh)
    assert torch.equal(used.get_state(), fresh.get_state())
    for noise, expected in ((0.5, 1.0), (0.5 - 2.0**-24, 1.125)):
        monkeypatch.setattr(torch, "rand", lambda shape, noise=noise, **_: torch.full(shape, noise))
        rounded = round_to(
            x, "fp8_e4m3", rounding="stochastic", generator=torch.Generator(), implementation=implementation
        )
        assert rounded.item() == expected
