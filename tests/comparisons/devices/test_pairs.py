"""Two recordings side by side: their inputs, and what a layer was given."""

import dataclasses
from pathlib import Path

import pytest
import torch

from probe import diff
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
