"""A recording states the configuration of its model: another model with the same weights is never taken for it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import probe
from probe.comparisons.devices.diff import diff
from probe.comparisons.modes import compare
from probe.gate.bench import Bench
from probe.gate.configuration import Settings
from probe.models.loading import Loaded, load_model
from probe.recordings.manifest import RecordingError
from probe.recordings.reading import Recording, read_recording
from probe.running.recipes import Recipe

OTHER = "rms_norm_eps 1e-06 -> 0.001"


@pytest.fixture(scope="module")
def ids() -> list[Tensor]:
    return [torch.arange(32).reshape(2, 16) % 256]


def model(epsilon: float = 1e-6) -> Loaded:
    found = load_model("tiny-llama")
    vars(found.model)["config"].rms_norm_eps = epsilon
    return found


def record(folder: Path, ids: list[Tensor], *modes: str, epsilon: float = 1e-6) -> Recording:
    return probe.record(folder, model=model(epsilon), batches=ids, modes=list(modes))


def test_a_recipe_of_another_configuration_is_not_added(tmp_path: Path, ids: list[Tensor]) -> None:
    record(tmp_path, ids, "fp32")
    with pytest.raises(RecordingError, match=rf"holds a recording of something else: config\.{OTHER}\. Give another"):
        record(tmp_path, ids, "bf16", epsilon=1e-3)
    assert list(record(tmp_path, ids, "bf16").recipes) == ["fp32", "bf16"]


def test_what_an_older_recording_does_not_state_stays_unknown(tmp_path: Path, ids: list[Tensor]) -> None:
    record(tmp_path, ids, "fp32")
    file = tmp_path / "manifest.json"
    stated = json.loads(file.read_text())
    assert stated.pop("configuration")["rms_norm_eps"] == "1e-06"
    file.write_text(json.dumps(stated))
    assert read_recording(tmp_path).manifest.configuration == {}
    assert record(tmp_path, ids, "bf16", epsilon=1e-3).manifest.configuration == {}


def test_recordings_of_two_configurations_are_not_compared_and_noted_by_diff(tmp_path: Path, ids: list[Tensor]) -> None:
    here = record(tmp_path / "here", ids, "fp32")
    there = record(tmp_path / "there", ids, "bf16", epsilon=1e-3)
    with pytest.raises(ValueError, match=rf"the configuration of the model differs \({here.folder} -> .*: {OTHER}\)"):
        compare(there, "bf16", reference_recording=here)
    notes = diff(here, there, recipe=("fp32", "bf16")).notes
    assert f"the configuration of the model differs (A -> B): {OTHER}" in notes
    assert not any("configuration" in note for note in diff(here, here).notes)


def test_a_recording_of_another_configuration_is_no_device_of_the_gate(tmp_path: Path) -> None:
    settings = Settings("tiny-llama", modes=("bf16",), devices=("recorded:r",), samples=2, seqlen=16, batch_size=2)
    for epsilon in (1e-6, 1e-3):
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        probe.record(tmp_path / "r", model=model(epsilon), modes=["bf16"], samples=2, seqlen=16, taps=["logits"])
        bench = Bench(settings, root=tmp_path)
        if epsilon == 1e-6:
            assert not bench.observe(Recipe("bf16"), "recorded:r")["layer_0"].flaws
        else:
            with pytest.raises(RecordingError, match=r"another configuration \(rms_norm_eps 0\.001 -> 1e-06\)"):
                bench.observe(Recipe("bf16"), "recorded:r")


def test_any_text_of_a_configuration_can_be_read_again(tmp_path: Path, ids: list[Tensor]) -> None:
    found = model()
    vars(vars(found.model)["config"]).update(empty="", lines="a\nb")
    probe.record(tmp_path, model=found, batches=ids, modes=["fp32"])
    stated = read_recording(tmp_path).manifest.configuration
    assert (stated["empty"], stated["lines"]) == ("''", r"'a\nb'")
