"""Checkpoints of other tools in the gate, each with the real library: missing, accepted, passing, broken in a layer.

And a factory that returns a quantized model, beside its float original.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.models.quantized_models import break_layer, by_compressed_tensors, by_quanto, by_torchao, write_gguf
from tests.plugin.conftest import Run
from tests.plugin.project import lines_of

LLAMA: dict[str, object] = {"model": '"tiny-llama"', "formats": '["int8"]'}


def _broken_gguf(file: Path) -> None:
    def change(name: str, weight: np.ndarray) -> np.ndarray:
        return np.roll(weight, 1, 0) if name == "model.layers.2.mlp.up_proj.weight" else weight

    write_gguf(file, Kind.Q8_0, change=change)


#: By the name of the checkpoint: how it is made, how it is broken in layer 2, and what the weights line has.
LIVES: dict[str, tuple[Callable[[Path], object], Callable[[Path], None], str]] = {
    "int8": (by_torchao, lambda place: break_layer(place, "torchao", 2), "by torchao (Int8WeightOnlyConfig)"),
    "fp8": (
        lambda place: by_torchao(place, scheme="fp8"),
        lambda place: break_layer(place, "torchao", 2),
        "by torchao (Float8WeightOnlyConfig)",
    ),
    "quanto": (by_quanto, lambda place: break_layer(place, "quanto", 2), "by quanto (qint8)"),
    "int4": (
        by_compressed_tensors,
        lambda place: break_layer(place, "compressed-tensors", 2),
        "by compressed-tensors (int4 group 32)",
    ),
    "q8.gguf": (lambda place: write_gguf(place, Kind.Q8_0), _broken_gguf, "by GGUF (10 tensors F32, 28 tensors Q8_0)"),
}


@pytest.mark.parametrize("name", LIVES)
def test_a_checkpoint_is_missing_accepted_passes_and_broken_is_red_in_its_layer(
    name: str, project: Run, pytester: pytest.Pytester
) -> None:
    make, damage, told = LIVES[name]
    make(pytester.path / "out" / name if name != "q8.gguf" else pytester.path / name)
    source = f"./out/{name}" if name != "q8.gguf" else f"./{name}"
    mode = f"checkpoint_{name.replace('.', '_')}"
    run = {**LLAMA, "modes": f'["checkpoint:{source}"]'}

    missing = project(**run)
    assert missing.ret == pytest.ExitCode.TESTS_FAILED
    missing.stdout.fnmatch_lines([f"*{mode}-layer_0-cpu has no baseline*"])
    updated = project("--update-baselines", **run)
    assert updated.ret == 0
    assert [file.name for file in pytester.path.glob("baselines/tiny-llama/cpu/*")] == [f"{mode}.json"]
    assert str(pytester.path) not in next(pytester.path.glob("baselines/*/cpu/*.json")).read_text()
    passed = project("-v", **run)
    assert passed.ret == 0
    assert told in "\n".join(passed.outlines)

    damage(pytester.path / source)
    broken = project(**run)
    assert broken.ret == pytest.ExitCode.TESTS_FAILED
    text = "\n".join(lines_of(broken.outlines, f"{mode}-layer_2-cpu "))
    assert "own: layer_2" in text
    assert "injected.mse" in text
    assert not any(line.startswith((f"{mode}-layer_0-cpu ", f"{mode}-layer_1-cpu ")) for line in broken.outlines)


QUANTIZED = """
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from network import make


def quantized():
    model = make()
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda one, name: isinstance(one, nn.Linear) and name != "head")
    return model
"""


def test_a_factory_may_return_a_quantized_model_beside_its_reference(project: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(others=QUANTIZED)
    run: dict[str, object] = {"model": '"others:quantized"', "modes": None}
    refused = project(**run)
    assert refused.ret != 0
    told = 'Name its float original too, as reference = "package.module:factory" in [[]tool.probe] or --reference*'
    refused.stdout.fnmatch_lines([f"*{told}"])

    run["reference"] = '"network:make"'
    missing = project(**run)
    missing.stdout.fnmatch_lines(["*checkpoint_quantized-layer_0-cpu has no baseline*"])
    assert project("--update-baselines", **run).ret == 0
    assert [file.name for file in pytester.path.glob("baselines/*/cpu/*")] == ["checkpoint_quantized.json"]
    assert project(**run).ret == 0
    narrowed = project("--probe-modes", "given", **run)
    assert narrowed.ret == 0
    narrowed.stdout.fnmatch_lines(["*4 of 4 stored cases compared*"])

    pytester.makepyfile(
        others=QUANTIZED.replace("    return", "    model.layers[1].up.weight.qdata[0] += 1\n    return")
    )
    broken = project(**run)
    assert broken.ret == pytest.ExitCode.TESTS_FAILED
    assert "own: layer_1" in "\n".join(lines_of(broken.outlines, "checkpoint_quantized-layer_1-cpu "))


def test_the_reference_of_the_settings_is_not_that_of_another_model(project: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(others=QUANTIZED)
    run: dict[str, object] = {"model": '"others:quantized"', "reference": '"network:make"', "modes": '["linear_w"]'}
    result = project("--probe-model", "others:quantized", "--collect-only", "-q", **run)
    assert any("linear_w-layer_0-cpu-int8" in line for line in result.outlines)
    other = project("--probe-model", "network:make", "--probe-modes", "given", **run)
    other.stdout.fnmatch_lines(["*mode given is the model itself, quantized already, beside its float original*"])
