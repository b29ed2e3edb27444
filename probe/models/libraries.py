"""Quantizers of other libraries, for modes: torchao's int8, with the optional extra `torchao`."""

import warnings
from typing import Any

from torch import nn

from probe.models.linear import linears


def torchao_int8(model: nn.Module, format: str, *, dynamic: bool) -> nn.Module:
    """torchao's int8 quantization of every nn.Linear but the head, in place.

    Weight-only: int8 weights per output channel. Dynamic: int8 inputs per token as well.
    """
    if format != "int8":
        raise ValueError(f"torchao's int8 modes take the format int8, not {format}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own deprecations
        try:
            from torchao.quantization import (
                Int8DynamicActivationInt8WeightConfig,
                Int8WeightOnlyConfig,
                quantize_,
            )
        except ImportError:
            raise ValueError(
                "the torchao modes need torchao, which is not installed. "
                'Install it with: pip install "quant-probe[torchao]"'
            ) from None
        chosen = set(linears(model))
        config: Any = Int8DynamicActivationInt8WeightConfig() if dynamic else Int8WeightOnlyConfig()
        quantize_(model, config, filter_fn=lambda module, name: name in chosen)
    return model
