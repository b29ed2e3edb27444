"""probe: numerical regression tests for quantized models.

The public names are listed in `__init__.pyi`. Each is imported on first use: `probe --help` never loads torch.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

from probe.version import VERSION

__version__ = VERSION


def _homes() -> dict[str, str]:
    """Public name -> the module that defines it, from the imports of the stub."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module]
    return {name.name: str(node.module) for node in imports for name in node.names}


_HOMES = _homes()
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'probe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
