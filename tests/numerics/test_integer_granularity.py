"""Granularity of integer grids: which elements share a scale, in every shape."""

from typing import Any

import pytest
import torch
from torch import Tensor

from probe.numerics.integers import (
    dequantize_integer,
    dynamic_parameters,
    fake_quantize_integer,
    integer_parameters,
    quantize_integer,
)
from tests.numerics.tensors import KINDS, randn


def by_hand(x: Tensor, bits: int, symmetric: bool) -> Tensor:
    """One slice, one scale."""
    if x.numel() == 0:
        return x
    parameters = integer_parameters(x.min(), x.max(), bits=bits, symmetric=symmetric)
    return dequantize_integer(quantize_integer(x, parameters), parameters, x.dtype)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_each_granularity_equals_its_slices_taken_alone(bits: int, dtype: torch.dtype, symmetric: bool) -> None:
    x = randn(3, 4, 10, dtype=dtype) * torch.tensor([0.01, 1.0, 30.0, 1e3], dtype=dtype)[:, None]
    kind: dict[str, Any] = {"bits": bits, "symmetric": symmetric}

    def same(got: Tensor, expected: Tensor) -> None:
        assert got.dtype == dtype
        assert torch.equal(got, expected)

    same(fake_quantize_integer(x, **kind), by_hand(x, bits, symmetric))
    same(fake_quantize_integer(x, granularity="tensor", **kind), by_hand(x, bits, symmetric))
    for axis in range(-3, 3):
        slices = [by_hand(s, bits, symmetric) for s in x.unbind(axis)]
        same(fake_quantize_integer(x, granularity="channel", axis=axis, **kind), torch.stack(slices, axis))
    rows = [by_hand(row, bits, symmetric) for row in x.reshape(-1, 10)]
    same(fake_quantize_integer(x, granularity="token", **kind), torch.stack(rows).reshape(x.shape))
    for axis in (0, 1, -1):
        for size in (1, 3, 100):
            lines = x.movedim(axis, -1)
            groups = [
                torch.cat([by_hand(g, bits, symmetric) for g in line.split(size)])
                for line in lines.reshape(-1, lines.shape[-1])
            ]
            expected = torch.stack(groups).reshape(lines.shape).movedim(-1, axis)
            options = {"granularity": "group", "axis": axis, "group_size": size, **kind}
            same(fake_quantize_integer(x, **options), expected)
    assert torch.equal(
        fake_quantize_integer(x, granularity="group", group_size=4, **kind),
        fake_quantize_integer(x, granularity="group", group_size=4, axis=2, **kind),
    )
    assert torch.equal(
        fake_quantize_integer(x, granularity="channel", **kind),
        fake_quantize_integer(x, granularity="channel", axis=0, **kind),
    )


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (1, 1, 1)),
        ({"granularity": "channel"}, (3, 1, 1)),
        ({"granularity": "channel", "axis": 1}, (1, 4, 1)),
        ({"granularity": "token"}, (3, 4, 1)),
        ({"granularity": "group", "group_size": 32}, (3, 4, 10)),
    ],
)
def test_dynamic_parameters_broadcast_and_give_the_same_as_static(options: dict[str, Any], shape: Any) -> None:
    x = randn(3, 4, 10)
    parameters = dynamic_parameters(x, **options)
    assert parameters.scale.shape == parameters.zero_point.shape == shape
    static = fake_quantize_integer(x, parameters=parameters)
    assert torch.equal(static, fake_quantize_integer(x, **options))


def test_one_dimension_with_a_scale_per_element_is_not_read_as_one_scale_for_all() -> None:
    x = torch.tensor([1.0, 100.0])
    assert dynamic_parameters(x, granularity="channel").scale.shape == (2,)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"granularity": "channel"},
        {"granularity": "channel", "axis": -1},
        {"granularity": "token"},
        {"granularity": "group", "group_size": 3},
        {"granularity": "group", "group_size": 3, "axis": 0},
    ],
)
@KINDS
def test_empty_tensors_stay_empty(shape: tuple[int, ...], options: dict[str, Any], symmetric: bool) -> None:
    got = fake_quantize_integer(torch.empty(shape, dtype=torch.bfloat16), symmetric=symmetric, **options)
    assert got.shape == shape
    assert got.dtype == torch.bfloat16


def test_a_single_number_is_a_tensor() -> None:
    assert fake_quantize_integer(torch.tensor(2.5)).item() == 2.5
    assert fake_quantize_integer(torch.tensor(2.5)).shape == ()


def test_a_slice_of_zeros_stays_zero_and_minus_zero_becomes_zero() -> None:
    x = torch.tensor([[0.0, -0.0], [1.0, -1.0]])
    got = fake_quantize_integer(x, granularity="token")
    assert torch.equal(got, x)
    assert not got[0].signbit().any()


def test_strides_do_not_matter_the_input_is_kept_and_no_gradient_is_carried() -> None:
    x = randn(12, 10).T[::2].requires_grad_()
    kept = x.detach().clone()
    options: dict[str, Any] = {"granularity": "group", "group_size": 5}
    got = fake_quantize_integer(x, **options)
    assert torch.equal(got, fake_quantize_integer(kept, **options))
    assert torch.equal(x.detach(), kept)
    assert not got.requires_grad


def test_the_largest_float32_is_quantized_without_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    got = fake_quantize_integer(torch.tensor([largest, -largest, 0.0]))
    assert got.isfinite().all()
    assert got[0] > 0.99 * largest
