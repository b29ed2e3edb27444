"""Small models to analyze: known outliers, known layers."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 40
#: Of the text, the token that is an outlier, and the channel that it is one in.
OUTLIER, CHANNEL = ord("e"), 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 64)
        self.down_proj = nn.Linear(64, WIDTH)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + 0.1 * self.down_proj(torch.relu(self.up_proj(x))), None


class Toy(nn.Module):
    """Takes an attention mask and leaves it alone: every token is on its own."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.conv = nn.Conv1d(WIDTH, 8, 3, padding=2)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x)
        return self.conv(x.transpose(1, 2))


class Maskless(Toy):
    def forward(self, ids: Tensor) -> Any:  # type: ignore[override]
        return super().forward(ids)


def _filled(model: Toy) -> Toy:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        model.embed.weight[OUTLIER, CHANNEL] = 500.0
        model.embed.weight[0, :] = 1e6  # padding, if it counted
    return model


def make() -> nn.Module:
    return _filled(Toy())


def make_other() -> nn.Module:
    model = _filled(Toy())
    with torch.no_grad():
        model.embed.weight[OUTLIER, CHANNEL] = 2.0
    return model


def make_maskless() -> nn.Module:
    return _filled(Maskless())


def make_gpt2() -> nn.Module:
    """A GPT-2 of random weights: its Conv1D store [in, out], c_attn 48 x 144, c_fc 48 x 192; every layer is larger."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=48, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    build: Any = GPT2LMHeadModel
    model: nn.Module = build(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02 * (1 + index / 4))
                if "c_" in name:
                    parameter[::7] *= 8  # inputs that matter more: blocks along outputs would be other ones
    return model


def make_nan() -> nn.Module:
    model = _filled(Toy())
    with torch.no_grad():
        model.embed.weight[OUTLIER, 3] = float("nan")
    return model


def make_small_vocabulary() -> nn.Module:
    model = make()
    model.config = type("Config", (), {"vocab_size": 100})()
    return model


def make_bert() -> nn.Module:
    """A BERT of random weights: encoder.layer.0.attention.self.query, ..., output.dense."""
    from transformers import BertConfig, BertModel

    size: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 32}
    build: Any = BertModel
    model: nn.Module = build(BertConfig(vocab_size=256, num_hidden_layers=2, max_position_embeddings=64, **size)).eval()
    return model


def make_t5() -> nn.Module:
    """A T5 of random weights: encoder.block.0.layer.0.SelfAttention.q, ..., layer.1.DenseReluDense.wi_0."""
    from transformers import T5Config, T5ForConditionalGeneration

    size: dict[str, Any] = {"d_model": 24, "d_kv": 12, "d_ff": 32, "num_heads": 2, "num_layers": 2}
    build: Any = T5ForConditionalGeneration
    model: nn.Module = build(T5Config(vocab_size=256, feed_forward_proj="gated-gelu", **size)).eval()
    return model


class Stages(nn.Module):
    """Linear layers and a stack whose names no default pattern has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 16)
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        for stage in self.stages:
            x = x + stage(x)
        return x


def make_stages() -> nn.Module:
    return Stages()


def batches() -> list[Tensor]:
    return [torch.arange(24).reshape(2, 12) + 40, torch.arange(12).reshape(1, 12) + 80]
