"""What an output means is found by running the model: by its shape, its name, and whether it looks ahead."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probe.data.calls import Call
from probe.models.outputs import CLASSES, EMBEDDINGS, NEXT_TOKEN, VALUES, OutputKind, output_kind, target_tokens
from probe.words import LOGITS, OUTPUT

TOKENS = torch.arange(24).reshape(2, 12) % 20


class Scores(nn.Module):
    """Scores of `classes` for every token: causal sums, or means of all."""

    def __init__(self, classes: int = 20, *, causal: bool = True, shortest: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, classes)
        self.causal, self.shortest = causal, shortest

    def forward(self, ids: Tensor) -> Any:
        if ids.shape[1] < self.shortest:
            raise RuntimeError("too short")
        x = self.embed(ids)
        x = x.cumsum(1) if self.causal else x + x.mean(1, keepdim=True)
        return self.made(self.head(x))

    def made(self, scores: Tensor) -> Any:
        return scores


class Named(Scores):
    def made(self, scores: Tensor) -> Any:
        return {"loss": None, "logits": scores}


class Pooled(Scores):
    def made(self, scores: Tensor) -> Any:
        return SimpleNamespace(logits=scores.mean(1))


class Hidden(Scores):
    def made(self, scores: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=scores)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (Scores(), NEXT_TOKEN),
        (Scores(causal=False), CLASSES),
        (Scores(5), VALUES),
        (Scores(shortest=12), NEXT_TOKEN),
        (Named(), NEXT_TOKEN),
        (Named(5), CLASSES),
        (Named(causal=False), CLASSES),
        (Pooled(), CLASSES),
        (Hidden(), EMBEDDINGS),
        (nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 3)), VALUES),
    ],
    ids=lambda value: str(value) if isinstance(value, OutputKind) else type(value).__name__,
)
def test_the_kind_of_an_output(model: nn.Module, kind: OutputKind) -> None:
    assert output_kind(model, TOKENS) is kind


def test_one_later_token_that_is_looked_at_is_enough() -> None:
    class Ahead(Scores):
        def made(self, scores: Tensor) -> Any:
            leak = scores.clone()
            leak[:, 0] += 1e-2 * scores[:, -1]
            return leak

    assert output_kind(Ahead(), TOKENS) is CLASSES


def test_only_scores_are_called_logits() -> None:
    assert [kind.label for kind in (NEXT_TOKEN, CLASSES, EMBEDDINGS, VALUES)] == [LOGITS, LOGITS, OUTPUT, OUTPUT]


def test_of_an_encoder_decoder_the_targets_are_those_of_the_decoder() -> None:
    ids = {"input_ids": TOKENS, "decoder_input_ids": TOKENS + 1}
    assert target_tokens(Call(kwargs=ids)) is ids["decoder_input_ids"]
    assert target_tokens(Call((torch.zeros(2, 12),))) is None
