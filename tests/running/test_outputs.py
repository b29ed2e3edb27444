"""The output of a model against that of its reference: which figures there are, and what they are taken over."""

import pytest
import torch

from probe.data.calls import Call
from probe.metrics import Comparison, LogitComparison
from probe.models.outputs import CLASSES, EMBEDDINGS, NEXT_TOKEN, VALUES, OutputKind
from probe.running.outputs import OutputComparison, sample_vectors

TOKENS = torch.arange(12).reshape(2, 6)


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    expected = torch.randn(shape, generator=generator)
    return expected + 0.1 * torch.randn(shape, generator=generator), expected


@pytest.mark.parametrize("kind", [NEXT_TOKEN, CLASSES, EMBEDDINGS, VALUES], ids=str)
def test_every_output_has_the_figures_of_its_values_and_those_of_its_kind(kind: OutputKind) -> None:
    found, expected = pair(2, 6, 16)
    comparison = OutputComparison(kind)
    comparison.update(found, expected, TOKENS)
    metrics = comparison.metrics()
    plain = Comparison(percentiles=False)
    plain.update(found, expected)
    assert metrics.values == plain.metrics()
    known = metrics.as_dict()
    assert {"mse", "correlation", "cosine"} <= set(known)
    assert ("kl" in known) is kind.has_classes
    assert (known.get("bits_per_token") is not None) is kind.has_next_token
    assert ("neighbour_agreement" in known) is kind.has_embeddings


def test_bits_are_of_the_token_that_follows() -> None:
    found, expected = pair(2, 6, 16)
    comparison, logits = OutputComparison(NEXT_TOKEN), LogitComparison()
    comparison.update(found, expected, TOKENS)
    logits.update(found[:, :-1], expected[:, :-1], TOKENS[:, 1:])
    assert comparison.metrics().classes == logits.metrics()


def test_an_embedding_is_the_mean_of_the_tokens_that_are_no_padding() -> None:
    output = torch.arange(24.0).reshape(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    found = sample_vectors(output, Call(kwargs={"input_ids": mask, "attention_mask": mask}))
    assert torch.equal(found, torch.stack([output[0, :2].mean(0), output[1].mean(0)]).double())
    assert torch.equal(sample_vectors(output, TOKENS), output.double().mean(1))
    assert sample_vectors(output[:, 0], TOKENS).shape == (2, 4)


def test_targets_are_all_or_none() -> None:
    found, expected = pair(2, 6, 16)
    some = LogitComparison()
    some.update(found, expected)
    assert some.metrics().kl is not None
    assert some.metrics().change_in_bits is None
    with_targets = LogitComparison()
    with_targets.update(found, expected, TOKENS)
    assert with_targets.merge(some).metrics().bits_per_token is None
