"""tiny-llama, quantized and saved by other tools: each as its own library does it, or as GGUF with the package gguf."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from gguf import GGMLQuantizationType as Kind
from optimum.quanto import QuantizedModelForCausalLM, qint8
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

from probe.data.library_logs import quietly
from probe.models.loading import EMBEDDED, load_model

SOURCE = str(EMBEDDED["tiny-llama"].folder)
#: The tensor of a layer that `break_layer` changes, by library.
CODES = {
    "torchao": "model.layers.{}.mlp.up_proj._weight_qdata",
    "quanto": "model.layers.{}.mlp.up_proj.weight._data",
    "compressed-tensors": "model.layers.{}.mlp.up_proj.weight_packed",
}


def by_torchao(folder: Path, *, scheme: str = "int8", dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Weight-only int8 or fp8, saved by transformers; the head stays float."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[scheme]()
    with quietly():
        auto: Any = AutoModelForCausalLM
        made = TorchAoConfig(config, **options)
        auto.from_pretrained(SOURCE, quantization_config=made, dtype=dtype).save_pretrained(folder)
    return folder


def by_quanto(folder: Path, *, exclude: str | None = "lm_head") -> Path:
    """int8 weights of all linear layers but the head, in quanto's own layout."""
    with quietly():
        model: Any = load_model("tiny-llama").model
        QuantizedModelForCausalLM.quantize(model, weights=qint8, exclude=exclude).save_pretrained(folder)
    return folder


def scheme_of_compressed_tensors(
    bits: int = 4, *, ignore: tuple[str, ...] = ("lm_head",), inputs: bool = False
) -> QuantizationConfig:
    """int4 in groups of 32, or int8 by channel, of every nn.Linear but these; `inputs`: int8 by token as well."""
    size: Any = {"strategy": "group", "group_size": 32} if bits == 4 else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=True, **size)
    by_token = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=by_token if inputs else None)
    groups = {"group_0": scheme}
    return QuantizationConfig(config_groups=groups, ignore=list(ignore))


def quantize_in_place(model: nn.Module, config: QuantizationConfig) -> nn.Module:
    """compressed-tensors' quantization of a model in memory: the weights stay, and forward rounds them."""
    with quietly():
        apply_quantization_config(model, config)
    for module in model.modules():
        scheme: Any = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            weight: Tensor = module.weight.detach()  # type: ignore[operator]
            groups = weight.reshape(weight.shape[0], -1, scheme.weights.group_size or weight.shape[1])
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale)  # type: ignore[operator]
    return model


def by_compressed_tensors(folder: Path, **scheme: Any) -> Path:
    """Packed by the library's own compressor, with its config.json; `scheme_of_compressed_tensors` has the options."""
    model: Any = quantize_in_place(load_model("tiny-llama").model, scheme_of_compressed_tensors(**scheme))
    with quietly():
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))
    return folder


def write_gguf(
    file: Path,
    kind: Kind,
    *,
    blocks: int = 4,
    change: Callable[[str, np.ndarray], np.ndarray] = lambda name, weight: weight,
    more: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> dict[str, np.ndarray]:
    """tiny-llama as GGUF, matrices but the embedding of this kind; the values that gguf's own dequantize gives."""
    model = load_model("tiny-llama").model
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(blocks)
    writer.add_context_length(256)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(256)
    more(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    values: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        weight = change(name, parameter.detach().numpy())
        own = kind if weight.ndim == 2 and "embed" not in name else Kind.F32
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        data = gguf.quants.quantize(_for_llama_cpp(weight, heads), own)
        values[name] = _for_transformers(gguf.quants.dequantize(data, own).reshape(weight.shape), heads)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _for_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp has them: the halves of a head interleaved, row by row."""
    if not heads:
        return weight
    size = weight.shape[0] // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return np.ascontiguousarray(weight[order])


def _for_transformers(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `_for_llama_cpp`."""
    if not heads:
        return weight
    return weight[np.argsort(_for_llama_cpp(np.arange(weight.shape[0])[:, None], heads)[:, 0])]


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a folder; the metadata of the file, which torchao needs, stays."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata)


def break_layer(folder: Path, library: str, layer: int) -> None:
    """Exchange codes of one matrix: its first rows are those of the next ones."""
    name = CODES[library].format(layer)

    def roll(tensors: dict[str, Tensor]) -> None:
        codes = tensors[name]
        tensors[name] = codes.view(torch.uint8).roll(1, 0).view(codes.dtype).contiguous()

    change_tensors(folder, roll)


def working_weight(module: Any, inputs: int) -> Tensor:
    """The weight that a linear module works with, [out, in], whatever holds it: what it makes of the unit vectors."""
    with torch.no_grad():
        made: Tensor = module(torch.eye(inputs)) - module(torch.zeros(1, inputs))
    return made.mT
