"""`record`: what is on disk is what the model gave."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import probe
from probe.models.loading import Loaded
from probe.recordings import read_recording, record_job
from probe.running.calibration import Calibration
from probe.running.measurement import NotAppliedError
from probe.running.recipes import Recipe, apply
from tests.recordings.examples import SMALL, files
from tests.recordings.models import Stack
from tests.running.declared import declared


def test_the_manifest_states_what_happened(tmp_path: Path, loaded: Loaded) -> None:
    recording = probe.record(tmp_path / "r", modes=["fp32", "2-1"], layers=["first"], percentile=0.99, **SMALL)
    document = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert (document["model"], document["fingerprint"]) == ("tiny-mamba", loaded.fingerprint)
    assert (document["device"], document["layout"], document["unfinished"]) == ("cpu", "safetensors", None)
    tokens = document["tokens"]
    assert (tokens["count"], tokens["samples"], tokens["seqlen"], tokens["source"]) == (48, 3, 16, "evaluation")
    assert document["versions"]["torch"] == torch.__version__
    quantized, plain = document["recipes"]["mode_2_1-int8"], document["recipes"]["fp32"]
    assert (quantized["applied"], quantized["compiled"], quantized["layers"]) == ("by probe", False, ["layer_0"])
    calibration = quantized["calibration"]
    assert {key: calibration[key] for key in ("data", "percentile", "samples", "seqlen")} == {
        "data": "calibration",
        "percentile": 0.99,
        "samples": 2,
        "seqlen": 16,
    }
    assert plain["calibration"] is None
    assert set(document["files"]) == {"fp32.safetensors", "mode_2_1-int8.safetensors", "tokens.safetensors"}
    given = probe.token_batches(probe.text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=3)
    found = recording.input_ids()
    assert found is not None
    assert torch.equal(found, given[0])


def test_calibration_is_what_was_asked_for(tmp_path: Path, loaded: Loaded) -> None:
    calibration = probe.calibrate_on(loaded, "calibration", 2, 16, percentile=0.9)
    twin: Any = apply(loaded.model, Recipe("2-1", "int8"), calibration)
    batches = probe.token_batches(probe.text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=1)
    expected = torch.cat([twin(batch, use_cache=False).logits for batch in batches])
    recording = probe.record(tmp_path / "r", modes=["2-1"], taps=["logits"], percentile=0.9, **SMALL)
    assert torch.equal(recording.tensor("mode_2_1-int8", "logits"), expected)


def test_bfloat16_lies_in_numpy_as_float32_and_is_said_to_be_bfloat16(tmp_path: Path, ids: list[Tensor]) -> None:
    model = Stack(2)
    expected = probe.record(tmp_path / "s", model=model, modes=["bf16"], batches=ids)
    assert expected.tensor("bf16", "layer_0.output").dtype == torch.bfloat16
    for layout, file in (("npy", "mode_bf16_stats.json"), ("npz", "first_layer_io_all_modes_stats.json")):
        found = probe.record(tmp_path / layout, model=model, modes=["bf16"], batches=ids, layout=layout)
        tensor = found.tensor("bf16", "layer_0.output")
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected.tensor("bf16", "layer_0.output").float())
        assert found.dtype("bf16", "layer_0.output") == "bfloat16"
        assert '"bfloat16"' in (tmp_path / layout / file).read_text()
    array = np.load(tmp_path / "npy" / "mode_bf16_layer_0.npy", allow_pickle=False)
    assert array.dtype == np.float32


def test_how_it_is_batched_does_not_show(tmp_path: Path, ids: list[Tensor]) -> None:
    whole = torch.cat(ids)
    for size in (1, 2, 3):
        probe.record(tmp_path / str(size), model=Stack(2), modes=["fp32"], batches=list(torch.split(whole, size)))
    contents = [files(tmp_path / str(size)) for size in (1, 2, 3)]
    assert contents[0].keys() == contents[1].keys() == contents[2].keys()
    assert contents[0]["manifest.json"].count(b"\n") == contents[1]["manifest.json"].count(b"\n")


def test_a_mode_that_does_nothing_is_found_out(tmp_path: Path, loaded: Loaded) -> None:
    probe.register_mode("lazy", lambda model, format, calibration: model)
    try:
        with pytest.raises(NotAppliedError, match=r"lazy-mxint8 was not applied to layer_0, layer_3: given the ref"):
            probe.record(tmp_path / "r", model=loaded, modes=["fp32", "lazy"], formats=["mxint8"], **SMALL)
    finally:
        probe.unregister_mode("lazy")
    assert os.listdir(tmp_path / "r") == [".partial"]
    left = sorted(os.listdir(tmp_path / "r" / ".partial"))
    assert left == ["fp32.safetensors", "manifest.json", "tokens.safetensors"]


def test_a_mode_that_leaves_one_recorded_layer_as_it_was_is_found_out_without_a_reference(
    tmp_path: Path, loaded: Loaded
) -> None:
    def last_only(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
        model.get_parameter("backbone.layers.3.mixer.D").mul_(1.01)
        return model

    probe.register_mode("last_only", last_only)
    try:
        with pytest.raises(NotAppliedError, match=r"last_only-mxint8 was not applied to layer_0: .*\(1 of 2 layers\)"):
            probe.record(tmp_path / "r", model=loaded, modes=["last_only"], formats=["mxint8"], **SMALL)
    finally:
        probe.unregister_mode("last_only")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_runs_as_it_is_is_compared_with_the_recorded_reference(tmp_path: Path, ids: list[Tensor]) -> None:
    """Its float layers are not known, but those of fp32 in the same folder are."""
    model = probe.record_outputs(Stack(2).eval())
    probe.record(tmp_path / "r", model=model, modes=["fp32"], batches=ids)
    with pytest.raises(
        NotAppliedError, match=r"linear_w-int8 was not applied to layer_0, layer_1: .* that of fp32, to"
    ):
        probe.record(tmp_path / "r", model=model, modes=["linear_w"], formats=["int8"], batches=ids)


def test_a_built_in_mode_that_was_not_applied_is_found_out_without_a_reference(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_job, "apply", lambda model, recipe, calibration=None: apply(model, Recipe("fp32")))
    with pytest.raises(NotAppliedError, match=r"mode_2_1-int8 was not applied to layer_0, layer_3: "):
        probe.record(tmp_path / "r", model=loaded, modes=["2-1"], **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_is_not_on_its_grid_is_found_out_without_a_reference(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def partly(model: nn.Module, recipe: Recipe, calibration: Calibration | None = None) -> nn.Module:
        twin = apply(model, recipe, calibration)
        with torch.no_grad():
            twin.get_parameter("backbone.layers.0.mixer.in_proj.weight").mul_(torch.rand(1, 128) + 0.5)
        return twin

    monkeypatch.setattr(record_job, "apply", partly)
    with pytest.raises(NotAppliedError, match=r"mode_2_1-int8 was not applied: .* is not on a grid of int8"):
        probe.record(tmp_path / "r", model=loaded, modes=["2-1"], **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_the_layers_that_a_mode_declares_float_are_in_the_manifest_and_belong_to_the_request(
    tmp_path: Path, loaded: Loaded
) -> None:
    with declared("2-1", "layers.3"):
        found = probe.record(tmp_path / "r", model=loaded, modes=["fp32", "mixed"], formats=["mxint8"], **SMALL)
    assert found.manifest.recipes["mixed-mxint8"].float_layers == ("layer_3",)
    assert found.manifest.recipes["fp32"].float_layers == ()
    assert read_recording(tmp_path / "r", verify=True).manifest == found.manifest
    plain = json.loads((tmp_path / "r" / "manifest.json").read_text())
    for recipe in plain["recipes"].values():
        del recipe["float_layers"]  # as older recordings are
    (tmp_path / "r" / "manifest.json").write_text(json.dumps(plain))
    assert read_recording(tmp_path / "r").manifest.recipes["mixed-mxint8"].float_layers == ()
