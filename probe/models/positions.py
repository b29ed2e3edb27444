"""How many positions a model has: the rows of a table of learned ones, or the length that it was trained for."""

import re

from torch import nn

from probe.data.tokenizers import text_config

#: Tables of learned positions, as transformers and most others call them; relative ones are not among them.
POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions?|position_embeddings?|pos_emb\w*|embed_pos\w*)$")


def learned_positions(model: nn.Module) -> int | None:
    """The longest sample that the smallest table of positions of `model` has room for; None without one.

    OPT and BART start at row 2 (`offset`), RoBERTa behind the row of its padding.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and POSITIONS.search(name):
            start = getattr(module, "offset", 0) or (0 if module.padding_idx is None else module.padding_idx + 1)
            found.append(module.num_embeddings - int(start))
    return min(found, default=None)


def check_positions(model: nn.Module, length: int, *, key: str, longest: int | None = None) -> None:
    """Refuse samples that a table of learned positions has no row for.

    `length` is the value of the setting `key`; `longest` is that of the longest sample, if it is less.
    """
    learned = learned_positions(model)
    if learned is not None and (longest or length) > learned:
        raise ValueError(f"{key} {length} exceeds the {learned} positions of the model. Give {key} {learned} or less.")


def position_notes(model: nn.Module, length: int, *, key: str, longest: int) -> tuple[str, ...]:
    """`check_positions`, and a note if the model runs beyond the positions it was trained for."""
    check_positions(model, length, key=key, longest=longest)
    trained = _trained_positions(model)
    if trained is None or longest <= trained or learned_positions(model) is not None:
        return ()
    return (
        f"{key} {length} is beyond the {trained} positions that the model's configuration states: it was not "
        "trained there, and its activations may be unusual.",
    )


def position_limit(model: nn.Module) -> int | None:
    """The longest sample that the model has positions for and was trained for; None without a limit."""
    known = [limit for limit in (learned_positions(model), _trained_positions(model)) if limit is not None]
    return min(known, default=None)


def _trained_positions(model: nn.Module) -> int | None:
    stated = getattr(text_config(model), "max_position_embeddings", None)
    return stated if isinstance(stated, int) and not isinstance(stated, bool) and stated > 0 else None
