"""What the tests of recordings share: small recordings of made-up numbers, and what a device would do."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probe.data.calls import input_fingerprint
from probe.gate.measured_layers import Observation
from probe.gate.recorded_observations import observe_recording
from probe.models.loading import Loaded
from probe.recordings import Recording, RecordingError, read_recording, write_recording
from probe.running.calibration import Calibration
from probe.running.capture import capture
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference

Parts = dict[str, list[Tensor]]
FLOAT, QUANTIZED, CALIBRATED = Recipe("fp32"), Recipe("2-1", "fp8_e4m3"), Recipe("0", "int8")
RECIPES = (FLOAT, Recipe("fp16"), Recipe("bf16"), QUANTIZED, CALIBRATED)
RECIPE = str(QUANTIZED)
LAYERS = ("layer_0", "layer_1", "layer_2", "layer_3")
AGAIN = "Copy the recording again from where it was made, or make it again there"


@torch.no_grad()
def run(
    loaded: Loaded, recipe: Recipe, batches: list[Tensor], calibration: Calibration | None, *, inputs: bool = False
) -> Parts:
    """What a device would do: apply the recipe, run, capture."""
    twin = apply(loaded.model, recipe, calibration)
    with capture(twin, inputs=inputs) as captured:
        logits = [twin(batch, use_cache=False).logits for batch in batches]
    return {**captured.tensors, "logits": logits}


def write(folder: Path, loaded: Loaded, batches: list[Tensor], parts: dict[Recipe, Parts], **more: Any) -> Recording:
    facts = {"model": loaded.name, "model_fingerprint": loaded.fingerprint, "device": "neuron trn1"} | more
    return write_recording(folder, parts.items(), batches=batches, **facts)


def small_parts(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> Parts:
    generator = torch.Generator().manual_seed(seed)
    layers = {
        f"layer_{i}.output": [torch.randn(n, 4, 5, generator=generator).to(dtype) for n in (2, 1)] for i in (2, 10)
    }
    return {**layers, "logits": [torch.randn(n, 4, 7, generator=generator) for n in (2, 1)]}


SMALL_TOKENS = [torch.arange(8).view(2, 4), torch.arange(4).view(1, 4)]


def write_small(folder: Path, seed: int = 0, **more: Any) -> Recording:
    facts: dict[str, Any] = {"model": "small", "device": "cpu", "batches": SMALL_TOKENS} | more
    return write_recording(folder, [(FLOAT, small_parts(seed)), (QUANTIZED, small_parts(seed + 1))], **facts)


def seen(recording: Recording, recipe: Recipe, reference: Reference, **more: Any) -> dict[str, Observation]:
    facts = {"model_fingerprint": reference.model, "data_fingerprint": input_fingerprint(reference.batches)} | more
    return observe_recording(recording, recipe, reference, **facts)


def only(kinds: tuple[str, ...], named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name.split(".")[0] in kinds}


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest."""
    file = folder / "manifest.json"
    document = json.loads(file.read_bytes())
    change(document)
    file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def put_file(folder: Path, data: bytes, recipe: Recipe = QUANTIZED) -> None:
    """Other bytes for the file of a recipe, and a manifest that says so."""
    (folder / f"{recipe}.safetensors").write_bytes(data)
    facts = {"bytes": len(data) or 1, "sha256": hashlib.sha256(data).hexdigest()}
    edit(folder, lambda document: document["files"].update({f"{recipe}.safetensors": facts}))


SMALL: dict[str, Any] = {"samples": 3, "seqlen": 16, "calib_data_num": 2, "calib_seqlen": 16}


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[tuple[str, str]] = []
        self.total = 0

    def line(self, text: str) -> None:
        self.lines.append(text)

    def begin(self, steps: int) -> None:
        self.total = steps

    def step(self, recipe: str, name: str) -> None:
        self.steps.append((recipe, name))


def same(one: Recording, other: Recording) -> None:
    assert one.recipes == other.recipes
    for recipe in one.recipes:
        assert one.names(recipe) == other.names(recipe)
        for name in one.names(recipe):
            assert torch.equal(one.tensor(recipe, name), other.tensor(recipe, name)), (recipe, name)


def is_refused(folder: Path) -> bool:
    """Whether reading is a RecordingError that names the folder and that a terminal can show."""
    try:
        read_recording(folder)
    except RecordingError as problem:
        return str(folder) in str(problem) and str(problem).isprintable()
    return False


def is_sound(folder: Path) -> bool:
    """Whether every layer can be read."""
    recording = read_recording(folder)
    names = [(recipe, f"{label}.output") for recipe in recording.recipes for label in recording.layers(recipe)]
    return all(recording.tensor(*name).shape == (3, 4, 5) for name in names)
