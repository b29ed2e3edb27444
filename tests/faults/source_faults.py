"""Faults of what every recipe is made from: the float reference, the configuration, formats, tokens, calibration."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import probe.gate.matrix
import probe.models.forward
import probe.models.loading
import probe.running.calibration
import probe.running.reference
from probe.data.samples import TextSamples
from probe.formats import FORMATS
from probe.models.loading import EMBEDDED
from probe.models.scans import SCANS
from probe.numerics.fast import FLOAT32, FLOAT64, PLANS, Plan
from probe.numerics.kernels import mx
from probe.numerics.observers import MinMaxObserver, PercentileObserver
from probe.running.modes import find_mode
from probe.running.recipes import Recipe
from probe.running.reference import Reference
from tests.faults.breaking import Patient, applying, damaged, during, replacing, with_functions
from tests.faults.catalogue import ERROR, FP4, FP8, INT8, MOVED, MXINT8, REFERENCE, WideFault

LLAMA_W, LLAMA_WA = "linear_w-fp8_e4m3", "linear_wa-int8"


@contextmanager
def quantized_reference() -> Iterator[None]:
    """Mode fp32 runs the quantized checkpoint."""

    def broken(real: Any, model: nn.Module, recipe: Recipe, calibration: Any = None) -> nn.Module:
        twin: nn.Module = real(model, recipe, calibration)
        return real(model, Recipe("2-1", "fp8_e4m3")) if find_mode(recipe.mode).is_reference else twin

    with applying(broken):
        yield


@contextmanager
def changed_folder(model: str, change: Callable[[Path], None]) -> Iterator[None]:
    """An embedded model is read from a folder in which a file has changed."""
    row = EMBEDDED[model]
    assert row.folder is not None
    with tempfile.TemporaryDirectory() as name, ExitStack() as undo:
        folder = Path(name) / model
        shutil.copytree(row.folder, folder)
        change(folder)
        undo.callback(probe.gate.matrix._load.cache_clear)
        undo.enter_context(mock.patch.dict(EMBEDDED, {model: replace(row, folder=folder)}))
        probe.gate.matrix._load.cache_clear()
        yield


def config(**keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        facts = json.loads(file.read_text())
        assert set(keys) <= set(facts), keys
        file.write_text(json.dumps({**facts, **keys}))

    return change


def one_weight(folder: Path) -> None:
    """A checkpoint in which one value has moved by one ulp."""
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "out_proj" in name)
    tensors[name][3, 5] = torch.nextafter(tensors[name][3, 5], torch.tensor(torch.inf))
    save_file(tensors, file, metadata={"format": "pt"})


@contextmanager
def row(name: str, **changes: Any) -> Iterator[None]:
    """A row of the table of formats says something else, and all that is made from it follows."""
    changed = replace(FORMATS[name], **changes)
    machines = {True: FLOAT64, False: FLOAT32}
    plans = {key: Plan.of(changed, machines[key[1]], key[2]) for key in PLANS if key[0] == name}
    with mock.patch.dict(FORMATS, {name: changed}), mock.patch.dict(PLANS, plans):
        yield


@contextmanager
def running(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Whatever runs, the reference or a copy, runs on other tokens than it is said to."""
    real = probe.models.forward.output_of
    with replacing(real, lambda model, batch: real(model, change(batch))):
        yield


def twice(batch: Tensor) -> Tensor:
    """The first sample again in the place of the second."""
    return torch.cat([batch[:1], batch[:1], batch[2:]]) if batch.shape[0] > 1 else batch


@contextmanager
def stale(layer: str) -> Iterator[None]:
    """The capture of one layer is left over from a run on another text."""
    real = probe.running.reference.run_reference

    def run(model: Any, batches: Any, *args: Any, **kwargs: Any) -> Reference:
        made: Reference = real(model, batches, *args, **kwargs)
        if layer not in made.layers:
            return made
        other = real(model, [batch.roll(7, -1) for batch in batches], *args, **kwargs)
        names = [name for name in made.tensors if name.startswith(f"{layer}.")]
        return replace(made, tensors={**made.tensors, **{name: other.tensors[name] for name in names}})

    with replacing(real, run):
        yield


@contextmanager
def narrow_reference(dtype: torch.dtype) -> Iterator[None]:
    """The float model runs in another dtype, as after a changed default."""
    with damaged(lambda patient: patient.twin.to(dtype), 0, side="reference"):
        yield


def gate_sigmoid(patient: Patient) -> None:
    with_functions(silu=torch.sigmoid)(patient)


def no_delta(patient: Patient) -> None:
    """The scan, the definition itself: the drive lacks delta."""

    def scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any = None) -> Any:
        return SCANS["sequential"](u / delta, delta, A, B, C, state)

    during(patient.mixer, SCANS={**SCANS, "sequential": scan})


def not_causal(patient: Patient) -> None:
    """Attention sees the tokens to come."""
    real = patient.block.self_attn.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        patient.block.self_attn.is_causal = False
        return real(*args, **{**kwargs, "attention_mask": None})

    patient.block.self_attn.forward = forward


@contextmanager
def observed(make: Callable[[float], Any]) -> Iterator[None]:
    """Calibration takes its quantiles in another way."""
    with mock.patch.object(probe.running.calibration, "PercentileObserver", make):
        yield


class MovingAverage(MinMaxObserver):
    """A moving average of the largest values of the samples, not the largest of all."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.tensor(0.0, dtype=torch.float64)

    def _take(self, x: Tensor, minimum: Tensor, maximum: Tensor) -> None:
        super()._take(x, minimum, maximum)
        for sample in x.double().abs().flatten(1).amax(1):
            self.average = torch.lerp(self.average, sample, 0.1) if self.average else sample

    @property
    def amax(self) -> Tensor:
        return self.average


@contextmanager
def averaged() -> Iterator[None]:
    with mock.patch.object(probe.running.calibration, "MinMaxObserver", MovingAverage):
        yield


@contextmanager
def calibrating(change: Callable[[list[Tensor]], list[Tensor]]) -> Iterator[None]:
    """Calibration runs on other batches than it is said to."""
    real = probe.running.calibration.calibrate

    def calibrate(model: Any, batches: Any, **kwargs: Any) -> Any:
        return real(model, change(list(batches)), **kwargs)

    with replacing(real, calibrate):
        yield


def half(batches: list[Tensor]) -> list[Tensor]:
    """The second half of every batch is dropped."""
    return [batch[: max(1, batch.shape[0] // 2)] for batch in batches]


@contextmanager
def other_text() -> Iterator[None]:
    """The text is read from one byte further on."""
    real = TextSamples.batches

    def batches(self: TextSamples, tokenizer: Any) -> list[Tensor]:
        return [batch.roll(1, -1) for batch in real(self, tokenizer)]

    with mock.patch.object(TextSamples, "batches", batches):
        yield


@contextmanager
def doubled_kernel() -> Iterator[None]:
    """The machine code of the kernel gives twice the values."""
    real = mx.write_values

    def doubled(x: Any, out: Any, *rest: Any) -> None:
        real(x, out, *rest)
        if out.dtype == np.int32:
            out.view(np.float32)[:] *= 2

    with mock.patch.object(mx, "write_values", doubled):
        yield


def in_bfloat16(patient: Patient) -> None:
    patient.twin.to(torch.bfloat16)


def both(damage: Callable[[Patient], None], layer: int) -> Callable[[], AbstractContextManager[None]]:
    """The code that the reference and the copies share."""
    return lambda: damaged(damage, layer, side="both")


def reference(name: str, recipe: str, applied: Callable[[], Any], cause: str) -> WideFault:
    model = "tiny-llama" if recipe.startswith("linear") else "tiny-mamba"
    return WideFault(name, recipe, applied, cause, REFERENCE, MOVED, model)


REFERENCES = (
    reference(
        "reference quantized",
        INT8,
        quantized_reference,
        "reference, from layer_0 on; its mixer.A_log lies on the grid of fp8_e4m3: the reference is quantized",
    ),
    reference(
        "reference in bf16",
        FP8,
        lambda: narrow_reference(torch.bfloat16),
        "reference, from embedding on; its weight is bfloat16, not float32",
    ),
    reference(
        "reference in fp16, llama",
        LLAMA_W,
        lambda: narrow_reference(torch.float16),
        "reference, from embedding on; its weight is float16, not float32",
    ),
    reference(
        "gate sigmoid on both sides",
        FP8,
        both(gate_sigmoid, 1),
        "reference, from layer_1 on; weights, configuration and its input are the stored ones: look at its code",
    ),
    reference(
        "scan without delta on both sides",
        INT8,
        both(no_delta, 2),
        "reference, from layer_2 on; weights, configuration and its input are the stored ones: look at its code",
    ),
    reference(
        "attention not causal on both sides",
        LLAMA_WA,
        both(not_causal, 1),
        "reference, from layer_1 on; weights, configuration and its input are the stored ones: look at its code",
    ),
    reference(
        "a sample evaluated twice",
        INT8,
        lambda: running(twice),
        "reference, from embedding on; other tokens: sample 1 is sample 0",
    ),
    reference(
        "stale capture",
        INT8,
        lambda: stale("layer_2"),
        "reference, from layer_2 on; its input moved, what comes before did not: the capture, or what lies between",
    ),
    reference(
        "config.json changed",
        INT8,
        lambda: changed_folder("tiny-mamba", config(layer_norm_epsilon=1e-3)),
        "reference, from layer_0 on; configuration changed: layer_norm_epsilon 1e-05 -> 0.001",
    ),
    reference(
        "config.json changed, llama",
        LLAMA_W,
        lambda: changed_folder("tiny-llama", config(rms_norm_eps=1e-3)),
        "reference, from layer_0 on; configuration changed: rms_norm_eps 1e-06 -> 0.001",
    ),
    reference(
        "rope_theta changed",
        LLAMA_WA,
        lambda: changed_folder("tiny-llama", config(rope_parameters={"rope_theta": 500000.0, "rope_type": "default"})),
        "reference, from layer_0 on; configuration changed: rope_parameters.rope_theta 10000.0 -> 500000.0",
    ),
)
ERRORS = (
    WideFault(
        "another checkpoint",
        INT8,
        lambda: changed_folder("tiny-mamba", one_weight),
        "BaselineError: the baselines of tiny-mamba were made with another input: input.model *",
        ERROR,
    ),
    WideFault(
        "another text",
        FP8,
        other_text,
        "BaselineError: the baselines of tiny-mamba were made with another input: input.tokens *",
        ERROR,
    ),
)
KERNELS = (WideFault("kernel x 2", FP8, doubled_kernel, "site in_proj.input; the scale is off by a factor of 2^1"),)
FORMAT_ROWS = (
    WideFault(
        "format row: e4m3 up to 240",
        FP8,
        lambda: row("fp8_e4m3", max=240.0),
        "format fp8_e4m3 changed: max 448.0 -> 240.0",
    ),
    WideFault(
        "format row: fp4 blocks of 16",
        FP4,
        lambda: row("fp4_e2m1", block_size=16),
        "format fp4_e2m1 changed: block 32 -> 16",
    ),
    WideFault(
        "format row: mxint8 up to 126",
        MXINT8,
        lambda: row("mxint8", max=126 / 64),
        "format mxint8 changed: max 1.984375 -> 1.96875",
    ),
    WideFault(
        "format row: e4m3 up to 240, llama",
        LLAMA_W,
        lambda: row("fp8_e4m3", max=240.0),
        "format fp8_e4m3 changed: max 448.0 -> 240.0",
        model="tiny-llama",
    ),
)
CALIBRATION = (
    WideFault(
        "calibration on half the data",
        INT8,
        lambda: calibrating(half),
        "calibration changed: # of # scales, most # -> # at backbone.layers.2.mixer.scan.y",
    ),
    WideFault(
        "calibration on half the data, llama",
        LLAMA_WA,
        lambda: calibrating(half),
        "calibration changed: # of # scales, most # -> # at linear model.layers.1.mlp.down_proj.input",
        model="tiny-llama",
    ),
    WideFault(
        "calibration with a moving average",
        INT8,
        averaged,
        "calibration changed: # of # scales, most # -> # at backbone.layers.2.mixer.scan.y",
    ),
    WideFault(
        "minmax in calibration",
        INT8,
        lambda: observed(lambda alpha: MinMaxObserver()),
        "calibration of conv1d.output; amax # is the largest value (minmax), not a percentile",
    ),
    WideFault(
        "another percentile",
        INT8,
        lambda: observed(lambda alpha: PercentileObserver(0.9999)),
        "calibration of conv1d.output; amax #, but the 0.9995 quantile of this text is #",
    ),
    WideFault(
        "fp16 run in bf16",
        "fp16",
        partial(damaged, in_bfloat16, 0),
        "embedding; weight: is bfloat16, expected float16",
        label="embedding",
    ),
)
