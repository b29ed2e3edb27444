"""One test per row of the table in docs/numerics.md; the last test holds the two lists equal."""

import math
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from probe import FORMATS, fake_quantize, quantize
from probe.numerics.quantize import Options
from tests.numerics.tensors import MX, RULES, TWINS, Twin, assert_same_bits, every, scales_of

FLOATS = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "nvfp4")
INTEGERS = ("int8", "int4", "int2")


@TWINS
def test_below_a_power_of_two(implementation: Twin) -> None:
    x = torch.tensor([511.99997])
    assert math.log2(np.float32(511.99997)) < 9
    assert np.log2(np.float32(511.99997)) == 9  # what a float32 logarithm says
    assert fake_quantize(x, "fp8_e4m3", implementation=implementation).item() == 448


@pytest.mark.parametrize("name", [*MX, "nvfp4"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@TWINS
def test_nan_in_block(name: str, bad: float, implementation: Twin) -> None:
    x = torch.linspace(-3, 3, 96)
    clean = quantize(x, name, implementation=implementation, tensor_scale=0.01 if name == "nvfp4" else None)
    x[40] = bad
    got = quantize(x, name, implementation=implementation, tensor_scale=0.01 if name == "nvfp4" else None)
    size = FORMATS[name].block_size
    assert size is not None
    first = 40 // size * size
    spoiled = torch.zeros(96, dtype=torch.bool)
    spoiled[first : first + size] = True
    assert bool(got.dequantize()[spoiled].isnan().all())
    assert_same_bits(got.dequantize()[~spoiled], clean.dequantize()[~spoiled])
    assert scales_of(got)[40 // size].item() == (0x7F if name == "nvfp4" else 255)
    if name != "nvfp4":
        assert_same_bits(got.dequantize(), fake_quantize(x, name, implementation=implementation))


test_inf_in_block = test_nan_in_block


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_integer(name: str, bad: float) -> None:
    x = torch.linspace(-1, 1, 64)
    x[3] = bad
    assert bool(fake_quantize(x, name).isnan().all())
    grouped = fake_quantize(x, name, block_size=32)
    assert bool(grouped[:32].isnan().all())
    assert bool(grouped[32:].isfinite().all())


@pytest.mark.parametrize("name", [*FLOATS, "bf16", "fp16"])
@TWINS
def test_negative_zero(name: str, implementation: Twin) -> None:
    x = torch.tensor([-0.0, 0.0, -1e-30, 1e-30, 1.0])
    got = fake_quantize(x, name, implementation=implementation)
    assert got[:2].tolist() == [0, 0]
    assert torch.signbit(got).tolist() == [True, False, True, False, False]
    if name != "bf16":
        assert got[2:4].tolist() == [0, 0]


@pytest.mark.parametrize("name", ["mxint8", *INTEGERS])
@TWINS
def test_negative_zero_integer(name: str, implementation: Twin) -> None:
    got = fake_quantize(torch.tensor([-0.0, -1e-30, 1.0]), name, implementation=implementation)
    assert not bool(torch.signbit(got).any())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
@TWINS
def test_zero_block(name: str, rule: str, implementation: Twin) -> None:
    x = torch.tensor([0.0, -0.0] * 16)
    got = quantize(x, name, scale_rule=rule, implementation=implementation)
    assert scales_of(got).tolist() == [0]
    assert_same_bits(got.dequantize(), x.abs() if name == "mxint8" else x)


@pytest.mark.parametrize("name", MX)
@TWINS
def test_byte_zero(name: str, implementation: Twin) -> None:
    fmt = FORMATS[name]
    x = torch.tensor([fmt.decode(code) for code in range(2 ** (fmt.bits - 1))], dtype=torch.float64)
    x = (x[x.isfinite()] * 2.0**-127).float()  # the whole grid at scale 2^-127
    got = quantize(x, name, block_size=len(x), implementation=implementation)
    assert scales_of(got).tolist() == [0]
    assert_same_bits(got.dequantize(), x)
    assert_same_bits(fake_quantize(x, name, block_size=len(x), implementation=implementation), x)


@TWINS
def test_byte_clamped_low(implementation: Twin) -> None:
    step = 2.0**-127 * FORMATS["fp4_e2m1"].min_subnormal
    x = torch.tensor([step, step / 2, step * 0.75, -step / 4])
    got = fake_quantize(x, "fp4_e2m1", implementation=implementation)
    assert got.tolist() == [step, 0.0, step, 0.0]
    assert scales_of(quantize(x, "fp4_e2m1", implementation=implementation)).tolist() == [0]


@TWINS
def test_byte_clamped_high(implementation: Twin) -> None:
    x = torch.tensor([1e300, -1e300, 2.0**120], dtype=torch.float64)
    got = quantize(x, "fp8_e4m3", implementation=implementation)
    assert scales_of(got).tolist() == [254]
    assert got.dequantize().tolist() == [448 * 2.0**127, -448 * 2.0**127, 2.0**120]


@pytest.mark.parametrize("name", MX)
@TWINS
def test_subnormal_inputs(name: str, implementation: Twin) -> None:
    x = torch.arange(1, 33, dtype=torch.int32).mul(2**17).view(torch.float32)  # 2^-132 and up
    got = fake_quantize(x, name, implementation=implementation)
    expected = fake_quantize(x.double() * 2.0**20, name, implementation=implementation) * 2.0**-20
    step = FORMATS[name].min_subnormal * 2.0**-127
    close = (got.double() - x.double()).abs()
    assert bool((close <= torch.maximum((expected - x.double()).abs(), torch.tensor(step / 2).double())).all())
    assert bool((got > 0).any())


@pytest.mark.parametrize("name", MX)
@TWINS
def test_saturation(name: str, implementation: Twin) -> None:
    fmt = FORMATS[name]
    just_below = torch.tensor(2.0 ** (fmt.max_exponent + 1)).nextafter(torch.tensor(0.0))
    x = torch.stack([just_below, -just_below, torch.tensor(1.0)])
    got = fake_quantize(x, name, implementation=implementation)
    assert got.tolist() == [fmt.max, -fmt.max, 1.0]


@TWINS
def test_output_overflow(implementation: Twin) -> None:
    x = torch.tensor([65504.0, 1.0], dtype=torch.float16)
    got = quantize(x, "fp8_e4m3", scale_rule="ceil", implementation=implementation)
    assert got.dequantize(torch.float32)[0].item() == 65536
    assert got.dequantize()[0].item() == 65504
    assert_same_bits(got.dequantize(), fake_quantize(x, "fp8_e4m3", scale_rule="ceil", implementation=implementation))
    top = torch.full((32,), torch.finfo(torch.float32).max)
    assert bool(fake_quantize(top, "fp8_e4m3", scale_rule="ceil", implementation=implementation).isfinite().all())


@pytest.mark.parametrize("name", [*MX, "nvfp4"])
def test_short_last_block(name: str) -> None:
    x = torch.randn(3, 70)
    x[:, 64:] *= 1000
    scale: Options = {"tensor_scale": 1.0} if name == "nvfp4" else {}
    whole = fake_quantize(x, name, **scale)
    parts = [fake_quantize(x[:, a:b], name, **scale) for a, b in ((0, 32), (32, 64), (64, 70))]
    assert_same_bits(whole, torch.cat(parts, -1))
    size = FORMATS[name].block_size
    assert size is not None
    assert scales_of(quantize(x, name, **scale)).shape == (3, math.ceil(70 / size))


@pytest.mark.parametrize("name", [*MX, "nvfp4"])
def test_any_axis(name: str) -> None:
    x = torch.randn(5, 40, 3, 33)
    for axis in range(-4, 4):
        moved = fake_quantize(x.movedim(axis, -1).contiguous(), name).movedim(-1, axis)
        assert_same_bits(fake_quantize(x, name, axis=axis), moved.contiguous())
        assert_same_bits(quantize(x, name, axis=axis).dequantize(), moved.contiguous())


@pytest.mark.parametrize("name", list(FORMATS))
def test_non_contiguous(name: str) -> None:
    base = torch.randn(64, 48)
    for view in (base.t(), base[::2, 1::3], base[:1].expand(7, 48), base.flip(0)[:, ::2]):
        got = fake_quantize(view, name)
        assert got.is_contiguous()
        assert_same_bits(got, fake_quantize(view.contiguous(), name))


@pytest.mark.parametrize("name", list(FORMATS))
@TWINS
def test_zero_dimensional(name: str, implementation: Twin) -> None:
    x = torch.tensor(-3.3)
    got = fake_quantize(x, name, implementation=implementation)
    assert got.shape == ()
    assert got.item() == fake_quantize(x.reshape(1), name).item()
    assert quantize(x, name).dequantize().shape == ()


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 32), (2, 0, 5)])
def test_empty(name: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    assert fake_quantize(x, name).shape == shape
    assert fake_quantize(x, name).dtype == torch.bfloat16
    assert quantize(x, name).dequantize().shape == shape


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(FORMATS))
def test_no_double_rounding(name: str, source: torch.dtype) -> None:
    x = every(source)
    x = x[x.isfinite()]
    x = x[: len(x) // 32 * 32].reshape(-1, 32)
    options: Options = {"block_size": 32} if name.startswith("int") else {}
    exact = fake_quantize(x.double(), name, **options)
    got = fake_quantize(x, name, **options)
    if source == torch.float16:  # numpy rounds float64 to float16 once
        with np.errstate(over="ignore"):
            once = torch.from_numpy(exact.numpy().astype(np.float16))
    else:
        held = exact == exact.to(source).double()
        once = torch.where(held, exact.to(source), got)
        assert held.double().mean() > (0.9 if not name.startswith("int") else 0.0)
    limit = torch.finfo(source).max
    once = torch.where(once.isinf() & exact.isfinite(), once.clamp(-limit, limit), once)
    assert_same_bits(got, once)


@TWINS
def test_mxint8_symmetric(implementation: Twin) -> None:
    x = torch.tensor([-1.999, 1.999, -1.0])
    got = quantize(x, "mxint8", implementation=implementation)
    assert got.codes.tolist() == [-127, 127, -64]
    assert got.dequantize().tolist() == [-127 / 64, 127 / 64, -1.0]


def test_int8_asymmetric_range() -> None:
    from probe import integer_parameters, quantize_integer

    x = torch.tensor([-1.0, 1.0, 0.5])
    assert quantize(x, "int8").codes.tolist() == [-127, 127, 64]
    given = integer_parameters(torch.tensor(-0.5), torch.tensor(0.5))
    assert quantize_integer(x, given).tolist() == [-128, 127, 127]


@TWINS
def test_casts_follow_ieee(implementation: Twin) -> None:
    x = torch.tensor([65519.0, 65520.0, -1e38, math.inf, math.nan])
    assert_same_bits(fake_quantize(x, "fp16", implementation=implementation), x.half().float())
    inward = fake_quantize(x, "fp16", rounding="toward_zero", implementation=implementation)
    assert inward[:4].tolist() == [65504, 65504, -65504, math.inf]
    down = fake_quantize(x, "fp16", rounding="floor", implementation=implementation)
    assert down[:4].tolist() == [65504, 65504, -math.inf, math.inf]
    assert float(np.float32(1e38).astype(ml_dtypes.bfloat16)) == fake_quantize(torch.tensor(1e38), "bf16").item()


@TWINS
def test_nvfp4_tiny_block(implementation: Twin) -> None:
    x = torch.cat([torch.full((16,), 1e4), torch.full((16,), 1e-6), torch.zeros(16)])
    got = quantize(x, "nvfp4", implementation=implementation)
    assert scales_of(got).tolist() == [126, 1, 1]
    assert got.dequantize()[16:].tolist() == [0.0] * 32


def test_every_row_of_the_table_has_its_test_and_every_test_its_row() -> None:
    text = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    section = text.split("## Special values")[1].split("\n## ")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", section, re.M))
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert rows == tests - {"every_row_of_the_table_has_its_test_and_every_test_its_row"}
