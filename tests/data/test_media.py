"""Pictures and sounds of a folder through a processor of transformers, and synthetic samples."""

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probe.data.media import PICTURES, SOUNDS, media_files, processed, processor_of, read_sound
from probe.data.synthetic import GRAINS, STEPS, synthetic


def write_wave(file: Path, values: list[int], *, rate: int = 16_000, channels: int = 1, width: int = 2) -> None:
    with wave.open(str(file), "wb") as opened:
        opened.setparams((channels, width, rate, 0, "NONE", "not compressed"))
        opened.writeframes(b"".join(value.to_bytes(width, "little", signed=width > 1) for value in values))


def test_a_sound_is_the_mean_of_its_channels_between_minus_one_and_one(tmp_path: Path) -> None:
    write_wave(tmp_path / "a.wav", [-32768, 0, 16384, 16384], channels=2)
    assert read_sound(tmp_path / "a.wav", 16_000).tolist() == [-0.5, 0.5]
    write_wave(tmp_path / "b.wav", [0, 128, 255], width=1)
    assert read_sound(tmp_path / "b.wav", 16_000).tolist() == [-1.0, 0.0, 127 / 128]


def test_another_rate_and_a_broken_file_are_told(tmp_path: Path) -> None:
    write_wave(tmp_path / "a.wav", [0, 1], rate=8000)
    with pytest.raises(ValueError, match=r"a\.wav' has 8000 samples a second, and the model wants 16000"):
        read_sound(tmp_path / "a.wav", 16_000)
    (tmp_path / "b.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"b\.wav' cannot be read: .* Expected a PCM \.wav"):
        read_sound(tmp_path / "b.wav", 16_000)


def test_files_come_in_natural_order_and_too_few_are_told(tmp_path: Path) -> None:
    for name in ("p10.png", "p2.PNG", "p1.jpg", "notes.txt"):
        (tmp_path / name).touch()
    assert [file.name for file in media_files(tmp_path, PICTURES, samples=3)] == ["p1.jpg", "p2.PNG", "p10.png"]
    with pytest.raises(ValueError, match=r"has 3 files .* and 4 samples were asked for\. Give samples 3 or less"):
        media_files(tmp_path, PICTURES, samples=4)
    with pytest.raises(ValueError, match=r"has 0 files \(\.wav\), and 1 samples"):
        media_files(tmp_path, SOUNDS, samples=1)


def test_a_missing_processor_is_told_with_the_key_to_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no preprocessor_config\.json, .* inputs = \"package\.module:function\""):
        processor_of(tmp_path, None, "pictures")


def test_sounds_go_through_the_processor_of_the_model(tmp_path: Path) -> None:
    import transformers

    library: Any = transformers
    library.WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(tmp_path)
    files = [tmp_path / "a.wav", tmp_path / "b.wav"]
    for number, file in enumerate(files):
        write_wave(file, [int(9000 * np.sin(t / (5 + number))) for t in range(4000)])
    made = processed(processor_of(tmp_path, None, "sounds"), files, "sounds", "input_features")
    assert made.shape == (2, 16, 100)
    assert not torch.equal(made[0], made[1])
    with pytest.raises(ValueError, match="the processor returned input_features and no pixel_values"):
        processed(processor_of(tmp_path, None, "sounds"), files, "sounds", "pixel_values")


def test_pictures_go_through_the_processor_of_the_model(tmp_path: Path) -> None:
    from PIL import Image
    from transformers import ViTImageProcessorPil

    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    Image.new("L", (20, 10), 255).save(tmp_path / "white.png")
    made = processed(processor_of(tmp_path, None, "pictures"), [tmp_path / "white.png"], "pictures", "pixel_values")
    assert torch.equal(made, torch.ones(1, 3, 8, 8))  # (1 - 0.5) / 0.5
    (tmp_path / "cut.png").write_bytes((tmp_path / "white.png").read_bytes()[:40])
    with pytest.raises(ValueError, match=r"picture .*cut\.png' cannot be read"):
        processed(processor_of(tmp_path, None, "pictures"), [tmp_path / "cut.png"], "pictures", "pixel_values")


@pytest.mark.parametrize("shape", [(3, 32, 48), (16, 100), (1000,)])
def test_synthetic_samples_are_exact_steps_with_the_spread_of_one(shape: tuple[int, ...]) -> None:
    made = synthetic(4, shape, seed=1)
    assert made.shape == (4, *shape)
    assert torch.equal(made, (made * STEPS).round() / STEPS)
    assert 0.85 < float(made.std()) < 1.15
    assert torch.equal(synthetic(2, shape, seed=1), made[:2]), "a sample does not depend on how many there are"
    assert not torch.equal(synthetic(4, shape, seed=2), made)
    neighbours = float((made[..., 1:] * made[..., :-1]).mean())
    assert neighbours > 0.3, f"grains of {GRAINS} make neighbours alike"
