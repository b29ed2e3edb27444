"""Small models for tests of recording: many layers, a layer that misbehaves, one that kills its own process."""

import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

import probe


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.linear(x)
        return added


class Stack(nn.Module):
    """Embedding, blocks, a norm, logits."""

    def __init__(self, depth: int = 33, width: int = 128, vocabulary: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Twice(Stack):
    """Its first layer runs twice."""

    def forward(self, ids: Tensor) -> Tensor:
        self.layers[0](self.embedding(ids))
        return super().forward(ids)


class Deaf(Stack):
    """Its second layer is read without being called."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.embedding(ids))
        unseen = self.layers[1]
        assert isinstance(unseen, Block)
        x = x + nn.functional.linear(x, unseen.linear.weight)
        logits: Tensor = self.head(self.norm(x))
        return logits


KILL = Path("kill-at-the-seventh-forward")


def mortal() -> nn.Module:
    """tiny-mamba; while a file is there, its seventh forward ends the process as the system would: at once.

    Two are fp32, three check on a short sequence that fp16 changes the layers, and the next are fp16.
    """
    model = probe.load_model("tiny-mamba").model
    calls: list[int] = []

    def count(module: nn.Module, args: object, output: object) -> None:
        calls.append(1)
        if len(calls) == 7 and KILL.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    model.backbone.layers[1].register_forward_hook(count)  # type: ignore[index, union-attr]
    return model
