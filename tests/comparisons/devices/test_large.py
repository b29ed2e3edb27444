"""Every cause in tensors of more elements than are sampled (SAMPLED): samples, tokens and channels stay whole."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from probe import diff
from probe.comparisons.devices.differences import measure_structure
from probe.comparisons.devices.patterns import SAMPLED, WINDOW, choose, sample_tensor
from probe.recordings import Recording
from tests.comparisons.devices.recordings import as_scripts_leave_it, recorded

SAMPLES, TOKENS, WIDTH = 9, 320, 768
IDS = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS) % 251
FIRST, SECOND, THIRD = "embedding.output", "layer_0.output", "layer_1.output"
FAULT, MISMATCH, NOISE, NOT_COMPARED = "device fault", "mismatched capture", "dtype noise", "not compared"


def draw(*shape: int, seed: int) -> Tensor:
    found: Tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return found


@cache
def given() -> Tensor:
    """An embedding whose rows are of very different sizes."""
    return draw(251, WIDTH, seed=1)[IDS] * torch.exp(0.7 * draw(SAMPLES, TOKENS, 1, seed=2))


@cache
def adds() -> Tensor:
    """What the layer adds to it."""
    return 0.4 * draw(SAMPLES, TOKENS, WIDTH, seed=3)


def changed(x: Tensor, place: tuple[Any, ...], value: Tensor | float) -> Tensor:
    x = x.clone()
    x[place] = value
    return x


def swapped(x: Tensor, one: int, other: int, axis: int = 0) -> Tensor:
    order = torch.arange(x.shape[axis])
    order[one], order[other] = other, one
    return x.index_select(axis, order)


def epsilon(x: Tensor) -> Tensor:
    power = given().square().mean(-1, keepdim=True)
    return x * (power / (power + 1e-2)).sqrt()


#: Of the truth table (test_truth.py), and the parts of it that a sample of rows would miss: what the layer adds on B,
#: the cause, and whether it is certain.
CAUSES: dict[str, tuple[Callable[[Tensor], Tensor], str, bool]] = {
    "epsilon": (epsilon, "wrong epsilon in a norm", True),
    "permuted channels": (lambda x: swapped(x, 3, 700, axis=2), "channels are permuted (2 of 768)", True),
    "half layer": (lambda x: x.bfloat16().float(), "one layer in half precision: what it adds lies on the grid", True),
    "half matrices": (lambda x: x * (1 + 2**-7 * draw(*x.shape, seed=4)), "noise of the size that bfloat16", False),
    "clipped": (lambda x: x.clamp(-0.9, 0.9), "saturates: what it adds beyond +-0.9 is cut there", True),
    "a few values clipped": (lambda x: x.clamp(-1.85, 1.85), "saturates: what it adds beyond +-1.85 is cut", True),
    "dropped bias": (lambda x: x + 0.1 * draw(WIDTH, seed=5), "a constant for each channel is added or missing", True),
    "scale": (lambda x: 2 * x, "what it adds is 2 times A's: the scale is off by a factor of 2^1", True),
    "scales of channels": (lambda x: x * (1 + 0.02 * draw(WIDTH, seed=6)), "a factor for each channel explains", False),
    "scales of tokens": (lambda x: x * (1 + 0.1 * draw(SAMPLES, TOKENS, 1, seed=6)), "a factor for each token", False),
    "swapped samples": (lambda x: swapped(x, 2, 7), "samples are swapped (2 of 9 samples: sample 2 of B is", True),
    "all samples moved": (lambda x: x.roll(1, 0), "samples are swapped (9 of 9 samples: sample 0 of B is", True),
    "stale sample": (lambda x: changed(x, (5,), x[4]), "a sample has what another should have: a stale buffer", True),
    "late token": (lambda x: x.roll(1, 1), "what it adds comes one token later than on A", True),
    "early token": (lambda x: x.roll(-1, 1), "what it adds comes one token earlier than on A", True),
    "skipped": (lambda x: 0 * x, "returns its input on B: the layer is skipped", True),
    "stuck channel": (
        lambda x: changed(x, (..., 5), -given()[..., 5]),
        "of the squared difference is in one channel (5)",
        True,
    ),
    "one token": (lambda x: changed(x, (4, 100), draw(WIDTH, seed=7)), "is in one token (1380)", True),
    "one sample": (lambda x: changed(x, (4,), draw(TOKENS, WIDTH, seed=7)), "is in one sample (4)", True),
    "one NaN": (lambda x: changed(x, (8, 319, 767), torch.nan), "NaN on B where A is finite, in one value", True),
    "many NaN": (lambda x: changed(x, (3,), torch.nan), "NaN on B where A is finite, in 245760 values", True),
    "other weights": (lambda x: 0.4 * draw(*x.shape, seed=8), "unrelated to the expected values", False),
    "turned sign": (torch.neg, "what it adds is -1 times A's: the sign is flipped", True),
    "rough": (lambda x: x * (1 + 0.3 * draw(*x.shape, seed=9)), "kind not recognised", False),
}


@pytest.fixture(autouse=True)
def _no_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("large")


@pytest.fixture(scope="module")
def a(folder: Path) -> Recording:
    return recorded(folder / "a", {SECOND: given(), THIRD: given() + adds()}, ids=IDS)


def test_the_tensors_are_larger_than_the_sample() -> None:
    assert given().numel() > SAMPLED


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_recognised(tmp_path: Path, a: Recording, cause: str) -> None:
    change, says, is_certain = CAUSES[cause]
    found = diff(a, recorded(tmp_path / "b", {SECOND: given(), THIRD: given() + change(adds())}, ids=IDS))
    assert (found.verdict.kind, found.verdict.layer) == (FAULT, "layer_1")
    assert says in found.verdict.cause
    assert found.verdict.sure == ("certain" if is_certain else "likely")
    assert not found.passed


def test_saturation_instead_of_nan_is_recognised(tmp_path: Path) -> None:
    large = adds().abs() > 1.6
    x, y = ({FIRST: given(), SECOND: torch.where(large, top, given() + adds())} for top in (torch.inf, 448.0))
    found = diff(recorded(tmp_path / "a", x, ids=IDS), recorded(tmp_path / "b", y, ids=IDS))
    assert found.verdict.cause == "saturates instead of NaN or Inf: +-448 on B, the largest float8_e4m3fn"


def test_sound_devices_differ_by_noise(tmp_path: Path, a: Recording) -> None:
    noise = 1 + 2.0**-23 * draw(*adds().shape, seed=9)
    found = diff(a, recorded(tmp_path / "b", {SECOND: given(), THIRD: given() + adds() * noise}, ids=IDS))
    assert (found.verdict.kind, found.passed) == (NOISE, True)


def test_nan_on_both_sides_is_not_compared(tmp_path: Path) -> None:
    x = {FIRST: given(), SECOND: changed(given() + adds(), (slice(1, None),), torch.nan)}
    a = recorded(tmp_path / "a", x, ids=IDS)
    verdict = diff(a, a).verdict
    assert (verdict.kind, verdict.layer) == (NOT_COMPARED, "layer_0")


def test_swapped_samples_are_recognised_beside_nan_on_both_sides(tmp_path: Path) -> None:
    x = {FIRST: given(), SECOND: changed(given() + adds(), (3, 17, 5), torch.nan)}
    y = {FIRST: given(), SECOND: changed(given() + swapped(adds(), 2, 7), (3, 17, 5), torch.nan)}
    verdict = diff(recorded(tmp_path / "a", x, ids=IDS), recorded(tmp_path / "b", y, ids=IDS)).verdict
    assert verdict.cause.startswith("samples are swapped (2 of 9 samples")


CAPTURES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "reordered samples": (lambda x: x[torch.tensor([1, 2, 0, 4, 5, 3, 7, 8, 6])], "the order of the samples differs"),
    "two samples": (lambda x: swapped(x, 0, 8), "the order of the samples differs"),
    "later tokens": (lambda x: x.roll(1, 1), "the tokens of B come one place later than A's: padding or a begin token"),
}


@pytest.mark.parametrize("capture", CAPTURES)
def test_another_capture_is_recognised_without_token_ids(tmp_path: Path, capture: str) -> None:
    change, says = CAPTURES[capture]
    tensors = {FIRST: given(), SECOND: given() + adds()}
    a = as_scripts_leave_it(tmp_path / "a", tensors)
    b = as_scripts_leave_it(tmp_path / "b", {name: change(x) for name, x in tensors.items()})
    verdict = diff(a, b).verdict
    assert (verdict.kind, verdict.layer, verdict.cause) == (MISMATCH, "embedding", says)


def test_another_prompt_is_recognised_without_token_ids(tmp_path: Path) -> None:
    words = draw(251, WIDTH, seed=1)
    x, y = words[IDS], words[(IDS * 7 + 3) % 251]
    a, b = (as_scripts_leave_it(tmp_path / n, {FIRST: t, SECOND: t + 0.1}) for n, t in (("a", x), ("b", y)))
    verdict = diff(a, b).verdict
    assert (verdict.kind, verdict.layer, verdict.cause) == (MISMATCH, "embedding", "the inputs differ: another prompt")


def test_shifted_layers_are_recognised(tmp_path: Path) -> None:
    second = given() + adds()
    third = second + 0.4 * draw(*adds().shape, seed=11)
    a = recorded(tmp_path / "a", {FIRST: given(), SECOND: second, THIRD: third}, ids=IDS)
    b = recorded(tmp_path / "b", {FIRST: given(), SECOND: given(), THIRD: second}, ids=IDS)
    verdict = diff(a, b).verdict
    assert (verdict.kind, verdict.layer) == (MISMATCH, "layer_0")
    assert verdict.cause == "the layers are shifted: layer_0 of B is embedding of A, and so on"


SHAPES = {"many samples": (4096, 8, 80), "long samples": (2, 4096, 320), "wide": (6, 8, 50_257)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("cause", "says"),
    [
        ("swapped", "samples are swapped (2 of "),
        ("stale", "a stale buffer (1 of "),
        ("late", "comes one token later"),
    ],
)
def test_samples_and_tokens_stay_whole_in_any_shape(
    tmp_path: Path, shape: tuple[int, int, int], cause: str, says: str
) -> None:
    stream, added = draw(*shape, seed=1), draw(*shape, seed=2)
    last = shape[0] - 1
    broken = {
        "swapped": lambda: swapped(added, 0, last),
        "stale": lambda: changed(added, (last,), added[0]),
        "late": lambda: added.roll(1, 1),
    }[cause]()
    ids = torch.zeros(shape[:2], dtype=torch.int64)
    a, b = (
        recorded(tmp_path / name, {FIRST: stream, SECOND: stream + x}, ids=ids)
        for name, x in (("a", added), ("b", broken))
    )
    verdict = diff(a, b).verdict
    assert (verdict.kind, verdict.layer) == (FAULT, "layer_0")
    assert says in verdict.cause
    assert verdict.sure == "certain"


def test_the_sample_is_whole_windows_at_the_same_places_of_every_sample() -> None:
    a = torch.arange(SAMPLES * TOKENS, dtype=torch.float32).view(SAMPLES, TOKENS, 1).expand(-1, -1, WIDTH)
    b = changed(a, (4, 200), -1.0)
    rows = sample_tensor(a, b, None, residual=False, unit=2.0**-24, structure=measure_structure(a, b, None))
    samples, _, length = rows.grid
    assert (samples, length) == (SAMPLES, WINDOW)
    assert rows.a.size <= SAMPLED
    tokens = rows.a[:, 0].reshape(rows.grid) - TOKENS * torch.arange(SAMPLES).double().numpy()[:, None, None]
    assert (tokens == tokens[:1]).all()
    assert (tokens[0, :, 1:] - tokens[0, :, :-1] == 1).all()
    assert {0.0, TOKENS - 1.0, 200.0} <= set(tokens[0].ravel())


def test_half_of_the_chosen_places_are_evenly_spaced_and_half_are_the_largest() -> None:
    energy = torch.zeros(100, dtype=torch.float64).numpy()
    energy[[41, 42, 43]] = 1.0
    assert choose(energy, 6).tolist() == [0, 41, 42, 43, 50, 99]
    assert choose(energy, 100).tolist() == list(range(100))
    assert choose(energy, 1).tolist() == [0]
