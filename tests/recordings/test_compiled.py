"""Compiled graphs: hooks that do not fire are told; a model of record_outputs returns its layers itself."""

import copy
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import probe
from probe.recordings import RecordingError, read_recording, recorder as recorder_module
from probe.running.capture import UncoveredError
from tests.recordings.models import Stack

IDS = [torch.arange(12).view(2, 6), torch.arange(6).view(1, 6)]
TAPS = ["inputs", "embedding", "final_norm"]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled(model: nn.Module, **settings: Any) -> nn.Module:
    result = torch.compile(model, **settings)
    assert isinstance(result, nn.Module)
    return result


@torch.no_grad()
def test_hooks_on_a_graph_that_was_compiled_before_are_told_and_leave_nothing(tmp_path: Path) -> None:
    model = compiled(Stack(2), backend="eager")
    model(IDS[0])
    with pytest.raises(UncoveredError, match=r"2 of 2 selected layers never ran: .*\(probe\.record_outputs"):
        probe.record(tmp_path / "r", model=model, layers=["all"], batches=[IDS[0]])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_a_model_returns_its_layers_in_one_graph(tmp_path: Path, backend: str | None) -> None:
    expected = probe.record(tmp_path / "plain", model=Stack(3), modes=["fp32"], layers=["all"],
                            taps=[*TAPS, "logits"], batches=IDS)  # fmt: skip
    model: nn.Module = probe.record_outputs(Stack(3), ["all"], taps=TAPS)
    if backend:
        model = compiled(model, backend=backend, fullgraph=True)
    found = probe.record(tmp_path / "r", model=model, batches=IDS)
    assert found.names("fp32") == expected.names("fp32")
    for name in expected.names("fp32"):
        assert torch.allclose(found.tensor("fp32", name), expected.tensor("fp32", name), atol=1e-6), name
    facts = found.manifest.recipes["fp32"]
    assert (facts.applied, facts.compiled) == ("before", backend is not None)
    assert found.manifest.fingerprint == expected.manifest.fingerprint
    assert found.manifest.model == "Stack"


@torch.no_grad()
def test_a_model_of_transformers_returns_its_layers_in_one_graph() -> None:
    llama = probe.load_model("tiny-llama").model
    with probe.capture(llama, ["all"]) as captured:
        logits = llama(IDS[0], use_cache=False).logits
    model = compiled(probe.record_outputs(copy.deepcopy(llama), ["all"]), backend="eager", fullgraph=True)
    found = model(IDS[0])
    assert list(found) == [*(f"layer_{index}.output" for index in range(4)), "logits"]
    assert torch.equal(found["logits"], logits)
    for name, (tensor,) in captured.tensors.items():
        assert torch.equal(found[name], tensor)


def test_a_model_that_adds_in_place_returns_what_its_layer_gave() -> None:
    class InPlace(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.layers[0](self.embedding(ids))
            x += 1
            logits: Tensor = self.head(self.norm(x))
            return logits

    model = InPlace(1)
    with torch.no_grad():
        expected = model.layers[0](model.embedding(IDS[0]))
        assert torch.equal(probe.record_outputs(model)(IDS[0])["layer_0.output"], expected)


def test_a_model_that_is_run_as_it_is_is_one_recipe(tmp_path: Path) -> None:
    model = probe.record_outputs(Stack(2))
    with pytest.raises(ValueError, match=r"it is one recipe, but fp32, bf16 were asked for\. Name the one that"):
        probe.record(tmp_path / "r", model=model, modes=["fp32", "bf16"], batches=IDS)
    probe.record(tmp_path / "r", model=model, modes=["linear_w"], formats=["fp8_e4m3"], batches=IDS)
    assert read_recording(tmp_path / "r").recipes == ("linear_w-fp8_e4m3",)


def test_the_option_compiles_every_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true, graphs = torch.compile, []

    def eager(model: nn.Module) -> Any:
        graphs.append(model)
        return true(model, backend="eager")

    monkeypatch.setattr(recorder_module.torch, "compile", eager)
    found = probe.record(tmp_path / "r", model=Stack(2), modes=["fp32", "bf16"], batches=IDS, compile=True)
    assert len(graphs) == 2
    plain = probe.record(tmp_path / "plain", model=Stack(2), modes=["fp32", "bf16"], batches=IDS)
    for recipe in ("fp32", "bf16"):
        assert found.manifest.recipes[recipe].compiled
        assert found.names(recipe) == plain.names(recipe) == ("layer_0.output", "layer_1.output")
        for name in plain.names(recipe):
            assert torch.equal(found.tensor(recipe, name), plain.tensor(recipe, name))
    with pytest.raises(RecordingError, match="has fp32 already"):
        probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=IDS)


def test_a_graph_that_cannot_be_compiled_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    true = torch.compile
    monkeypatch.setattr(recorder_module.torch, "compile", lambda model: true(model, backend=refuse))
    with pytest.raises(ValueError, match=r"the model cannot be compiled here: .*no compiler here.* without --comp"):
        probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=IDS, compile=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_layers_too(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while inductor is imported
        found = probe.record(tmp_path / "r", model=Stack(1, width=16), modes=["fp32"], batches=IDS[:1], compile=True)
    plain = probe.record(tmp_path / "plain", model=Stack(1, width=16), modes=["fp32"], batches=IDS[:1])
    assert found.manifest.recipes["fp32"].compiled
    assert torch.allclose(found.tensor("fp32", "layer_0.output"), plain.tensor("fp32", "layer_0.output"), atol=1e-5)
