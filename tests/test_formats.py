import math
from typing import Any, cast

import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest

from probe.formats import FORMATS

GFLOAT = {
    "fp8_e4m3": gf.format_info_ocp_e4m3,
    "fp8_e5m2": gf.format_info_ocp_e5m2,
    "fp6_e3m2": gf.format_info_ocp_e3m2,
    "fp6_e2m3": gf.format_info_ocp_e2m3,
    "fp4_e2m1": gf.format_info_ocp_e2m1,
    "nvfp4": gf.format_info_ocp_e2m1,
    "mxint8": gf.format_info_ocp_int8,
    "bf16": gf.format_info_bfloat16,
    "fp16": gf.format_info_binary16,
}
ML_DTYPES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "nvfp4": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
INTEGERS = [name for name, f in FORMATS.items() if f.scale == "float32"]


def equal(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def test_every_format_has_an_oracle() -> None:
    assert set(GFLOAT) | set(INTEGERS) == set(FORMATS)


@pytest.mark.parametrize("name", GFLOAT)
def test_every_code_decodes_as_gfloat_says(name: str) -> None:
    fmt = FORMATS[name]
    wrong = [
        code for code in range(2**fmt.bits) if not equal(fmt.decode(code), gfloat.decode_float(GFLOAT[name], code).fval)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_code_decodes_as_ml_dtypes_says(name: str) -> None:
    fmt = FORMATS[name]
    word = np.uint16 if fmt.bits == 16 else np.uint8
    with np.errstate(invalid="ignore"):  # signalling NaNs
        theirs = np.arange(2**fmt.bits, dtype=word).view(ML_DTYPES[name]).astype(np.float64)
    wrong = [code for code in range(2**fmt.bits) if not equal(fmt.decode(code), float(theirs[code]))]
    assert wrong == []


@pytest.mark.parametrize("name", INTEGERS)
def test_plain_integers_decode_as_twos_complement(name: str) -> None:
    bits = FORMATS[name].bits
    expected = [int(code) for code in np.arange(2 ** (bits - 1))] + list(range(-(2 ** (bits - 1)), 0))
    assert [FORMATS[name].decode(code) for code in range(2**bits)] == expected


@pytest.mark.parametrize("name", FORMATS)
def test_the_figures_of_a_row_follow_from_its_codes(name: str) -> None:
    fmt = FORMATS[name]
    values = [fmt.decode(code) for code in range(2**fmt.bits)]
    positive = sorted(v for v in values if math.isfinite(v) and v > 0)
    assert fmt.max == positive[-1]
    assert fmt.min_subnormal == positive[0]
    assert 2.0**fmt.max_exponent <= fmt.max < 2.0 ** (fmt.max_exponent + 1)
    if fmt.min_normal is not None:
        assert fmt.min_normal == fmt.decode(1 << fmt.mantissa_bits)
        assert fmt.bias == GFLOAT[name].bias


@pytest.mark.parametrize("name", ML_DTYPES)
def test_smallest_numbers_are_those_of_finfo(name: str) -> None:
    info: Any = cast(Any, ml_dtypes.finfo)(ML_DTYPES[name])
    fmt = FORMATS[name]
    assert float(info.max) == fmt.max
    assert float(info.smallest_normal) == fmt.min_normal
    assert float(info.smallest_subnormal) == fmt.min_subnormal


def test_block_sizes_and_scales_are_those_of_the_standards() -> None:
    for name in ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "mxint8"):
        assert (FORMATS[name].block_size, FORMATS[name].scale) == (32, "e8m0")
    assert (FORMATS["nvfp4"].block_size, FORMATS["nvfp4"].scale) == (16, "e4m3")
    assert all(FORMATS[name].block_size is None for name in ("int8", "int4", "int2", "bf16", "fp16"))


def test_special_codes_are_named() -> None:
    assert FORMATS["fp8_e4m3"].special_codes == "NaN 0x7f, 0xff"
    assert FORMATS["fp8_e5m2"].special_codes == "Inf 0x7c, 0xfc; NaN above"
    assert FORMATS["fp4_e2m1"].special_codes == "none"
    assert FORMATS["mxint8"].special_codes == "-128 is never produced"
