"""GGUF files: the model that transformers makes of one, all values dequantized, and the type of every tensor in it."""

import io
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from probe.data.library_logs import quietly
from probe.models.checkpoints import check_weights
from probe.models.quantized import Statement
from probe.words import describe_error

#: Types of tensors that are no codes.
FLOAT_TYPES = ("F16", "BF16", "F32", "F64")
#: The key of a file that brings its own tokenizer.
TOKENS = "tokenizer.ggml.tokens"


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file."""
    return name.lower().endswith(".gguf")


@dataclass(frozen=True)
class GgufFacts:
    """What the head of a file says: its architecture, its number of layers, and the type of every tensor by name."""

    architecture: str
    blocks: int
    types: Mapping[str, str]
    has_tokenizer: bool

    @property
    def scheme(self) -> str:
        """10 tensors F32, 28 tensors Q8_0."""
        counts = Counter(self.types.values())
        return ", ".join(f"{count} tensors {kind}" for kind, count in sorted(counts.items()))


def read_facts(file: Path) -> GgufFacts:
    """The facts of a file; one that is no GGUF file, or a package that is missing, is a ValueError."""
    check_gguf(file)
    with quietly():
        from gguf import GGUFReader

        try:
            reader = GGUFReader(file)
            architecture = str(reader.fields["general.architecture"].contents())
            blocks = int(reader.fields[f"{architecture}.block_count"].contents())
        except Exception as problem:
            raise ValueError(
                f"{str(file)!r} cannot be read as a GGUF file: {describe_error(problem)} Copy or download it again."
            ) from problem
    types = {str(tensor.name): str(tensor.tensor_type.name) for tensor in reader.tensors}
    return GgufFacts(architecture, blocks, types, TOKENS in reader.fields)


def check_gguf(file: Path) -> None:
    """Refuse a file that is not there, and packages that are missing, before anything is read."""
    if not file.is_file():
        raise ValueError(f"{str(file)!r} does not exist (looked for {file.absolute()}). Expected a GGUF file.")
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        needs = " and ".join(missing)
        raise ValueError(f'{str(file)!r} needs {needs} to be read, not installed: pip install "quant-probe[gguf]"')


def from_gguf(file: Path, dtype: torch.dtype | None) -> tuple[nn.Module, GgufFacts]:
    """The model of a file, with plain floats in it, and the facts of the file."""
    facts = read_facts(file)
    place: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with quietly(), redirect_stderr(io.StringIO()):  # transformers' bars of GGUF know no switch
        import transformers
        from transformers.models.auto import modeling_auto

        try:
            config = transformers.AutoConfig.from_pretrained(str(file.parent), **place)
            has_head = config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            loader: Any = transformers.AutoModelForCausalLM if has_head else transformers.AutoModel
            model, info = loader.from_pretrained(
                str(file.parent),
                config=config,
                dtype="auto" if dtype is None else dtype,
                quantization_config=transformers.GgufConfig(dequantize=True),
                ignore_mismatched_sizes=True,  # reported by check_weights, with their names
                output_loading_info=True,
                **place,
            )
        except Exception as problem:
            raise ValueError(
                f"transformers {transformers.__version__} cannot load {str(file)!r}, of the architecture "
                f"{facts.architecture}: {describe_error(problem)} Check that this version knows the architecture."
            ) from problem
    check_weights(file, model, info)
    return model, facts


def gguf_statement(model: nn.Module, facts: GgufFacts) -> Statement:
    """What a file states of the model that was made of it."""
    forms = {name: f"{kind} of GGUF" for name, kind in _types_by_parameter(model, facts).items()}
    return Statement("GGUF", facts.scheme, forms, is_dequantized=True)


def _types_by_parameter(model: nn.Module, facts: GgufFacts) -> dict[str, str]:
    """The types of the tensors that are codes, by the parameter that each became.

    One that matches no parameter by the names of the package gguf keeps its own name, and stands for itself.
    """
    import gguf

    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    if facts.architecture not in known:
        return {name: kind for name, kind in facts.types.items() if kind not in FLOAT_TYPES}
    names = gguf.get_tensor_name_map(known[facts.architecture], facts.blocks)
    by_tensor: dict[str, str] = {}
    for parameter, _ in model.named_parameters():
        tensor = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if tensor is not None:
            by_tensor.setdefault(str(tensor), parameter)
    return {by_tensor.get(name, name): kind for name, kind in facts.types.items() if kind not in FLOAT_TYPES}
