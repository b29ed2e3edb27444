"""What the output of a model means: scores of the next token, scores of classes, embeddings, or plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from probe.data.calls import Batch, Call, as_call, shortened
from probe.data.tokenizers import text_config
from probe.models.forward import output_of, run_model, tensor_in
from probe.models.offload import device_of
from probe.models.outside import embedding_of
from probe.words import LOGITS, OUTPUT


@dataclass(frozen=True)
class OutputKind:
    """One meaning of an output, and the figures that follow from it beside those that every output has."""

    name: str
    what: str
    label: str = OUTPUT  # of the case
    has_classes: bool = False  # KL and top-1 agreement along the last axis
    has_next_token: bool = False  # bits of the token that follows
    has_embeddings: bool = False  # a vector for every sample

    def __str__(self) -> str:
        return self.name


OUTPUT_KINDS = {
    row.name: row
    for row in (
        OutputKind("next token", "scores of the next token", LOGITS, has_classes=True, has_next_token=True),
        OutputKind("classes", "scores of classes", LOGITS, has_classes=True),
        OutputKind("embeddings", "embeddings", has_embeddings=True),
        OutputKind("values", "values"),
    )
}
NEXT_TOKEN, CLASSES, EMBEDDINGS, VALUES = OUTPUT_KINDS.values()

#: Tokens of the forwards that show whether a model looks ahead.
FEW = 16
#: A change of the last token moves the outputs before it by less than this part of its own, if the model is causal.
NO_EFFECT = 1e-4


@torch.no_grad()
def output_kind(model: nn.Module, batch: Batch) -> OutputKind:
    """What the output means, found by what runs.

    next token    [samples, tokens, at least the ids that it was given], and no output depends on a later token
    classes       the same where one does, and any other `logits`
    embeddings    `last_hidden_state`, [samples, ..., channels] of at most three axes
    values        everything else
    """
    few = _on_device(shortened(batch, samples=1, tokens=FEW), model)
    try:
        output = run_model(model, few)
    except ValueError:  # it takes no short input
        few = _on_device(batch, model)
        output = run_model(model, few)
    found, tokens = tensor_in(output, model), target_tokens(few)
    if _has(output, "logits") or found is output or isinstance(output, tuple):
        if tokens is not None and found.dim() == 3 and found.shape[:2] == tokens.shape and _names(model, found, tokens):
            return NEXT_TOKEN if _is_causal(model, few, found) else CLASSES
        return CLASSES if _has(output, "logits") and found.dim() > 1 else VALUES
    return EMBEDDINGS if _has(output, "last_hidden_state") and found.dim() in (2, 3) else VALUES


def _on_device(batch: Batch, model: nn.Module) -> Batch:
    return batch.to(device_of(model))


def _has(output: Any, name: str) -> bool:
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return isinstance(value, Tensor)


def _names(model: nn.Module, scores: Tensor, tokens: Tensor) -> bool:
    """Whether there is a score for every token that the model reads, so that a class is a token."""
    stated, embedding = getattr(text_config(model), "vocab_size", None), embedding_of(model)
    size = stated or (len(cast(Any, model.get_submodule(embedding)).weight) if embedding else 0)
    return scores.shape[-1] >= max(int(size), int(tokens.max()) + 1)


def _is_causal(model: nn.Module, batch: Batch, output: Tensor) -> bool:
    """Whether the output before the last token stays the same for another last token."""
    name, tokens = _token_argument(batch)
    if tokens.shape[1] < 2:
        return True
    other = tokens.clone()
    other[:, -1] = torch.where(tokens[:, -1] == tokens[:, 0], (tokens[:, -1] + 1) % int(tokens.max() + 1), tokens[:, 0])
    changed = as_call(batch).with_argument(name, other)
    moved = (output_of(model, changed).double() - output.double()).abs()
    return not bool(moved[:, :-1].max() > NO_EFFECT * moved[:, -1].max())  # NaN says nothing


#: The arguments that hold the tokens whose successors a model predicts, by the names that transformers has.
TOKEN_ARGUMENTS = ("decoder_input_ids", "input_ids", "0")


def _token_argument(batch: Batch) -> tuple[str, Tensor]:
    arguments = as_call(batch).arguments
    for name in TOKEN_ARGUMENTS:
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.dim() == 2 and not (value.is_floating_point() or value.is_complex()):
            return name, value
    return "", torch.empty(0)


def target_tokens(batch: Batch) -> Tensor | None:
    """The tokens [samples, tokens] whose successors a model predicts from this batch; None if it reads none."""
    name, tokens = _token_argument(batch)
    return tokens if name else None


def real_tokens(batch: Batch) -> Tensor | None:
    """True at the tokens [samples, tokens] that are no padding; None where there is no mask."""
    mask = batch.kwargs.get("attention_mask") if isinstance(batch, Call) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
