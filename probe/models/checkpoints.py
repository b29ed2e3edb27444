"""Loading a folder that transformers wrote: checked first; weights that do not fit in memory stay in their files."""

import json
import math
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from probe.data.library_logs import quietly
from probe.files.defects import DefectError, parsing, read_document, reading
from probe.files.tensors import tensors_in
from probe.models.offload import Room
from probe.models.quantized import quantized_weights
from probe.numerics.native import without_collection
from probe.words import describe_error, first_few

#: The file of names and types that quanto writes beside the weights.
QUANTO_MAP = "quanto_qmap.json"


def check_folder(folder: Path) -> None:
    """Refuse, before transformers runs, a folder without a readable config.json or with weights that are not whole."""
    config = folder / "config.json"
    if not config.is_file():
        for file in sorted(folder.glob("*.gguf"))[:1]:
            raise ValueError(f"model folder {str(folder)!r} holds a GGUF file. Name the file itself: {str(file)!r}")
        expected = "Expected a folder written by save_pretrained of transformers."
        raise ValueError(f"model folder {str(folder)!r} has no config.json. {expected}")
    if not isinstance(read_json(config).get("model_type"), str):
        raise ValueError(f"{str(config)!r} names no model_type. Expected the config.json that save_pretrained writes.")
    for file in weight_files(folder):
        try:
            tensors_in(file)
        except (DefectError, OSError) as problem:
            raise ValueError(
                f"weights {str(file)!r} are corrupt or cut short ({file.stat().st_size} bytes): {problem}. "
                "Copy or download the file again."
            ) from problem


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that hold its weights: one, or the shards of an index."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = read_json(index).get("weight_map")
        names = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []
        missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if missing or not names:
            raise ValueError(
                f"{str(index)!r} lists shards that are not in its folder: {first_few(missing) or 'none are listed'}. "
                "Copy or download the model again."
            )
        return [folder / name for name in names]
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickles:
        raise ValueError(
            f"model folder {str(folder)!r} has its weights only as pickle ({first_few(pickles)}), which can run code "
            "when opened. Expected model.safetensors: convert them with save_pretrained where you trust the file."
        )
    raise ValueError(f"model folder {str(folder)!r} has no weights. Expected model.safetensors, whole or in shards.")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a file; anything else in it is a ValueError."""
    with reading(file, ValueError, remedy="Copy or download it again."), parsing("JSON"):
        found = json.loads(read_document(file))
    if not isinstance(found, dict):
        raise ValueError(f"{str(file)!r} holds a {type(found).__name__}; expected a JSON object.")
    return found


def quantization_of(folder: Path) -> dict[str, Any]:
    """What config.json says of a tool that quantized the weights; empty for a float model."""
    stated = read_json(folder / "config.json").get("quantization_config")
    return stated if isinstance(stated, dict) else {}


def from_folder(
    folder: Path,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
    room: Room | None = None,
    *,
    quantized: bool = False,
) -> tuple[nn.Module, tuple[str, ...]]:
    """The model of a folder, and a note on tensors of the checkpoint that it has no place for.

    If its weights take more than the `room`, accelerate loads them as the model runs: weights that are kept on disk
    stay in the files of the folder. A folder of weights that a tool quantized is refused, unless `quantized`.
    """
    check_folder(folder)
    if (folder / QUANTO_MAP).is_file() and not quantized:
        raise _quantized_model(folder, "quanto")
    away = room is not None and not room.takes(stored_size(folder, dtype))
    with ExitStack() as undo:
        placing: dict[str, Any] = {}
        if room is not None and away:
            spare = undo.enter_context(tempfile.TemporaryDirectory(prefix="probe-offload-"))
            placing = {"device_map": "sequential", "max_memory": room.by_device(), "offload_folder": spare}
        model, info = _pretrained(folder, dtype, trust_remote_code, placing)
        check_weights(folder, model, info, _unfit_on_disk(model) if away else [])
        weakref.finalize(model, undo.pop_all().close)
    unused, kind = sorted(info["unexpected_keys"]), type(model).__name__
    note = f"{len(unused)} tensors of the checkpoint are not part of {kind} and were left out: {first_few(unused)}"
    notes = [note] if unused else []
    if (tool := quantization_of(folder).get("quant_method")) and not quantized:
        if quantized_weights(model):
            raise _quantized_model(folder, tool)
        notes.append(f"the weights in {str(folder)!r} were quantized by {tool}, and dequantized when they were loaded")
    return model, tuple(notes)


def _quantized_model(folder: Path, tool: str) -> ValueError:
    return ValueError(
        f"model folder {str(folder)!r} holds weights that {tool} quantized. Expected the float model: give that as the "
        f"model with the mode checkpoint:{folder}, or as the reference (reference in [tool.probe], --reference)."
    )


def check_weights(source: Path, model: nn.Module, info: dict[str, Any], more: Sequence[str] = ()) -> None:
    """Refuse a model whose weights are not all in its source; `info` is the loading info of transformers."""
    wrong = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    wrong += [f"{k} is {tuple(got)}, not {tuple(want)}" for k, got, want in sorted(info["mismatched_keys"])]
    wrong += [*more, *info["error_msgs"]]
    if wrong:
        raise ValueError(
            f"the weights in {str(source)!r} do not fit {type(model).__name__} of "
            f"{'config.json' if source.is_dir() else 'its head'}: {first_few(wrong, '; ')}. "
            "Expected every tensor of the model, in its shape: check that both come from the same model."
        )


def _pretrained(
    folder: Path, dtype: torch.dtype | None, trust_remote_code: bool, placing: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the loading info of transformers: missing, mismatched and unexpected keys."""
    with quietly():
        import transformers

        try:
            found: tuple[nn.Module, dict[str, Any]] = _class_of(folder).from_pretrained(
                str(folder),
                dtype="auto" if dtype is None else dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # reported below, with their names
                output_loading_info=True,
                **placing,
            )
        except Exception as problem:
            if "trust_remote_code" in str(problem):
                raise ValueError(
                    f"model folder {str(folder)!r} needs its own Python code to run. Read that code first, then allow "
                    "it with --trust-remote-code (trust_remote_code=True in Python)."
                ) from problem
            if tool := quantization_of(folder).get("quant_method"):
                raise ValueError(
                    f"{str(folder)!r} was quantized by {tool}, and transformers {transformers.__version__} cannot load "
                    f"that here: {describe_error(problem)} Install what it names, run where there is such a device, or "
                    "save the checkpoint again."
                ) from problem
            raise ValueError(
                f"transformers {transformers.__version__} cannot load {str(folder)!r}: {describe_error(problem)} "
                "Check that config.json fits the weights and that this version knows the model."
            ) from problem
    return found


def stored_size(folder: Path, dtype: torch.dtype | None) -> int:
    """Bytes that the weights of a folder take in memory, floats as `dtype` (None: as they are stored)."""
    size = 0
    for kind in (kind for file in weight_files(folder) for kind in tensors_in(file).values()):
        stored = getattr(torch, kind.dtype, torch.uint8)  # torch has no name for types narrower than a byte
        size += math.prod(kind.shape) * (dtype if dtype is not None and stored.is_floating_point else stored).itemsize
    return size


def _unfit_on_disk(model: nn.Module) -> list[str]:
    """Tensors on disk whose shape is not that of the model; transformers checks only those that it loads."""
    kinds_in = cache(tensors_in)
    wrong = []
    for place, module in model.named_modules():
        kept: Any = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        for name, value in module.state_dict().items() if kept is not None else ():
            if value.is_meta and "." not in name:
                entry = kept.dataset.index[kept.prefix + name]
                shape = kinds_in(Path(entry["safetensors_file"]))[entry["weight_name"]].shape
                if shape != tuple(value.shape):
                    wrong.append(f"{place}.{name} is {shape}, not {tuple(value.shape)}")
    return wrong


#: The classes of transformers that load a model with code of its own, the most telling first.
AUTO_CLASSES = (
    *("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"),
    *("AutoModelForTokenClassification", "AutoModelForQuestionAnswering", "AutoModelForImageClassification"),
    *("AutoModelForAudioClassification", "AutoModelForSpeechSeq2Seq", "AutoModelForCTC", "AutoModel"),
)


@without_collection()
def _class_of(folder: Path) -> Any:
    """The class that loads the folder.

    A model with code of its own (`auto_map`): the first of AUTO_CLASSES that it has. Else the class that
    `architectures` names, if transformers has it for this type of model. Else the one with a language-model head where
    there is one for the type and the checkpoint has that head, and AutoModel as the last resort.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    config = read_json(folder / "config.json")
    auto_map, architectures = config.get("auto_map") or {}, config.get("architectures") or []
    if not isinstance(auto_map, dict) or not isinstance(architectures, list):
        wrong = "auto_map" if isinstance(architectures, list) else "architectures"
        expected = "an object" if wrong == "auto_map" else "a list of names"
        raise ValueError(f"{str(folder / 'config.json')!r}: {wrong} is {config[wrong]!r}; expected {expected}.")
    if auto_map:
        return getattr(transformers, next((name for name in AUTO_CLASSES if name in auto_map), "AutoModel"))
    for name in architectures:
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        stated = getattr(getattr(found, "config_class", None), "model_type", None)
        if stated == config["model_type"] and hasattr(found, "from_pretrained"):
            return found
    has_head = config["model_type"] in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_headless = modeling_auto.MODEL_MAPPING_NAMES.get(config["model_type"]) in architectures
    return transformers.AutoModelForCausalLM if has_head and not is_headless else transformers.AutoModel
