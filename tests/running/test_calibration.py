"""Calibration: the figures are those of the data, they survive the disk, and foreign ones are refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from probe.data.calls import input_fingerprint
from probe.data.samples import token_batches
from probe.data.texts import text_of
from probe.models.loading import Loaded, load_model
from probe.models.mamba import MAMBA
from probe.models.mamba_blocks import rotated_twin
from probe.running.calibration import Calibration, calibrate, calibrate_on, load_calibration
from probe.running.capture import capture


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model("tiny-mamba")


@pytest.fixture(scope="module")
def calibration(loaded: Loaded) -> Calibration:
    return calibrate_on(loaded, "calibration", 4, 64)


def test_every_site_of_every_layer_has_its_figure(calibration: Calibration) -> None:
    for layer in range(4):
        for site in MAMBA.sites:
            assert calibration.amax_of(f"backbone.layers.{layer}.mixer.{site}") > 0
    assert calibration.tokens == 256


def test_figures_are_the_maximum_or_the_quantile_over_all_data(loaded: Loaded, calibration: Calibration) -> None:
    batches = token_batches(text_of("calibration"), loaded.tokenizer, samples=4, seqlen=64, batch_size=4)
    twin = rotated_twin(loaded.model, scan="fast")
    with capture(twin, [r"layers\.1\.mixer\.sites\.(conv1d\.output|out_proj\.input)$"]) as captured, torch.no_grad():
        twin(batches[0], use_cache=False)
    tensors = {name: value[0].abs().double().numpy() for name, value in captured.tensors.items()}
    conv = next(v for n, v in tensors.items() if "conv1d" in n)
    out = next(v for n, v in tensors.items() if "out_proj" in n)
    assert calibration.amax_of("backbone.layers.1.mixer.conv1d.output") == pytest.approx(np.quantile(conv, 0.9995))
    assert calibration.amax_of("backbone.layers.1.mixer.out_proj.input") == pytest.approx(out.max())
    assert np.quantile(conv, 0.9995) < conv.max()


def test_batching_does_not_matter(loaded: Loaded, calibration: Calibration) -> None:
    other = calibrate_on(loaded, "calibration", 4, 64, batch_size=1)
    assert other.data == calibration.data
    for name, value in calibration.amax.items():
        assert other.amax[name] == pytest.approx(value, rel=1e-5), name


def test_it_survives_the_disk(tmp_path: Path, loaded: Loaded, calibration: Calibration) -> None:
    calibration.save(tmp_path / "deep" / "tiny")
    again = load_calibration(tmp_path / "deep" / "tiny", model=loaded.fingerprint, data=calibration.data)
    assert again.amax == calibration.amax
    assert (again.percentile, again.tokens) == (calibration.percentile, calibration.tokens)
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["tiny.json", "tiny.safetensors"]


def test_two_files_of_different_calibrations_are_refused(
    tmp_path: Path, loaded: Loaded, calibration: Calibration
) -> None:
    """What a kill between the two writes leaves."""
    calibration.save(tmp_path / "c")
    old = (tmp_path / "c.json").read_bytes()
    replace(calibration, amax={name: 2 * value for name, value in calibration.amax.items()}).save(tmp_path / "c")
    assert load_calibration(tmp_path / "c", model=loaded.fingerprint).amax != calibration.amax
    (tmp_path / "c.json").write_bytes(old)
    with pytest.raises(ValueError, match=r"c: its two files are not of one calibration\. Make it again\."):
        load_calibration(tmp_path / "c", model=loaded.fingerprint)
    facts = json.loads(old)
    del facts["figures"]
    (tmp_path / "c.json").write_text(json.dumps(facts))
    load_calibration(tmp_path / "c", model=loaded.fingerprint)  # as older versions wrote it


def test_stale_foreign_and_broken_files_are_refused(tmp_path: Path, loaded: Loaded, calibration: Calibration) -> None:
    path = tmp_path / "c"
    with pytest.raises(ValueError, match=r"there is no .*c\.json"):
        load_calibration(path, model=loaded.fingerprint)
    calibration.save(path)
    with pytest.raises(ValueError, match=r"belongs to a model with fingerprint \w+, this one has 0000"):
        load_calibration(path, model="0000")
    with pytest.raises(ValueError, match=r"was made from data with fingerprint \w+, expected other"):
        load_calibration(path, model=loaded.fingerprint, data="other")
    facts = tmp_path / "c.json"
    text = facts.read_text()
    facts.write_text(text.replace('"version": 1', '"version": 9'))
    with pytest.raises(ValueError, match="has version 9; this probe reads 1"):
        load_calibration(path, model=loaded.fingerprint)
    facts.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match="is not a calibration that can be read"):
        load_calibration(path, model=loaded.fingerprint)
    facts.write_text(text)
    figures = tmp_path / "c.safetensors"
    figures.write_bytes(figures.read_bytes()[:40])
    with pytest.raises(ValueError, match="is not a calibration that can be read"):
        load_calibration(path, model=loaded.fingerprint)


def test_mistakes_are_told(loaded: Loaded, calibration: Calibration) -> None:
    with pytest.raises(ValueError, match=r"has no scale for layers\.9.*Nearest: "):
        calibration.amax_of("layers.9.mixer.scan.u")
    with pytest.raises(ValueError, match="not one batch was given"):
        calibrate(loaded.model, [], model_fingerprint="a", data_fingerprint="b")
    batches = token_batches(text_of("calibration"), loaded.tokenizer, samples=1, seqlen=8, batch_size=1)
    with pytest.raises(ValueError, match="alpha"):
        calibrate(
            loaded.model, batches, model_fingerprint="a", data_fingerprint=input_fingerprint(batches), percentile=2
        )
