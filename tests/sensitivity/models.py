"""Models whose layers are called in different ways, and the tokens that they run on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.models.loading import Loaded
from probe.sensitivity import Sensitivity


def batches_of(loaded: Loaded, samples: int = 3, seqlen: int = 12) -> list[Tensor]:
    return token_batches(text_of("evaluation"), loaded.tokenizer, samples=samples, seqlen=seqlen, batch_size=2)


def assert_same(found: Sensitivity, expected: Sensitivity) -> None:
    """Bit for bit here; elsewhere a matrix product over more rows may add in another order."""
    assert found.notes == expected.notes
    for one, other in zip((*found.effects,), (*expected.effects,), strict=True):
        assert one.name == other.name
        for side in ("alone", "without"):
            mine, theirs = getattr(one, side), getattr(other, side)
            assert mine.kl == pytest.approx(theirs.kl, rel=1e-3, abs=1e-10), (one.name, side)
            assert mine.mse == pytest.approx(theirs.mse, rel=1e-3, abs=1e-10), (one.name, side)
            assert mine.top1_agreement == pytest.approx(theirs.top1_agreement, abs=0.02)


def random_batch(samples: int = 2) -> Tensor:
    """Tokens for a `Stack`."""
    return torch.randint(0, 16, (samples, 8), generator=torch.Generator().manual_seed(1))


class Stack(nn.Module):
    """A language model of a few linears; what differs is how its layers are called."""

    def __init__(self, how: str, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embedding = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(Layer(how) for _ in range(depth))
        self.out = nn.Linear(32, 16)

    def forward(self, batch: Tensor) -> Tensor:
        h = first = self.embedding(batch)
        rows = batch.float().mean(1)[:, None, None] / 8
        if self.how == "by place":
            rows = torch.arange(len(batch), dtype=torch.float32)[:, None, None] / 10 + 1
        positions = torch.linspace(0, 1, batch.shape[1])[:, None]
        memory = torch.zeros_like(first)
        for _ in range(2 if self.how == "twice" else 1):
            extra = None
            for layer in self.layers:
                if self.how == "residual":
                    h, extra = layer(h, extra if extra is not None else first)
                elif self.how == "tuple":
                    h = layer(h, positions=positions)[0]
                elif self.how.startswith("by"):
                    h = layer(h, weights=rows, positions=positions)
                elif self.how == "object":
                    h = layer(h, state=_State())
                elif self.how == "memory" or (self.how == "last memory" and layer is self.layers[-1]):
                    h = layer(h, memory=memory)
                elif self.how == "in place":
                    h = layer(h).add_(positions)
                else:
                    h = layer(hidden_states=h)
                    extra = h if extra is None else extra
        if self.how == "skip":
            h = h + extra
        logits: Tensor = self.out(h + memory)
        return logits

    def get_output_embeddings(self) -> nn.Module:
        return self.out


class _State:
    pass


class Layer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up = how, nn.Linear(32, 32)

    def forward(
        self,
        hidden_states: Tensor,
        extra: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        weights: Tensor | None = None,
        state: object = None,
        memory: Tensor | None = None,
    ) -> Any:
        h = hidden_states + torch.tanh(self.up(hidden_states))
        h = h if positions is None else h + positions
        h = h if weights is None else h * weights
        if memory is not None:
            memory += h  # and not returned
        if self.how == "residual":
            return h, hidden_states + (0 if extra is None else extra)
        return (h, None) if self.how == "tuple" else h


class Hidden(Stack):
    """Calls its layers through a list that is no module."""

    def __init__(self) -> None:
        super().__init__("named")
        self.order = list(self.layers)

    def forward(self, batch: Tensor) -> Tensor:
        h = self.embedding(batch)
        for layer in self.order:
            h = layer(h)
        logits: Tensor = self.out(h)
        return logits
