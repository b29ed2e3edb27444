from typing import Any

import pytest
import torch

from probe.metrics import Comparison, LogitComparison

ERRORS = {
    "shapes": (
        lambda: Comparison().update(torch.ones(2, 3), torch.ones(3)),
        "output has shape [2, 3] and reference [3]. They are compared element by element and never broadcast or "
        "cropped: give tensors of one shape.",
    ),
    "same size": (
        lambda: Comparison().update(torch.ones(2, 3), torch.ones(3, 2)),
        "output has shape [2, 3] and reference [3, 2]. They are compared element by element and never broadcast or "
        "cropped: give tensors of one shape.",
    ),
    "integers": (
        lambda: Comparison().update(torch.ones(2), torch.ones(2, dtype=torch.int32)),
        "reference is torch.int32. Only floats are compared. Convert first, e.g. reference.float().",
    ),
    "empty": (
        Comparison().metrics,
        "Comparison(percentiles=True, keep=4194304, count=0) has seen nothing, so it has no metrics. "
        "Call update(...) with data first.",
    ),
    "keep": (
        lambda: Comparison(keep=-1),
        "keep is -1. Give how many values to keep exactly: 0 or more, e.g. 2**22.",
    ),
    "settings": (
        lambda: Comparison().merge(Comparison(keep=5)),
        "cannot merge Comparison(percentiles=True, keep=5, count=0) into Comparison(percentiles=True, keep=4194304, "
        "count=0): what they have kept is not comparable. Make both with the same percentiles and keep.",
    ),
    "kinds": (
        lambda: LogitComparison().merge(Comparison(keep=5)),  # type: ignore[arg-type]
        "cannot merge Comparison(percentiles=True, keep=5, count=0) into LogitComparison(positions=0). "
        "Merge accumulators of one kind.",
    ),
    "empty logits": (
        LogitComparison().metrics,
        "LogitComparison(positions=0) has seen nothing, so it has no metrics. Call update(...) with data first.",
    ),
    "logit shapes": (
        lambda: LogitComparison().update(torch.ones(2, 3), torch.ones(2, 4), torch.ones(2).long()),
        "logits has shape [2, 3] and reference_logits [2, 4]. They are compared element by element and never "
        "broadcast or cropped: give tensors of one shape.",
    ),
    "target shape": (
        lambda: LogitComparison().update(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 1).long()),
        "targets have shape [2, 1] and logits [2, 3]. Give one target per position: the shape of the logits without "
        "its last axis.",
    ),
    "target dtype": (
        lambda: LogitComparison().update(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)),
        "targets are torch.float32. Give token numbers as integers, e.g. torch.int64.",
    ),
    "target range": (
        lambda: LogitComparison().update(torch.ones(2, 3), torch.ones(2, 3), torch.tensor([-1, 3])),
        "targets run from -1 to 3, but the logits have a vocabulary of 3. Drop padded positions, and check that the "
        "tokenizer is that of the model.",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_is_wrong_and_what_to_do(call: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call()
    assert str(error.value) == message
