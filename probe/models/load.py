"""Loading a model by name: embedded, a local folder, a hub id or a factory. transformers loads only when used."""

import hashlib
import importlib
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from probe.names import nearest

FOLDER = Path(__file__).parent / "embedded"
BYTES = 256
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("spiece.model", "vocab.json", "vocab.txt"),
)
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]  # no pickles
FACTORY = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
WAYS = (
    "Write a folder as ./path/to/model, a hub model as organization/name, a function that makes the model as "
    "package.module:factory."
)


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. No token is added that is not in the text."""

    def encode(self, text: str, /) -> list[int]:
        """The ids of `text`."""

    def decode(self, tokens: Sequence[int], /) -> str:
        """The text of `tokens`."""


class ByteTokenizer:
    """A token is a byte of UTF-8: 256 ids, no special ones."""

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these bytes; a byte that is not UTF-8 becomes the replacement character."""
        return bytes(tokens).decode("utf-8", errors="replace")


@dataclass(frozen=True, eq=False)
class PretrainedTokenizer:
    """A tokenizer of transformers, without its begin and end tokens: samples are windows of running text."""

    inner: Any

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        return [int(token) for token in self.inner.encode(text, add_special_tokens=False, verbose=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`."""
        return str(self.inner.decode(list(tokens)))


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to measure: eval mode, no gradients. `notes` says what a user should know about the loading."""

    name: str
    model: nn.Module
    tokenizer: Tokenizer
    fingerprint: str
    notes: tuple[str, ...] = ()


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
) -> Loaded:
    """The model called `name`, in `dtype` (None: as its maker left it). The global CPU random state is untouched.

    Looked up in this order:
        a name in EMBEDDED        `tiny-mamba`
        a factory                 `package.module:factory`, called without arguments
        a folder                  transformers format, weights in safetensors only
        a hub id                  `organization/name`, from the local cache unless `allow_download`

    Every mistake is a ValueError. Code in a model's folder runs only with `trust_remote_code`.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"dtype {dtype} cannot hold weights. Expected a floating-point one, or None to keep the model's."
        )
    with torch.random.fork_rng(devices=[]):
        if name in EMBEDDED:
            return _from_embedded(EMBEDDED[name], dtype)
        if made := FACTORY.fullmatch(name):
            model = _from_factory(name, *made.groups()).to(dtype=dtype)
            return _finish(name, model, *_tokenizer_of_factory(name, model))
        folder = _folder_of(name, allow_download=allow_download)
        model, notes = _from_folder(folder, dtype, trust_remote_code)
        tokenizer, more = _tokenizer_of_folder(folder, model, trust_remote_code)
        return _finish(name, model, tokenizer, (*notes, *more))


def fingerprint(model: nn.Module) -> str:
    """The first 16 hex digits of sha256 over the state: sorted names, each with dtype, shape and bytes.

    Parameters and persistent buffers, tied ones under each of their names. Buffers that a model computes for itself
    (rotary frequencies) are left out: their last bit may differ from machine to machine.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bars, warnings or log lines below ERROR from transformers and what it imports, inside the block."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _no_progress_bars():
                yield
    finally:
        logging.disable(level)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()  # type: ignore[no-untyped-call]


def _finish(name: str, model: nn.Module, tokenizer: Tokenizer, notes: tuple[str, ...]) -> Loaded:
    model.eval().requires_grad_(False)
    return Loaded(name, model, tokenizer, fingerprint(model), notes)


def _from_embedded(row: Embedded, dtype: torch.dtype | None) -> Loaded:
    if row.folder is None:
        return _finish(row.name, _random_mamba(row).to(dtype=dtype), ByteTokenizer(), ())
    model, notes = _from_folder(row.folder, dtype, trust_remote_code=False)
    return _finish(row.name, model, ByteTokenizer(), notes)


def _random_mamba(row: Embedded) -> nn.Module:
    with quietly():
        from transformers import MambaConfig, MambaForCausalLM

        torch.default_generator.manual_seed(row.seed)
        config = MambaConfig(**cast(Any, row.mamba), **cast(Any, NO_SPECIAL_TOKENS), use_cache=False)
        return cast(nn.Module, cast(Any, MambaForCausalLM)(config))


def _from_factory(name: str, module_name: str, attribute: str) -> nn.Module:
    try:
        module = importlib.import_module(module_name)
    except Exception as problem:
        raise ValueError(
            f"model {name!r}: module {module_name!r} cannot be imported: {_said(problem)} "
            "Expected package.module:factory with the module installed or on PYTHONPATH."
        ) from problem
    factory = getattr(module, attribute, None)
    if not callable(factory):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = nearest(attribute, public, count=1)
        hint = f" Did you mean '{module_name}:{near[0]}'?" if near else ""
        wrong = "has no" if factory is None else "has an uncallable"
        raise ValueError(
            f"model {name!r}: module {module_name!r} {wrong} {attribute!r}; "
            f"expected a function that returns the model.{hint}"
        )
    try:
        model = factory()
    except Exception as problem:
        raise ValueError(
            f"model {name!r}: the factory failed: {_said(problem)} "
            f"It is called without arguments; try: python -c 'import {module_name}; {module_name}.{attribute}()'"
        ) from problem
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r}: the factory returned a {type(model).__name__}; expected a torch.nn.Module.")
    return model


def _folder_of(name: str, *, allow_download: bool) -> Path:
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
    near = nearest(name, EMBEDDED, count=1)[0]
    raise ValueError(f"unknown model {name!r}. Did you mean {near!r}? Embedded: {', '.join(EMBEDDED)}. {WAYS}")


def _hub_snapshot(name: str, *, allow_download: bool) -> Path:
    """The folder in the hub cache. Only top-level files of the kinds in HUB_FILES are ever fetched."""
    with quietly():
        from huggingface_hub import snapshot_download

        try:
            return Path(
                snapshot_download(
                    name,
                    allow_patterns=HUB_FILES,
                    ignore_patterns=["*/*", "consolidated*"],
                    local_files_only=not allow_download,
                )
            )
        except Exception as problem:
            if allow_download:
                raise ValueError(
                    f"hub model {name!r} could not be downloaded: {_said(problem)} Check the name, the network and, "
                    "for a gated model, your login (hf auth login)."
                ) from problem
            raise ValueError(
                f"hub model {name!r} is not in the local cache, and no folder has that name. Downloading is off: "
                "allow it with --allow-download (allow_download=True in Python), or give the path of a folder."
            ) from problem


def _check_folder(folder: Path) -> None:
    """What can be said before transformers runs: config.json is readable, weights are safetensors and whole."""
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(
            f"model folder {str(folder)!r} has no config.json. "
            "Expected a folder written by save_pretrained of transformers."
        )
    if not isinstance(_read_json(config).get("model_type"), str):
        raise ValueError(f"{str(config)!r} names no model_type. Expected the config.json that save_pretrained writes.")
    from safetensors import safe_open

    for file in _weight_files(folder):
        try:
            with safe_open(file, "pt"):
                pass
        except Exception as problem:
            raise ValueError(
                f"weights {str(file)!r} are corrupt or cut short ({file.stat().st_size} bytes): {_said(problem)} "
                "Copy or download the file again."
            ) from problem


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        names = sorted(set(shards.values())) if isinstance(shards, dict) else []
        missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if missing or not names:
            raise ValueError(
                f"{str(index)!r} lists shards that are not in its folder: {_some(missing) or 'none are listed'}. "
                "Copy or download the model again."
            )
        return [folder / name for name in names]
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickles:
        raise ValueError(
            f"model folder {str(folder)!r} has its weights only as pickle ({_some(pickles)}), which can run code when "
            "opened. Expected model.safetensors: convert them with save_pretrained where you trust the file."
        )
    raise ValueError(f"model folder {str(folder)!r} has no weights. Expected model.safetensors, whole or in shards.")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except ValueError as problem:
        raise ValueError(f"{str(file)!r} is not valid JSON: {_said(problem)} Copy or download it again.") from problem
    if not isinstance(found, dict):
        raise ValueError(f"{str(file)!r} holds a {type(found).__name__}; expected a JSON object.")
    return found


def _from_folder(folder: Path, dtype: torch.dtype | None, trust_remote_code: bool) -> tuple[nn.Module, tuple[str, ...]]:
    """The model of a folder, and a note on tensors it has no place for."""
    _check_folder(folder)
    with quietly():
        import transformers

        auto: Any = transformers.AutoModelForCausalLM if _is_causal(folder) else transformers.AutoModel
        try:
            model, info = auto.from_pretrained(
                str(folder),
                dtype="auto" if dtype is None else dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # reported below, with their names
                output_loading_info=True,
            )
        except Exception as problem:
            if "trust_remote_code" in str(problem):
                raise ValueError(
                    f"model folder {str(folder)!r} needs its own Python code to run. Read that code first, then allow "
                    "it with --trust-remote-code (trust_remote_code=True in Python)."
                ) from problem
            raise ValueError(
                f"transformers {transformers.__version__} cannot load {str(folder)!r}: {_said(problem)} "
                "Check that config.json fits the weights and that this version knows the model."
            ) from problem
    kind = type(model).__name__
    wrong = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    wrong += [f"{k} is {tuple(got)}, not {tuple(want)}" for k, got, want in sorted(info["mismatched_keys"])]
    wrong += info["error_msgs"]
    if wrong:
        raise ValueError(
            f"the weights in {str(folder)!r} do not fit {kind} of config.json: {_some(wrong, '; ')}. "
            "Expected every tensor of the model, in its shape: check that both files come from the same model."
        )
    unused = sorted(info["unexpected_keys"])
    note = f"{len(unused)} tensors of the checkpoint are not part of {kind} and were left out: {_some(unused)}"
    return model, (note,) if unused else ()


def _is_causal(folder: Path) -> bool:
    """Whether to load with the language-model head: one exists for the type, and the checkpoint is not headless."""
    from transformers.models.auto import modeling_auto

    config = _read_json(folder / "config.json")
    if auto_map := config.get("auto_map"):
        return "AutoModelForCausalLM" in auto_map
    base = modeling_auto.MODEL_MAPPING_NAMES.get(config["model_type"])
    headless = base in (config.get("architectures") or ())
    return config["model_type"] in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not headless


def _tokenizer_of_folder(folder: Path, model: nn.Module, trust_remote_code: bool) -> tuple[Tokenizer, tuple[str, ...]]:
    if any((folder / file).is_file() for file in TOKENIZER_FILES):
        with quietly():
            from transformers import AutoTokenizer

            try:
                auto: Any = AutoTokenizer
                inner = auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
            except Exception as problem:
                raise ValueError(
                    f"the tokenizer in {str(folder)!r} cannot be loaded: {_said(problem)} "
                    "Copy its files again, or remove them to read text as bytes."
                ) from problem
        return PretrainedTokenizer(inner), ()
    vocabulary = _vocabulary_size(model)
    if vocabulary is None or vocabulary < BYTES:
        size = "an unknown vocabulary" if vocabulary is None else f"a vocabulary of {vocabulary}"
        raise ValueError(
            f"model folder {str(folder)!r} has no tokenizer files and {size}; text as bytes needs at least "
            f"{BYTES} ids. Add tokenizer.json, as save_pretrained of the tokenizer writes it."
        )
    return ByteTokenizer(), (f"no tokenizer files in {str(folder)!r}: text is read as bytes, ids 0 to 255",)


def _tokenizer_of_factory(name: str, model: nn.Module) -> tuple[Tokenizer, tuple[str, ...]]:
    own = getattr(model, "tokenizer", None)
    if isinstance(own, Tokenizer):
        return own, ()
    vocabulary = _vocabulary_size(model)
    if vocabulary is not None and vocabulary < BYTES:
        raise ValueError(
            f"model {name!r} has no tokenizer and a vocabulary of {vocabulary}; text as bytes needs at least {BYTES} "
            "ids. Give the model an attribute `tokenizer` with encode(text) and decode(ids)."
        )
    return ByteTokenizer(), (f"model {name!r} brings no tokenizer: text is read as bytes, ids 0 to 255",)


def _vocabulary_size(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) else None


def _said(problem: BaseException) -> str:
    """What an exception says, on one line of bounded length, ending in a full stop."""
    words = " ".join(str(problem).split())
    words = words if len(words) <= 300 else words[:297] + "..."
    return f"{type(problem).__name__}: {words}".rstrip(".: ") + "."


def _some(names: Sequence[str], separator: str = ", ", *, most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
