"""Loading a model by name: embedded, a local folder or file, a hub id or a factory. transformers loads when used."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from probe.data.library_logs import quietly
from probe.data.tokenizers import (
    BYTES,
    ByteTokenizer,
    Tokenizer,
    tokenizer_of_factory,
    tokenizer_of_folder,
    tokenizer_of_gguf,
)
from probe.models.checkpoints import from_folder
from probe.models.factories import from_factory
from probe.models.gguf_files import from_gguf, is_gguf
from probe.models.offload import Room, state_of
from probe.models.quantized import plain_parts
from probe.numerics.native import without_collection
from probe.settings import FUNCTION
from probe.words import describe_error, did_you_mean

FOLDER = Path(__file__).parent / "embedded"
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
#: Keys of a configuration that say nothing of what the model computes.
NO_SETTINGS = ("transformers_version", "architectures", "dtype", "torch_dtype")
HUB_FILES: dict[str, Any] = {
    "allow_patterns": ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"],  # no pickles
    "ignore_patterns": ["*/*", "consolidated*"],
}
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
WAYS = (
    "Write a folder as ./path/to/model, a GGUF file as ./path/to/model.gguf, a hub model as organization/name, a "
    "function that makes the model as package.module:factory."
)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to measure: eval mode, no gradients. `notes` says what a user should know about the loading."""

    name: str
    model: nn.Module
    tokenizer: Tokenizer
    fingerprint: str
    notes: tuple[str, ...] = ()
    folder: Path | None = None  # where its files are, if it has a folder


@dataclass(frozen=True)
class Embedded:
    """A model that comes with the package: trained, in a folder, or random, made of `mamba` settings and a seed."""

    name: str
    about: str
    folder: Path | None = None
    mamba: Mapping[str, int] | None = None
    seed: int = 0


EMBEDDED = {
    row.name: row
    for row in (
        Embedded("tiny-mamba", "0.5 million parameters, trained, byte-level", FOLDER / "tiny-mamba"),
        Embedded("tiny-llama", "0.6 million parameters, trained, byte-level", FOLDER / "tiny-llama"),
        Embedded(
            "mamba-130m-random",
            "the shape of mamba-130m with a vocabulary of bytes, random weights: for speed, memory and shapes",
            mamba={"hidden_size": 768, "num_hidden_layers": 24, "state_size": 16, "vocab_size": BYTES},
        ),
    )
}


def load_model(
    name: str,
    *,
    dtype: torch.dtype | None = torch.float32,
    allow_download: bool = False,
    trust_remote_code: bool = False,
    room: Room | None = None,
) -> Loaded:
    """The model called `name`, in `dtype` (None: its own). The global CPU random state stays as it was.

    Looked up in this order:
        a name in EMBEDDED        `tiny-mamba`
        a factory                 `package.module:factory`, called without arguments
        a GGUF file               `path/name.gguf`, its values dequantized
        a folder                  transformers format, weights in safetensors only
        a hub id                  `organization/name`, from the local cache unless `allow_download`

    Weights of a folder that do not fit in the `room` are never loaded whole: accelerate loads them as the model runs.
    Every mistake is a ValueError. Code in a model's folder runs only with `trust_remote_code`.
    """
    if dtype is not None and not dtype.is_floating_point:
        expected = "Expected a floating-point one, or None to keep the model's."
        raise ValueError(f"dtype {dtype} cannot hold weights. {expected}")
    with torch.random.fork_rng(devices=[]):
        if name in EMBEDDED:
            return _from_embedded(EMBEDDED[name], dtype, room)
        if FUNCTION.fullmatch(name):
            model = _in_dtype(name, from_factory(name), dtype)
            return _finish(name, model, *tokenizer_of_factory(name, model))
        if is_gguf(name):
            file = Path(os.path.expanduser(name))
            model, facts = from_gguf(file, dtype)
            found = tokenizer_of_gguf(file, model, has_tokenizer=facts.has_tokenizer)
            return _finish(name, model, found[0], (f"values are dequantized: {facts.scheme}", *found[1]))
        folder = folder_of(name, allow_download=allow_download)
        model, notes = from_folder(folder, dtype, trust_remote_code, room)
        tokenizer, more = tokenizer_of_folder(folder, model, trust_remote_code)
        return replace(_finish(name, model, tokenizer, (*notes, *more)), folder=folder)


def _in_dtype(name: str, model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model of a factory in a dtype; one that is offloaded must have it already."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.to(dtype=dtype)
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if dtype is not None and found != {dtype}:
        there = ", ".join(sorted(str(one).removeprefix("torch.") for one in found))
        wanted = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name}: its offloaded weights are {there}, expected {wanted}. Load them so in the factory.")
    return model


def weight_fingerprint(model: nn.Module) -> str:
    """The first 16 hex digits of sha256 over the state: sorted names, each with dtype, shape and bytes.

    Parameters and persistent buffers, tied ones under each of their names; of a library's own tensors (torchao) the
    codes and scales. Buffers that a model computes for itself (rotary frequencies) are left out: their last bit may
    differ from machine to machine.
    """
    digest = hashlib.sha256()
    for name, value in state_of(model):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        for part in plain_parts(value.detach()):
            digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def configuration_of(model: nn.Module) -> dict[str, str]:
    """The configuration of a model of transformers, key by key, without versions and names; empty of other models."""
    read = getattr(getattr(model, "config", None), "to_diff_dict", None)
    stated: dict[str, Any] = read() if callable(read) else {}
    shown = {key: str(value) for key, value in stated.items() if key not in NO_SETTINGS and not key.startswith("_")}
    return {key: text if text and text.isprintable() else repr(text) for key, text in shown.items()}


def _finish(name: str, model: nn.Module, tokenizer: Tokenizer, notes: tuple[str, ...]) -> Loaded:
    model.eval().requires_grad_(False)
    return Loaded(name, model, tokenizer, weight_fingerprint(model), notes)


def _from_embedded(row: Embedded, dtype: torch.dtype | None, room: Room | None) -> Loaded:
    if row.folder is None:
        return _finish(row.name, _random_mamba(row).to(dtype=dtype), ByteTokenizer(), ())
    model, notes = from_folder(row.folder, dtype, trust_remote_code=False, room=room)
    return _finish(row.name, model, ByteTokenizer(), notes)


def _random_mamba(row: Embedded) -> nn.Module:
    with quietly():
        with without_collection():
            from transformers import MambaConfig, MambaForCausalLM

        torch.default_generator.manual_seed(row.seed)
        config = MambaConfig(**cast(Any, row.mamba), **cast(Any, NO_SPECIAL_TOKENS), use_cache=False)
        return cast(nn.Module, cast(Any, MambaForCausalLM)(config))


def folder_of(name: str, *, allow_download: bool) -> Path:
    """The folder of a model: by its path, or of a hub id in the cache."""
    folder = Path(os.path.expanduser(name))  # leaves an unknown ~user as it is, Path.expanduser raises
    if name and folder.is_dir():
        return folder
    if folder.is_file():
        raise ValueError(f"model {name!r} is a file. Expected the folder that holds config.json and the weights.")
    if HUB_ID.fullmatch(name):
        return _hub_snapshot(name, allow_download=allow_download)
    if "/" in name or name.startswith((".", "~")):
        raise ValueError(
            f"model folder {name!r} does not exist (looked for {folder.absolute()}). "
            "Expected a folder with config.json and safetensors weights."
        )
    raise ValueError(f"unknown model {name!r}.{did_you_mean(name, EMBEDDED)} Embedded: {', '.join(EMBEDDED)}. {WAYS}")


def _hub_snapshot(name: str, *, allow_download: bool) -> Path:
    """The folder in the hub cache. Only top-level files of the kinds in HUB_FILES are ever fetched."""
    with quietly():
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(name, local_files_only=not allow_download, **HUB_FILES))
        except Exception as problem:
            if allow_download:
                raise ValueError(
                    f"hub model {name!r} could not be downloaded: {describe_error(problem)} "
                    "Check the name, the network and, for a gated model, your login (hf auth login)."
                ) from problem
            raise ValueError(
                f"hub model {name!r} is not in the local cache, and no folder has that name. Downloading is off: "
                "allow it with --allow-download (allow_download=True in Python), or give the path of a folder."
            ) from problem
