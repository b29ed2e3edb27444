"""MX and nvfp4 blocks against independent implementations: gfloat's float64 arithmetic and torchao."""

import math
import warnings
from fractions import Fraction

import gfloat
import numpy as np
import pytest
import torch
from gfloat import RoundMode

from probe import FORMATS, fake_quantize, quantize
from tests.numerics.tensors import MX, TWINS, Twin, adversarial_blocks, assert_same_bits, scales_of
from tests.test_formats import GFLOAT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

RULES = ("floor", "ceil", "even", "rceil")
GFLOAT_ROUNDING = {
    "half_even": RoundMode.TiesToEven,
    "half_away": RoundMode.TiesToAway,
    "toward_zero": RoundMode.TowardZero,
    "floor": RoundMode.TowardNegative,
}
TORCHAO = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp6_e3m2": DTYPE_FP6_E3M2,
    "fp6_e2m3": DTYPE_FP6_E2M3,
    "fp4_e2m1": torch.float4_e2m1fn_x2,
}


def exact_exponent(amax: float, name: str, rule: str) -> int:
    """The scale rules over rationals, by search upwards: no logarithm, no bit trick."""
    if amax == 0:
        return -127
    fmt, value = FORMATS[name], Fraction(amax)
    biggest = Fraction(fmt.max)
    top = 2**fmt.max_exponent
    guess = math.frexp(amax)[1] - fmt.max_exponent
    for e in range(max(-127, guess - 4), 128):
        scaled = value / Fraction(2) ** e
        fits = {
            "floor": scaled < 2 * top,
            "ceil": scaled <= top,
            "rceil": scaled <= biggest,
            "even": scaled < 2 * top - Fraction(top, 2 ** (fmt.mantissa_bits + 1)),
        }[rule]
        if fits:
            return e
    return 127  # mxint8 under ceil wants 128 for amax above 2^127


def by_gfloat(x: torch.Tensor, name: str, rule: str, rounding: str) -> torch.Tensor:
    """Each row scaled by the exact exponent and rounded by gfloat in float64."""
    rows = x.double().numpy()
    amax = np.abs(rows).max(-1)
    finite = np.isfinite(amax)
    cache: dict[float, int] = {}
    exponents = np.array(
        [cache.setdefault(a, exact_exponent(a, name, rule)) if ok else 0 for a, ok in zip(amax, finite, strict=True)]
    )
    scaled = np.ldexp(np.where(finite[:, None], rows, 0.0), -exponents[:, None])
    info = GFLOAT[name]
    elements = gfloat.round_ndarray(info, scaled, GFLOAT_ROUNDING[rounding], sat=True)
    if name == "mxint8":  # gfloat has the code -128 and its value -2; the quantizers are symmetric
        elements = np.maximum(elements, -FORMATS[name].max) + 0.0
    values = np.where(finite[:, None], np.ldexp(elements, exponents[:, None]), np.nan)
    limit = torch.finfo(x.dtype).max
    return torch.from_numpy(values).clamp(-limit, limit).to(x.dtype)


@TWINS
@pytest.mark.parametrize("rounding", GFLOAT_ROUNDING)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
def test_blocks_equal_gfloat(name: str, rule: str, rounding: str, implementation: Twin) -> None:
    x = adversarial_blocks(64)
    ours = fake_quantize(x, name, scale_rule=rule, rounding=rounding, implementation=implementation)
    assert_same_bits(ours, by_gfloat(x, name, rule, rounding))


@TWINS
@pytest.mark.parametrize("name", MX)
def test_blocks_of_bfloat16_equal_gfloat(name: str, implementation: Twin) -> None:
    x = adversarial_blocks(128, seed=2).bfloat16()
    assert_same_bits(fake_quantize(x, name, implementation=implementation), by_gfloat(x, name, "floor", "half_even"))


def test_gfloats_own_block_quantizer_agrees_with_the_oracle_used_here() -> None:
    x = adversarial_blocks(4, seed=3)
    x = x[x.isfinite().all(-1)]
    theirs = [
        gfloat.quantize_block(gfloat.formats.format_info_mxfp8_e4m3, row.numpy(), gfloat.compute_scale_amax)
        for row in x.double()
    ]
    assert_same_bits(torch.from_numpy(np.array(theirs)).float(), fake_quantize(x, "fp8_e4m3"))


def torchao_mx(x: torch.Tensor, name: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    mode = ScaleCalculationMode(rule)
    scale, data = to_mx(x, TORCHAO[name], 32, mode)
    return to_dtype(data, scale, TORCHAO[name], 32, torch.float32).reshape(x.shape), scale.view(torch.uint8)


def where_torchao_is_right(x: torch.Tensor, rule: str) -> torch.Tensor:
    """Rows of finite values whose scale byte is not 0 and, for rceil, not at the mercy of a float32 log2."""
    amax = x.abs().amax(-1)
    right = amax.isfinite() & (amax > 2.0**-100)
    if rule == "rceil":
        fraction = torch.frexp(amax).mantissa * 2
        right &= ((fraction - 1.0).abs() > 1e-3) & ((fraction - 1.75).abs() > 1e-3) & ((fraction - 1.875).abs() > 1e-3)
        right &= ((fraction - 1.5).abs() > 1e-3) & (amax < 2.0**100) & (fraction < 1.999)
    if rule != "floor":
        right &= amax < 2.0**126
    return right


@TWINS
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TORCHAO)
def test_blocks_equal_torchao_where_torchao_is_right(name: str, rule: str, implementation: Twin) -> None:
    x = adversarial_blocks(512, seed=4)
    x = x[where_torchao_is_right(x, rule)].contiguous()
    assert len(x) > 500
    theirs, bytes_ = torchao_mx(x, name, rule)
    assert_same_bits(fake_quantize(x, name, scale_rule=rule, implementation=implementation), theirs)
    ours = quantize(x, name, scale_rule=rule, implementation=implementation)
    assert torch.equal(scales_of(ours).flatten(), bytes_.flatten())


def test_torchao_halves_values_at_scale_byte_0_and_the_quantizers_do_not() -> None:
    """If torchao mends this, the note in docs/numerics.md is out of date."""
    x = torch.full((1, 32), 2.0**-127 * 256)  # fp8_e4m3: exponent -119 - 8 = -127, byte 0, lossless
    theirs, bytes_ = torchao_mx(x, "fp8_e4m3", "floor")
    assert bytes_.item() == 0
    assert_same_bits(theirs, x / 2)
    assert_same_bits(fake_quantize(x, "fp8_e4m3"), x)


def test_torchaos_rceil_misses_amax_just_above_a_power_of_two_times_max() -> None:
    amax = float(np.nextafter(np.float32(448 * 2.0**100), np.float32(np.inf)))
    x = torch.full((1, 32), amax)
    assert torchao_mx(x, "fp8_e4m3", "rceil")[1].item() == 127 + 100  # log2 rounded down: it saturates
    assert scales_of(quantize(x, "fp8_e4m3", scale_rule="rceil")).item() == 127 + 101


@TWINS
def test_nvfp4_equals_exact_arithmetic(implementation: Twin) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(40, 64, generator=g) * torch.exp(2 * torch.randn(40, 1, generator=g))
    got = quantize(x, "nvfp4", implementation=implementation)
    tensor_scale = np.float32(x.abs().max().double().item() / (448 * 6))
    assert got.tensor_scale is not None
    assert got.tensor_scale.item() == tensor_scale
    e4m3 = [FORMATS["fp8_e4m3"].decode(c) for c in range(127)]
    e2m1 = [FORMATS["nvfp4"].decode(c) for c in range(8)]

    def nearest(grid: list[float], value: Fraction) -> int:
        return min(range(len(grid)), key=lambda c: (abs(Fraction(grid[c]) - value), c % 2))

    for row, codes, scales in zip(x, got.codes, scales_of(got), strict=True):
        for block in range(4):
            piece = row[16 * block : 16 * block + 16]
            wanted = Fraction(piece.abs().max().item()) / 6 / Fraction(float(tensor_scale))
            byte = max(1, nearest(e4m3, wanted))
            assert scales[block].item() == byte
            factor = Fraction(float(np.float32(e4m3[byte]) * tensor_scale))
            for value, code in zip(piece.tolist(), codes[16 * block : 16 * block + 16].tolist(), strict=True):
                assert code & 7 == nearest(e2m1, abs(Fraction(value)) / factor)
                assert bool(code & 8) == (math.copysign(1, value) < 0)


def test_nvfp4_is_torchaos_but_for_its_two_roundings_of_the_quotient() -> None:
    """torchao multiplies by a rounded reciprocal; the quantizers divide, so a few ties fall otherwise."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(256, 256, generator=g)
    scale = per_tensor_amax_to_scale(x.abs().max())
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
    ours = fake_quantize(x, "nvfp4")
    assert (ours != theirs).double().mean() < 1e-3
    assert (ours - theirs).abs().max() <= 2 * 448 * scale
