"""Figures of embeddings against a plain loop."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from probe.metrics import Comparison, EmbeddingComparison, EmbeddingMetrics


def plain(found: list[list[float]], expected: list[list[float]]) -> tuple[float | None, float | None, float | None]:
    def cosine(a: list[float], b: list[float]) -> float:
        return math.fsum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    def nearest(vectors: list[list[float]], place: int) -> int:
        others = [(-cosine(vectors[place], one), i) for i, one in enumerate(vectors) if i != place]
        return min(others)[1]

    def usable(one: list[float]) -> bool:
        return all(map(math.isfinite, one)) and any(one)

    good = [(a, b) for a, b in zip(found, expected, strict=True) if usable(a) and usable(b)]
    if not good:
        return None, None, None
    cosines = [cosine(a, b) for a, b in good]
    sides = [list(side) for side in zip(*good, strict=True)]
    agreed = [nearest(sides[0], i) == nearest(sides[1], i) for i in range(len(good))] if len(good) > 2 else None
    return math.fsum(cosines) / len(good), min(cosines), sum(agreed) / len(agreed) if agreed else None


def measured(found: Tensor, expected: Tensor) -> EmbeddingMetrics:
    comparison = EmbeddingComparison()
    comparison.update(found, expected)
    return comparison.metrics()


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([1e-160, 1.0, 1e160]))
def test_the_figures_are_those_of_a_plain_loop(samples: int, channels: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(samples, channels, generator=generator, dtype=torch.float64)
    found = expected + 0.5 * torch.randn(samples, channels, generator=generator, dtype=torch.float64)
    mean, lowest, agreement = plain(found.tolist(), expected.tolist())
    metrics = measured(found * scale, expected)
    assert metrics.sample_cosine == pytest.approx(mean, abs=1e-12)
    assert metrics.lowest_sample_cosine == pytest.approx(lowest, abs=1e-12)
    assert metrics.neighbour_agreement == agreement
    assert metrics.compared == samples


def test_samples_that_are_zero_or_not_finite_are_left_out() -> None:
    expected = torch.eye(5)
    found = expected.clone()
    found[0, 1], found[1] = math.nan, 0.0
    metrics = measured(found, expected)
    assert (metrics.samples, metrics.compared, metrics.sample_cosine) == (5, 3, 1.0)
    assert measured(torch.zeros(2, 3), torch.ones(2, 3)).sample_cosine is None


def test_two_samples_have_no_neighbours_to_agree_on() -> None:
    assert measured(torch.randn(2, 4), torch.randn(2, 4)).neighbour_agreement is None


def test_a_swap_of_two_samples_shows() -> None:
    expected = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    metrics = measured(expected[[2, 1, 0, 3]], expected)
    assert metrics.neighbour_agreement == 0.0
    assert metrics.lowest_sample_cosine == pytest.approx(0.0)


def test_halves_that_are_merged_are_the_whole() -> None:
    found, expected = torch.randn(6, 4), torch.randn(6, 4)
    first, second = EmbeddingComparison(), EmbeddingComparison()
    first.update(found[:2], expected[:2])
    second.update(found[2:], expected[2:])
    assert first.merge(second).metrics() == measured(found, expected)


def test_what_is_no_embedding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"embeddings have shape \[2, 3, 4\]\. Expected \[samples, channels\]"):
        measured(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="has seen nothing"):
        EmbeddingComparison().metrics()
    with pytest.raises(ValueError, match="Merge accumulators of one kind"):
        EmbeddingComparison().merge(Comparison())  # type: ignore[arg-type]
