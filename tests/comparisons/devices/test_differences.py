"""The difference of one tensor: figures as numpy has them, sums over tokens and channels, limits."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from probe import diff
from probe.comparisons.devices import differences
from probe.comparisons.devices.differences import Limits, measure_structure
from probe.recordings import Recording
from tests.comparisons.devices.recordings import network, noisy, recorded
from tests.comparisons.devices.streams import sampled, stream


def oracle(a: np.ndarray, b: np.ndarray, rtol: float, atol: float) -> dict[str, float]:
    """numpy's own, over what is finite on both sides."""
    good = np.isfinite(a) & np.isfinite(b)
    within = np.isclose(b, a, rtol=rtol, atol=atol).mean()
    a, b = a[good], b[good]
    d = np.abs(b - a)
    relative = d / (np.abs(a) + 1e-8)
    return {
        "max_abs": d.max(),
        "mean_abs": d.mean(),
        "median_abs": np.median(d),
        "max_relative": relative.max(),
        "mean_relative": relative.mean(),
        "median_relative": np.median(relative),
        "within": within,
        "cosine": (a @ b) / np.sqrt((a @ a) * (b @ b)),
        "correlation": np.corrcoef(a, b)[0, 1],
    }


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "with NaN and Inf"])
@pytest.mark.parametrize("chunk", [2**18, 64], ids=["one chunk", "many chunks"])
def test_the_figures_of_every_layer_are_numpys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: bool, chunk: int
) -> None:
    monkeypatch.setattr(differences, "CHUNK", chunk)
    x, y = network(), noisy(network(), 1e-3)
    x["layer_1.output"][0, 0, 0] = 0.0
    if odd:
        x["layer_2.output"][0, 1, 2], y["layer_2.output"][0, 1, 2] = torch.inf, torch.inf
        x["layer_2.output"][0, 1, 3], y["layer_2.output"][0, 1, 3] = torch.inf, -torch.inf
        y["layer_2.output"][2, 1, 3] = torch.nan
    found = diff(recorded(tmp_path / "a", x), recorded(tmp_path / "b", y), rtol=3e-3, atol=1e-4)
    assert [layer.name for layer in found.layers] == list(x)
    for layer in found.layers:
        expected = oracle(x[layer.name].double().numpy().ravel(), y[layer.name].double().numpy().ravel(), 3e-3, 1e-4)
        for name, value in expected.items():
            assert getattr(layer, name) == pytest.approx(value, rel=1e-9, abs=1e-15), (layer.name, name)
    second = found.layers[3]
    counts = (second.nan_a, second.inf_a, second.nan_b, second.inf_b, second.lost)
    assert counts == ((0, 2, 1, 2, 2) if odd else (0, 0, 0, 0, 0))
    assert ("finite" in second.exceeded) is odd


@pytest.mark.parametrize("chunk", [2**18, 100])
@pytest.mark.parametrize("residual", [True, False])
def test_the_sums_are_those_of_a_plain_computation(monkeypatch: pytest.MonkeyPatch, chunk: int, residual: bool) -> None:
    monkeypatch.setattr(differences, "CHUNK", chunk)
    draw = np.random.default_rng(3)
    a, b, pa, pb = (draw.normal(0, 1, (3, 5, 8)) for _ in range(4))
    a[1, 2, 3] = b[0, 1] = np.nan  # one element, and a whole row
    tensors = [torch.from_numpy(x) for x in (a, b, pa, pb)]
    found = measure_structure(tensors[0], tensors[1], (tensors[2], tensors[3]) if residual else None)
    rows = [row for row in range(15) if row != 1]
    a, b, pa, pb = (x.reshape(15, 8)[rows] for x in (a, b, pa, pb))
    good = np.isfinite(a)
    a, b, pa, pb = (np.where(good, x, 0.0) for x in (a, b, pa, pb))
    n = np.sqrt((a**2).sum(1, keepdims=True) / good.sum(1, keepdims=True))
    d = (b - a) / n
    u, e = ((a - pa) / n, d - (pb - pa) / n) if residual else (a / n, d)
    assert (found.rows, found.per_sample) == (14, 5)
    assert found.compared == pytest.approx((13 * 8 + 7) / (15 * 8))
    assert np.flatnonzero(np.isnan(found.tokens[0])).tolist() == [1]
    assert found.error == pytest.approx(math.sqrt((d**2).sum() / good.sum()))
    assert found.added == pytest.approx(np.linalg.norm(e) / np.linalg.norm(u))
    assert found.part == pytest.approx(np.linalg.norm(u) / np.linalg.norm(a / n))
    assert found.slope == pytest.approx((e * u).sum() / (u**2).sum())
    assert found.factor_share == pytest.approx((e * u).sum() ** 2 / (u**2).sum() / (e**2).sum())
    by_channel = ((e * u).sum(0) ** 2 / (u**2).sum(0)).sum() / (e**2).sum()
    by_token = ((e * u).sum(1) ** 2 / (u**2).sum(1)).sum() / (e**2).sum()
    assert found.channel_factor_share == pytest.approx(by_channel)
    assert found.token_factor_share == pytest.approx(by_token)
    raw = e * n
    assert found.constant_share == pytest.approx((raw.sum(0) ** 2 / good.sum(0)).sum() / (raw**2).sum())
    whole = np.full(15, np.nan)
    whole[rows] = (e**2).sum(1)
    assert found.samples() == pytest.approx(np.nanmean(whole.reshape(3, 5), 1))


def test_one_huge_token_does_not_outshine_the_rest() -> None:
    given, adds = stream()
    given[0, 0] *= 1e4
    noise = 1e-3 * np.random.default_rng(1).normal(0, 1, adds.shape)
    assert sampled(given, adds, adds * (1 + noise)).structure.error > 1e-4


def test_limits_decide_and_can_be_changed(tmp_path: Path, a: Recording) -> None:
    tensors = network()
    tensors["layer_3.output"] = tensors["layer_3.output"] + 2.0**-8  # 0.0039, constant
    b = recorded(tmp_path / "b", tensors)
    found = diff(a, b)
    assert found.layers[4].exceeded == ("mean_abs",)
    wide = diff(a, b, limits=Limits(max_abs=1, mean_abs=1, cosine=0))
    assert not any(layer.exceeded for layer in wide.layers)
    assert wide.verdict.kind == "device fault"
    assert not wide.passed  # a fault does not pass, whatever the limits
    assert diff(a, b, limits=Limits(max_abs=1e-3)).layers[4].exceeded == ("max_abs", "mean_abs")
    close = Limits(max_abs=1, mean_abs=1, cosine=1)
    assert diff(a, b, limits=close).layers[4].exceeded == ("cosine",)


def test_a_figure_at_its_limit_has_not_kept_it(tmp_path: Path) -> None:
    zeros, ones = torch.zeros(3, 8, 4), torch.full((3, 8, 4), 0.5)
    a = recorded(tmp_path / "a", {"layer_0.output": zeros})
    b = recorded(tmp_path / "b", {"layer_0.output": ones})
    found = diff(a, b, limits=Limits(max_abs=0.5, mean_abs=0.51, cosine=0))
    assert found.layers[0].exceeded == ("max_abs", "cosine")  # the cosine of zeros is undefined


def test_noise_within_the_limits_passes(tmp_path: Path, a: Recording) -> None:
    found = diff(a, recorded(tmp_path / "b", noisy(network())))
    assert found.passed
    assert (found.verdict.kind, found.verdict.layer) == ("dtype noise", "layer_0")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_abs": -1.0}, "the limit max_abs is -1.0. Expected a number, 0 or more."),
        ({"mean_abs": math.nan}, "the limit mean_abs is nan. Expected a number, 0 or more."),
        ({"cosine": 1.5}, "the limit cosine is 1.5. Expected -1 to 1."),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(limits: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match="limit") as caught:
        Limits(**limits)
    assert str(caught.value) == message


def test_tolerances_must_be_numbers(a: Recording) -> None:
    with pytest.raises(ValueError, match=r"rtol is -1. Expected a number, 0 or more."):
        diff(a, a, rtol=-1)
    with pytest.raises(ValueError, match=r"atol is nan. Expected a number, 0 or more."):
        diff(a, a, atol=math.nan)
