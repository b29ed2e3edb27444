"""Checkpoints that another tool quantized: loading one beside its float original, with which it must fit by name.

a folder with quantization_config in config.json    torchao, compressed-tensors, and what else transformers loads
a folder with quanto_qmap.json                      quanto's own layout, which transformers does not load
a GGUF file                                         its values are dequantized
package.module:factory                              a function that returns the quantized model
"""

import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probe.data.library_logs import quietly
from probe.files.tensors import tensors_in
from probe.models.checkpoints import QUANTO_MAP, check_folder, from_folder, quantization_of, read_json, weight_files
from probe.models.factories import from_factory
from probe.models.gguf_files import check_gguf, from_gguf, gguf_statement, is_gguf
from probe.models.layers import blocks_of
from probe.models.loading import folder_of
from probe.models.quantized import STATEMENT, Statement, quantized_weights, statement_of
from probe.settings import FUNCTION
from probe.words import describe_error, first_few

#: The packages that the checkpoints of a tool need on a CPU, and what pip installs them by.
NEEDS = {
    "torchao": (("torchao",), '"quant-probe[torchao]"'),
    "quanto": (("optimum.quanto",), '"quant-probe[quanto]"'),
    "compressed-tensors": (("compressed_tensors",), '"quant-probe[compressed-tensors]"'),
    "gptq": (("gptqmodel", "optimum.gptq"), "gptqmodel optimum"),
    "awq": (("gptqmodel",), "gptqmodel"),
}
#: torchao's scheme whose plain packing (the default) needs a package beside torchao.
INT4, INT4_NEEDS = "Int4WeightOnlyConfig", "mslk"
OTHER_PACKINGS = r"PLAIN_INT32|TILE_PACKED_TO_4D"


def check_source(source: str) -> None:
    """Refuse, without loading weights, a checkpoint that is not there, is not quantized, or needs what is missing."""
    if FUNCTION.fullmatch(source):
        return
    if is_gguf(source):
        check_gguf(Path(os.path.expanduser(source)))
        return
    try:
        folder = folder_of(source, allow_download=False)
    except ValueError:
        raise ValueError(
            f"checkpoint {source!r} is neither a folder (looked for {Path(source).absolute()}) nor a hub model in the "
            "local cache. Expected the folder that the tool saved, a .gguf file, or package.module:factory."
        ) from None
    check_folder(folder)
    if (folder / QUANTO_MAP).is_file():
        _check_installed(folder, "quanto")
        return
    stated = quantization_of(folder)
    if not stated:
        raise ValueError(
            f"checkpoint {source!r} is a float model: its config.json has no quantization_config, and there is no "
            f"{QUANTO_MAP}. Expected a model that another tool quantized and saved."
        )
    tool = str(stated.get("quant_method", ""))
    _check_installed(folder, tool)
    if _scheme(stated) == INT4 and not re.search(OTHER_PACKINGS, str(stated)) and not _is_installed(INT4_NEEDS):
        raise ValueError(
            f"{str(folder)!r} was quantized by {tool} with {INT4}, which needs the package {INT4_NEEDS} and a GPU. "
            f"Install {INT4_NEEDS} where there is one, or quantize with another scheme."
        )


def _check_installed(folder: Path, tool: str) -> None:
    packages, install = NEEDS.get(tool, ((), ""))
    missing = [package for package in packages if not _is_installed(package)]
    if missing:
        raise ValueError(
            f"{str(folder)!r} was quantized by {tool}, and needs {' and '.join(missing)}, not installed. "
            f"Install with: pip install {install}"
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def load_quantized(source: str, original: nn.Module) -> nn.Module:
    """The quantized model: eval mode, no gradients, its layers those of its float original by name and shape.

    It runs in float32, unless its packed weights have another dtype. A model without a quantized weight is refused.
    """
    check_source(source)
    with torch.random.fork_rng(devices=[]):
        model = _load(source).eval().requires_grad_(False)
    wrong = list(dict.fromkeys(_misfits(model, original)))
    if wrong:
        raise ValueError(
            f"checkpoint {source!r} does not fit {type(original).__name__}, its float original: "
            f"{first_few(wrong, '; ', most=3)}. Expected the same layers by name, in the same shapes: give the float "
            "model that was quantized."
        )
    stated = statement_of(model)
    if not (stated.forms if stated and stated.is_dequantized else quantized_weights(model)):
        says = f"states {stated}" if stated else "is the model of a factory"
        raise ValueError(f"checkpoint {source!r} {says}, but all its weights are plain floats: nothing is quantized.")
    return model


def _load(source: str) -> nn.Module:
    if FUNCTION.fullmatch(source):
        return from_factory(source, quantized=True)
    if is_gguf(source):
        model, facts = from_gguf(Path(os.path.expanduser(source)), torch.float32)
        setattr(model, STATEMENT, gguf_statement(model, facts))
        return model
    folder = folder_of(source, allow_download=False)
    with quietly(), redirect_stderr(io.StringIO()):  # bars that know no switch
        if (folder / QUANTO_MAP).is_file():
            return _from_quanto(folder)
        model, _ = from_folder(folder, torch.float32, trust_remote_code=False, quantized=True)
        packed = {value.dtype for value in model.parameters() if type(value.data) is not Tensor}
        if packed - {torch.float32}:  # of torchao, which computes in the dtype that the model had
            model, _ = from_folder(folder, packed.pop(), trust_remote_code=False, quantized=True)
        return _with_statement(model, quantization_of(folder))


def _with_statement(model: nn.Module, stated: Mapping[str, Any]) -> nn.Module:
    """The model with what its configuration states; weights of compressed-tensors are unpacked."""
    tool, quantizer = str(stated.get("quant_method", "")), getattr(model, "hf_quantizer", None)
    forms: dict[str, str] | None = None
    if tool == "torchao" and quantizer is not None:
        names = [name for name, _ in model.named_parameters()]
        forms = {name: _scheme(stated) for name in names if quantizer.param_needs_quantization(model, name)}
    elif tool == "compressed-tensors" and quantizer is not None:
        forms = _stated_by_compressed_tensors(model, quantizer.compressor.quantization_config)
        quantizer.compressor.decompress_model(model)  # else the first call does: a layer alone could not run
    dtype = next(value.dtype for value in model.parameters() if value.is_floating_point())
    runs = "" if dtype is torch.float32 else f", runs in {str(dtype).removeprefix('torch.')}"
    setattr(model, STATEMENT, Statement(tool, f"{_scheme(stated)}{runs}", forms))
    return model


def _stated_by_compressed_tensors(model: nn.Module, config: Any) -> dict[str, str]:
    from compressed_tensors.utils.match import match_named_modules

    forms: dict[str, str] = {}
    for group in config.config_groups.values() if config is not None else ():
        if group.weights is not None:
            matched = match_named_modules(model, group.targets, config.ignore)
            forms |= {f"{name}.weight": f"{group.weights.type}{group.weights.num_bits}" for name, _ in matched}
    return forms


def _scheme(stated: Mapping[str, Any]) -> str:
    """The scheme in a few words: Int8WeightOnlyConfig, int4 group 32, 4 bits."""
    by_torchao = stated.get("quant_type")
    if by_torchao is not None:
        named = by_torchao.get("default", {}) if isinstance(by_torchao, dict) else {}
        return str(named.get("_type", by_torchao)) if isinstance(named, dict) else str(named)
    groups = stated.get("config_groups")
    if isinstance(groups, dict):
        return ", ".join(_group(one) for one in groups.values() if isinstance(one, dict))
    return f"{stated['bits']} bits" if "bits" in stated else ""


def _group(group: Mapping[str, Any]) -> str:
    """int4 group 32; int8 channel, inputs int8 token."""
    parts = []
    for kind, before in (("weights", ""), ("input_activations", "inputs ")):
        if isinstance(own := group.get(kind), dict):
            size = f" {own['group_size']}" if own.get("group_size") else ""
            parts.append(f"{before}{own.get('type', '')}{own.get('num_bits', '')} {own.get('strategy', '')}{size}")
    return ", ".join(parts)


def _from_quanto(folder: Path) -> nn.Module:
    """The model of quanto's own layout. Its loader leaves out what the file lacks, so that the names are compared."""
    from optimum.quanto import QuantizedModelForCausalLM

    try:
        model: nn.Module = QuantizedModelForCausalLM.from_pretrained(str(folder))._wrapped
    except Exception as problem:
        raise ValueError(
            f"quanto cannot load {str(folder)!r}: {describe_error(problem)} Expected what save_pretrained of its "
            "QuantizedModelForCausalLM writes."
        ) from problem
    there = {name for file in weight_files(folder) for name in tensors_in(file)}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    lacking = sorted(model.state_dict().keys() - there - tied)
    if lacking:
        raise ValueError(f"the weights in {str(folder)!r} lack {first_few(lacking)}. Save the model again.")
    stated = {f"{name}.weight": str(one.get("weights")) for name, one in read_json(folder / QUANTO_MAP).items()}
    scheme = ", ".join(sorted(set(stated.values())))
    setattr(model, STATEMENT, Statement("quanto", scheme, stated))
    return model


def _misfits(model: nn.Module, original: nn.Module) -> Iterator[str]:
    """What of the float model has no counterpart in the quantized one, or one of another shape."""
    here, wanted = len(blocks_of(model)), len(blocks_of(original))
    if here != wanted:
        yield f"it has {here} layers, not {wanted}"
        return
    modules = dict(model.named_modules())
    for name, value in original.named_parameters():
        owner, _, own = name.rpartition(".")
        if owner not in modules:
            yield f"it has no {owner}"
        elif (shape := _shape(modules[owner], own)) not in (None, tuple(value.shape)):
            yield f"{name} is {shape}, not {tuple(value.shape)}"
    known = {name for name, _ in original.named_modules()}
    for name, module in modules.items():
        if name not in known and next(module.parameters(recurse=False), None) is not None:
            yield f"{name} is not in {type(original).__name__}"


def _shape(module: nn.Module, own: str) -> tuple[int, ...] | None:
    """The shape of a weight, whatever holds it; None where nothing tells it."""
    value: Any = getattr(module, own, None)
    if isinstance(value, Tensor) and (value.is_floating_point() or type(value.data) is not Tensor):
        return tuple(value.shape)
    sizes = [getattr(module, name, None) for name in ("out_features", "in_features")]
    return tuple(sizes) if own == "weight" and all(isinstance(size, int) for size in sizes) else None  # type: ignore[arg-type]
