"""Weights that a tool quantized: the form that each has in a model, and what the tool states about them.

torchao               a tensor subclass in the place of the weight             Int8Tensor of torchao
quanto                a module of its own; frozen, with a tensor subclass      qint8 of quanto
compressed-tensors    a scheme at the module, whether it is packed or not      int4 of compressed-tensors
torch.ao, GPTQ, ...   a module with codes under other names                    Linear of torch
plain codes           a parameter of integers or of eight-bit floats           torch.float8_e4m3fn
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: The attribute of a model that its loader puts the statement in.
STATEMENT = "probe_statement"
#: What a package is called where its modules have another name.
PACKAGES = {"optimum": "quanto", "compressed_tensors": "compressed-tensors"}
_EIGHT_BIT_FLOATS = tuple(dtype for name, dtype in vars(torch).items() if name.startswith("float8_"))


@dataclass(frozen=True)
class Statement:
    """What a checkpoint states: the tool, its scheme, and which parameters it quantized.

    `forms` has them by their names in the float model, each with its type. None: the tool states no names.
    """

    tool: str
    scheme: str
    forms: Mapping[str, str] | None
    is_dequantized: bool = False  # the values are plain floats again, so that only the statement has their types

    def __str__(self) -> str:
        return f"{self.tool} ({self.scheme})" if self.scheme else self.tool


def statement_of(model: nn.Module) -> Statement | None:
    """What the checkpoint of a model states; None for a model that was not loaded from a quantized one."""
    found = getattr(model, STATEMENT, None)
    return found if isinstance(found, Statement) else None


def weight_form(module: nn.Module, own: str = "weight") -> str:
    """The form of the parameter `own` of a module: `Int8Tensor of torchao`. Empty for plain floats, or if it is gone.

    A module without that parameter that has other tensors holds it as codes under other names.
    """
    value: Any = getattr(module, own, None)
    if own == "weight" and (form := _form_by_module(module)):
        return form
    if isinstance(value, Tensor):
        return _form_by_tensor(value)
    return f"{type(module).__name__} of {_package(type(module))}" if module.state_dict() else ""


def _form_by_module(module: nn.Module) -> str:
    scheme = getattr(getattr(module, "quantization_scheme", None), "weights", None)  # of compressed-tensors
    if scheme is not None and getattr(module, "quantization_enabled", True):
        kind = getattr(scheme.type, "value", scheme.type)
        return f"{kind}{scheme.num_bits} of compressed-tensors"
    qtype = getattr(module, "weight_qtype", None)  # of quanto
    if qtype is not None and hasattr(module, "frozen"):
        return f"{qtype.name} of quanto{'' if module.frozen else ', not frozen'}"
    has_codes = isinstance(getattr(module, "qweight", None), Tensor)  # of GPTQ and AWQ
    return f"{type(module).__name__} of {_package(type(module))}" if has_codes else ""


def _form_by_tensor(value: Tensor) -> str:
    kind = type(value.data)
    if kind is not Tensor:
        return f"{kind.__name__} of {_package(kind)}"
    is_codes = isinstance(value, nn.Parameter) and not (value.is_floating_point() or value.is_complex())
    return str(value.dtype) if value.is_quantized or is_codes or value.dtype in _EIGHT_BIT_FLOATS else ""


def _package(kind: type) -> str:
    first = kind.__module__.partition(".")[0]
    return PACKAGES.get(first, first)


def quantized_weights(model: nn.Module) -> dict[str, str]:
    """The form of every weight that is not plain floats, by its name in the float model."""
    return dict(_quantized_weights(model))


def _quantized_weights(model: nn.Module) -> Iterator[tuple[str, str]]:
    for place, module in model.named_modules():
        before = f"{place}." if place else ""
        kind, by_module = type(module), _form_by_module(module)
        if by_module or "quantized" in kind.__module__.split(".") or getattr(module, "grid", None) is not None:
            yield f"{before}weight", by_module or f"{kind.__module__}.{kind.__name__}"
        for own, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            form = "" if by_module else _form_by_tensor(value)
            if form:
                yield f"{before}{own}", form


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: itself, or the codes and scales inside of a subclass."""
    if type(tensor) in (Tensor, nn.Parameter):
        yield tensor
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(tensor, name))
    else:
        yield tensor.dequantize() if tensor.is_quantized else tensor.as_subclass(Tensor)
