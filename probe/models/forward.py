"""One forward of any model: how it is called, and what it says if it cannot be."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probe.data.calls import Batch, Call, as_call
from probe.words import describe_error

#: Where this package lies: its own errors have a message already.
PACKAGE = Path(__file__).parents[1]
#: The tensors of an output of transformers, the most telling first; without any of them, its first tensor.
OUTPUTS = ("logits", "last_hidden_state")


def call_options(model: nn.Module) -> dict[str, Any]:
    """What a model is given beside its input: use_cache=False if it takes that."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    is_known = hasattr(getattr(model, "config", None), "use_cache")
    return {"use_cache": False} if "use_cache" in parameters or (takes_any and is_known) else {}


def call_model(model: nn.Module, batch: Batch, options: Mapping[str, Any] | None = None) -> Any:
    """The output of a forward; what the batch itself gives goes before the `options`."""
    call = as_call(batch)
    given = call_options(model) if options is None else options
    return model(*call.args, **{**given, **call.kwargs})


def run_model(model: nn.Module, batch: Batch, options: Mapping[str, Any] | None = None) -> Any:
    """The output of a forward; an exception of the model becomes one message."""
    try:
        return call_model(model, batch, options)
    except (OSError, MemoryError, torch.OutOfMemoryError):  # not the model's
        raise
    except Exception as problem:
        if isinstance(problem, ValueError) and _is_ours(problem):
            raise
        given = str(batch) if isinstance(batch, Call) else f"token ids {list(batch.shape)}"
        raise ValueError(
            f"{type(model).__name__} failed on {given}: {describe_error(problem)} It is called with these and nothing "
            'else. What else its forward needs, a function returns: inputs = "package.module:function" (--inputs). '
            "--debug shows where it failed."
        ) from problem


def _is_ours(problem: BaseException) -> bool:
    """Whether an error was raised by this package, in a hook or a site, and so has its message."""
    trace = problem.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return trace is not None and PACKAGE in Path(trace.tb_frame.f_code.co_filename).parents


def tensor_in(output: Any, model: nn.Module) -> Tensor:
    """The tensor that stands for an output: alone, by name (OUTPUTS), or the first in a tuple, list or mapping."""
    if isinstance(output, Tensor):
        return output
    for name in OUTPUTS:
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    members = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    found = next((one for one in members if isinstance(one, Tensor)), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} returned a {type(output).__name__} without a tensor. Expected a tensor, or a "
            "tuple, a dict or an output of transformers that holds one: wrap the model in a factory that returns it."
        )
    return found


def output_of(model: nn.Module, batch: Batch) -> Tensor:
    """The tensor that a forward returns: the logits, where there are any."""
    found = tensor_in(run_model(model, batch), model)
    if found.is_floating_point():
        return found
    raise ValueError(
        f"{type(model).__name__} returned {found.dtype} of shape {list(found.shape)}. Only floats are compared: return "
        "the scores before they are turned into choices."
    )
