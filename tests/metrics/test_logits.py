import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from probe.metrics import LogitComparison, LogitMetrics, comparison as module

INF, NAN = math.inf, math.nan


def log_softmax(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = x - x.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return result


def expected_logits(output: Tensor, reference: Tensor, targets: Tensor) -> dict[str, float]:
    vocabulary = output.shape[-1]
    o, r = (log_softmax(x.double().numpy().reshape(-1, vocabulary)) for x in (output, reference))
    t = targets.numpy().reshape(-1, 1)
    bits = [float(np.mean(-np.take_along_axis(x, t, 1))) / math.log(2) for x in (o, r)]
    return {
        "kl": float(np.mean((np.exp(r) * (r - o)).sum(1))),
        "top1_agreement": float((output.double().argmax(-1) == reference.double().argmax(-1)).double().mean()),
        "bits_per_token": bits[0],
        "reference_bits_per_token": bits[1],
        "change_in_bits": bits[0] - bits[1],
    }


def logits(*shape: int, seed: int = 0, noise: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    reference = 3 * torch.randn(*shape, generator=g)
    output = reference + noise * torch.randn(*shape, generator=g)
    return output, reference, torch.randint(shape[-1], shape[:-1], generator=g)


def assert_logits_agree(found: LogitMetrics, *wanted: Tensor) -> None:
    for name, want in expected_logits(*wanted).items():
        assert getattr(found, name) == pytest.approx(want, rel=1e-11, abs=1e-13), name


@pytest.mark.parametrize("shape", [(5, 11), (4, 6, 33), (11,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [1, 50, 2**17])
def test_logit_figures_are_numpys(
    shape: tuple[int, ...], dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    output, reference, targets = logits(*shape)
    comparison = LogitComparison()
    comparison.update(output.to(dtype), reference.to(dtype), targets.int())
    found = comparison.metrics()
    assert_logits_agree(found, output.to(dtype), reference.to(dtype), targets)
    assert (found.positions, found.compared, found.finite) == (targets.numel(), targets.numel(), True)


@given(st.lists(st.integers(0, 12), max_size=5), st.booleans())
def test_logit_splits_and_merges_change_nothing(cuts: list[int], merging: bool) -> None:
    batch = logits(40, 9)
    sizes = [*cuts, 40 - sum(cuts)] if sum(cuts) <= 40 else [40]
    whole = LogitComparison()
    for parts in zip(*(torch.split(x, sizes) for x in batch), strict=True):
        part = LogitComparison() if merging else whole
        part.update(*parts)
        if merging:
            whole.merge(part)
    assert_logits_agree(whole.metrics(), *batch)
    assert whole.metrics().positions == 40


def test_the_divergence_is_of_the_output_from_the_reference() -> None:
    output, reference = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    comparison = LogitComparison()
    comparison.update(output, reference, torch.tensor([0]))
    found = comparison.metrics()
    assert found.kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert found.bits_per_token == pytest.approx(1.0)
    assert found.reference_bits_per_token == pytest.approx(math.log2(4 / 3))
    assert found.change_in_bits == pytest.approx(1 - math.log2(4 / 3))


def test_the_same_logits_lose_nothing() -> None:
    _, reference, targets = logits(20, 50)
    comparison = LogitComparison()
    comparison.update(reference, reference, targets)
    found = comparison.metrics()
    assert (found.kl, found.top1_agreement, found.change_in_bits) == (0, 1, 0)


@pytest.mark.parametrize("shift", [1e-3, 0.1, 7.0])
def test_a_divergence_is_never_negative(shift: float) -> None:
    for seed in range(20):
        _, reference, targets = logits(3, 50, seed=seed)
        comparison = LogitComparison()
        comparison.update(reference.double() + shift, reference.double(), targets)
        kl = comparison.metrics().kl
        assert kl is not None
        assert 0 <= kl < 1e-14


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_huge_and_tiny_logits_are_numpys(scale: float) -> None:
    output, reference, targets = logits(20, 10)
    comparison = LogitComparison()
    comparison.update(output * scale, reference * scale, targets)
    assert_logits_agree(comparison.metrics(), output * scale, reference * scale, targets)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("rows", [1, 40])
def test_positions_with_nan_or_inf_are_counted_and_left_out(
    bad: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", rows * 9)
    output, reference, targets = logits(40, 9)
    output[5, 3] = output[17, 0] = output[17, 1] = reference[5, 2] = reference[30, 8] = bad
    comparison = LogitComparison()
    comparison.update(output, reference, targets)
    found = comparison.metrics()
    assert (found.positions, found.compared, found.finite) == (40, 37, False)
    assert (found.nonfinite_output, found.nonfinite_reference, found.first_nonfinite) == (2, 2, 17)
    good = torch.tensor([i not in (5, 17, 30) for i in range(40)])
    assert_logits_agree(found, output[good], reference[good], targets[good])
    clean = LogitComparison()
    clean.update(*logits(6, 9))
    assert clean.merge(comparison).metrics().first_nonfinite == 23
    only = LogitComparison()
    only.update(output[5:6], reference[5:6], targets[5:6])
    lost = only.metrics().as_dict()
    assert [lost[x] for x in expected_logits(*logits(1, 9))] == [None] * 5


def test_logits_beyond_float64_are_none_not_nan() -> None:
    big = torch.tensor([[1.7e308, -1.7e308]], dtype=torch.float64)
    comparison = LogitComparison()
    comparison.update(big, -big, torch.tensor([0]))
    found = comparison.metrics()
    assert (found.kl, found.change_in_bits, found.top1_agreement) == (None, None, 0)
