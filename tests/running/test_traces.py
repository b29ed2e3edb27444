"""The trace of a layer: what its parts were given and made, batch by batch."""

import pytest
import torch
from torch import nn

from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.models.loading import Loaded, load_model
from probe.models.mamba import MAMBA
from probe.running.calibration import Calibration, calibrate_on
from probe.running.recipes import Recipe
from probe.running.reference import Reference, run_reference
from probe.running.traces import LayerTrace


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model("tiny-mamba")


@pytest.fixture(scope="module")
def calibration(loaded: Loaded) -> Calibration:
    return calibrate_on(loaded, "calibration", 2, 64)


@pytest.fixture(scope="module")
def reference(loaded: Loaded) -> Reference:
    batches = token_batches(text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=32, batch_size=2)
    return run_reference(loaded.model, batches)


def test_every_part_of_a_mamba_layer_is_kept_for_every_batch(
    loaded: Loaded, reference: Reference, calibration: Calibration
) -> None:
    trace = LayerTrace(loaded.model, Recipe("2-1", "int8"), reference, calibration, "layer_1")
    batches = list(trace.batches())
    assert trace.module == "backbone.layers.1"
    assert [len(batch.given) for batch in batches] == [2, 1]
    for index, batch in enumerate(batches):
        (tensors,) = batch.parts.values()
        parts = set(MAMBA.sites) - {"scan.state"} | {"block", "norm", "mixer"}  # a prefill carries no state on
        assert {name.rpartition(".")[0] for name in tensors} >= parts
        assert torch.equal(tensors["block.given"], batch.given)
        assert batch.output is not None
        assert torch.equal(tensors["block.made"], batch.output)
        assert torch.equal(batch.expected, reference.tensors["layer_1.injected"][index].float())


def test_linears_are_kept_with_their_inputs(loaded: Loaded, reference: Reference, calibration: Calibration) -> None:
    trace = LayerTrace(loaded.model, Recipe("linear_wa", "int8"), reference, calibration, "layer_0")
    parts = next(trace.batches()).parts
    assert set(parts["mixer.in_proj"]) == {"linear.given", "linear.made", "input.given", "input.made"}


def test_a_layer_that_is_never_called_has_no_output(
    loaded: Loaded, reference: Reference, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = LayerTrace(loaded.model, Recipe("2-1", "int8"), reference, calibration, "layer_1")
    monkeypatch.setattr(trace.twin, "forward", lambda batch, **_: torch.zeros(*batch.shape, 256))
    assert next(trace.batches()).output is None


def test_nothing_runs_before_it_is_asked_for(reference: Reference) -> None:
    trace = LayerTrace(nn.Linear(2, 2), Recipe("2-1", "int8"), reference, None, "layer_1")
    assert trace.label == "layer_1"
    with pytest.raises(ValueError, match="Linear has no Mamba blocks"):
        next(trace.batches())
