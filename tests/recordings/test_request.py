"""Requests: their defaults, and every mistake in one is told before the model runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import probe
from probe.models.loading import Loaded
from probe.recordings.request import ModelToRun, RecordRequest, recipes_for
from tests.recordings.examples import SMALL
from tests.recordings.models import Stack

ALL_QUANTIZED = " ".join(f"mode_{mode}-int8" for mode in ("0", "2_0", "2_1", "2_2", "2_3", "2_4", "3"))


@pytest.mark.parametrize(
    ("layout", "modes", "recipes"),
    [
        ("safetensors", None, "fp32 mode_0-int8 mode_2_1-int8 mode_2_2-int8 mode_2_4-int8"),
        ("safetensors", ["fp_only"], "fp32"),
        ("safetensors", ["quant_only"], ALL_QUANTIZED),
        ("npz", None, f"fp32 {ALL_QUANTIZED}"),
        ("pt", None, "fp32"),
    ],
)
def test_groups_and_defaults(loaded: Loaded, layout: Any, modes: Any, recipes: str) -> None:
    found = recipes_for(RecordRequest(modes=modes, layout=layout), ModelToRun(loaded))
    assert " ".join(map(str, found)) == recipes


def test_a_request_is_given_whole_or_by_its_options(tmp_path: Path) -> None:
    request = RecordRequest(tmp_path / "a", model=Stack(2), modes=["fp32"], batches=[torch.arange(6).view(1, 6)])
    whole = probe.record(request)
    options: dict[str, Any] = {"model": request.model, "modes": request.modes, "batches": request.batches}
    assert whole.manifest == probe.record(tmp_path / "b", **options).manifest
    again = probe.record(request, modes=["bf16"])
    assert again.recipes == ("fp32", "bf16"), "an option replaces that of the request"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'mode'"):
        probe.record(request, mode=["fp32"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'mode'"):
        probe.record(tmp_path / "d", mode=["fp32"])


@pytest.mark.parametrize(
    ("given", "layers", "taps", "source"),
    [
        ({}, ("first", "last"), (), "evaluation"),
        ({"layout": "npz"}, ("first",), ("inputs",), "evaluation"),
        ({"layout": "npz", "taps": ["scan"]}, ("first",), ("inputs", "scan"), "evaluation"),
        ({"layout": "npz", "taps": ["inputs", "scan", "scan"]}, ("first",), ("inputs", "scan"), "evaluation"),
        ({"layout": "pt"}, ("all",), ("embedding", "final_norm"), "evaluation"),
        ({"layout": "pt", "taps": []}, ("all",), (), "evaluation"),
        ({"layers": [0, 3], "prompt": "hi"}, (0, 3), (), None),
        ({"batches": [], "out": "."}, ("first", "last"), (), None),
        ({"data": "calibration"}, ("first", "last"), (), "calibration"),
    ],
)
def test_what_is_left_out_is_the_default_of_the_layout(given: Any, layers: Any, taps: Any, source: str | None) -> None:
    request = RecordRequest(**given)
    assert (request.chosen_layers, request.chosen_taps, request.source) == (layers, taps, source)


def test_all_has_its_reference_with_it(loaded: Loaded) -> None:
    found = recipes_for(RecordRequest(modes=["all"]), ModelToRun(loaded))
    assert str(found[0]) == "fp32"
    assert len(found) == 8
    llama = probe.load_model("tiny-llama")
    found = recipes_for(RecordRequest(), ModelToRun(llama))
    assert list(map(str, found)) == ["fp32", "linear_w-int8", "linear_wa-int8"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layout": "zip"}, "unknown layout 'zip'. Did you mean 'npz'|unknown layout 'zip'"),
        ({"taps": ["scans"]}, "unknown tap 'scans'. Did you mean 'scan'"),
        ({"layers": ["nowhere"]}, "layer 'nowhere' matches none of the"),
        ({"modes": ["2-9"]}, "unknown mode '2-9'"),
        ({"samples": 0}, "samples is 0; expected 1 or more"),
        ({"seqlen": 70000}, r"the text has 65536 tokens; 3 samples of 70000 need 210000"),
        ({"prompt": "abc", "seqlen": 9, "samples": None}, r"the text has 3 tokens; 1 samples of 9 need 9"),
        ({"prompt": "", "seqlen": None, "samples": None}, "the prompt is empty"),
        ({"prompt": "abc"}, r"prompt and samples were both given, and a prompt is one sample of its own\. Leave one"),
        ({"prompt": "abc", "samples": None, "data": "evaluation"}, r"prompt and data were both given"),
        ({"batches": [torch.zeros(1, 4, dtype=torch.int64)]}, r"batches and samples were both given"),
        ({"output_file": "x.npz"}, r"an output file is for the layout npz, and the layout is safetensors"),
        ({"compile": True, "model": probe.record_outputs(Stack(2)), "layers": ["all"]}, "layers were chosen when"),
        ({"data": "nowhere.txt"}, "text file 'nowhere.txt' does not exist"),
        ({"device": "cuda"}, "device 'cuda' is not present on this machine"),
        ({"device": "recorded:x"}, "is a recording already"),
        ({"output_file": "../x.npz", "layout": "npz"}, "Expected a plain name that ends in .npz"),
        ({"output_file": "x.npy", "layout": "npz"}, "Expected a plain name that ends in .npz"),
        ({"output_file": "-x$.npz", "layout": "npz"}, "Expected a plain name that ends in .npz"),
        ({"model": Stack(2), "pretrained_dir": "x"}, "a model and a folder of weights were both given"),
        ({"model": "tiny-llama", "modes": ["2-1"]}, "quantizes Mamba blocks and tiny-llama has none"),
        ({"model": "tiny-llama", "modes": ["fp32"], "taps": ["scan"]}, "tiny-llama has no tap 'scan' at these layers. "
         "It has: inputs, embedding, final_norm, logits"),
    ],
)  # fmt: skip
def test_mistakes_are_told_and_leave_nothing(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probe.record(tmp_path / "r", **({"modes": ["fp32"], **SMALL} | wrong))
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Stack brings no tokenizer\. Give the tokens themselves: batches="):
        probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"])


def test_a_folder_of_weights_is_recorded_under_the_given_name(tmp_path: Path) -> None:
    weights = Path(probe.models.loading.FOLDER) / "tiny-mamba"  # type: ignore[attr-defined]
    recording = probe.record(
        tmp_path / "r", model="quamba-130m", pretrained_dir=str(weights), modes=["fp32"], layout="npz", **SMALL
    )
    assert recording.manifest.model == "quamba-130m"
    stats = json.loads((tmp_path / "r" / "first_layer_io_all_modes_stats.json").read_text())
    assert (stats["model"], stats["pretrained_dir"]) == ("quamba-130m", str(weights))
