"""Quantizers of other libraries, as modes: torchao's int8."""

import warnings
from typing import Any

from torch import nn

from probe.models.linear import linear_layers
from probe.models.mamba import SiteMixer


def torchao_int8(model: nn.Module, format: str, *, dynamic: bool) -> nn.Module:
    """torchao's int8 quantization of every nn.Linear that is called, in place; it knows no other layer.

    The head and routers stay float, as in probe's own modes.

    Weight-only: int8 weights per output channel. Dynamic: int8 inputs per token as well.
    """
    if format != "int8":
        raise ValueError(f"torchao's int8 modes take the format int8, not {format}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own deprecations
        try:
            from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
        except ImportError:
            raise ValueError(
                "the torchao modes need torchao, which is not installed. "
                'Install it with: pip install "quant-probe[torchao]"'
            ) from None
        # the product of a weight that is read without a call needs more of its tensors than they have
        mixers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, SiteMixer))
        chosen = {
            name
            for name, layer in linear_layers(model).items()
            if isinstance(layer.module, nn.Linear) and (layer.inputs or name.startswith(mixers))
        }
        config: Any = Int8DynamicActivationInt8WeightConfig() if dynamic else Int8WeightOnlyConfig()
        quantize_(model, config, filter_fn=lambda module, name: name in chosen)
    return model
