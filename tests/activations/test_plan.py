"""Weights as rows of inputs, for every kind of module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from probe.activations.plan import weight_rows


class Conv1D(nn.Module):
    """As that of transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Derived(Conv1D):
    pass


def transformers_conv1d(nf: int, nx: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D as Theirs

    build: Any = Theirs
    module: nn.Module = build(nf, nx)
    return module


MAKERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda inputs: nn.Linear(inputs, 8, bias=False),
    "conv1d": lambda inputs: nn.Conv1d(inputs, 8, 3, padding=1, groups=2, bias=False),
    "conv2d": lambda inputs: nn.Conv2d(inputs, 8, 3, bias=False),
    "transposed 1d": lambda inputs: nn.ConvTranspose1d(inputs, 8, 3, groups=2, bias=False),
    "transposed 2d": lambda inputs: nn.ConvTranspose2d(inputs, 8, 3, bias=False),
    "Conv1D": lambda inputs: Conv1D(8, inputs),
    "derived": lambda inputs: Derived(8, inputs),
    "transformers": lambda inputs: transformers_conv1d(8, inputs),
}


@pytest.mark.parametrize("inputs", [6, 8])
@pytest.mark.parametrize("kind", MAKERS)
@torch.no_grad()
def test_a_row_of_a_weight_is_what_one_output_is_made_of(kind: str, inputs: int) -> None:
    """With all weights but those of a row at zero, that output is as it was, and the others are zero."""
    torch.manual_seed(0)
    module: Any = MAKERS[kind](inputs)
    rows = weight_rows(module)
    assert rows is not None
    assert rows.shape[0] == 8
    assert rows.numel() == module.weight.numel()
    x = torch.randn(1, inputs, *[5] * (module.weight.dim() - 2))
    whole, weight = module(x), module.weight.clone()
    for output, row in enumerate(rows.clone()):
        module.weight.copy_(torch.where(torch.isin(weight, row), weight, 0))
        expected = torch.zeros_like(whole)
        expected[:, output] = whole[:, output]
        torch.testing.assert_close(module(x), expected)


def test_a_vector_is_one_row_and_no_weight_is_none() -> None:
    rows = weight_rows(nn.LayerNorm(5))
    assert rows is not None
    assert rows.shape == (1, 5)
    assert weight_rows(nn.ReLU()) is None
