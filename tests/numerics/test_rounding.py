import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from probe.numerics.rounding import narrow

# precision in bits, exponent of the smallest normal number, largest finite value
SHAPES = {
    torch.float16: (11, -14, Fraction(65504)),
    torch.bfloat16: (8, -126, Fraction(255) * 2**120),
    torch.float32: (24, -126, Fraction(2**24 - 1) * 2**104),
}
DTYPES = list(SHAPES)


def exact(value: float, dtype: torch.dtype) -> Fraction:
    """Nearest value of the dtype by rational arithmetic, ties to even, saturating."""
    precision, min_exponent, largest = SHAPES[dtype]
    if value == 0:
        return Fraction(0)
    exponent = max(math.frexp(value)[1] - 1, min_exponent)
    step = Fraction(2) ** (exponent - precision + 1)
    rounded = round(Fraction(value) / step) * step  # Fraction rounds half to even
    return max(-largest, min(largest, rounded))


def check(values: list[float], dtype: torch.dtype) -> None:
    got = narrow(torch.tensor(values, dtype=torch.float64), dtype)
    assert got.dtype == dtype
    for value, result in zip(values, got.double().tolist(), strict=True):
        assert Fraction(result) == exact(value, dtype), (value.hex(), result.hex())
        assert math.copysign(1, result) == math.copysign(1, value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=300)
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_any_float64_is_rounded_once(dtype: torch.dtype, values: list[float]) -> None:
    check(values, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=300)
@given(
    mantissa=st.integers(0, 2**25),
    exponent=st.integers(-180, 130),
    nudge=st.sampled_from([0, 1, -1, 2, -2]),
    sign=st.sampled_from([1, -1]),
)
def test_values_beside_a_tie_go_to_their_own_side(
    dtype: torch.dtype, mantissa: int, exponent: int, nudge: int, sign: int
) -> None:
    value = math.ldexp(float(mantissa), exponent)
    for _ in range(abs(nudge)):
        value = math.nextafter(value, math.inf * nudge)
    check([sign * value], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_tie_of_the_dtype_and_its_neighbours_are_rounded_once(dtype: torch.dtype) -> None:
    codes = torch.arange(0, 2**15 - 1, dtype=torch.int32).to(torch.int16)
    values = codes.view(dtype).double()
    values = values[values.isfinite()]
    ties = (values[1:] + values[:-1]) / 2
    below, above = (
        torch.nextafter(ties, -torch.inf * ties.sign()),
        torch.nextafter(ties, torch.inf * ties.sign()),
    )
    assert torch.equal(narrow(below, dtype).double(), values[:-1])
    assert torch.equal(narrow(above, dtype).double(), values[1:])
    even = torch.where(torch.arange(len(ties)) % 2 == 0, values[:-1], values[1:])
    assert torch.equal(narrow(ties, dtype).double(), even)
    assert torch.equal(narrow(-above, dtype).double(), -values[1:])


def test_the_plain_cast_of_torch_rounds_twice_and_narrow_does_not() -> None:
    beside_a_tie = torch.tensor([1 + 2**-8 + 2**-40, 1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert beside_a_tie.to(torch.bfloat16)[0] == 1.0
    assert beside_a_tie.to(torch.float16)[1] == 1.0
    assert narrow(beside_a_tie, torch.bfloat16)[0] == 1 + 2**-7
    assert narrow(beside_a_tie, torch.float16)[1] == 1 + 2**-10


def random_values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 17, (200_000,), generator=generator).double()
    return torch.randn(200_000, dtype=torch.float64, generator=generator) * torch.exp2(exponents)


def test_float16_and_float32_agree_with_numpy() -> None:
    x = random_values()
    x = x[x.abs() < 65000]
    for dtype, numpy_type in ((torch.float16, np.float16), (torch.float32, np.float32)):
        assert np.array_equal(narrow(x, dtype).numpy(), x.numpy().astype(numpy_type))


def test_bfloat16_agrees_with_ml_dtypes_except_where_that_rounds_twice() -> None:
    # ml_dtypes 0.5 goes from float64 to bfloat16 through float32, as torch does: not an oracle beside a tie.
    x = random_values()
    ours = narrow(x, torch.bfloat16).float()
    theirs = torch.from_numpy(x.numpy().astype(ml_dtypes.bfloat16).astype(np.float32))
    lands_on_tie = (x.float().view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(ours[~lands_on_tie], theirs[~lands_on_tie])
    assert lands_on_tie.any()
    check(x[lands_on_tie].tolist(), torch.bfloat16)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_finite_values_saturate_and_special_values_stay(dtype: torch.dtype) -> None:
    x = torch.tensor([1.7e308, -1.7e308, math.inf, -math.inf, math.nan, -0.0, 0.0], dtype=torch.float64)
    got = narrow(x, dtype)
    largest = 1.7e308 if dtype == torch.float64 else torch.finfo(dtype).max
    assert got[:4].tolist() == [largest, -largest, math.inf, -math.inf]
    assert got[4].isnan()
    assert got[5:].tolist() == [0.0, 0.0]
    assert got[5:].signbit().tolist() == [True, False]


def test_float64_comes_back_unchanged() -> None:
    x = random_values()
    assert torch.equal(narrow(x, torch.float64), x)


def test_shape_and_strides_do_not_matter() -> None:
    x = random_values().reshape(400, 500).T[::3]
    assert torch.equal(narrow(x, torch.bfloat16), narrow(x.contiguous(), torch.bfloat16))
    assert narrow(torch.empty(0, 3, dtype=torch.float64), torch.bfloat16).shape == (0, 3)
    assert narrow(torch.tensor(1.5, dtype=torch.float64), torch.float16).shape == ()


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot narrow to torch\.int8\. Give one of: torch\.float64, "):
        narrow(torch.zeros(1, dtype=torch.float64), torch.int8)
    with pytest.raises(ValueError, match=r"narrow takes float64, got torch\.float32\. Compute in float64"):
        narrow(torch.zeros(1), torch.bfloat16)
