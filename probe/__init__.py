"""probe: numerical regression tests for quantized models.

Names are imported when first used, so that `probe --help` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from probe.version import VERSION

if TYPE_CHECKING:
    from probe.formats import FORMATS, Format
    from probe.quantizers.codes import Quantized
    from probe.quantizers.hadamard import hadamard_matrix, hadamard_transform
    from probe.quantizers.integers import (
        IntegerParameters,
        dequantize_integer,
        dynamic_parameters,
        fake_quantize_integer,
        integer_parameters,
        quantize_integer,
    )
    from probe.quantizers.observers import MinMaxObserver, MSEObserver, PercentileObserver, make_observer
    from probe.quantizers.quantize import fake_quantize, quantize, round_to
    from probe.quantizers.underflow import Underflow, UnderflowWarning, analyze_underflow

__version__ = VERSION

_HOME = {
    "FORMATS": "formats",
    "Format": "formats",
    "IntegerParameters": "quantizers.integers",
    "MSEObserver": "quantizers.observers",
    "MinMaxObserver": "quantizers.observers",
    "PercentileObserver": "quantizers.observers",
    "Quantized": "quantizers.codes",
    "Underflow": "quantizers.underflow",
    "UnderflowWarning": "quantizers.underflow",
    "analyze_underflow": "quantizers.underflow",
    "dequantize_integer": "quantizers.integers",
    "dynamic_parameters": "quantizers.integers",
    "fake_quantize": "quantizers.quantize",
    "fake_quantize_integer": "quantizers.integers",
    "hadamard_matrix": "quantizers.hadamard",
    "hadamard_transform": "quantizers.hadamard",
    "integer_parameters": "quantizers.integers",
    "make_observer": "quantizers.observers",
    "quantize": "quantizers.quantize",
    "quantize_integer": "quantizers.integers",
    "round_to": "quantizers.quantize",
}
__all__ = [  # noqa: RUF022
    "__version__",
    "FORMATS",
    "Format",
    "IntegerParameters",
    "MSEObserver",
    "MinMaxObserver",
    "PercentileObserver",
    "Quantized",
    "Underflow",
    "UnderflowWarning",
    "analyze_underflow",
    "dequantize_integer",
    "dynamic_parameters",
    "fake_quantize",
    "fake_quantize_integer",
    "hadamard_matrix",
    "hadamard_transform",
    "integer_parameters",
    "make_observer",
    "quantize",
    "quantize_integer",
    "round_to",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'probe' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"probe.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
