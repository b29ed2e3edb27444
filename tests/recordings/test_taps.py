"""Taps: what hooks see; hooks that do not fire are told; a model of record_outputs returns its layers itself."""

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
from probe.models.loading import Loaded
from probe.recordings import (
    RecordingError,
    read_recording,
)
from probe.running.capture import UncoveredError
from probe.running.recipes import Recipe, apply
from tests.recordings.examples import SMALL, Log
from tests.recordings.models import Deaf, Stack, Twice

ALL_TAPS = ["inputs", "mixer", "conv1d", "scan", "embedding", "final_norm", "logits"]

IDS = [torch.arange(12).view(2, 6), torch.arange(6).view(1, 6)]

TAPS = ["inputs", "embedding", "final_norm"]


@pytest.mark.parametrize("layout", ["safetensors", "npy", "npz", "pt"])
def test_every_tap_is_what_hooks_of_ones_own_see(tmp_path: Path, loaded: Loaded, layout: str) -> None:
    """The oracle registers its own hooks on its own copy; no code of the recorder takes part."""
    log = Log()
    recording = probe.record(
        tmp_path / "r",
        model=loaded,
        modes=["fp32", "2-1"],
        formats=["fp8_e4m3"],
        layers=["first", "last"],
        taps=ALL_TAPS,
        batch_size=2,
        layout=layout,
        progress=log,
        **SMALL,
    )
    batches = probe.token_batches(probe.text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=2)
    for recipe in (Recipe("fp32"), Recipe("2-1", "fp8_e4m3")):
        twin: Any = apply(loaded.model, recipe)
        seen: dict[str, list[Tensor]] = {}

        def keep(name: str, module: Any, seen: dict[str, list[Tensor]] = seen) -> None:
            module.register_forward_hook(lambda m, i, o: seen.setdefault(name, []).append(o.clone()))

        keep("embedding.output", twin.backbone.embeddings)
        keep("final_norm.output", twin.backbone.norm_f)
        for index in (0, 3):
            block = twin.backbone.layers[index]
            block.register_forward_hook(
                lambda m, i, o, n=f"layer_{index}.input", s=seen: s.setdefault(n, []).append(i[0].clone())
            )
            keep(f"layer_{index}.output", block)
            keep(f"layer_{index}.mixer.output", block.mixer)
            keep(f"layer_{index}.conv1d.output", block.mixer.sites["conv1d"]["output"])
            keep(f"layer_{index}.scan.input", block.mixer.sites["scan"]["u"])
            keep(f"layer_{index}.scan.output", block.mixer.sites["scan"]["y"])
        seen["logits"] = [twin(batch, use_cache=False).logits for batch in batches]
        assert set(recording.names(str(recipe))) == set(seen)
        for name, tensors in seen.items():
            assert torch.equal(recording.tensor(str(recipe), name), torch.cat(tensors)), (recipe, name)
    assert recording == read_recording(tmp_path / "r")
    names = recording.names("fp32")
    assert names[:3] == ("embedding.output", "layer_0.input", "layer_0.conv1d.output")
    assert names[-3:] == ("layer_3.output", "final_norm.output", "logits")
    assert log.total == len(log.steps) == 2 * 2 * len(names)
    assert "[2/2] mode_2_1-fp8_e4m3" in log.lines


def test_modules_that_run_twice_or_never_are_told_and_leave_nothing(tmp_path: Path, ids: list[Tensor]) -> None:
    with pytest.raises(RecordingError, match=r"fp32: layer_0\.output has 4 samples of .*Expected 3 of one dtype"):
        probe.record(tmp_path / "r", model=Twice(2), modes=["fp32"], batches=ids)
    with pytest.raises(UncoveredError, match="1 of 2 selected layers never ran: layer_1"):
        probe.record(tmp_path / "r", model=Deaf(2), modes=["fp32"], layers=["all"], batches=ids)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------ compiled graphs


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

    monkeypatch.setattr(torch, "compile", eager)
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
    monkeypatch.setattr(torch, "compile", lambda model: true(model, backend=refuse))
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
