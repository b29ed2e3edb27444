"""checkpoint:FOLDER as a mode, and modes of users that quantize in place with a library: names, recipes, the counts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from optimum.quanto import freeze, qint8, quantize
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import probe
from probe.files.checked_json import Node
from probe.models.loading import Loaded
from probe.running.calibration import Calibration
from probe.running.declarations import DeclaredMode
from probe.running.measurement import NotAppliedError
from probe.running.measurement_job import measure_all
from probe.running.modes import (
    MODES,
    Mode,
    declare_modes,
    expand_modes,
    find_mode,
    given_modes,
    register_mode,
    unregister_mode,
)
from probe.running.recipes import Recipe, apply, check_recipes, recipes_of
from probe.running.weights import Weights, count_weights
from tests.models.quantized_models import (
    by_compressed_tensors,
    by_quanto,
    by_torchao,
    change_tensors,
    quantize_in_place,
    scheme_of_compressed_tensors,
    write_gguf,
)

SHORT: dict[str, Any] = {"data": ("evaluation", 2, 32, 2), "calibration_data": ("calibration", 2, 32, 2)}
REST = "embedding 32,768 float, norms 1,152 float, head tied to the embedding"


@pytest.fixture(autouse=True)
def _no_new_modes() -> Iterator[None]:
    known = set(MODES)
    yield
    for name in set(MODES) - known:
        unregister_mode(name)


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("checkpoint:quantized", "checkpoint_quantized"),
        ("checkpoint:./out/q-4.b/", "checkpoint_q_4_b"),
        ("checkpoint:/data/me/q4", "checkpoint_q4"),
        ("checkpoint:~/q4", "checkpoint_q4"),
        ("checkpoint:../../q4.gguf", "checkpoint_q4_gguf"),
        ("checkpoint:a b;c$(d)", "checkpoint_a_b_c__d_"),
        ("checkpoint:package.module:quantized", "checkpoint_quantized"),
    ],
)
def test_the_id_is_a_plain_name_without_the_place_of_the_folder(name: str, id: str) -> None:
    mode = find_mode(name)
    assert mode.id == id
    assert find_mode(id) is mode
    assert str(Recipe(id)) == str(Recipe(name)) == id
    assert mode.is_quantized
    assert not mode.takes_format
    assert not Recipe(name).needs_calibration


def test_two_spellings_of_a_folder_are_one_mode_and_two_folders_of_a_name_are_refused() -> None:
    assert find_mode("checkpoint:./out/q4/") is find_mode("checkpoint:out/q4")
    with pytest.raises(ValueError, match="modes checkpoint:out/q4 and checkpoint:other/q4 are both checkpoint_q4 in"):
        find_mode("checkpoint:other/q4")
    assert "checkpoint:other/q4" not in MODES


@pytest.mark.parametrize("name", ["checkpoint:", "checkpoint: ", "checkpoint:.", "checkpoint:..", "checkpoint:/"])
def test_a_path_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"names no checkpoint. Expected checkpoint:FOLDER, a .gguf file, or "):
        find_mode(name)


def test_a_checkpoint_takes_no_format() -> None:
    assert recipes_of(["checkpoint:q4", "fp16"], ["int8", "nvfp4"]) == [Recipe("checkpoint:q4"), Recipe("fp16")]
    with pytest.raises(ValueError, match="mode checkpoint:q4 is quantized already and takes no format, but int8 was"):
        Recipe("checkpoint:q4", "int8")


def test_a_checkpoint_that_is_not_there_is_refused_before_anything_runs(llama: Loaded) -> None:
    with pytest.raises(ValueError, match="checkpoint 'nowhere' is neither a folder"):
        check_recipes(llama, [Recipe("checkpoint:nowhere")])


def test_given_is_the_model_beside_its_reference() -> None:
    assert given_modes([], "a:b", "a:c") == ["checkpoint:a:b"]
    assert given_modes(["given", "linear_w"], "a:b", "a:c") == ["checkpoint:a:b", "linear_w"]
    assert given_modes(["linear_w"], "a:b", None) == ["linear_w"]
    assert given_modes(["linear_w"], "a:b", "a:c", narrowed=True) == ["linear_w"]
    with pytest.raises(ValueError, match="a:c is the reference of a:b, and the modes linear_w leave that model out"):
        given_modes(["linear_w"], "a:b", "a:c")
    with pytest.raises(ValueError, match="mode given is the model itself, quantized already, beside its float orig"):
        expand_modes(["given"])
    with pytest.raises(ValueError, match="there is a mode 'given' already"):
        register_mode("given", lambda model, format, calibration: model)


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "int8": (by_torchao, "quantized by torchao (Int8WeightOnlyConfig); as: 589,824 Int8Tensor of torchao"),
    "quanto": (by_quanto, "quantized by quanto (qint8); as: 589,824 qint8 of quanto"),
    "int4": (by_compressed_tensors, "quantized by compressed-tensors (int4 group 32); as: 589,824 int4 of compressed"),
    "q4.gguf": (
        lambda file: write_gguf(file, Kind.Q4_0),
        "quantized by GGUF (10 tensors F32, 28 tensors Q4_0); as: 589,824 Q4_0 of GGUF",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_weights_line_has_the_tool_the_scheme_and_the_forms(name: str, llama: Loaded, tmp_path: Path) -> None:
    make, told = CHECKPOINTS[name]
    make(tmp_path / name)
    recipe = Recipe(f"checkpoint:{tmp_path / name}")
    weights = count_weights(llama.model, apply(llama.model, recipe), recipe)
    assert weights.line.startswith(f"weights on a grid: 100.0 % (589,824 of 589,824); {told}")
    assert weights.line.endswith(REST)
    assert weights.contradictions == []
    assert Weights.from_json(Node("weights", json.loads(json.dumps(weights.as_dict())))) == weights


def test_a_head_that_is_tied_in_the_model_and_quantized_in_the_checkpoint_is_counted(
    llama: Loaded, tmp_path: Path
) -> None:
    recipe = Recipe(f"checkpoint:{by_quanto(tmp_path / 'all', exclude=None)}")
    weights = count_weights(llama.model, apply(llama.model, recipe), recipe)
    assert weights.contradictions == []
    assert weights.line.endswith("embedding 32,768 float, norms 1,152 float, untied head 32,768 on a grid")
    assert weights.forms == {"qint8 of quanto": 589824 + 32768}


def test_a_tensor_that_is_tied_in_the_copy_too_is_counted_once(llama: Loaded) -> None:
    def build(model: Any, format: str, calibration: Calibration | None) -> Any:
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda one, name: name == "lm_head")
        model.model.embed_tokens.weight = model.lm_head.weight
        return model

    probe.register_mode("tied", build)
    recipe = Recipe("tied", "int8")
    weights = count_weights(llama.model, apply(llama.model, recipe), recipe)
    assert weights.forms == {"Int8Tensor of torchao": 32768}
    assert weights.line.endswith("embedding 32,768 on a grid, norms 1,152 float, head tied to the embedding")


def test_counts_that_were_written_before_there_were_forms_are_read(llama: Loaded) -> None:
    recipe = Recipe("linear_w", "int8")
    weights = count_weights(llama.model, apply(llama.model, recipe), recipe)
    old = {k: v for k, v in weights.as_dict().items() if k not in ("forms", "stated", "contradictions")}
    assert Weights.from_json(Node("weights", json.loads(json.dumps(old)))) == weights


def test_a_weight_that_is_float_though_its_configuration_states_a_grid_is_told(llama: Loaded, tmp_path: Path) -> None:
    folder, name = by_torchao(tmp_path / "half"), "model.layers.1.self_attn.q_proj"

    def make_float(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(f"{name}.")]:
            del tensors[key]
        tensors[f"{name}.weight"] = llama.model.get_submodule(name).weight.detach().bfloat16().float()  # type: ignore[operator]

    change_tensors(folder, make_float)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"][f"{name}.weight"] = '{"_type": "Tensor"}'
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])

    recipe = Recipe(f"checkpoint:{folder}")
    line = count_weights(llama.model, apply(llama.model, recipe), recipe).line
    assert f"not as its configuration states: {name}.weight (stated to be quantized, but float)" in line
    assert "weights on a grid: 97.2 % (573,440 of 589,824)" in line
    assert f"float: 16,384 in {name}.weight (nn.Linear, other values than the model's)" in line


def test_a_weight_that_is_quantized_though_its_configuration_leaves_it_out_is_told(
    llama: Loaded, tmp_path: Path
) -> None:
    folder = by_torchao(tmp_path / "more")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "model.layers.1.mlp.up_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    recipe = Recipe(f"checkpoint:{folder}")
    line = count_weights(llama.model, apply(llama.model, recipe), recipe).line
    told = "not as its configuration states: model.layers.1.mlp.up_proj.weight (quantized, but not stated to be)"
    assert told in line


def test_a_layer_that_the_tool_left_float_must_be_declared(tmp_path: Path) -> None:
    folder = by_compressed_tensors(tmp_path / "some", ignore=("lm_head", "re:.*layers.2.*"))
    with pytest.raises(NotAppliedError, match="checkpoint_some was not applied to layer_2: given the reference's"):
        measure_all("tiny-llama", modes=[f"checkpoint:{folder}"], **SHORT)
    declare_modes({"mixed": DeclaredMode(f"checkpoint:{folder}", ("model.layers.2",))}, where="a.toml")
    (found,) = measure_all("tiny-llama", modes=["mixed"], injected=True, **SHORT)
    assert found.layers["layer_2"].identical
    assert not found.layers["layer_1"].identical
    assert "147,456 in model.layers.2.* (nn.Linear, kept float)" in found.weights.line

    declare_modes({"wrong": DeclaredMode(f"checkpoint:{folder}", ("model.layers.1",))}, where="a.toml")
    with pytest.raises(NotAppliedError, match="was not applied as declared: layer_1 is declared float, but changed"):
        measure_all("tiny-llama", modes=["wrong"], **SHORT)


def test_a_function_outside_of_the_project_is_no_base_of_a_declared_mode() -> None:
    """A file of declared modes may come from anywhere, and a factory is called."""
    with pytest.raises(ValueError, match=r"the checkpoint of base is 'shutil:rmtree', a function outside of this pro"):
        declare_modes({"mixed": DeclaredMode("checkpoint:shutil:rmtree", ("layers.1",))}, where="a.toml")
    assert "checkpoint:shutil:rmtree" not in MODES


def by_torchao_in_place(model: nn.Module) -> None:
    quantize_(
        model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: ".layers." in f".{name}" and is_linear(module)
    )


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def by_quanto_in_place(model: nn.Module) -> None:
    quantize(model, weights=qint8, exclude="lm_head")
    freeze(model)


IN_PLACE: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "torchao": (by_torchao_in_place, "Int8Tensor of torchao"),
    "quanto": (by_quanto_in_place, "qint8 of quanto"),
    "quanto, not frozen": (
        lambda model: quantize(model, weights=qint8, exclude="lm_head"),
        "qint8 of quanto, not frozen",
    ),
    "compressed-tensors": (
        lambda model: quantize_in_place(model, scheme_of_compressed_tensors()),
        "int4 of compressed-tensors",
    ),
}


@pytest.mark.parametrize("library", IN_PLACE)
def test_a_users_mode_may_quantize_in_place_with_a_library(library: str) -> None:
    """compressed-tensors leaves the weights as they are until forward, quanto until it is frozen."""
    change, form = IN_PLACE[library]

    def build(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
        change(model)
        return model

    mode: Mode = probe.register_mode("in_place", build)
    assert not mode.source
    (found,) = measure_all("tiny-llama", modes=["in_place"], formats=["int8"], injected=True, **SHORT)
    assert found.weights.line == f"weights on a grid: 100.0 % (589,824 of 589,824); as: 589,824 {form}; {REST}"
    assert not any(metrics.identical for metrics in found.layers.values())
