"""Figures of a saved model, all through the stock forward: bits per byte, outliers at one layer's input."""

import math
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from models import CONTEXT, stock_logits


def windows(text: bytes, length: int = CONTEXT) -> Tensor:
    """`text` as byte ids, (count, length), in windows that do not overlap; a shorter rest is left out."""
    count = len(text) // length
    return torch.tensor(list(text[: count * length])).view(count, length)


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, text: bytes, *, length: int = CONTEXT, batch: int = 4) -> float:
    """Mean of -log2 p(byte | the bytes before it in its window), the first byte of a window not counted."""
    total, count = 0.0, 0
    for ids in windows(text, length).split(batch):
        logits = stock_logits(model, ids)[:, :-1].flatten(0, 1)
        total += functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").item()
        count += ids[:, 1:].numel()
    return total / count / math.log(2)


@torch.no_grad()
def outlier_ratios(model: PreTrainedModel, text: bytes, layer: str, *, batch: int = 8) -> dict[str, float]:
    """max|x| / median|x| of the input of every module named `layer`, over the first windows of `text`."""
    ratios = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name.endswith(layer):

                def keep(_module: object, inputs: tuple[Tensor, ...], name: str = name) -> None:
                    magnitudes = inputs[0].abs().flatten()
                    ratios[name] = (magnitudes.max() / magnitudes.median()).item()

                hooks.callback(module.register_forward_pre_hook(keep).remove)
        stock_logits(model, windows(text)[:batch])
    return ratios
