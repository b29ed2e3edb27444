"""One forward of any model on token ids: how it is called, and what it says if it cannot be."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from probe.words import describe_error


def call_options(model: nn.Module) -> dict[str, Any]:
    """What a model is given beside the tokens: use_cache=False if it takes that."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    is_known = hasattr(getattr(model, "config", None), "use_cache")
    return {"use_cache": False} if "use_cache" in parameters or (takes_any and is_known) else {}


def run_model(model: nn.Module, tokens: Tensor, options: Mapping[str, Any] | None = None) -> Any:
    """The output of a forward; an exception of the model becomes one message."""
    try:
        return model(tokens, **(call_options(model) if options is None else options))
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError):  # they have a message, or are not the model's
        raise
    except Exception as problem:
        raise ValueError(
            f"{type(model).__name__} failed on {list(tokens.shape)} tokens: {describe_error(problem)} "
            "It is called with token ids [samples, tokens] and nothing else; --debug shows where it failed."
        ) from problem


def logits_in(output: Any, model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits in an output: alone, in an output of transformers, or first in a tuple."""
    found = getattr(output, "logits", output[0] if isinstance(output, tuple) and output else output)
    if not isinstance(found, Tensor):
        raise ValueError(
            f"{type(model).__name__} returned a {type(output).__name__} without logits; "
            "expected a causal language model."
        )
    if found.dim() < 2 or found.shape[:2] != tokens.shape[:2]:
        raise ValueError(
            f"{type(model).__name__} returned {list(found.shape)} for {list(tokens.shape)} tokens; expected the logits "
            "of every token, [samples, tokens, vocabulary]."
        )
    return found
