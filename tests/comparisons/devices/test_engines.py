"""Independent engines as devices: differences are noise and judged so; what is planted is found among it."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probe import Recipe, diff
from tests.comparisons.devices.cases import Shelf, faulty, plain
from tests.comparisons.devices.engines import Tensors, run, threads
from tests.comparisons.devices.models import prompt, shared

FLOAT = Recipe("fp32")
SEED = 5
has_onnx = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not has_onnx, reason="the extra onnx is not installed")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return Shelf(tmp_path)


def judged(shelf: Shelf, a: Tensors, b: Tensors) -> Any:
    ids = prompt(SEED)
    return diff(shelf.kept(a, ids, FLOAT), shelf.kept(b, ids, FLOAT))


@needs_onnx
@pytest.mark.parametrize("name", ["small", "tiny-llama"])
def test_onnxruntime_differs_by_noise(shelf: Shelf, name: str) -> None:
    from tests.comparisons.devices.onnx_engine import through_onnxruntime

    found = judged(shelf, plain(name, SEED), through_onnxruntime(name, prompt(SEED)))
    assert found.verdict.kind == "dtype noise"
    assert found.passed
    assert 1e-8 < max(layer.error for layer in found.layers) < 1e-5  # another engine, and not by accident the same


@needs_onnx
@pytest.mark.parametrize("name", ["small", "tiny-llama"])
@pytest.mark.parametrize("fault", ["epsilon", "activation", "scales of channels", "half layer"])
def test_a_fault_is_found_against_onnxruntime(shelf: Shelf, name: str, fault: str) -> None:
    from tests.comparisons.devices.onnx_engine import through_onnxruntime

    found = judged(shelf, through_onnxruntime(name, prompt(SEED)), faulty(name, fault, 2, SEED))
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "layer_2")


class Returning(nn.Module):
    """The small model as one graph that returns what its layers gave: hooks do not fire in a compiled one."""

    def __init__(self, model: Any, layers: int) -> None:
        super().__init__()
        self.model, self.count = model, layers

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        found = {"embedding.output": self.model.embedding(ids)}
        x = found["embedding.output"]
        for index in range(self.count):
            x = self.model.layers[index](x)
            found[f"layer_{index}.output"] = x
        return found


def test_a_compiled_graph_differs_by_noise_or_not_at_all(shelf: Shelf) -> None:
    compiled = torch.compile(Returning(shared("small"), 2), backend="aot_eager")
    with torch.no_grad():
        b = compiled(prompt(SEED))
    a = {name: plain("small", SEED)[name] for name in b}
    assert judged(shelf, a, b).verdict.kind in ("identical", "dtype noise")


@pytest.mark.skipif("PROBE_INDUCTOR" not in os.environ, reason="compiling takes half a minute: set PROBE_INDUCTOR=1")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_inductor_differs_by_noise(shelf: Shelf) -> None:
    compiled = torch.compile(Returning(shared("small"), 2))
    with torch.no_grad():
        b = compiled(prompt(SEED))
    a = {name: plain("small", SEED)[name] for name in b}
    assert judged(shelf, a, b).verdict.kind == "dtype noise"


@pytest.mark.parametrize("count", [2, 3])
def test_other_thread_counts_are_identical_or_noise(shelf: Shelf, count: int) -> None:
    with threads(count):
        b = run(shared("tiny-llama"), prompt(SEED))
    assert judged(shelf, plain("tiny-llama", SEED), b).verdict.kind in ("identical", "dtype noise")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gone", [(), ("embedding.output",), ("embedding.output", "final_norm.output", "logits")])
def test_narrow_devices_are_noise_with_whatever_was_recorded(
    shelf: Shelf, dtype: torch.dtype, gone: tuple[str, ...]
) -> None:
    def some(tensors: Tensors, change: Callable[[Tensor], Tensor] = lambda x: x) -> Tensors:
        return {name: change(x) for name, x in tensors.items() if name not in gone}

    import copy

    narrow = run(copy.deepcopy(shared("small")).to(dtype), prompt(SEED))
    a = some(plain("small", SEED))
    assert judged(shelf, a, some(narrow)).verdict.kind == "dtype noise"
    hidden = judged(shelf, a, some(narrow, Tensor.float)).verdict  # numpy has no bfloat16: kept as float32
    assert hidden.kind == "dtype noise"
    assert hidden.cause.startswith("computed in ")
    assert hidden.cause.endswith("though recorded as float32")


def test_a_half_first_layer_is_distinguished_from_a_device_that_is_half_throughout(shelf: Shelf) -> None:
    found = judged(shelf, plain("tiny-llama", SEED), faulty("tiny-llama", "half matrices", 0, SEED))
    assert (found.verdict.kind, found.verdict.layer) == ("device fault", "layer_0")
