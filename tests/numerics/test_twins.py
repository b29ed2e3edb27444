"""The reference, torch's operations, the kernel and the compiled operations: the same bits, everywhere."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from probe import dynamic_parameters, fake_quantize, fake_quantize_integer, quantize, quantize_integer
from probe.numerics.codes import Quantized
from probe.numerics.integers import GridOptions, IntegerImplementation, IntegerParameters
from probe.numerics.quantize import Implementation, Options
from probe.numerics.rounding import narrow
from tests.numerics.tensors import (
    DTYPES,
    KINDS,
    MX,
    ROUNDINGS,
    RULES,
    adversarial_blocks,
    assert_same_bits,
    every,
    scales_of,
)

IMPLEMENTED: tuple[Implementation, ...] = ("torch", "auto")


def generator(rounding: str) -> torch.Generator | None:
    return torch.Generator().manual_seed(3) if rounding == "stochastic" else None


def hostile(dtype: torch.dtype, count: int = 256) -> torch.Tensor:
    x = adversarial_blocks(count)
    if dtype == torch.float64:  # also beyond the range of float32, where the scale byte is clamped
        x = torch.cat([x.double(), x.double() * 2.0**200, x.double() * 2.0**-200])
    if dtype == torch.float16:
        x = torch.cat([x, adversarial_blocks(count, seed=1).clamp(-65504, 65504), torch.randn(count, 32) * 2.0**13])
    return x.to(dtype)


def check(name: str, dtype: torch.dtype, rule: str, rounding: str, implementation: Implementation) -> None:
    x = hostile(dtype)

    def run(chosen: Implementation) -> torch.Tensor:
        drawn = generator(rounding)
        return fake_quantize(x, name, scale_rule=rule, rounding=rounding, generator=drawn, implementation=chosen)

    fast, slow = run(implementation), run("reference")
    assert_same_bits(fast, slow)
    assert bool((x != 0).any())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("implementation", ["torch", "auto"], ids=["torch", "kernel"])
def test_fast_equals_reference(
    name: str, rule: str, rounding: str, dtype: torch.dtype, implementation: Implementation
) -> None:
    check(name, dtype, rule, rounding, implementation)


@pytest.mark.parametrize("name", MX)
def test_compiled_equals_reference(name: str) -> None:
    check(name, torch.float32, "floor", "half_even", "compiled")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d).removeprefix("torch."))
def test_compiled_equals_reference_in_every_dtype(dtype: torch.dtype) -> None:
    check("fp8_e4m3", dtype, "floor", "half_even", "compiled")


@pytest.mark.parametrize("rounding", ROUNDINGS[1:])
def test_compiled_equals_reference_in_every_rounding(rounding: str) -> None:
    check("fp6_e2m3", torch.float32, "floor", rounding, "compiled")


@pytest.mark.parametrize("rule", RULES[1:])
def test_compiled_equals_reference_under_every_rule(rule: str) -> None:
    check("mxint8", torch.float32, rule, "half_even", "compiled")


def test_compiling_leaves_subnormal_arithmetic_on() -> None:
    """Linking with -ffast-math would flush subnormals to zero in the whole process from then on."""
    fake_quantize(torch.randn(64, 32), "fp8_e4m3", implementation="compiled")
    tiny = torch.full((64,), 2.0**-140)
    assert torch.equal(tiny * 1.0, tiny)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
def test_codes_equal_fake_quantize_and_each_other(name: str, rule: str, dtype: torch.dtype) -> None:
    x = hostile(dtype)
    slow = quantize(x, name, scale_rule=rule, implementation="reference")
    for implementation in IMPLEMENTED:
        codes = quantize(x, name, scale_rule=rule, implementation=implementation)
        assert torch.equal(codes.codes, slow.codes)
        assert torch.equal(scales_of(codes), scales_of(slow))
        assert_same_bits(codes.dequantize(), fake_quantize(x, name, scale_rule=rule))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["nvfp4", "int8", "int4", "int2", "bf16", "fp16"])
def test_codes_equal_fake_quantize_outside_mx(name: str, rounding: str, dtype: torch.dtype) -> None:
    x = hostile(dtype, 64)
    for part in (x, x[x.isfinite().all(-1)], x[:, :20]):
        slow = fake_quantize(part, name, rounding=rounding, generator=generator(rounding), implementation="reference")
        for implementation in IMPLEMENTED:

            def options(chosen: Implementation = implementation) -> Options:
                return {"rounding": rounding, "generator": generator(rounding), "implementation": chosen}

            fake, coded = fake_quantize(part, name, **options()), quantize(part, name, **options())
            assert_same_bits(fake, slow)
            assert_same_bits(fake, coded.dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("tensor_scale", [1e-3, 1e-38, 1e-45, 3e38])
def test_any_tensor_scale_gives_the_same_nvfp4(tensor_scale: float, axis: int, dtype: torch.dtype) -> None:
    """Also one with which the scale of a block becomes 0 or Inf."""
    for x in (hostile(dtype, 16), hostile(dtype, 16)[:, :20]):
        options: Options = {"axis": axis, "tensor_scale": tensor_scale}
        reference: Options = {**options, "implementation": "reference"}
        coded, slow = quantize(x, "nvfp4", **options), quantize(x, "nvfp4", **reference)
        assert torch.equal(coded.codes, slow.codes)
        assert torch.equal(scales_of(coded), scales_of(slow))
        assert_same_bits(fake_quantize(x, "nvfp4", **options), fake_quantize(x, "nvfp4", **reference))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("axis", [0, 1])
def test_16_bit_values_of_nvfp4_are_rounded_once(axis: int, dtype: torch.dtype) -> None:
    """With scales of which 3 times is rounded to another number by way of float32."""
    scales = torch.randint(2**23, 2**24, (2**20,), generator=torch.Generator().manual_seed(0)) * 2.0**-20
    exact = 3 * scales.double()
    hard = scales[narrow(exact, dtype) != exact.float().to(dtype)][:4].tolist()
    assert len(hard) == 4
    for scale in hard:
        x = torch.full((16, 16), 6 * scale).to(dtype)
        options: Options = {"axis": axis, "tensor_scale": scale}
        assert_same_bits(
            fake_quantize(x, "nvfp4", **options), narrow(torch.full((16, 16), 6 * scale, dtype=torch.float64), dtype)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", [*MX, "nvfp4", "int8"])
def test_every_code_under_every_scale_is_decoded_as_by_torch(name: str, axis: int, dtype: torch.dtype) -> None:
    """Codes of Inf and NaN too, which `quantize` does not write."""
    made = quantize(torch.ones(256, 256), name, axis=axis, block_size=256)
    codes = torch.arange(256) % 2**made.format.bits
    assert made.scales is not None
    scales = torch.arange(256).to(torch.uint8)
    stored = torch.randn(256).exp() if made.scales.dtype == torch.float32 else scales
    square = (codes if axis == 1 else codes[:, None]).to(torch.uint8).expand(256, 256)
    given = replace(made, codes=square.view(made.codes.dtype), scales=stored.reshape(made.scales.shape))
    with mock.patch.object(Quantized, "_kernels", return_value=None):
        slow = given.dequantize(dtype)
    assert_same_bits(given.dequantize(dtype), slow)


def test_large_tensors_are_cut_into_pieces_without_a_trace() -> None:
    x = torch.randn(5000, 96)
    for name in MX:
        assert_same_bits(fake_quantize(x, name), fake_quantize(x, name, implementation="reference"))
        assert_same_bits(
            fake_quantize(x, name, implementation="torch"), fake_quantize(x, name, implementation="reference")
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*MX, "nvfp4", "int8", "int4", "int2"])
def test_every_16_bit_number_alone_and_among_others(name: str, dtype: torch.dtype) -> None:
    """The kernel widens them and rounds back by bit operations of its own."""
    x = every(dtype)
    scrambled = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))]
    for given, size in ((x, 1), (x, 32), (scrambled, 32), (scrambled[x.isfinite()], 5)):
        slow = fake_quantize(given, name, block_size=size, implementation="reference")
        assert_same_bits(fake_quantize(given, name, block_size=size), slow)
        assert_same_bits(quantize(given, name, block_size=size).dequantize(), slow)


GRANULARITIES: dict[str, GridOptions] = {
    "tensor": {"granularity": "tensor"},
    "token": {"granularity": "token"},
    "channel 0": {"granularity": "channel"},
    "channel 1": {"granularity": "channel", "axis": 1},
    "channel 2": {"granularity": "channel", "axis": 2},
    "group": {"granularity": "group", "group_size": 8},
    "group along 0": {"granularity": "group", "group_size": 3, "axis": 0},
}


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_integer_grids_by_kernel_equal_their_definition(granularity: str, dtype: torch.dtype, symmetric: bool) -> None:
    x = hostile(dtype, 16)
    x = x[(x.abs().amax(-1) < min(1e38, torch.finfo(dtype).max)) & x.isfinite().all(-1)]
    x = x[: len(x) // 4 * 4].reshape(-1, 4, 32)
    for bits in (8, 4, 2):
        options: GridOptions = {**GRANULARITIES[granularity], "bits": bits, "symmetric": symmetric}
        parameters = dynamic_parameters(x, **options)
        beyond = x.clone()
        beyond.view(-1)[::97], beyond.view(-1)[1::89] = torch.inf, -torch.inf
        spoilt = beyond.clone()
        spoilt.view(-1)[2::101] = torch.nan
        for rounding in ROUNDINGS:
            codes, values = (
                [work(given, parameters, rounding, implementation) for implementation in ("auto", "reference")]
                for work, given in (
                    (codes_of, beyond),
                    (values_of, spoilt.transpose(0, 1).contiguous().transpose(0, 1)),
                )
            )
            assert torch.equal(*codes)
            assert_same_bits(*values)


def codes_of(x: Tensor, grid: IntegerParameters, rounding: str, chosen: IntegerImplementation) -> Tensor:
    return quantize_integer(x, grid, rounding=rounding, generator=generator(rounding), implementation=chosen)


def values_of(x: Tensor, grid: IntegerParameters, rounding: str, chosen: IntegerImplementation) -> Tensor:
    return fake_quantize_integer(
        x, parameters=grid, rounding=rounding, generator=generator(rounding), implementation=chosen
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_ties_of_integer_grids_are_exact_without_a_division(dtype: torch.dtype) -> None:
    """Every code and every tie at scales of few bits, whose inverses are not exact, and the numbers beside them.

    Their values are ties of the 16-bit dtypes, too.
    """
    halves = torch.arange(-260, 261, dtype=torch.float64) / 2
    for odd in (*range(1, 64, 2), 8191, 12345, 2**14 - 1):
        for exponent in (-3, 2):
            scale = torch.tensor(odd * 2.0**exponent)
            exact = (halves * scale.double()).to(dtype)
            x = torch.cat([exact, *(exact.nextafter(torch.full_like(exact, end)) for end in (torch.inf, -torch.inf))])
            grid = IntegerParameters(scale, torch.tensor(0, dtype=torch.int32), 8, True)
            codes = [codes_of(x, grid, "half_even", chosen) for chosen in ("auto", "reference")]
            values = [values_of(x, grid, "half_even", chosen) for chosen in ("auto", "reference")]
            assert torch.equal(*codes)
            assert_same_bits(*values)
