"""A model of a user's own: a plain module with two inputs, and the batches that it is called with."""

import torch
from torch import Tensor, nn

WIDTH = 32


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, picture: Tensor, text: Tensor, scale: float = 1.0) -> Tensor:
        x = picture + scale * text
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        out: Tensor = self.out(x)
        return out


def make() -> nn.Module:
    torch.manual_seed(0)
    return TwoInputs()


def batches() -> list[object]:
    drawn = [torch.randn(4, WIDTH) for _ in range(3)]
    return [(drawn[0], drawn[1]), {"picture": drawn[1], "text": drawn[2], "scale": 0.5}]
