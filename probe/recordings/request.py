"""What a recording is asked for: the model, the recipes, the tokens; all that can be wrong is found before a run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probe.data import text_of, token_batches
from probe.data.tokenizers import Tokenizer
from probe.models.loading import Loaded, load_model, weight_fingerprint
from probe.models.mamba import is_mamba
from probe.models.positions import check_positions
from probe.recordings.checked import RecordingError
from probe.recordings.format import Calibrated, Layout, Manifest
from probe.recordings.placing import is_taken
from probe.recordings.reading import Recording, read_recording
from probe.recordings.returning import is_compiled, returns_outputs, unwrapped
from probe.running.calibration import Calibration
from probe.running.devices import check_device, is_present, is_recorded
from probe.running.environment import comparable, differences
from probe.running.recipes import Recipe, check_recipes, recipes_of


@dataclass(frozen=True)
class Defaults:
    """What a layout records unless it is told otherwise: what the script did whose layout it is."""

    modes: tuple[str, ...]
    layers: tuple[str, ...]
    taps: tuple[str, ...]
    samples: int


DEFAULTS: dict[Layout, Defaults] = {
    "safetensors": Defaults(("essential",), ("first", "last"), (), 10),
    "npy": Defaults(("essential",), ("first", "last"), (), 10),
    "npz": Defaults(("all",), ("first",), ("inputs",), 1),
    "pt": Defaults(("fp_only",), ("all",), ("embedding", "final_norm"), 1),
}
#: In a recording `all` has its reference with it: without one there is nothing to compare.
ALL = ("fp_only", "quant_only")
#: For models without Mamba blocks, which most modes quantize.
PLAIN = ("fp32", "linear_w", "linear_wa")
SEQLEN = 512


@dataclass(frozen=True)
class Calibrating:
    """What static scales are to be taken from."""

    data: str
    samples: int
    seqlen: int
    percentile: float

    def done(self, calibration: Calibration) -> Calibrated:
        """As it is written down once it has happened."""
        return Calibrated(self.data, calibration.data, self.percentile, self.samples, self.seqlen)

    def __str__(self) -> str:
        return f"{self.samples} x {self.seqlen} of {self.data}, percentile {self.percentile}"


@dataclass(frozen=True)
class _NoTokenizer:
    model: str

    def encode(self, text: str) -> list[int]:
        raise ValueError(f"{self.model} brings no tokenizer. Give the tokens themselves: batches=[...].")

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


@dataclass(frozen=True)
class Subject:
    """What is run: a float model that recipes are applied to, or, `as_it_is`, one that somebody made ready."""

    loaded: Loaded
    as_it_is: bool = False


def subject_of(
    model: str | Loaded | nn.Module, pretrained_dir: str | None, *, allow_download: bool, trust_remote_code: bool
) -> Subject:
    """Load a model by name, from `pretrained_dir` if that is given, or take the one that is there."""
    if isinstance(model, str):
        where = model if pretrained_dir is None else pretrained_dir
        found = load_model(where, allow_download=allow_download, trust_remote_code=trust_remote_code)
        return Subject(Loaded(model, found.model, found.tokenizer, found.fingerprint, found.notes))
    if pretrained_dir is not None:
        raise ValueError("a model and a folder of weights were both given. Leave one out.")
    if isinstance(model, Loaded):
        return Subject(model)
    inner = unwrapped(model)
    as_it_is = is_compiled(model) or returns_outputs(model)
    own = getattr(inner, "tokenizer", None)
    name = type(inner).__name__
    tokenizer = own if isinstance(own, Tokenizer) else _NoTokenizer(name)
    return Subject(Loaded(name, model, tokenizer, weight_fingerprint(inner)), as_it_is)


def recipes_for(
    subject: Subject, modes: Sequence[str] | None, formats: Sequence[str], defaults: Defaults
) -> list[Recipe]:
    """The recipes to record. A model that is run as it is has one, which the caller names."""
    if subject.as_it_is:
        recipes = recipes_of(list(modes or ("fp32",)), list(formats))
        if len(recipes) != 1:
            raise ValueError(
                f"the model is run as it is, so it is one recipe, but {', '.join(map(str, recipes))} were asked for. "
                "Name the one that it is."
            )
        return recipes
    fitting = defaults.modes if is_mamba(subject.loaded.model) or defaults.modes == ("fp_only",) else PLAIN
    names = [one for name in modes or fitting for one in (ALL if name == "all" else (name,))]
    recipes = recipes_of(names, list(formats))
    check_recipes(subject.loaded, recipes)
    return recipes


def batches_of(
    subject: Subject, *, prompt: str | None, data: str, samples: int, seqlen: int | None, batch_size: int
) -> list[Tensor]:
    """Windows of a text, or a prompt; never fewer tokens than were asked for."""
    tokenizer = subject.loaded.tokenizer
    if prompt is None:
        length = SEQLEN if seqlen is None else seqlen
        check_positions(unwrapped(subject.loaded.model), length, key="seqlen")
        return token_batches(text_of(data), tokenizer, samples=samples, seqlen=length, batch_size=batch_size)
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise ValueError("the prompt is empty. Expected text.")
    length = len(tokens) if seqlen is None else seqlen
    check_positions(unwrapped(subject.loaded.model), length, key="seqlen")
    return token_batches(tokens, tokenizer, samples=1, seqlen=length, batch_size=batch_size)


def device_name(device: str) -> str:
    """The device as it is written down, once it is known to be here."""
    if is_recorded(device):
        raise ValueError(f"device {device!r} is a recording already. Give a device that can run a model.")
    check_device(device, Path())
    if not is_present(device):
        raise ValueError(f"device {device!r} is not present on this machine. Record there, or give cpu.")
    return f"{device} {torch.cuda.get_device_name(device)}" if device.startswith("cuda") else device


def device_of(subject: Subject, device: str) -> str:
    """Where a model lies that is run as it is."""
    found = next((parameter.device for parameter in subject.loaded.model.parameters()), torch.device("cpu"))
    if device not in ("cpu", str(found), found.type):
        raise ValueError(f"the model lies on {found}, and the device is {device}. Move it, or leave the device out.")
    return device_name(str(found)) if found.type == "cuda" else found.type


def check_ready(subject: Subject, *, layers: object, taps: object, compile: bool) -> None:
    """Refuse what a model that is run as it is can no longer be told."""
    model = subject.loaded.model
    if returns_outputs(model) and (layers is not None or taps is not None):
        raise ValueError("layers were chosen when record_outputs wrapped the model. Leave layers and taps out.")
    if compile and is_compiled(model):
        raise ValueError("the model is compiled already. Leave compile out.")


def check_only_one(**given: object) -> None:
    """Tokens come from one place: what another would need is refused, not ignored."""
    there = [name for name, value in given.items() if value is not None]
    for first, others, why in (
        ("batches", ("prompt", "data", "samples", "seqlen"), "batches are whole"),
        ("prompt", ("data", "samples"), "a prompt is one sample of its own"),
    ):
        for other in others:
            if first in there and other in there:
                raise ValueError(f"{first} and {other} were both given, and {why}. Leave one out.")


def facts_of(manifest: Manifest, layout: Layout) -> dict[str, str]:
    """What two recordings must share to lie in one folder."""
    return {
        "model": manifest.model,
        "weights": str(manifest.fingerprint),
        "tokens": f"{manifest.tokens.samples} x {manifest.tokens.seqlen}, {manifest.tokens.fingerprint}",
        "device": manifest.device,
        "layout": layout,
        **comparable(manifest.versions),
    }


def existing_recording(folder: Path, begun: Manifest, layout: Layout, *, overwrite: bool) -> Recording | None:
    """The recording that is there already, if these recipes can be added to it."""
    if not is_taken(folder):
        return None
    existing = read_recording(folder, verify=False)
    there = existing.manifest
    if other := differences(facts_of(there, there.layout), facts_of(begun, layout)):
        raise RecordingError(f"{folder} holds a recording of something else: {'; '.join(other)}. Give another folder.")
    assert begun.unfinished is not None
    new = begun.unfinished.missing
    clash = [recipe for recipe in new if recipe in there.recipes]
    if clash and not overwrite:
        raise RecordingError(
            f"{folder} has {', '.join(clash)} already. Leave them out, give another folder, or overwrite them "
            "(--overwrite)."
        )
    files = [one.file for recorded in there.recipes.values() for one in recorded.tensors.values()]
    if layout == "pt" and set(there.recipes) != set(new) and any("/" not in file for file in files):
        raise RecordingError(
            f"{folder} holds {', '.join(existing.recipes)}, and the layout pt has one mode in a folder. Give another "
            "folder, or record all modes in one call, which makes a folder for each."
        )
    return existing


def config_of(model: nn.Module) -> dict[str, Any]:
    """The configuration of a model of transformers in plain values."""
    config: Any = getattr(model, "config", None)
    found = config.to_dict() if hasattr(config, "to_dict") else {}
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain
