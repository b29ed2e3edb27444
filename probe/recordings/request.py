"""A request to record: its options, and the model, recipes and tokens that follow from them.

Every mistake in a request is found before the model runs.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probe.data.calls import Batch
from probe.data.samples import TextSamples, token_batches
from probe.data.tokenizers import NoTokenizer, Tokenizer
from probe.formats import PERCENTILE
from probe.models.loading import Loaded, load_model, weight_fingerprint
from probe.models.mamba_blocks import is_all_mamba
from probe.models.offload import device_of
from probe.models.outputs import output_kind
from probe.models.positions import check_positions
from probe.recordings.manifest import FILE_NAME, LAYOUTS, Layout, RecordedCalibration
from probe.recordings.script_formats import NPZ, ScriptFacts
from probe.recordings.taps import TAPS, is_compiled, points_returned, unwrapped
from probe.running.calibration import check_percentile
from probe.running.environment import check_device, is_present, is_recorded
from probe.running.inputs import Inputs, batch_of, calibrating, check_samples, input_batches, with_decoder_tokens
from probe.running.modes import GIVEN, given_modes
from probe.running.recipes import Recipe, check_recipes, recipes_of
from probe.words import WHOLE, look_up


@dataclass(frozen=True)
class LayoutDefaults:
    """What a layout records unless the request says otherwise: the same as the script that it comes from."""

    modes: tuple[str, ...]
    layers: tuple[str, ...]
    taps: tuple[str, ...]
    samples: int
    always: tuple[str, ...] = ()  # taps that are recorded in addition to those of the request


DEFAULTS: dict[Layout, LayoutDefaults] = {
    "safetensors": LayoutDefaults(("essential",), ("first", "last"), (), 10),
    "npy": LayoutDefaults(("essential",), ("first", "last"), (), 10),
    "npz": LayoutDefaults(("all",), ("first",), ("inputs",), 1, always=("inputs",)),
    "pt": LayoutDefaults(("fp_only",), ("all",), ("embedding", "final_norm"), 1),
}
#: In a recording `all` includes the float reference: without it there is nothing to compare.
ALL = ("fp_only", "quant_only")
#: For models without Mamba blocks, which most modes quantize.
PLAIN = ("fp32", "linear_w", "linear_wa")
SEQLEN = 512


@dataclass(frozen=True, eq=False)
class RecordRequest:
    """What to record, and how. None stands for the default of the layout (DEFAULTS)."""

    out: Path | str = "layer_outputs"
    """The folder. While it is made, the recording is in `.partial` in it."""
    _: KW_ONLY
    model: str | Loaded | nn.Module = "tiny-mamba"
    """A name, or a model. A model that is compiled or made by record_outputs runs as it is; `modes` and `formats` then
    only state its recipe."""
    pretrained_dir: str | None = None
    """The folder of the weights; `model` is then only the name in the manifest."""
    reference: str | None = None
    """The float original of a model that is quantized already, which is then the mode `given`."""
    modes: Sequence[str] | None = None
    formats: Sequence[str] = ("int8",)
    include: Sequence[str] = ()
    """What linear modes put on the grid too: router, embedding, head."""
    layers: Sequence[str | int] | None = None
    taps: Sequence[str] | None = None
    samples: int | None = None
    """Windows of the text `data`, each of `seqlen` tokens."""
    seqlen: int | None = None
    data: str | None = None
    prompt: str | None = None
    """This text instead of `data`: one sample."""
    inputs: str | None = None
    """What `package.module:function` returns, instead of a text."""
    batches: Sequence[Any] | None = None
    """These tokens instead of a text, [samples, tokens]; or tensors, tuples and dicts that the model is called with."""
    batch_size: int = 1
    device: str = "cpu"
    compile: bool = False
    calib_data: str = "calibration"
    calib_data_num: int = 16
    calib_seqlen: int = 256
    percentile: float = PERCENTILE
    layout: Layout = "safetensors"
    output_file: str | None = None
    """The archive of the layout npz."""
    overwrite: bool = False
    """Replace recipes that the folder has already. Others are added to it."""
    restart: bool = False
    """Delete an interrupted recording instead of finishing it."""
    allow_download: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_percentile(self.percentile)
        object.__setattr__(self, "percentile", float(self.percentile))  # as a manifest has it
        look_up("layout", self.layout, dict.fromkeys(LAYOUTS))
        for tap in self.taps or ():
            look_up("tap", tap, dict.fromkeys(TAPS))
        if self.output_file is not None and self.layout != "npz":
            raise ValueError(f"an output file is for the layout npz, and the layout is {self.layout}. Leave it out.")
        if not self.archive.endswith(".npz") or "/" in self.archive or not FILE_NAME.fullmatch(self.archive):
            raise ValueError(f"the output file is {self.archive!r}. Expected a plain name that ends in .npz.")
        for first, others, why in (
            ("batches", ("inputs", "prompt", "data", "samples", "seqlen"), "batches are whole"),
            ("inputs", ("prompt", "data", "samples", "seqlen"), "what a function returns is whole"),
            ("prompt", ("data", "samples"), "a prompt is one sample of its own"),
        ):
            for other in others:
                if getattr(self, first) is not None and getattr(self, other) is not None:
                    raise ValueError(f"{first} and {other} were both given, and {why}. Leave one out.")

    @property
    def folder(self) -> Path:
        """`out` without links."""
        return Path(os.path.realpath(self.out))

    @property
    def defaults(self) -> LayoutDefaults:
        """What the layout records unless the request says otherwise."""
        return DEFAULTS[self.layout]

    @property
    def weights(self) -> str:
        """Where the weights of a model by name are."""
        return str(self.pretrained_dir or self.model)

    @property
    def named_modes(self) -> list[str]:
        """The modes that are asked for, by name; none: those of the layout."""
        modes = self.modes or (("fp32", GIVEN) if self.reference else ())
        return given_modes(modes, self.weights, self.reference)

    @property
    def chosen_layers(self) -> tuple[str | int, ...]:
        """The layers, in the syntax of `select`."""
        return tuple(self.layers or self.defaults.layers)

    @property
    def chosen_taps(self) -> tuple[str, ...]:
        """The taps, each once."""
        if self.taps is None:
            return self.defaults.taps
        return tuple(dict.fromkeys((*self.defaults.always, *self.taps)))

    @property
    def archive(self) -> str:
        """The file of the layout npz."""
        return self.output_file or NPZ

    @property
    def source(self) -> str | None:
        """The text that the tokens come from; None for a prompt and for batches."""
        return (self.inputs or self.data or "evaluation") if self.prompt is None and self.batches is None else None

    @property
    def evaluated(self) -> TextSamples | None:
        """The samples; None for a prompt and for batches."""
        if self.source is None:
            return None
        samples = self.defaults.samples if self.samples is None else self.samples
        return TextSamples(self.source, samples, SEQLEN if self.seqlen is None else self.seqlen, self.batch_size)

    @property
    def calibrated(self) -> TextSamples:
        """The samples that static scales are computed from."""
        wanted = TextSamples(self.calib_data, self.calib_data_num, self.calib_seqlen)
        return wanted if self.evaluated is None else calibrating(self.evaluated, wanted)

    @property
    def calibration(self) -> str:
        """The data that static scales are computed from, in words."""
        ours = self.calibrated
        return f"{ours.samples} x {ours.seqlen} of {ours.source}, percentile {self.percentile}"

    def recorded_calibration(self, fingerprint: str) -> RecordedCalibration:
        """The facts of a calibration that was made as requested, on data with this fingerprint."""
        ours = self.calibrated
        return RecordedCalibration(ours.source, fingerprint, self.percentile, ours.samples, ours.seqlen)


# --------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class ModelToRun:
    """A float model that recipes are applied to, or one that `runs_as_is`: compiled, or made by record_outputs."""

    loaded: Loaded
    runs_as_is: bool = False


def check_request(request: RecordRequest) -> None:
    """Refuse what no model is needed for to see that it cannot be."""
    if request.reference is not None and not isinstance(request.model, str):
        raise ValueError("a reference is the float original of a model by its name. Name the model, or leave it out.")
    recipes_of(request.named_modes, list(request.formats), request.include)
    check_samples(*(one for one in (request.calibrated, request.evaluated) if one is not None))
    if request.prompt == "":
        raise ValueError("the prompt is empty. Expected text.")
    if isinstance(request.model, str):
        _check_present(request.device)


def model_to_run(request: RecordRequest) -> ModelToRun:
    """The model of the request, loaded if it is a name, from `pretrained_dir` if there is one."""
    model = request.model
    if isinstance(model, str):
        source = request.reference or request.weights
        found = load_model(source, allow_download=request.allow_download, trust_remote_code=request.trust_remote_code)
        return ModelToRun(replace(found, name=model))
    if request.pretrained_dir is not None:
        raise ValueError("a model and a folder of weights were both given. Leave one out.")
    if isinstance(model, Loaded):
        return ModelToRun(model)
    returns = points_returned(model) is not None
    if returns and (request.layers is not None or request.taps is not None):
        raise ValueError("layers were chosen when record_outputs wrapped the model. Leave layers and taps out.")
    if request.compile and is_compiled(model):
        raise ValueError("the model is compiled already. Leave compile out.")
    inner = unwrapped(model)
    name = type(inner).__name__
    own = getattr(inner, "tokenizer", None)
    absent = NoTokenizer(f"{name} brings no tokenizer. Give the tokens themselves: batches=[...].")
    tokenizer = own if isinstance(own, Tokenizer) else absent
    loaded = Loaded(name, model, tokenizer, weight_fingerprint(inner))
    return ModelToRun(loaded, runs_as_is=is_compiled(model) or returns)


def _check_present(device: str) -> None:
    if is_recorded(device):
        raise ValueError(f"device {device!r} is a recording already. Give a device that can run a model.")
    check_device(device, Path())
    if not is_present(device):
        raise ValueError(f"device {device!r} is not present on this machine. Record there, or give cpu.")


def device_name(request: RecordRequest, model: ModelToRun) -> str:
    """The device for the manifest; one that is not present is an error. A model that runs as is has its own device."""
    device = request.device
    if model.runs_as_is:
        found = device_of(model.loaded.model)
        if device not in ("cpu", str(found), found.type):
            wrong = f"the model lies on {found}, and the device is {device}"
            raise ValueError(f"{wrong}. Move it, or leave the device out.")
        if found.type != "cuda":
            return found.type
        device = str(found)
    _check_present(device)
    return f"{device} {torch.cuda.get_device_name(device)}" if device.startswith("cuda") else device


# ------------------------------------------------------------------------------------------ recipes and tokens


def recipes_for(request: RecordRequest, model: ModelToRun) -> list[Recipe]:
    """The recipes to record. A model that runs as is has exactly one, which the request must name."""
    if model.runs_as_is:
        recipes = recipes_of(list(request.modes or ("fp32",)), list(request.formats), request.include)
        if len(recipes) != 1:
            raise ValueError(
                f"the model is run as it is, so it is one recipe, but {', '.join(map(str, recipes))} were asked for. "
                "Name the one that it is."
            )
        return recipes
    default = request.defaults.modes
    fitting = default if is_all_mamba(model.loaded.model) or default == ("fp_only",) else PLAIN
    names = [one for name in request.named_modes or fitting for one in (ALL if name == "all" else (name,))]
    recipes = recipes_of(names, list(request.formats), request.include)
    check_recipes(model.loaded, recipes)
    return recipes


def inputs_for(request: RecordRequest, model: ModelToRun) -> Inputs:
    """The batches of the request, samples, or a prompt; never fewer tokens than the request says."""
    inner = replace(model.loaded, model=unwrapped(model.loaded.model))
    if request.batches is not None:
        batches = [batch_of(one, where=f"batch {index}") for index, one in enumerate(request.batches)]
        return Inputs(batches, "inputs of the caller", "")
    if request.prompt is None:
        assert request.evaluated is not None
        return input_batches(inner, request.evaluated)
    text = inner.tokenizer.encode(request.prompt)
    if not text:
        raise ValueError("the prompt is empty. Expected text.")
    seqlen = len(text) if request.seqlen is None else request.seqlen
    check_positions(inner.model, seqlen, key="seqlen")
    tokens = token_batches(text, inner.tokenizer, samples=1, seqlen=seqlen, batch_size=request.batch_size)
    return Inputs(with_decoder_tokens(inner.model, tokens), "a prompt", f"1 x {seqlen}")


def check_whole(request: RecordRequest, model: ModelToRun, batches: Sequence[Batch]) -> None:
    """Refuse a tap of the whole model's output by a name that it does not have."""
    asked = next((tap for tap in request.chosen_taps if tap in WHOLE), None)
    if asked is None or model.runs_as_is:
        return
    kind = output_kind(model.loaded.model, batches[0])
    if kind.label != asked:
        raise ValueError(f"the output of {model.loaded.name} is {kind.what}, and its tap is {kind.label}, not {asked}.")


def script_facts(request: RecordRequest, model: ModelToRun, batches: Sequence[Batch]) -> ScriptFacts:
    """The facts of the users' scripts: the text of each sample, and the configuration in plain values."""
    prompt: str | list[str] | None = request.prompt
    if prompt is None:
        rows = [row for batch in batches if isinstance(batch, Tensor) for row in batch]
        texts = [model.loaded.tokenizer.decode(row.tolist()) for row in rows]
        prompt = texts[0] if len(texts) == 1 else texts
    config: Any = getattr(unwrapped(model.loaded.model), "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    return ScriptFacts(prompt, json.loads(json.dumps(values, default=str)), request.pretrained_dir, request.archive)
