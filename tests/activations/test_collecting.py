"""The hooks: which axis of a tensor is the tokens, and tensors that several modules share."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from probe.activations.collecting import token_rows
from probe.activations.plan import Plan
from probe.activations.statistics import measure
from probe.data.samples import TokenBatch as Batch


def shaped(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


@pytest.mark.parametrize(
    ("x", "module", "expected"),
    [
        (shaped(2, 5, 3), nn.Identity(), lambda x: x),
        (shaped(2, 5, 3, 4), nn.Identity(), lambda x: x.reshape(2, 5, 12)),
        (shaped(10, 3), nn.Identity(), lambda x: x.reshape(2, 5, 3)),
        (shaped(2, 3, 5, 4), nn.Identity(), lambda x: x.permute(0, 2, 1, 3).reshape(2, 5, 12)),
        (shaped(2, 3, 5), nn.Identity(), lambda x: x.transpose(1, 2)),
        (shaped(2, 3, 8), nn.Conv1d(3, 3, 4, padding=3), lambda x: x[..., :5].transpose(1, 2)),
        (shaped(2, 5, 5), nn.Conv1d(5, 5, 1), lambda x: x.transpose(1, 2)),
    ],
)
def test_which_axis_is_the_tokens(x: torch.Tensor, module: nn.Module, expected: Any) -> None:
    rows = token_rows(x, (2, 5), module)
    assert rows.are_tokens
    assert torch.equal(rows.values, expected(x))


@pytest.mark.parametrize("shape", [(7, 3), (2, 4, 6), (3,), ()])
def test_rows_that_are_not_tokens_are_not_taken_for_them(shape: tuple[int, ...]) -> None:
    rows = token_rows(torch.zeros(shape), (2, 5), nn.Identity())
    assert not rows.are_tokens
    assert rows.values.numel() == max(1, int(np.prod(shape)))


def test_a_tensor_that_several_modules_read_is_measured_once_unless_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from probe.activations import collecting

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, 4)
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, ids: torch.Tensor) -> Any:
            x = self.embed(ids).clone()
            self.a(x)
            self.b(x)
            return self.c(x.mul_(2))

    names = ("a", "b", "c")
    plan = Plan({"input": names}, ("input", ()), (), ("output", ()), ("output", ()), 0, ("embed", *names))
    collector = collecting.Collector(plan, threshold=1.0, heat_sample=0)
    model, measured = Shared(), list[str]()

    def spied(*args: Any, **kwargs: Any) -> Any:
        measured.append(kwargs["module"])
        return measure(*args, **kwargs)

    monkeypatch.setattr(collecting, "measure", spied)
    tokens = torch.arange(6)[None]
    with torch.no_grad(), collector.hooked(model):
        collector.begin(Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), 0))
        model(tokens)
    amax = {name: collector.statistics[name, "input"].amax for name in names}
    assert measured == ["a", "c"]
    assert amax["a"] == amax["b"]
    assert amax["c"] == 2 * amax["a"], "changed in place"
    assert {name for name, _ in collector.statistics} == set(names)
    assert collector.statistics["b", "input"].module == "b"
    assert not any(module._forward_hooks for module in model.modules()), "no hook is left"


def test_the_input_of_a_convolution_is_measured_by_its_own_channels() -> None:
    """[1, 6, 6]: tokens first for a linear layer, channels first for a convolution, of one and the same tensor."""
    from probe.activations.collecting import Collector

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.a, self.b = nn.Embedding(256, 6), nn.Linear(6, 6), nn.Conv1d(6, 6, 1)

        def forward(self, ids: torch.Tensor) -> Any:
            x = self.embed(ids)
            return self.a(x), self.b(x)

    plan = Plan({"input": ("a", "b")}, ("input", ()), (), ("output", ()), ("output", ()), 0, ("embed", "a", "b"))
    collector, model, tokens = Collector(plan, threshold=1.0, heat_sample=0), Shared(), torch.arange(6)[None]
    with torch.no_grad(), collector.hooked(model):
        collector.begin(Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), 0))
        model(tokens)
    x = model.embed(tokens)[0].detach().abs()
    for name, axis in (("a", 0), ("b", 1)):
        assert np.array_equal(collector.statistics[name, "input"].channel_amax, x.amax(axis).numpy())
