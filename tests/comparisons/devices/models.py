"""The models that devices run here: two trained ones, and a small random transformer with biases and LayerNorm."""

import copy
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.data.texts import text_of
from probe.models.loading import load_model

SAMPLES, TOKENS = 4, 48
#: The number of layers of each model, written down so that cases can be named without loading one.
DEPTHS = {"tiny-mamba": 4, "tiny-llama": 4, "small": 6}
NAMES = tuple(DEPTHS)


class Block(nn.Module):
    """Pre-norm attention and MLP, as in GPT-2: LayerNorm, biases everywhere, exact GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.GELU()
        self.scale = (width // heads) ** -0.5

    def attend(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        q, k, v = self.qkv(x).view(samples, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        out: Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return out


class Small(nn.Module):
    """Six blocks of random weights, bytes in, logits out."""

    def __init__(self, width: int = 64, layers: int = 6, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


@cache
def shared(name: str) -> nn.Module:
    if name != "small":
        return load_model(name).model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = Small().eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))  # biases and gains that matter
    return model


def fresh(name: str) -> nn.Module:
    """A copy to break."""
    return copy.deepcopy(shared(name))


def prompt(seed: int) -> Tensor:
    """Samples of the evaluation text, from another place for every seed."""
    text = text_of("evaluation").encode()
    start = 1000 + 977 * seed
    return torch.tensor(list(text[start : start + SAMPLES * TOKENS])).view(SAMPLES, TOKENS)


def layers_of(model: nn.Module) -> nn.ModuleList:
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def embedding_of(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if isinstance(module, nn.Embedding))


def final_norm_of(model: nn.Module) -> nn.Module:
    for name in ("backbone.norm_f", "model.norm", "norm"):
        if name in dict(model.named_modules()):
            return model.get_submodule(name)
    raise AssertionError("no final norm")
