"""The manifest of a recording: what really ran, as JSON. A manifest from elsewhere is checked key by key.

    {
     "device": "cuda NVIDIA L4",
     "files": {"mode_2_1-fp8_e4m3.safetensors": {"bytes": 4194816, "sha256": "9f86d0..."}},   all but the manifest
     "fingerprint": "be9b3c8fb9a0b5a1",                 of the float weights; null where the device cannot tell
     "layout": "safetensors",                           or npy, npz, pt
     "model": "tiny-mamba",
     "recipes": {
      "mode_2_1-fp8_e4m3": {
       "applied": "by probe",                           or "before": the model came quantized
       "calibration": null,                             or data, fingerprint, percentile, samples, seqlen
       "compiled": false,
       "format": "fp8_e4m3",                            null for a float mode
       "layers": ["layer_0"],                           those that fired, in order
       "mode": "mode_2_1",
       "tensors": {
        "layer_0.output": {
         "dtype": "bfloat16",                           as the model gave it
         "file": "mode_2_1-fp8_e4m3.safetensors",
         "key": "layer_0.output",                       in the file; null where a file is one tensor
         "shape": [8, 256, 64]
        }
       }
      }
     },
     "tokens": {"count": 2048, "file": "tokens.safetensors", "fingerprint": "0e2c...", "samples": 8, "seqlen": 256,
                "source": "evaluation"},
     "unfinished": null,                                or asked, missing: the recipes that are not recorded yet
     "version": 1,
     "versions": {"probe": "0.1.0", "torch": "2.13.0"}
    }

The first axis of every tensor is that of the samples; the second of the logits, that of the tokens.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, cast

from probe.files import atomic, defects
from probe.files.checked_json import Node, document, repeated
from probe.files.defects import DefectError
from probe.words import LOGITS

VERSION = 1
Layout = Literal["safetensors", "npy", "npz", "pt"]
LAYOUTS: tuple[Layout, ...] = ("safetensors", "npy", "npz", "pt")
MANIFEST = "manifest.json"
TOKENS = "tokens.safetensors"
#: The types of recorded tensors, as torch calls them.
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
#: Places beside the layers, and parts of a layer, that can be tapped: `embedding.output`, `layer_0.scan.input`.
ENDS = ("embedding", "final_norm")
PARTS = ("mixer", "conv1d", "scan")
TENSOR_NAME = re.compile(rf"{LOGITS}|(?P<label>.+)\.(output|input)", re.DOTALL)
#: Plain names, in a folder of their mode at most: a manifest from elsewhere must not lead out of its folder.
FILE_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*\.(safetensors|npy|npz|pt|json)")
SHA256 = re.compile(r"[0-9a-f]{64}")
AGAIN = "Copy the recording again from where it was made, or make it again there"


class RecordingError(ValueError):
    """A recording that cannot be read or written, or that is of something else than it is compared with."""


#: Around code that reads a file: a defect of it, or a refusal of the system, is a RecordingError.
reading = partial(defects.reading, error=RecordingError, remedy=AGAIN)
#: Around code that writes: a full disk, or a folder without permission, is a RecordingError.
writing = partial(atomic.writing, error=RecordingError)


@dataclass(frozen=True)
class Tokens:
    """What the model was given: `samples` rows of `seqlen` tokens."""

    count: int
    samples: int
    seqlen: int
    fingerprint: str | None  # of all samples in order, however they were batched; None: nobody knows
    file: str | None = None  # where the ids are
    source: str | None = None  # the text; None: a prompt, or tokens of the caller


@dataclass(frozen=True)
class StoredTensor:
    """One tensor and its place on disk."""

    dtype: str  # as the model gave it
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


@dataclass(frozen=True)
class StoredFile:
    """A file as it was written."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> "StoredFile":
        """The facts of a file on disk, all of which is read."""
        with open(file, "rb") as stream:
            return cls(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


@dataclass(frozen=True)
class UnfinishedWork:
    """The request of an interrupted recording, and the recipes that it lacks."""

    asked: dict[str, str]
    missing: tuple[str, ...]


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


def manifest_to_json(manifest: Manifest) -> bytes:
    """Sorted keys, an indent of one space."""
    return (json.dumps({"version": VERSION, **asdict(manifest)}, indent=1, sort_keys=True) + "\n").encode()


def manifest_from_json(data: bytes) -> Manifest:
    """The inverse of manifest_to_json; anything wrong is a DefectError with its key."""
    facts = document(data, version=VERSION).members(
        *("version", "model", "fingerprint", "device", "tokens", "recipes"),
        *("versions", "layout", "files", "unfinished"),
    )
    unfinished = facts["unfinished"].or_null(_unfinished)
    files = {name: _file(name, node) for name, node in facts["files"].members(empty=True).items()}
    tokens = _tokens(facts["tokens"], files)
    recipes = {
        name: _recorded(name, node, tokens, files)
        for name, node in facts["recipes"].members(empty=unfinished is not None).items()
    }
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


def _tokens(node: Node, files: dict[str, StoredFile]) -> Tokens:
    facts = node.members("count", "samples", "seqlen", "fingerprint", "file", "source")
    count, samples, seqlen = (facts[key].count() for key in ("count", "samples", "seqlen"))
    if count != samples * seqlen:
        raise facts["count"].wrong(f"{samples} x {seqlen}")
    return Tokens(
        count,
        samples,
        seqlen,
        facts["fingerprint"].or_null(Node.text),
        facts["file"].or_null(lambda node: _file_name(node, files)),
        facts["source"].or_null(Node.text),
    )


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
    facts = node.members("bytes", "sha256")
    return StoredFile(facts["bytes"].count(), facts["sha256"].text(SHA256, "64 hexadecimal digits"))


def _unfinished(node: Node) -> UnfinishedWork:
    facts = node.members("asked", "missing")
    asked = {name: one.text() for name, one in facts["asked"].members(empty=True).items()}
    return UnfinishedWork(asked, tuple(one.text() for one in facts["missing"].entries(empty=True)))


def _calibrated(node: Node) -> RecordedCalibration:
    facts = node.members("data", "fingerprint", "percentile", "samples", "seqlen")
    percentile = facts["percentile"]
    if type(percentile.value) is not float or not 0 < percentile.value <= 1:
        raise percentile.wrong("a share above 0, at most 1.0")
    samples, seqlen = facts["samples"].count(), facts["seqlen"].count()
    return RecordedCalibration(facts["data"].text(), facts["fingerprint"].text(), percentile.value, samples, seqlen)


def _recorded(recipe: str, node: Node, tokens: Tokens, files: dict[str, StoredFile]) -> RecordedRecipe:
    facts = node.members("mode", "format", "layers", "tensors", "applied", "calibration", "compiled")
    mode, format = facts["mode"].text(), facts["format"].or_null(Node.text)
    if recipe != "-".join(part for part in (mode, format) if part):
        raise DefectError(f"{node.key}: its mode is {mode!r} and its format {format!r}, which is another recipe")
    tensors = facts["tensors"].members()
    layers = tuple(one.text() for one in facts["layers"].entries())
    _check_names(facts["layers"], layers, tensors)
    return RecordedRecipe(
        mode,
        format,
        layers,
        {name: _stored(name, one, tokens, files) for name, one in tensors.items()},
        cast(Literal["by probe", "before"], facts["applied"].one_of(("by probe", "before"))),
        facts["calibration"].or_null(_calibrated),
        facts["compiled"].flag(),
    )


def _stored(name: str, node: Node, tokens: Tokens, files: dict[str, StoredFile]) -> StoredTensor:
    facts = node.members("dtype", "shape", "file", "key")
    shape = tuple(size.count() for size in facts["shape"].entries())
    expected = (tokens.samples, tokens.seqlen) if name == LOGITS else (tokens.samples,)
    if shape[: len(expected)] != expected:
        raise facts["shape"].wrong(f"{' x '.join(map(str, expected))} first, as tokens says")
    file = _file_name(facts["file"], files)
    return StoredTensor(facts["dtype"].one_of(DTYPES), shape, file, facts["key"].or_null(Node.text))


def _check_names(node: Node, layers: tuple[str, ...], tensors: dict[str, Node]) -> None:
    """Every layer has an output; every tensor is of a layer or a part of one, of an end of the model, or the logits."""
    for label in repeated(layers):
        raise DefectError(f"{node.key}: {label} is listed twice")
    for label in layers:
        if f"{label}.output" not in tensors:
            raise DefectError(f"{node.key}: {label} is listed, but there is no {label}.output")
    known = {None, *layers, *ENDS, *(f"{label}.{part}" for label in layers for part in PARTS)}
    for name, one in tensors.items():
        match = TENSOR_NAME.fullmatch(name)
        if not match or match["label"] not in known:
            raise DefectError(f"{one.key}: is neither {LOGITS} nor of a layer in {node.key}")
