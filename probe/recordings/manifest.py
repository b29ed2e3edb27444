"""The manifest of a recording: a JSON file that states what ran. A manifest from elsewhere is checked key by key.

    {
     "configuration": {"layer_norm_epsilon": "1e-05"},  the model's settings but for its defaults; {} if it is not known
     "device": "cuda NVIDIA L4",
     "files": {"mode_2_1-fp8_e4m3.safetensors": {"bytes": 4194816, "sha256": "9f86d0..."}},   all but the manifest
     "fingerprint": "be9b3c8fb9a0b5a1",                 of the float weights; null where it is not known
     "layout": "safetensors",                           or npy, npz, pt
     "model": "tiny-mamba",
     "recipes": {
      "mode_2_1-fp8_e4m3": {
       "applied": "by probe",                           or "before": the model was quantized already
       "calibration": null,                             or data, fingerprint, percentile, samples, seqlen
       "compiled": false,
       "float_layers": [],                              those that the mode declares float (keep_float)
       "format": "fp8_e4m3",                            null for a float mode
       "include": [],                                   what a linear mode put on a grid too: router, embedding, head
       "layers": ["layer_0"],                           those that were recorded, in order
       "mode": "mode_2_1",
       "tensors": {
        "layer_0.output": {
         "dtype": "bfloat16",                           of the model's tensor; numpy files have float32 for some
         "file": "mode_2_1-fp8_e4m3.safetensors",
         "key": "layer_0.output",                       in the file; null where a file is one tensor
         "shape": [8, 256, 64]
        }
       },
       "weights": {"on_grid": 36864, "floating": 0, ...}   how much was on a grid; null or no key where it is not known
      }
     },
     "tokens": {"count": 2048, "file": "tokens.safetensors", "fingerprint": "0e2c...", "samples": 8, "seqlen": 256,
                "source": "evaluation"},
     "unfinished": null,                                or asked, failed, missing: the recipes that are not recorded yet
     "version": 1,
     "versions": {"probe": "0.1.0", "torch": "2.13.0"}
    }

The first axis of every tensor is the samples; the second axis of the logits is the tokens.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Literal, cast

from probe.files import atomic, defects
from probe.files.checked_json import Node, document, repeated
from probe.files.defects import DefectError
from probe.running.environment import differences
from probe.running.weights import Weights
from probe.words import LOGITS, OUTPUT, first_few, single_line

VERSION = 1
Layout = Literal["safetensors", "npy", "npz", "pt"]
LAYOUTS: tuple[Layout, ...] = ("safetensors", "npy", "npz", "pt")
MANIFEST = "manifest.json"
TOKENS = "tokens.safetensors"
#: The types of recorded tensors, as torch calls them.
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
#: What can be tapped beside whole layers, `embedding.output`, and inside of them, `layer_0.scan.input`.
ENDS = ("embedding", "final_norm")
PARTS = ("mixer", "conv1d", "scan")
TENSOR_NAME = re.compile(rf"{LOGITS}|{OUTPUT}|(?P<label>.+)\.(output|input)", re.DOTALL)
#: A plain name, in at most one folder: a manifest from elsewhere must not lead out of its own folder.
FILE_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*\.(safetensors|npy|npz|pt|json)")
SHA256 = re.compile(r"[0-9a-f]{64}")
AGAIN = "Copy the recording again from where it was made, or make it again there"


class RecordingError(ValueError):
    """A recording that cannot be read or written, or that does not match what it is compared with."""


#: Around code that reads a file: a defect of the file, or an OSError, becomes a RecordingError.
reading = partial(defects.reading, error=RecordingError, remedy=AGAIN)
#: Around code that writes: an OSError, such as a full disk, becomes a RecordingError.
writing = partial(atomic.writing, error=RecordingError)


@dataclass(frozen=True)
class Tokens:
    """The input of the model: `samples` rows of `seqlen` tokens.

    What is no token ids (`kind` is inputs) has no length: there `seqlen` is 1, and `source` says what it is.
    """

    count: int
    samples: int
    seqlen: int
    fingerprint: str | None  # of all samples in order, however they were batched; None if unknown
    file: str | None = None  # holds the ids
    source: str | None = None  # the name of the text; None for a prompt and for the caller's own tokens
    kind: Literal["token ids", "inputs"] = "token ids"

    def __str__(self) -> str:
        if self.kind == "inputs":
            return f"{self.samples} samples ({self.source or 'inputs of the caller'})"
        return f"{self.samples} x {self.seqlen} tokens"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor and its place on disk."""

    dtype: str  # of the model's tensor
    shape: tuple[int, ...]
    file: str
    key: str | None


@dataclass(frozen=True)
class RecordedCalibration:
    """The data that static scales were computed from."""

    data: str
    fingerprint: str
    percentile: float
    samples: int
    seqlen: int


@dataclass(frozen=True)
class RecordedRecipe:
    """One recipe: what ran, and its tensors."""

    mode: str  # as in test ids: mode_2_1
    format: str | None
    layers: tuple[str, ...]
    tensors: dict[str, StoredTensor]
    applied: Literal["by probe", "before"] = "before"
    calibration: RecordedCalibration | None = None
    compiled: bool = False
    float_layers: tuple[str, ...] = ()  # of `layers`: those that the mode declares float
    weights: Weights | None = None  # how much was on a grid; None where probe did not quantize
    include: tuple[str, ...] = ()  # what a linear mode put on a grid too: router, embedding, head


@dataclass(frozen=True)
class StoredFile:
    """The size and digest of a file, as it was written."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> "StoredFile":
        """Those of a file on disk, all of which is read."""
        with open(file, "rb") as stream:
            return cls(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


@dataclass(frozen=True)
class UnfinishedWork:
    """The request of an interrupted recording, and the recipes that it lacks."""

    asked: dict[str, str]
    missing: tuple[str, ...]
    failed: bool = False  # by an error, not by a kill: another request may replace it


@dataclass(frozen=True)
class Manifest:
    """A recording without its tensors."""

    model: str
    fingerprint: str | None
    device: str
    tokens: Tokens
    recipes: dict[str, RecordedRecipe]
    versions: dict[str, str]
    layout: Layout = "safetensors"
    files: dict[str, StoredFile] = field(default_factory=dict)
    unfinished: UnfinishedWork | None = None
    configuration: dict[str, str] = field(default_factory=dict)

    def other_configuration(self, configuration: Mapping[str, str]) -> str:
        """How the model is set up otherwise, as `layer_norm_epsilon 1e-05 -> 0.001`; empty where one is not known."""
        other = differences(self.configuration, configuration) if configuration else []
        return first_few([single_line(one, most=120) for one in other])


def manifest_to_json(manifest: Manifest) -> bytes:
    """Sorted keys, an indent of one space."""
    return (json.dumps({"version": VERSION, **asdict(manifest)}, indent=1, sort_keys=True) + "\n").encode()


def manifest_from_json(data: bytes) -> Manifest:
    """The inverse of manifest_to_json; anything wrong is a DefectError with its key."""
    whole = document(data, version=VERSION)
    if whole.value and isinstance(whole.value, dict):  # older recordings have none
        whole = Node(whole.key, {"configuration": {}, **whole.value})
    facts = whole.members("version", *(field.name for field in fields(Manifest)))
    work = partial(Node.as_dataclass, cls=UnfinishedWork, asked=_texts, missing=_list)
    unfinished = facts["unfinished"].or_null(work)
    files = {name: _file(name, node) for name, node in facts["files"].members(empty=True).items()}
    tokens = _tokens(facts["tokens"], files)
    nodes = facts["recipes"].members(empty=unfinished is not None)
    recipes = {name: _recipe(name, node, tokens, files) for name, node in nodes.items()}
    for place in repeated(f"{one.file} {one.key}" for recipe in recipes.values() for one in recipe.tensors.values()):
        raise DefectError(f"recipes: {place} belongs to more than one tensor")
    return Manifest(
        facts["model"].text(),
        facts["fingerprint"].or_null(Node.text),
        facts["device"].text(),
        tokens,
        recipes,
        {name: node.text() for name, node in facts["versions"].members().items()},
        cast(Layout, facts["layout"].one_of(LAYOUTS)),
        files,
        unfinished,
        _texts(facts["configuration"]),
    )


def data_flow_order(names: Iterable[str], layers: Iterable[str]) -> tuple[str, ...]:
    """Names of tensors in the order of the data flow: embedding, layer by layer, final norm, logits."""
    labels = {label: place for place, label in enumerate(layers)}

    def key(name: str) -> tuple[int, int, str]:
        label, _, side = name.rpartition(".")
        layer, _, part = label.rpartition(".")
        if label in labels:
            return labels[label], 0 if side == "input" else 9, name
        if layer in labels and part in PARTS:
            return labels[layer], {"conv1d": 1, "scan": 2, "mixer": 4}[part] + (name.endswith("scan.output")), name
        ends = {"embedding": -1, "final_norm": len(labels) + 1, "": len(labels) + 2}  # the logits have no label
        return ends.get(label, len(labels)), 0, name

    return tuple(sorted(names, key=key))


def _texts(node: Node) -> dict[str, str]:
    return {name: member.text() for name, member in node.members(empty=True).items()}


def _list(node: Node) -> tuple[str, ...]:
    return tuple(entry.text() for entry in node.entries(empty=True))


def _tokens(node: Node, files: dict[str, StoredFile]) -> Tokens:
    if isinstance(node.value, dict):  # older recordings have only token ids
        node = Node(node.key, {"kind": "token ids", **node.value})
    tokens = node.as_dataclass(
        Tokens,
        file=lambda name: name.or_null(partial(_file_name, files=files)),
        kind=lambda kind: kind.one_of(("token ids", "inputs")),
    )
    if tokens.count != tokens.samples * tokens.seqlen:
        raise node.members()["count"].wrong(f"{tokens.samples} x {tokens.seqlen}")
    return tokens


def _file_name(node: Node, files: dict[str, StoredFile]) -> str:
    name = node.text(FILE_NAME, "the plain name of a file in this folder")
    if name not in files:
        raise node.wrong("the name of a file in files")
    return name


def _file(name: str, node: Node) -> StoredFile:
    if not FILE_NAME.fullmatch(name):
        raise DefectError(f"files: {name!r} is not the plain name of a file in this folder")
    if name == MANIFEST:
        raise DefectError(f"files: {name} cannot vouch for itself")
    return node.as_dataclass(StoredFile, sha256=lambda digest: digest.text(SHA256, "64 hexadecimal digits"))


def _share(node: Node) -> float:
    if type(node.value) is not float or not 0 < node.value <= 1:
        raise node.wrong("a share above 0, at most 1.0")
    return node.value


def _recipe(name: str, node: Node, tokens: Tokens, files: dict[str, StoredFile]) -> RecordedRecipe:
    if isinstance(node.value, dict):  # older recordings have neither of these
        node = Node(node.key, {"weights": None, "float_layers": [], "include": [], **node.value})
    recipe = node.as_dataclass(
        RecordedRecipe,
        float_layers=_list,
        include=_list,
        layers=lambda layers: tuple(label.text() for label in layers.entries()),
        tensors=lambda tensors: {key: _tensor(key, one, tokens, files) for key, one in tensors.members().items()},
        applied=lambda applied: applied.one_of(("by probe", "before")),
        calibration=lambda facts: facts.or_null(partial(Node.as_dataclass, cls=RecordedCalibration, percentile=_share)),
        weights=lambda counts: counts.or_null(Weights.from_json),
    )
    if name != "-".join(filter(None, (recipe.mode, recipe.format))):
        other = f"its mode is {recipe.mode!r} and its format {recipe.format!r}"
        raise DefectError(f"{node.key}: {other}, which is another recipe")
    _check_names(node, recipe)
    return recipe


def _tensor(name: str, node: Node, tokens: Tokens, files: dict[str, StoredFile]) -> StoredTensor:
    def shape(node: Node) -> tuple[int, ...]:
        sizes = tuple(size.count() for size in node.entries())
        by_token = name == LOGITS and tokens.kind == "token ids" and len(sizes) != 2  # of classes, [samples, classes]
        expected = (tokens.samples, tokens.seqlen) if by_token else (tokens.samples,)
        if sizes[: len(expected)] != expected:
            raise node.wrong(f"{' x '.join(map(str, expected))} first, as tokens says")
        return sizes

    file = partial(_file_name, files=files)
    return node.as_dataclass(StoredTensor, dtype=lambda dtype: dtype.one_of(DTYPES), shape=shape, file=file)


def _check_names(node: Node, recipe: RecordedRecipe) -> None:
    """Every layer has an output; every tensor is of a layer or a part of one, of an end of the model, or the logits."""
    layers, where = recipe.layers, f"{node.key}.layers"
    for label in repeated(layers):
        raise DefectError(f"{where}: {label} is listed twice")
    for label in layers:
        if f"{label}.output" not in recipe.tensors:
            raise DefectError(f"{where}: {label} is listed, but there is no {label}.output")
    for label in recipe.float_layers:
        if label not in layers:
            raise DefectError(f"{node.key}.float_layers: {label} is no layer in {where}")
    known = {None, *layers, *ENDS, *(f"{label}.{part}" for label in layers for part in PARTS)}
    for name in recipe.tensors:
        match = TENSOR_NAME.fullmatch(name)
        if not match or match["label"] not in known:
            raise DefectError(f"{node.key}.tensors.{name}: is neither {LOGITS} or {OUTPUT} nor of a layer in {where}")
