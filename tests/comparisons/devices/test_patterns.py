"""Patterns of faults: each is recognised in values that have it, and none in noise."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from probe.comparisons.devices.differences import Array
from probe.comparisons.devices.patterns import recognise
from tests.comparisons.devices.streams import sampled, stream


def _clipped(g: Array, x: Array) -> Array:
    return np.clip(x, -0.8, 0.8)


def _permuted(g: Array, x: Array) -> Array:
    order = np.arange(x.shape[-1])
    order[[4, 9, 30]] = [9, 30, 4]
    return x[..., order]


def _bfloat16(g: Array, x: Array) -> Array:
    return torch.from_numpy(x).bfloat16().double().numpy()


def _float16(g: Array, x: Array) -> Array:
    return torch.from_numpy(x).half().double().numpy()


def _epsilon(g: Array, x: Array) -> Array:
    power = np.square(g).mean(-1, keepdims=True)
    shrunk: Array = x * np.sqrt(power / (power + 1e-2))
    return shrunk


def _one_channel(g: Array, x: Array) -> Array:
    x = x.copy()
    x[..., 7] = np.random.default_rng(1).normal(0, 1, x.shape[:-1])
    return x


def _per_channel(g: Array, x: Array) -> Array:
    return x * (1 + 0.05 * np.random.default_rng(1).normal(0, 1, x.shape[-1]))


def _unrelated(g: Array, x: Array) -> Array:
    return np.random.default_rng(9).normal(0, 0.4, x.shape)


def _rough(g: Array, x: Array) -> Array:
    return x * (1 + 2.0**-8 * np.random.default_rng(1).normal(0, 1, x.shape))


PATTERNS: dict[str, tuple[Callable[[Array, Array], Array], str]] = {
    "skipped": (lambda g, x: 0 * x, "returns its input on B: the layer is skipped"),
    "clipped": (_clipped, "saturates: what it adds beyond +-0.8 is cut there on B"),
    "permuted": (_permuted, "channels are permuted (3 of 48): channel "),
    "half": (_bfloat16, "one layer in half precision: what it adds lies on the grid of bfloat16 on B"),
    "float16": (_float16, "one layer in half precision: what it adds lies on the grid of float16 on B"),
    "bias": (lambda g, x: x + 0.1, "a constant for each channel is added or missing, such as a bias (100% of"),
    "epsilon": (_epsilon, "wrong epsilon in a norm: the smaller a token's variance, the larger its difference"),
    "factor": (lambda g, x: 0.25 * x, "what it adds is 0.25 times A's: the scale is off by a factor of 2^-2"),
    "sign": (lambda g, x: -x, "what it adds is -1 times A's: the sign is flipped"),
    "channel": (_one_channel, "100% of the squared difference is in one channel (7)"),
    "channels": (_per_channel, "a factor for each channel explains"),
    "rough": (_rough, "noise of the size that bfloat16 makes begins here: half precision in this layer, or a rough"),
    "unlike": (_unrelated, "unrelated to the expected values (correlation "),
}


@pytest.mark.parametrize(("fault", "says"), PATTERNS.values(), ids=PATTERNS)
def test_a_fault_is_recognised(fault: Callable[[Array, Array], Array], says: str) -> None:
    given, adds = stream()
    assert recognise(sampled(given, adds, fault(given, adds))).words.startswith(says)


def test_zeros_are_recognised() -> None:
    given, adds = stream()
    assert recognise(sampled(given, adds, 0 * adds, residual=False)).words == "gives only zeros"


@pytest.mark.parametrize(
    ("on_a", "on_b", "says"),
    [
        (np.nan, 65504.0, "saturates instead of NaN or Inf: +-65504 on B, the largest float16"),
        (np.inf, 448.0, "saturates instead of NaN or Inf: +-448 on B, the largest float8_e4m3fn"),
        (np.inf, 77.0, "saturates instead of NaN or Inf: +-77 on B"),
        (np.nan, 0.0, "NaN or Inf of A is replaced by 0 on B"),
        (1.0, np.nan, "NaN on B where A is finite, in 2 values"),
        (7e4, np.inf, "Inf on B where A is finite, in 2 values: A reaches 7e+04, beyond float16"),
    ],
)
def test_what_is_finite_on_one_side_only_is_explained(on_a: float, on_b: float, says: str) -> None:
    given, adds = stream()
    other = adds.copy()
    for place in ((0, 1, 2), (2, 3, 4)):
        adds[place], other[place] = on_a, on_b
    assert recognise(sampled(0 * given, adds, other)).words == says


def test_noise_is_recognised_as_nothing() -> None:
    given, adds = stream()
    noise = sampled(given, adds, adds * (1 + 1e-6 * np.random.default_rng(1).normal(0, 1, adds.shape)))
    assert noise.structure.is_unstructured
    assert recognise(noise).words == ""


@pytest.mark.parametrize("fault", [_per_channel, _one_channel, lambda g, x: 1.01 * x, lambda g, x: x + 0.01])
def test_what_has_structure_is_no_noise(fault: Callable[[Array, Array], Array]) -> None:
    given, adds = stream()
    assert not sampled(given, adds, fault(given, adds)).structure.is_unstructured
