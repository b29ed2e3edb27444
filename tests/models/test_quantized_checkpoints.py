"""Checkpoints of other tools beside their float original: the values, what they state, and what is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from probe.models import quantized_checkpoints
from probe.models.loading import load_model, weight_fingerprint
from probe.models.quantized import quantized_weights, statement_of, weight_form
from probe.models.quantized_checkpoints import load_quantized
from tests.models.folders import change_config, copy_of_llama, refusal, save_small
from tests.models.quantized_models import (
    break_layer,
    by_compressed_tensors,
    by_quanto,
    by_torchao,
    change_tensors,
    working_weight,
)

Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def original() -> nn.Module:
    return load_model("tiny-llama").model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("quantized")
    return {
        "torchao int8": by_torchao(place / "int8"),
        "torchao fp8": by_torchao(place / "fp8", scheme="fp8"),
        "quanto": by_quanto(place / "quanto"),
        "compressed-tensors int4": by_compressed_tensors(place / "int4"),
        "compressed-tensors int8": by_compressed_tensors(place / "int8_channel", bits=8),
    }


def _nibbles(packed: Tensor) -> Tensor:
    """Codes of 4 bits, eight in an int32, the lowest bits first, 8 above their value."""
    return torch.stack([(packed >> (4 * place)) & 15 for place in range(8)], -1).flatten(1) - 8


#: The weight of Q_PROJ by the codes and scales of the file, as each format defines it.
DEFINED: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "torchao int8": lambda t: t[f"{Q_PROJ}._weight_qdata"].float() * t[f"{Q_PROJ}._weight_scale"],
    "torchao fp8": lambda t: t[f"{Q_PROJ}._weight_qdata"].float() * t[f"{Q_PROJ}._weight_scale"],
    "quanto": lambda t: t[f"{Q_PROJ}.weight._data"].float() * t[f"{Q_PROJ}.weight._scale"],
    "compressed-tensors int4": lambda t: (
        _nibbles(t[f"{Q_PROJ}.weight_packed"]).float() * t[f"{Q_PROJ}.weight_scale"].repeat_interleave(32, 1)
    ),
    "compressed-tensors int8": lambda t: (
        (t[f"{Q_PROJ}.weight_packed"].view(torch.uint8).float() - 128) * t[f"{Q_PROJ}.weight_scale"]
    ),
}
FORMS = {
    "torchao int8": "Int8Tensor of torchao",
    "torchao fp8": "Float8Tensor of torchao",
    "quanto": "qint8 of quanto",
    "compressed-tensors int4": "int4 of compressed-tensors",
    "compressed-tensors int8": "int8 of compressed-tensors",
}
STATED = {
    "torchao int8": "torchao (Int8WeightOnlyConfig)",
    "torchao fp8": "torchao (Float8WeightOnlyConfig)",
    "quanto": "quanto (qint8)",
    "compressed-tensors int4": "compressed-tensors (int4 group 32)",
    "compressed-tensors int8": "compressed-tensors (int8 channel)",
}


@pytest.mark.parametrize("tool", DEFINED)
def test_a_layer_works_with_codes_times_scales_of_the_file(
    tool: str, folders: dict[str, Path], original: nn.Module
) -> None:
    model = load_quantized(str(folders[tool]), original)
    wanted = DEFINED[tool](load_file(folders[tool] / "model.safetensors"))
    found = working_weight(model.get_submodule(Q_PROJ), 128)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert not torch.equal(wanted, original.get_parameter(f"{Q_PROJ}.weight"))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_inputs_that_compressed_tensors_quantizes_are_quantized(tmp_path: Path, original: nn.Module) -> None:
    """int8 by token: the scale is amax / 127.5, and code 128 is clipped to 127."""
    folder = by_compressed_tensors(tmp_path / "both", bits=8, inputs=True)
    model = load_quantized(str(folder), original)
    assert str(statement_of(model)) == "compressed-tensors (int8 channel, inputs int8 token)"
    tensors = load_file(folder / "model.safetensors")
    weight = tensors[f"{Q_PROJ}.weight"].float() * tensors[f"{Q_PROJ}.weight_scale"]
    given = torch.randn(1, 6, 128, generator=torch.Generator().manual_seed(0))
    scale = given.abs().amax(-1, keepdim=True) / 127.5
    rounded = (given / scale).round().clamp(-128, 127) * scale
    with torch.no_grad():
        made = model.get_submodule(Q_PROJ)(given)
    torch.testing.assert_close(made, rounded @ weight.mT, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(made, given @ weight.mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tool", DEFINED)
def test_what_is_quantized_is_found_and_stated_by_name(
    tool: str, folders: dict[str, Path], original: nn.Module
) -> None:
    model = load_quantized(str(folders[tool]), original)
    linears = {
        f"{name}.weight"
        for name, module in original.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    assert len(linears) == 28
    assert {name: form for name, form in quantized_weights(model).items() if name.endswith(".weight")} == {
        name: FORMS[tool] for name in quantized_weights(model) if name.endswith(".weight")
    }
    assert {name for name in quantized_weights(model) if name.endswith(".weight")} == linears
    stated = statement_of(model)
    assert stated is not None
    assert str(stated) == STATED[tool]
    assert set(stated.forms or ()) == linears
    assert weight_form(model.get_submodule("lm_head")) == weight_form(model.get_submodule("model.norm")) == ""
    assert quantized_weights(original) == {}


@pytest.mark.parametrize(("tool", "library"), [("torchao int8", "torchao"), ("quanto", "quanto")])
def test_the_fingerprint_of_a_quantized_model_depends_on_every_code(
    tool: str, library: str, folders: dict[str, Path], original: nn.Module, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[tool], tmp_path / "copy"))
    before = weight_fingerprint(load_quantized(str(folder), original))
    assert before == weight_fingerprint(load_quantized(str(folders[tool]), original))
    break_layer(folder, library, 2)
    assert weight_fingerprint(load_quantized(str(folder), original)) != before


def test_packed_weights_of_another_dtype_run_in_it_and_that_is_stated(tmp_path: Path, original: nn.Module) -> None:
    """torchao multiplies in the dtype that the model had: float32 inputs would be an error."""
    folder = by_torchao(tmp_path / "half", scheme="fp8", dtype=torch.bfloat16)
    model = load_quantized(str(folder), original)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert str(statement_of(model)) == "torchao (Float8WeightOnlyConfig, runs in bfloat16)"
    assert model(torch.arange(8)[None]).logits.dtype is torch.bfloat16


def message(source: object, original: nn.Module) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_quantized(str(source), original)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_one_message(
    folders: dict[str, Path], original: nn.Module, tmp_path: Path
) -> None:
    other = save_small("LlamaForCausalLM", tmp_path / "small")
    assert message(folders["quanto"], other) == (
        f"checkpoint '{folders['quanto']}' does not fit LlamaForCausalLM, its float original: it has 4 layers, not 2. "
        "Expected the same layers by name, in the same shapes: give the float model that was quantized."
    )
    wide = load_model("tiny-llama").model
    wide.get_submodule("model.layers.1.mlp").up_proj = nn.Linear(128, 300, bias=False)
    for tool in folders:
        assert "model.layers.1.mlp.up_proj.weight is (256, 128), not (300, 128)" in message(folders[tool], wide)
    wide.get_submodule("model.layers.1.mlp").up_proj = nn.Sequential(nn.Linear(128, 256))
    assert "it has no model.layers.1.mlp.up_proj.0" in message(folders["torchao int8"], wide)
    bare = load_model("tiny-llama").model
    bare.get_submodule("model.layers.3").self_attn = nn.Identity()
    assert "model.layers.3.self_attn.q_proj is not in LlamaForCausalLM" in message(folders["quanto"], bare)


def test_a_float_folder_is_no_checkpoint(original: nn.Module, tmp_path: Path) -> None:
    folder = copy_of_llama(tmp_path)
    assert message(folder, original) == (
        f"checkpoint '{folder}' is a float model: its config.json has no quantization_config, and there is no "
        "quanto_qmap.json. Expected a model that another tool quantized and saved."
    )


def test_a_folder_that_is_not_there_is_one_message(
    original: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ("nowhere", "no/where"):
        assert message(source, original) == (
            f"checkpoint '{source}' is neither a folder (looked for {tmp_path / source}) nor a hub model in the local "
            "cache. Expected the folder that the tool saved, a .gguf file, or package.module:factory."
        )


@pytest.mark.parametrize(("tool", "lacking"), [("torchao int8", "_weight_qdata"), ("quanto", "weight._data")])
def test_a_checkpoint_without_the_codes_of_a_weight_is_refused(
    tool: str, lacking: str, folders: dict[str, Path], original: nn.Module, tmp_path: Path
) -> None:
    """quanto's own loader says nothing, and leaves the weight empty."""
    folder = Path(shutil.copytree(folders[tool], tmp_path / "copy"))
    change_tensors(folder, lambda tensors: tensors.pop(f"{Q_PROJ}.{lacking}"))
    assert Q_PROJ in message(folder, original) or "cannot load" in message(folder, original)


def test_a_configuration_that_states_what_the_file_has_not_is_refused(
    folders: dict[str, Path], original: nn.Module, tmp_path: Path
) -> None:
    for tool in ("torchao int8", "compressed-tensors int4"):
        folder = Path(shutil.copytree(folders[tool], tmp_path / tool.replace(" ", "_")))
        shutil.copy(copy_of_llama(folder) / "model.safetensors", folder)
        told = message(folder, original)
        assert "cannot load" in told or "do not fit" in told


@pytest.mark.parametrize(
    ("method", "needs", "install"),
    [
        ("gptq", "gptqmodel and optimum.gptq", "gptqmodel optimum"),
        ("awq", "gptqmodel", "gptqmodel"),
    ],
)
def test_what_needs_a_package_is_one_message_that_names_it(
    method: str, needs: str, install: str, original: nn.Module, tmp_path: Path
) -> None:
    folder = copy_of_llama(tmp_path)
    change_config(folder, quantization_config={"quant_method": method, "bits": 4, "group_size": 32})
    assert message(folder, original) == (
        f"'{folder}' was quantized by {method}, and needs {needs}, not installed. Install with: pip install {install}"
    )


def test_what_transformers_cannot_load_here_is_told_in_its_words(original: nn.Module, tmp_path: Path) -> None:
    folder = copy_of_llama(tmp_path)
    change_config(folder, quantization_config={"quant_method": "eetq", "weights": "int8"})
    told = message(folder, original)
    assert f"'{folder}' was quantized by eetq, and transformers " in told
    assert "Install what it names, run where there is such a device, or save the checkpoint again." in told


def test_torchao_int4_names_the_package_that_it_needs(original: nn.Module, tmp_path: Path) -> None:
    folder = copy_of_llama(tmp_path)
    kind = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": 32}}
    change_config(folder, quantization_config={"quant_method": "torchao", "quant_type": {"default": kind}})
    assert message(folder, original) == (
        f"'{folder}' was quantized by torchao with Int4WeightOnlyConfig, which needs the package mslk and a GPU. "
        "Install mslk where there is one, or quantize with another scheme."
    )
    other = kind | {"_data": {"int4_packing_format": {"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"}}}
    change_config(folder, quantization_config={"quant_method": "torchao", "quant_type": {"default": other}})
    assert "mslk" not in message(folder, original)


@pytest.mark.parametrize(
    ("tool", "package"),
    [
        ("torchao int8", "torchao"),
        ("quanto", "optimum.quanto"),
        ("compressed-tensors int4", "compressed_tensors"),
    ],
)
def test_a_tool_that_is_not_installed_is_named_with_its_extra(
    tool: str, package: str, folders: dict[str, Path], original: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_checkpoints, "find_spec", lambda name: None)
    library = tool.partition(" ")[0]
    assert message(folders[tool], original) == (
        f"'{folders[tool]}' was quantized by {library}, and needs {package}, not installed. "
        f'Install with: pip install "quant-probe[{library}]"'
    )


def test_a_quantized_folder_is_no_float_model(folders: dict[str, Path]) -> None:
    for tool, folder in folders.items():
        assert refusal(folder) == (
            f"model folder '{folder}' holds weights that {tool.partition(' ')[0]} quantized. Expected the float model: "
            f"give that as the model with the mode checkpoint:{folder}, or as the reference (reference in "
            "[tool.probe], --reference)."
        )


def test_the_statement_of_compressed_tensors_leaves_out_what_it_ignores(original: nn.Module, tmp_path: Path) -> None:
    folder = by_compressed_tensors(tmp_path / "some", ignore=("lm_head", "re:.*layers.2.*"))
    stated = statement_of(load_quantized(str(folder), original))
    assert stated is not None
    assert len(stated.forms or ()) == 21
    assert not any("layers.2." in name for name in stated.forms or ())
