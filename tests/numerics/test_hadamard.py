import math
from unittest import mock

import pytest
import torch

from probe.numerics import hadamard
from probe.numerics.hadamard import hadamard_matrix, hadamard_transform

SIZES = sorted({base << k for base in (1, 12, 20, 40) for k in range(13) if base << k <= 5120})


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("n", SIZES)
def test_matrix_is_symmetric_and_its_square_is_exactly_n(n: int) -> None:
    h = hadamard_matrix(n)
    assert h.shape == (n, n)
    assert torch.equal(h.abs(), torch.ones(n, n))
    assert torch.equal(h, h.T)
    # Partial sums are integers below 2^24, which float32 adds exactly.
    assert torch.equal(h @ h.T, n * torch.eye(n))


@pytest.mark.parametrize("n", SIZES)
def test_transform_of_small_integers_is_the_matrix_product_exactly(n: int) -> None:
    x = torch.randint(-8, 8, (3, n), generator=torch.Generator().manual_seed(0)).double()
    product = x @ hadamard_matrix(n, torch.float64).T
    assert torch.equal(hadamard_transform(x), product * (1 / math.sqrt(n)))


@pytest.mark.parametrize("n", SIZES)
def test_transform_is_orthonormal_and_its_own_inverse(n: int) -> None:
    x = randn(5, n)
    y = hadamard_transform(x)
    torch.testing.assert_close(hadamard_transform(y), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(y.square().sum(-1), x.square().sum(-1), rtol=1e-12, atol=0)


def test_powers_of_two_are_in_sylvester_order() -> None:
    h = torch.ones(1, 1)
    for k in range(8):
        assert torch.equal(hadamard_matrix(2**k), h)
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])


@pytest.mark.parametrize(("base", "power"), [(12, 8), (20, 4), (40, 16)])
def test_other_sizes_are_the_kronecker_product_of_base_and_power(base: int, power: int) -> None:
    product = torch.kron(hadamard_matrix(base), hadamard_matrix(power))
    assert torch.equal(hadamard_matrix(base * power), product)


def test_transform_is_linear() -> None:
    x, y = randn(2, 7, 160)
    left = hadamard_transform(2.5 * x - y)
    torch.testing.assert_close(left, 2.5 * hadamard_transform(x) - hadamard_transform(y), rtol=0, atol=1e-13)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_any_axis_gives_what_the_last_axis_gives(axis: int) -> None:
    x = randn(12, 8, 20)
    expected = hadamard_transform(x.movedim(axis, -1)).movedim(-1, axis)
    matrix = hadamard_matrix(x.shape[axis], torch.float64) / math.sqrt(x.shape[axis])
    product = torch.tensordot(x, matrix, dims=([axis], [0])).movedim(-1, axis)
    got = hadamard_transform(x, axis=axis)
    assert torch.equal(got, expected)
    torch.testing.assert_close(got, product, rtol=0, atol=1e-13)


def test_strides_do_not_matter_and_the_input_is_not_changed() -> None:
    x = randn(48, 30).T[::2]
    kept = x.clone()
    assert torch.equal(hadamard_transform(x), hadamard_transform(x.contiguous()))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("n", [64, 768, 2560])
def test_a_vector_does_not_depend_on_its_batch(n: int) -> None:
    x = randn(33, n, dtype=torch.float32)
    whole = hadamard_transform(x)
    assert torch.equal(whole, torch.stack([hadamard_transform(row) for row in x]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    x = randn(4, 1536, dtype=dtype)
    got = hadamard_transform(x)
    assert got.dtype == dtype
    assert torch.equal(got, hadamard_transform(x.float()).to(dtype))


@pytest.mark.parametrize("n", [1024, 1536, 5120])
def test_float32_is_as_close_to_float64_as_its_precision_allows(n: int) -> None:
    x = randn(4, n, dtype=torch.float32)
    got = hadamard_transform(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), hadamard_transform(x.double()), rtol=0, atol=1e-5)


def test_size_one_is_the_identity_and_an_empty_batch_stays_empty() -> None:
    assert torch.equal(hadamard_transform(torch.tensor([3.0])), torch.tensor([3.0]))
    assert hadamard_transform(torch.empty(0, 12)).shape == (0, 12)


def test_nan_spreads_over_its_own_vector_only() -> None:
    x = torch.zeros(2, 24)
    x[0, 5] = torch.nan
    assert hadamard_transform(x).isnan().all(1).tolist() == [True, False]
    assert torch.equal(hadamard_transform(x)[1], torch.zeros(24))


def test_gradients_pass_through() -> None:
    x = randn(2, 24).requires_grad_()
    weight = randn(2, 24)
    torch.autograd.backward((hadamard_transform(x) * weight).sum())
    assert x.grad is not None
    torch.testing.assert_close(x.grad, hadamard_transform(weight))


@pytest.mark.parametrize(
    ("n", "near"),
    [
        (3, "Nearest: 2 below and 4 above."),
        (28, "Nearest: 24 below and 32 above."),
        (1000, "Nearest: 768 below and 1024 above."),
        (5121, "Nearest: 5120 below and 6144 above."),
        (0, "Nearest: 1 above."),
    ],
)
def test_an_unsupported_size_names_its_neighbours(n: int, near: str) -> None:
    with pytest.raises(ValueError, match=f"no Hadamard matrix of size {n} here: sizes are 2.k") as matrix_error:
        hadamard_matrix(n)
    assert near in str(matrix_error.value)
    with pytest.raises(ValueError, match="leave this axis unrotated"):
        hadamard_transform(torch.zeros(2, n))


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="no Hadamard matrix of size -4 here"):
        hadamard_matrix(-4)


def test_wrong_dtypes_and_axes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x is torch\.int64\. Hadamard transforms take torch\.float64, "):
        hadamard_transform(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"torch\.uint8 cannot hold \+1 and -1"):
        hadamard_matrix(4, torch.uint8)
    with pytest.raises(
        ValueError, match=r"axis 2 is out of range for a tensor of 2 dimensions\. Give one from -2 to 1"
    ):
        hadamard_transform(torch.zeros(4, 4), axis=2)
    with pytest.raises(ValueError, match="A single number has no axis"):
        hadamard_transform(torch.tensor(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_large_values_do_not_overflow_on_the_way(dtype: torch.dtype) -> None:
    big = torch.finfo(dtype).max * 0.9
    x = torch.tensor([[big, big, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]], dtype=dtype)
    got = hadamard_transform(x)
    assert got[0, [1, 3]].tolist() == [0, 0]
    assert torch.allclose(got[0, [0, 2]].double(), torch.tensor([big, big], dtype=torch.float64), rtol=0.01)
    assert torch.equal(got[1], hadamard_transform(x[1]))
    assert hadamard_transform(torch.full((4,), big, dtype=dtype)).tolist() == [float("inf"), 0, 0, 0]


def by_torch(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """The readable twin."""
    with mock.patch.object(hadamard, "is_native", return_value=False):
        return hadamard_transform(x, axis=axis)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits, but for those of NaN, which may be any."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.isnan(), -1, x.contiguous().view(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", SIZES)
def test_the_loops_have_the_bits_of_the_readable_twin(n: int, dtype: torch.dtype) -> None:
    x = randn(9, n, dtype=dtype)
    assert torch.equal(bits(hadamard_transform(x)), bits(by_torch(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 4, 12, 64, 160, 1024])
def test_the_loops_have_the_bits_of_the_readable_twin_for_hostile_values(n: int, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    hostile = [math.nan, math.inf, -math.inf, -0.0, info.max, -info.max, info.tiny, info.smallest_normal / 4]
    hostile += [info.max / n, -info.max / n * (1 - info.eps), info.max / 2]
    x = randn(3 * len(hostile), n, dtype=dtype)
    for row, value in enumerate(hostile):
        x[row, row % n], x[row + len(hostile)] = value, value
        x[row + 2 * len(hostile)] *= value
    assert torch.equal(bits(hadamard_transform(x)), bits(by_torch(x)))


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("shape", [(2049, 512), (3, 2**19), (0, 64), (2, 0, 8), (8,), (5, 7, 96)], ids=str)
def test_the_loops_have_the_bits_of_the_readable_twin_on_any_number_of_threads(shape: tuple[int, ...]) -> None:
    x = randn(*shape, dtype=torch.float32)
    assert torch.equal(hadamard_transform(x), by_torch(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("axis", [0, -1])
def test_out_receives_the_result_and_may_be_the_input(axis: int, dtype: torch.dtype) -> None:
    x = randn(24, 64, dtype=dtype)
    expected, out = hadamard_transform(x, axis=axis), torch.empty_like(x)
    assert hadamard_transform(x, axis=axis, out=out) is out
    assert torch.equal(out, expected)
    turned = torch.empty(64, 24, dtype=dtype).T
    assert torch.equal(hadamard_transform(x, axis=axis, out=turned), expected)
    assert hadamard_transform(x, axis=axis, out=x) is x
    assert torch.equal(x, expected)


def test_out_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"out is torch.float32 of shape \(3, 8\) .* Pass torch.empty_like\(x\)"):
        hadamard_transform(torch.ones(4, 8), out=torch.ones(3, 8))


def test_a_gradient_goes_through() -> None:
    x = randn(3, 12).requires_grad_()
    (gradient,) = torch.autograd.grad(hadamard_transform(x).square().sum(), x)
    torch.testing.assert_close(gradient, 2 * x.detach())
