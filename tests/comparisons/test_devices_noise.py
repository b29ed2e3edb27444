"""What the verdict on devices rests on: sums over tokens and channels, floors of noise, and patterns."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from probe.comparisons.devices import differences
from probe.comparisons.devices.differences import measure_structure
from probe.comparisons.devices.examination import other_prompt, sample_order, token_shift
from probe.comparisons.devices.noise import GAIN, ROUNDINGS, SUMS, UNITS, floor_of, own_error_of, unit_of
from probe.comparisons.devices.patterns import SampledRows, recognise, sample_tensor

Array = np.ndarray


def stream(seed: int = 0, samples: int = 4, tokens: int = 32, width: int = 48) -> tuple[Array, Array]:
    """What a layer was given and what it adds; tokens of very different sizes."""
    draw = np.random.default_rng(seed)
    sizes = np.exp(draw.normal(0, 0.7, (samples, tokens, 1)))
    return draw.normal(0, 1, (samples, tokens, width)) * sizes, draw.normal(0, 0.4, (samples, tokens, width))


def seen(given: Array, adds: Array, other: Array, *, residual: bool = True, unit: float = 2.0**-24) -> SampledRows:
    """A look at a layer that adds `adds` on A and `other` on B."""
    g, a, b = (torch.from_numpy(np.float32(x)) for x in (given, given + adds, given + other))
    if not residual:
        a, b = torch.from_numpy(np.float32(adds)), torch.from_numpy(np.float32(other))
    structure = measure_structure(a, b, (g, g) if residual else None)
    return sample_tensor(a, b, (g, g), residual=residual, unit=unit, structure=structure)


# -------------------------------------------------------------------------------------------------- structure


@pytest.mark.parametrize("chunk", [2**18, 100])
@pytest.mark.parametrize("residual", [True, False])
def test_the_sums_are_those_of_a_plain_computation(monkeypatch: pytest.MonkeyPatch, chunk: int, residual: bool) -> None:
    monkeypatch.setattr(differences, "CHUNK", chunk)
    draw = np.random.default_rng(3)
    a, b, pa, pb = (draw.normal(0, 1, (3, 5, 8)) for _ in range(4))
    a[1, 2, 3] = np.nan
    tensors = [torch.from_numpy(x) for x in (a, b, pa, pb)]
    found = measure_structure(tensors[0], tensors[1], (tensors[2], tensors[3]) if residual else None)
    rows = [row for row in range(15) if row != 7]
    a, b, pa, pb = (x.reshape(15, 8)[rows] for x in (a, b, pa, pb))
    n = np.sqrt((a**2).mean(1, keepdims=True))
    d = (b - a) / n
    u, e = ((a - pa) / n, d - (pb - pa) / n) if residual else (a / n, d)
    assert (found.rows, found.left_out, found.per_sample) == (14, 1, 5)
    assert found.error == pytest.approx(math.sqrt((d**2).mean()))
    assert found.added == pytest.approx(np.linalg.norm(e) / np.linalg.norm(u))
    assert found.part == pytest.approx(np.linalg.norm(u) / np.linalg.norm(a / n))
    assert found.slope == pytest.approx((e * u).sum() / (u**2).sum())
    assert found.factor_share == pytest.approx((e * u).sum() ** 2 / (u**2).sum() / (e**2).sum())
    by_channel = ((e * u).sum(0) ** 2 / (u**2).sum(0)).sum() / (e**2).sum()
    by_token = ((e * u).sum(1) ** 2 / (u**2).sum(1)).sum() / (e**2).sum()
    assert found.channel_factor_share == pytest.approx(by_channel)
    assert found.token_factor_share == pytest.approx(by_token)
    raw = e * n
    assert found.constant_share == pytest.approx((raw.mean(0) ** 2).sum() * 14 / (raw**2).sum())
    whole = np.full(15, np.nan)
    whole[rows] = (e**2).sum(1)
    assert found.samples() == pytest.approx(np.nanmean(whole.reshape(3, 5), 1))


def test_one_huge_token_does_not_outshine_the_rest() -> None:
    given, adds = stream()
    given[0, 0] *= 1e4
    noise = 1e-3 * np.random.default_rng(1).normal(0, 1, adds.shape)
    assert seen(given, adds, adds * (1 + noise)).structure.error > 1e-4


# ------------------------------------------------------------------------------------------------------ noise


def test_units_are_half_a_step_of_torch() -> None:
    for name, unit in UNITS.items():
        assert unit == torch.finfo(getattr(torch, name)).eps / 2


def test_the_unit_of_a_device_is_what_it_began_with_or_what_most_layers_are() -> None:
    layers = {f"layer_{i}.output": "float32" for i in range(5)}
    assert unit_of(layers) == UNITS["float32"]
    assert unit_of({"embedding.output": "bfloat16", **layers}) == UNITS["bfloat16"]
    assert unit_of({**layers, "layer_3.output": "bfloat16"}) == UNITS["float32"]  # one narrow layer is a fault
    assert unit_of({**dict.fromkeys(layers, "float16"), "layer_0.output": "float32"}) == UNITS["float16"]
    assert unit_of({"layer_0.mixer.output": "float16", "logits": "float32"}) == UNITS["float16"]


def test_the_floor_grows_with_what_is_given_with_width_and_with_a_small_part() -> None:
    plain = {"given": 0.0, "part": 1e9, "channels": 64}
    assert floor_of(2.0**-24, **plain) == pytest.approx(SUMS * 2.0**-24)
    assert floor_of(2.0**-24, **plain | {"channels": 128 * 16}) == pytest.approx(4 * SUMS * 2.0**-24)
    assert floor_of(2.0**-8, **plain | {"channels": 128 * 16}) == pytest.approx(ROUNDINGS * 2.0**-8)
    assert floor_of(2.0**-24, **plain | {"given": 0.1}) == pytest.approx(GAIN * 0.1, rel=1e-6)
    assert floor_of(2.0**-24, **plain | {"part": 1e-3}) == pytest.approx(2000 * 2.0**-24, rel=1e-2)
    assert floor_of(2.0**-24, **plain, own=0.3) == 0.3


def test_a_recipe_may_differ_by_its_own_error() -> None:
    errors = {name: own_error_of(name) for name in (None, "mxint8", "fp8_e4m3", "int8", "nvfp4", "fp4_e2m1")}
    assert errors == {None: 0, "mxint8": 2**-5, "fp8_e4m3": 0.25, "int8": 0.125, "nvfp4": 0.5, "fp4_e2m1": 0.5}
    assert own_error_of("somebody's") == 0


# --------------------------------------------------------------------------------------------------- patterns


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
    return x * np.sqrt(power / (power + 1e-2))


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
    "skipped": (lambda g, x: 0 * x, "gives its input back on B: the layer is skipped"),
    "clipped": (_clipped, "saturates: what it adds beyond +-0.8 is cut there on B"),
    "permuted": (_permuted, "channels are permuted (3 of 48): channel "),
    "half": (_bfloat16, "one layer in half precision: what it adds lies on the grid of bfloat16 on B"),
    "float16": (_float16, "one layer in half precision: what it adds lies on the grid of float16 on B"),
    "bias": (lambda g, x: x + 0.1, "a constant for each channel is added or missing, such as a bias (100% of"),
    "epsilon": (_epsilon, "wrong epsilon in a norm: the smaller a token's variance, the larger its difference"),
    "factor": (lambda g, x: 0.25 * x, "what it adds is 0.25 times A's: the scale is off by a factor of 2^-2"),
    "sign": (lambda g, x: -x, "what it adds is -1 times A's: the sign is turned"),
    "channel": (_one_channel, "100% of the squared difference is in one channel (7)"),
    "channels": (_per_channel, "a factor for each channel explains"),
    "rough": (_rough, "noise of the size that bfloat16 makes begins here: half precision in this layer, or a rough"),
    "unlike": (_unrelated, "unlike what it should be (correlation "),
}


@pytest.mark.parametrize(("fault", "says"), PATTERNS.values(), ids=PATTERNS)
def test_a_fault_is_recognised(fault: Callable[[Array, Array], Array], says: str) -> None:
    given, adds = stream()
    assert recognise(seen(given, adds, fault(given, adds))).startswith(says)


def test_zeros_are_recognised() -> None:
    given, adds = stream()
    assert recognise(seen(given, adds, 0 * adds, residual=False)) == "gives only zeros"


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
    assert recognise(seen(0 * given, adds, other)) == says


def test_noise_is_recognised_as_nothing() -> None:
    given, adds = stream()
    noise = seen(given, adds, adds * (1 + 1e-6 * np.random.default_rng(1).normal(0, 1, adds.shape)))
    assert noise.structure.is_unstructured
    assert recognise(noise) == ""


@pytest.mark.parametrize("fault", [_per_channel, _one_channel, lambda g, x: 1.01 * x, lambda g, x: x + 0.01])
def test_what_has_structure_is_no_noise(fault: Callable[[Array, Array], Array]) -> None:
    given, adds = stream()
    assert not seen(given, adds, fault(given, adds)).structure.is_unstructured


# ---------------------------------------------------------------------------------------------------- capture


def test_samples_in_another_order_are_found() -> None:
    given, adds = stream()
    words, each_once = sample_order(seen(0 * given, adds, adds[[1, 0, 2, 3]]))
    assert words == "2 of 4 samples: sample 0 of B is sample 1 of A"
    assert each_once
    words, each_once = sample_order(seen(0 * given, adds, adds[[0, 0, 2, 3]]))
    assert words == "1 of 4 samples: sample 1 of B is sample 0 of A"
    assert not each_once
    assert sample_order(seen(0 * given, adds, adds * 1.5)) == ("", False)


@pytest.mark.parametrize("shift", [1, -1])
def test_shifted_tokens_are_found(shift: int) -> None:
    given, adds = stream()
    one = seen(0 * given, adds, np.roll(adds, shift, axis=1))
    assert token_shift(one, one.a, one.b) == shift
    same = seen(0 * given, adds, adds * 1.01)
    assert token_shift(same, same.a, same.b) == 0


def test_a_layer_under_another_name_is_found() -> None:
    draw = np.random.default_rng(0)
    layers = {f"layer_{i}.output": draw.normal(0, 1, (16, 8)) for i in range(3)}
    assert (
        same_elsewhere("layer_1.output", layers["layer_0.output"] * (1 + 1e-7), layers, noise=1e-5) == "layer_0.output"
    )
    assert same_elsewhere("layer_1.output", layers["layer_1.output"] * 1.1, layers, noise=1e-5) == ""
    assert same_elsewhere("layer_1.output", layers["layer_0.output"] * 1.1, layers, noise=1e-5) == ""


def test_another_text_is_told_from_a_fault() -> None:
    draw = np.random.default_rng(0)
    words = draw.normal(0, 1, (40, 48)) * np.exp(draw.normal(0, 1, 48))
    text, other = words[draw.integers(0, 40, (4, 32))], words[draw.integers(0, 40, (4, 32))]
    assert other_prompt(seen(0 * text, text, other)).endswith(": another text")
    fresh = draw.normal(0, 1, (4, 32, 48)) * np.exp(draw.normal(0, 1, 48))
    spread = fresh.std((0, 1))
    unrelated = draw.normal(0, 1, (4, 32, 48)) * spread
    assert "every channel is spread as on A" in other_prompt(seen(0 * fresh, fresh, unrelated))
    for broken in (fresh * 3, fresh[..., ::-1], fresh + 1):
        assert other_prompt(seen(0 * fresh, fresh, broken)) == ""
