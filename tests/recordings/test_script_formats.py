"""What users already have keeps working: every snippet of their documents, against what `probe record` writes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch

import probe
from probe.commands import main
from tests.recordings.models import Stack

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parent / "seed_snippets.md").read_text(), re.S)
PLACES = {
    "/home/ubuntu/traced_model/test_layers/full_model": "neuron",
    "/home/ubuntu/traced_model/gpu_reference/full_model": "gpu",
}
SMALL = ("--samples", "1", "--seqlen", "16", "--calib-data-num", "2", "--calib-seqlen", "16")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Everything that the snippets read, in the folder that they run in."""
    root = tmp_path_factory.mktemp("snippets")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        mpl.use("Agg")
        assert main(["record", "--layout", "npy", "--modes", "fp32", "0", "2-1", *SMALL]) == 0
        assert main(["record", "--layout", "npz", "--modes", "fp32", "0", "2-1", "--out", "io", *SMALL]) == 0
        ids = torch.arange(8)[None]
        for folder in ("neuron", "gpu"):
            probe.record(folder, model=Stack(), layout="pt", batches=[ids])
        yield root


def test_the_blocks_are_all_there() -> None:
    assert len(BLOCKS) == 13


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_snippet_runs(recorded: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    for path, place in PLACES.items():
        block = block.replace(path, str(recorded / place))
    monkeypatch.chdir(recorded / "io" if "first_layer_io" in block else recorded)
    names: dict[str, Any] = {"N": 30, "np": np}
    exec(compile(block, "snippet", "exec"), names)
    assert len(names) > 3, "it has loaded something"


def test_files_of_the_layout_npy_are_named_as_the_scripts_name_them(recorded: Path) -> None:
    names = {path.name for path in (recorded / "layer_outputs").iterdir()}
    for mode in ("fp32", "0", "2-1"):
        assert {f"mode_{mode}_layer_0.npy", f"mode_{mode}_layer_3.npy", f"mode_{mode}_stats.json"} <= names
    assert len(names) == 3 * 3 + 2, "the tokens and the manifest"
    stats = json.loads((recorded / "layer_outputs" / "mode_2-1_stats.json").read_text())
    array = np.load(recorded / "layer_outputs" / "mode_2-1_layer_3.npy")
    assert array.shape == (1, 16, 128)
    assert array.dtype == np.float32
    layer = stats["layers"]["layer_3"]
    assert set(stats["layers"]) == {"layer_0", "layer_3"}
    assert (layer["shape"], layer["dtype"]) == ([1, 16, 128], "float32")
    assert layer["mean"] == pytest.approx(array.mean(dtype=np.float64), abs=1e-12)
    assert layer["std"] == pytest.approx(array.std(dtype=np.float64), rel=1e-12)


def test_fields_of_the_layout_npz_are_those_of_the_document(recorded: Path) -> None:
    stats = json.loads((recorded / "io" / "first_layer_io_all_modes_stats.json").read_text())
    assert list(stats) == ["timestamp", "model", "pretrained_dir", "seq_len", "modes"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", stats["timestamp"])
    assert (stats["model"], stats["seq_len"]) == ("tiny-mamba", 16)
    assert list(stats["modes"]) == ["fp32", "0", "2-1"]
    data = np.load(recorded / "io" / "first_layer_io_all_modes.npz", allow_pickle=False)
    assert sorted(data.files) == sorted(f"mode_{m}_{s}" for m in ("fp32", "0", "2-1") for s in ("input", "output"))
    for mode in stats["modes"]:
        for side in ("input", "output"):
            figures, array = stats["modes"][mode][side], data[f"mode_{mode}_{side}"].astype(np.float64)
            assert set(figures) == {"shape", "dtype", "first_10", "mean", "std", "min", "max"}
            assert figures["shape"] == list(array.shape) == [1, 16, 128]
            assert figures["first_10"] == array.reshape(-1)[:10].tolist()
            assert figures["mean"] == pytest.approx(array.mean(), abs=1e-12)
            assert figures["std"] == pytest.approx(array.std(), rel=1e-12)
            assert (figures["min"], figures["max"]) == (array.min(), array.max())
    assert np.array_equal(data["mode_0_input"], data["mode_fp32_input"]), "the embedding is not quantized"
    assert not np.array_equal(data["mode_0_output"], data["mode_fp32_output"])


def test_the_metadata_of_the_layout_pt_is_that_of_the_document(recorded: Path) -> None:
    names = {path.name for path in (recorded / "neuron").iterdir()}
    expected = {f"layer_{index}_output.pt" for index in range(33)}
    expected |= {"embedding_output.pt", "final_norm_output.pt", "metadata.pt", "manifest.json", "tokens.safetensors"}
    assert names == expected
    metadata = torch.load(recorded / "neuron" / "metadata.pt")
    assert list(metadata) == ["prompt", "input_ids", "attention_mask", "config", "statistics"]
    assert torch.equal(metadata["input_ids"], torch.arange(8)[None])
    assert torch.equal(metadata["attention_mask"], torch.ones(1, 8, dtype=torch.int64))
    statistics = metadata["statistics"]
    assert set(statistics) == {"embedding", "final_norm", *(f"layer_{index}" for index in range(33))}
    layer = torch.load(recorded / "neuron" / "layer_10_output.pt").double()
    found = statistics["layer_10"]
    assert set(found) == {"shape", "dtype", "mean", "std", "min", "max", "has_nan", "has_inf"}
    assert (found["shape"], found["dtype"]) == ([1, 8, 128], "torch.float32")
    assert found["mean"] == pytest.approx(float(layer.mean()), abs=1e-12)
    assert found["std"] == pytest.approx(float(layer.std()), rel=1e-12)
    assert (found["min"], found["max"]) == (float(layer.min()), float(layer.max()))
    assert (found["has_nan"], found["has_inf"]) == (False, False)


def test_a_tensor_file_is_no_larger_than_its_tensor(recorded: Path) -> None:
    """torch.save keeps whole storages: of a view of a mapped file that would be the file."""
    assert (recorded / "neuron" / "layer_10_output.pt").stat().st_size < 8 * 128 * 4 + 4096


def test_the_prompt_and_the_configuration_are_written_down(tmp_path: Path) -> None:
    probe.record(tmp_path / "r", prompt="Call me Ishmael.", layout="pt", layers=["first"])
    metadata: dict[str, Any] = torch.load(tmp_path / "r" / "metadata.pt")
    assert metadata["prompt"] == "Call me Ishmael."
    assert bytes(metadata["input_ids"][0].tolist()) == b"Call me Ishmael."
    assert metadata["config"]["model_type"] == "mamba"
    manifest = probe.read_recording(tmp_path / "r").manifest
    assert (manifest.tokens.samples, manifest.tokens.seqlen, manifest.tokens.source) == (1, 16, None)


FIRST_LAYER = """\
==================================================================================================
MODE 2-1
==================================================================================================

📥 INPUT (Shape: [1, 16, 128]):
  First 10 values: ['N', 'N', 'N', 'N', 'N', 'N', 'N', 'N', 'N', 'N']
  Mean: N
  Std:  N
  Range: [N, N]

📤 OUTPUT (Shape: [1, 16, 128]):
  First 10 values: ['N', 'N', 'N', 'N', 'N', 'N', 'N', 'N', 'N', 'N']
  Mean: N
  Std:  N
  Range: [N, N]
"""
KEY_LAYERS = """\
关键层统计信息:
  embedding:
    Shape: [1, 5, 128]
    Mean: N, Std: N
    Range: [N, N]
    Has NaN: False, Has Inf: False

  layer_0:
"""


def test_the_screen_is_that_of_the_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["record", "--layout", "npz", "--modes", "0", "2-1", "--out", str(tmp_path / "io"), *SMALL])
    shown = capsys.readouterr().out
    assert FIRST_LAYER in re.sub(r"-?\d+\.\d{6}\b", "N", shown)
    array = np.load(tmp_path / "io" / "first_layer_io_all_modes.npz")["mode_2-1_output"]
    block = shown.partition("MODE 2-1")[2].partition("OUTPUT")[2]
    assert f"First 10 values: {[f'{value:.6f}' for value in array.reshape(-1)[:10]]}" in block
    assert f"Range: [{array.min():.6f}, {array.max():.6f}]" in block
    main(["record", "--layout", "pt", "--prompt", "Hello", "--out", str(tmp_path / "all")])
    assert KEY_LAYERS in re.sub(r"-?\d+\.\d{6}\b", "N", capsys.readouterr().out)
