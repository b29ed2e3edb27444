"""Models of users, as their factories make them: with a config of their own, with two inputs, quantized already."""

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 256


class Configuration:
    vocab_size = VOCABULARY


class Gpt(nn.Module):
    """As nanoGPT: a config without use_cache, a head without get_output_embeddings, and a loss beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Configuration()
        self.wte = nn.Embedding(VOCABULARY, 32)
        self.h = nn.ModuleList([nn.Sequential(nn.Linear(32, 32)) for _ in range(2)])
        self.lm_head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = self.wte(idx)
        for block in self.h:
            x = x + block(x)
        return self.lm_head(x), None


class LastOnly(Gpt):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits, loss = super().forward(idx)
        return logits[:, -1:], loss


class TwoInputs(Gpt):
    def forward(self, ids: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(ids)[0] * mask


def gpt() -> nn.Module:
    return Gpt()


def last_only() -> nn.Module:
    return LastOnly()


def two_inputs() -> nn.Module:
    return TwoInputs()


def by_torchao() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = Gpt()
    quantize_(model, Int8WeightOnlyConfig())
    return model


def by_probe() -> nn.Module:
    from probe.running.recipes import Recipe, apply

    return apply(Gpt(), Recipe("linear_wa", "fp8_e4m3"))
