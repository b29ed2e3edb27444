"""Anchors: what noise could decide is decided once; what really changed is left to be seen."""

import pytest
import torch

import probe
from probe.running.calibration import Calibration
from probe.running.noise import NEAR, SAME_SCALE, Anchors, anchored, narrowed, near_ties

X = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0))


def anchors() -> Anchors:
    places, values = near_ties([X])
    return Anchors({"layer_0": places}, {"layer_0": values}, {"site": 2.0})


def test_noise_below_the_bound_never_changes_what_a_layer_is_fed() -> None:
    golden = narrowed("layer_0", [X], None)[0]
    rms = X.square().mean().sqrt()
    flipped = 0
    for seed in range(20):
        noise = (torch.rand(X.shape, generator=torch.Generator().manual_seed(seed)) - 0.5) * 1.9 * NEAR * rms
        flipped += int((narrowed("layer_0", [X + noise], None)[0] != golden).sum())
        assert torch.equal(narrowed("layer_0", [X + noise], anchors())[0], golden)
    assert flipped > 20, "without anchors the noise decides"


def test_places_do_not_depend_on_batches() -> None:
    whole, parts = near_ties([X]), near_ties(list(torch.split(X, 1)))
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(
        torch.cat(narrowed("layer_0", list(torch.split(X, 3)), anchors())), narrowed("layer_0", [X], None)[0]
    )


def test_a_real_change_is_fed_as_it_is() -> None:
    rms = X.square().mean().sqrt()
    for factor in (1.02, -1.0):
        fed, plain = narrowed("layer_0", [X * factor], anchors())[0], (X * factor).bfloat16()
        assert float((fed.float() - plain.float()).abs().max()) <= 2.1 * NEAR * rms  # those near zero are noise anyway
        assert (fed != plain).float().mean() < 0.01


def test_a_scale_is_the_golden_one_only_within_noise() -> None:
    def amax(value: float) -> float:
        return anchored(Calibration({"site": value}, "model", "data", 1.0, 1), {"site": 2.0}).amax["site"]

    assert amax(2.0 * (1 + 0.9 * SAME_SCALE)) == 2.0
    assert amax(2.0 * (1 + 1.1 * SAME_SCALE)) != 2.0


def test_anchors_are_the_same_after_a_file_and_always_the_same_bytes() -> None:
    data = anchors().to_bytes()
    assert anchors().to_bytes() == data
    found = Anchors.from_bytes(data)
    assert torch.equal(found.places["layer_0"], anchors().places["layer_0"])
    assert torch.equal(found.values["layer_0"].view(torch.int16), anchors().values["layer_0"].view(torch.int16))
    assert found.amax == {"site": 2.0}


def test_what_is_no_file_of_anchors_is_refused() -> None:
    for data in (b"", b"{}", anchors().to_bytes()[:100]):
        with pytest.raises(ValueError, match="is not a file of anchors"):
            Anchors.from_bytes(data)


def test_united_anchors_are_those_of_all_and_of_two_the_first() -> None:
    other = Anchors(
        {"layer_1": torch.tensor([7]).int()}, {"layer_1": torch.ones(1).bfloat16()}, {"site": 3.0, "b": 1.0}
    )
    whole = Anchors.united([anchors(), other])
    assert set(whole.places) == set(whole.values) == {"layer_0", "layer_1"}
    assert whole.amax == {"site": 2.0, "b": 1.0}


def test_with_anchors_a_jittered_model_is_fed_the_very_bits() -> None:
    from probe.running.noise import Variation, under

    loaded = probe.load_model("tiny-mamba")
    text = probe.text_of("evaluation")
    batches = probe.token_batches(text, loaded.tokenizer, samples=4, seqlen=64, batch_size=2)
    golden = probe.run_reference(loaded.model, batches)
    kept = Anchors({k: v[0] for k, v in golden.ties.items()}, {k: v[1] for k, v in golden.ties.items()})
    with under(Variation("jitter", jitter=7), loaded.model):
        other = probe.run_reference(loaded.model, batches, anchors=kept)
    assert not torch.equal(golden.tensors["layer_3.output"][0], other.tensors["layer_3.output"][0])
    for label in golden.layers:
        for one, two in zip(golden.tensors[f"{label}.input"], other.tensors[f"{label}.input"], strict=True):
            assert torch.equal(one, two)
