"""Two recordings side by side: their inputs, the input of a layer, and the noise bound."""

import dataclasses
from pathlib import Path

import pytest
import torch

from probe import diff
from probe.comparisons.devices.pairs import (
    GAIN,
    ROUNDINGS,
    SUMS,
    UNITS,
    format_error,
    noise_bound,
    rounding_unit,
)
from probe.recordings import Recording
from tests.comparisons.devices.recordings import IDS, network, recorded


def test_other_tokens_are_a_mismatched_capture_and_nothing_is_compared(tmp_path: Path, a: Recording) -> None:
    other = IDS.clone()
    other[1, 5], other[2, 0] = 7, 9
    found = diff(a, recorded(tmp_path / "b", network(), ids=other))
    reason = f"2 of 24 token ids differ, the first in sample 1 at position 5: {int(IDS[1, 5])} on A, 7 on B"
    assert (found.verdict.kind, found.verdict.sure, found.layers) == ("mismatched capture", "certain", ())
    assert found.inputs.reason == reason
    assert reason in found.verdict.evidence
    assert not found.passed


def test_the_same_samples_in_another_order_are_reported(tmp_path: Path, a: Recording) -> None:
    order = torch.tensor([2, 0, 1])
    tensors = {name: x[order] for name, x in network().items()}
    found = diff(a, recorded(tmp_path / "b", tensors, ids=IDS[order]))
    assert found.verdict.kind == "mismatched capture"
    assert found.inputs.reason.endswith("; the samples are the same ones in another order")


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        ((slice(2), slice(None)), "A has 3 samples, B has 2"),
        ((slice(None), slice(7)), "A has 8 tokens in a sample, B has 7"),
    ],
)
def test_another_number_of_samples_or_tokens_is_never_cropped(
    tmp_path: Path, a: Recording, cut: tuple[slice, slice], reason: str
) -> None:
    tensors = {name: x[cut].clone() for name, x in network().items()}
    found = diff(a, recorded(tmp_path / "b", tensors, ids=IDS[cut].clone()))
    assert (found.verdict.kind, found.inputs.reason, found.layers) == ("mismatched capture", reason, ())


def test_without_ids_the_fingerprints_are_compared(tmp_path: Path, a: Recording) -> None:
    def forget(recording: Recording, fingerprint: str | None) -> Recording:
        tokens = dataclasses.replace(recording.manifest.tokens, file=None, fingerprint=fingerprint)
        return Recording(recording.folder, dataclasses.replace(recording.manifest, tokens=tokens))

    b = recorded(tmp_path / "b", network())
    prints = a.manifest.tokens.fingerprint
    assert diff(forget(a, prints), b).inputs.reason == f"the fingerprints of the token ids agree: {prints}"
    found = diff(forget(a, "other"), b)
    assert found.inputs.reason == f"the fingerprints of the token ids differ: other on A, {prints} on B"
    assert found.verdict.kind == "mismatched capture"
    unknown = diff(forget(a, None), b)
    assert unknown.inputs.status == "unknown"
    assert unknown.inputs.reason == "A did not keep the token ids: whether inputs agree is not known"
    assert unknown.verdict.kind == "identical"


def test_another_shape_is_a_mismatched_capture(tmp_path: Path, a: Recording) -> None:
    tensors = {name: x[..., :16].clone() for name, x in network().items()}
    found = diff(a, recorded(tmp_path / "b", tensors))
    assert (found.verdict.kind, found.verdict.layer, found.layers) == ("mismatched capture", "embedding", ())
    assert found.verdict.cause == "the shapes differ: nothing is cropped"
    assert found.verdict.evidence == ("embedding is [3, 8, 24] on A, [3, 8, 16] on B",)


def test_a_chosen_layer_is_judged_beside_what_it_was_given(tmp_path: Path) -> None:
    """The noise that reaches layer_3 is measured, though only layer_3 is asked for."""
    x = network()
    error = 1e-3 * torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(2))
    y = {name: tensor + error if name in ("layer_2.output", "layer_3.output") else tensor for name, tensor in x.items()}
    a, b = recorded(tmp_path / "a", x), recorded(tmp_path / "b", y)
    assert diff(a, b, layers="layer_3").verdict.kind == "dtype noise"
    assert diff(a, b).verdict.layer == "layer_2"


def test_what_a_layer_makes_of_a_difference_that_it_was_given_is_not_its_fault(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(4)
    matrix = torch.randn(24, 24, generator=draw) / 24**0.5
    given = torch.randn(3, 8, 24, generator=draw)
    other = given * (1 + 1e-2 * torch.randn(given.shape, generator=draw))
    for folder, x in (("a", given), ("b", other)):
        y = x + 0.5 * torch.tanh(x @ matrix)
        recorded(
            tmp_path / folder, {"layer_2.output": x, "layer_3.output": y, "layer_4.output": y + 0.5 * (y @ matrix)}
        )
    found = diff(tmp_path / "a", tmp_path / "b", layers="layer_[34]")
    assert found.layers[0].added > 5e-3
    assert all(layer.beyond_noise < 0.5 for layer in found.layers)
    assert (found.verdict.kind, found.verdict.cause) == ("dtype noise", "rounding and the order of sums")


def test_units_are_half_a_step_of_a_dtype() -> None:
    bits = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
    assert {name: 2.0**-count for name, count in bits.items()} == UNITS


def test_the_rounding_unit_a_device_is_what_it_began_with_or_what_most_layers_are() -> None:
    layers = {f"layer_{i}.output": "float32" for i in range(5)}
    assert rounding_unit(layers) == UNITS["float32"]
    assert rounding_unit({"embedding.output": "bfloat16", **layers}) == UNITS["bfloat16"]
    assert rounding_unit({**layers, "layer_3.output": "bfloat16"}) == UNITS["float32"]  # one narrow layer is a fault
    assert rounding_unit({**dict.fromkeys(layers, "float16"), "layer_0.output": "float32"}) == UNITS["float16"]
    assert rounding_unit({"layer_0.mixer.output": "float16", "logits": "float32"}) == UNITS["float16"]


def test_the_noise_bound_grows_with_the_error_of_the_input_with_width_and_with_a_small_part() -> None:
    def bound(
        unit: float, *, given: float = 0.0, part: float = 1e9, channels: int = 64, at_least: float = 0.0
    ) -> float:
        return noise_bound(unit, given=given, part=part, channels=channels, at_least=at_least)

    assert bound(2.0**-24) == pytest.approx(SUMS * 2.0**-24)
    assert bound(2.0**-24, channels=128 * 16) == pytest.approx(4 * SUMS * 2.0**-24)
    assert bound(2.0**-8, channels=128 * 16) == pytest.approx(ROUNDINGS * 2.0**-8)
    assert bound(2.0**-24, given=0.1) == pytest.approx(GAIN * 0.1, rel=1e-6)
    assert bound(2.0**-24, part=1e-3) == pytest.approx(2000 * 2.0**-24, rel=1e-2)
    assert bound(2.0**-24, at_least=0.3) == 0.3


def test_a_recipe_may_differ_by_its_own_error() -> None:
    errors = {name: format_error(name) for name in (None, "mxint8", "fp8_e4m3", "int8", "nvfp4", "fp4_e2m1")}
    assert errors == {None: 0, "mxint8": 2**-5, "fp8_e4m3": 0.25, "int8": 0.125, "nvfp4": 0.5, "fp4_e2m1": 0.5}
    assert format_error("somebody's") == 0
