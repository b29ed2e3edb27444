"""Another capture is recognised in values: other samples, shifted tokens, other names, another text."""

import numpy as np
import pytest

from probe.comparisons.devices.examination import other_prompt, same_elsewhere, sample_order, token_shift
from tests.comparisons.devices.streams import sampled, stream


def test_samples_in_another_order_are_found() -> None:
    given, adds = stream()
    words, each_once = sample_order(sampled(0 * given, adds, adds[[1, 0, 2, 3]]))
    assert words == "2 of 4 samples: sample 0 of B is sample 1 of A"
    assert each_once
    words, each_once = sample_order(sampled(0 * given, adds, adds[[0, 0, 2, 3]]))
    assert words == "1 of 4 samples: sample 1 of B is sample 0 of A"
    assert not each_once
    assert sample_order(sampled(0 * given, adds, adds * 1.5)) == ("", False)


@pytest.mark.parametrize("shift", [1, -1])
def test_shifted_tokens_are_found(shift: int) -> None:
    given, adds = stream()
    one = sampled(0 * given, adds, np.roll(adds, shift, axis=1))
    assert token_shift(one, one.a, one.b) == shift
    same = sampled(0 * given, adds, adds * 1.01)
    assert token_shift(same, same.a, same.b) == 0


def test_a_layer_under_another_name_is_found() -> None:
    draw = np.random.default_rng(0)
    layers = {f"layer_{i}.output": draw.normal(0, 1, (16, 8)) for i in range(3)}
    assert (
        same_elsewhere("layer_1.output", layers["layer_0.output"] * (1 + 1e-7), layers, noise=1e-5) == "layer_0.output"
    )
    assert same_elsewhere("layer_1.output", layers["layer_1.output"] * 1.1, layers, noise=1e-5) == ""
    assert same_elsewhere("layer_1.output", layers["layer_0.output"] * 1.1, layers, noise=1e-5) == ""


def test_another_text_is_distinguished_from_a_fault() -> None:
    draw = np.random.default_rng(0)
    words = draw.normal(0, 1, (40, 48)) * np.exp(draw.normal(0, 1, 48))
    text, other = words[draw.integers(0, 40, (4, 32))], words[draw.integers(0, 40, (4, 32))]
    assert other_prompt(sampled(0 * text, text, other)).endswith(": another text")
    fresh = draw.normal(0, 1, (4, 32, 48)) * np.exp(draw.normal(0, 1, 48))
    spread = fresh.std((0, 1))
    unrelated = draw.normal(0, 1, (4, 32, 48)) * spread
    assert "every channel is spread as on A" in other_prompt(sampled(0 * fresh, fresh, unrelated))
    for broken in (fresh * 3, fresh[..., ::-1], fresh + 1):
        assert other_prompt(sampled(0 * fresh, fresh, broken)) == ""
