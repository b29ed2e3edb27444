"""The manifest of a recording: what really ran, as JSON. One that came from elsewhere is checked key by key.

    {
     "device": "cuda NVIDIA L4",
     "fingerprint": "be9b3c8fb9a0b5a1",                 of the float weights; null where the device cannot tell
     "model": "tiny-mamba",
     "recipes": {
      "mode_2_1-fp8_e4m3": {
       "dtype": {"layer_0.output": "float32", "logits": "float32"},
       "file": "mode_2_1-fp8_e4m3.safetensors",
       "format": "fp8_e4m3",                            null for a float mode
       "layers": ["layer_0"],                           those that fired, in order
       "mode": "mode_2_1",
       "sha256": "9f86d0...",                           of the file
       "shapes": {"layer_0.output": [8, 256, 64], "logits": [8, 256, 256]}
      }
     },
     "tokens": {"count": 2048, "fingerprint": "0e2c...", "samples": 8, "seqlen": 256},
     "version": 1,
     "versions": {"probe": "0.1.0", "torch": "2.13.0"}
    }

The first axis of every tensor is that of the samples; the second of the logits, that of the tokens.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from probe.names import LOGITS

VERSION = 1
#: The dtypes of a recording: as torch calls them, and as a safetensors file does.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
TENSOR_NAME = re.compile(rf"{LOGITS}|(?P<label>.+)\.(output|input)", re.DOTALL)
#: Plain names only: a manifest from elsewhere must not lead out of its folder.
FILE_NAME = re.compile(r"\w[\w.-]*\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")
AGAIN = "Copy the recording again from where it was made, or make it again there"


class RecordingError(ValueError):
    """A recording that cannot be read or written, or that is of something else than it is compared with."""


@dataclass(frozen=True)
class Tokens:
    """What the model was given: `samples` rows of `seqlen` tokens."""

    count: int
    samples: int
    seqlen: int
    fingerprint: str  # of all samples in order, however they were batched


@dataclass(frozen=True)
class Recorded:
    """One recipe and its file."""

    file: str
    mode: str  # as in test ids: mode_2_1
    format: str | None
    layers: tuple[str, ...]
    dtype: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A recording without its tensors."""

    model: str
    fingerprint: str | None
    device: str
    tokens: Tokens
    recipes: dict[str, Recorded]
    versions: dict[str, str]


def manifest_to_json(manifest: Manifest) -> bytes:
    """Sorted keys, an indent of one space."""
    return (json.dumps({"version": VERSION, **asdict(manifest)}, indent=1, sort_keys=True) + "\n").encode()


def manifest_from_json(data: bytes, file: Path) -> Manifest:
    """The inverse of manifest_to_json; what is wrong is told with `file` and key."""
    facts = _document(data, file).members(
        *("version", "model", "fingerprint", "device", "tokens", "recipes", "versions")
    )
    tokens = _tokens(facts["tokens"])
    recipes = {name: _recorded(name, node, tokens) for name, node in facts["recipes"].members().items()}
    for shared in _repeated(one.file for one in recipes.values()):
        raise defect(file, f"recipes: the file {shared} belongs to more than one")
    return Manifest(
        facts["model"].text(),
        facts["fingerprint"].text_or_null(),
        facts["device"].text(),
        tokens,
        recipes,
        {name: node.text() for name, node in facts["versions"].members().items()},
    )


def defect(file: Path, problem: str, *, remedy: str = AGAIN) -> RecordingError:
    """The problem may quote a file from elsewhere: nothing of it reaches the terminal as a command."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in problem)
    return RecordingError(f"{file}: {text}. {remedy}")


@dataclass(frozen=True)
class _Node:
    """A value in the manifest, and where it stands there."""

    file: Path
    key: str
    value: Any

    def wrong(self, expected: str) -> RecordingError:
        where = f"{self.key}: " if self.key else ""
        return defect(self.file, f"{where}expected {expected}, found {_shown(self.value)}")

    def members(self, *keys: str) -> dict[str, "_Node"]:
        """Of an object: just these keys, or any if none are given."""
        if not isinstance(self.value, dict) or not self.value or not all(map(_is_text, self.value)):
            raise self.wrong("an object with named keys")
        for key in sorted(self.value.keys() ^ set(keys)) if keys else ():
            raise defect(self.file, f"the key {self._below(key)} is {'unknown' if key in self.value else 'missing'}")
        return {key: _Node(self.file, self._below(key), value) for key, value in self.value.items()}

    def entries(self) -> list["_Node"]:
        if not isinstance(self.value, list) or not self.value:
            raise self.wrong("a list that is not empty")
        return [_Node(self.file, f"{self.key}[{index}]", value) for index, value in enumerate(self.value)]

    def text(self, pattern: re.Pattern[str] | None = None, expected: str = "a text") -> str:
        if not _is_text(self.value) or (pattern and not pattern.fullmatch(self.value)):
            raise self.wrong(expected)
        return str(self.value)

    def text_or_null(self) -> str | None:
        return None if self.value is None else self.text(expected="a text or null")

    def count(self) -> int:
        if type(self.value) is not int or self.value < 1:
            raise self.wrong("a whole number, 1 or more")
        return self.value

    def _below(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else key


def _document(data: bytes, file: Path) -> _Node:
    """The whole manifest, once its version is known to be ours."""

    def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name in _repeated(name for name, _ in pairs):
            raise defect(file, f"the key {name!r} is there twice")
        return dict(pairs)

    try:
        document = _Node(file, "", json.loads(data.decode(), object_pairs_hook=each_key_once))
    except RecordingError:
        raise
    except (RecursionError, ValueError) as problem:
        raise defect(file, f"is not JSON that can be read ({problem})") from None
    if isinstance(document.value, dict) and "version" in document.value:
        version = document.members()["version"]
        if version.count() > VERSION:
            newer = f"version: was written by a newer probe, {version.value}; this one reads {VERSION}"
            raise defect(file, newer, remedy="Upgrade probe.")
    return document


def _tokens(node: _Node) -> Tokens:
    facts = node.members("count", "samples", "seqlen", "fingerprint")
    count, samples, seqlen = (facts[key].count() for key in ("count", "samples", "seqlen"))
    if count != samples * seqlen:
        raise facts["count"].wrong(f"{samples} x {seqlen}")
    return Tokens(count, samples, seqlen, facts["fingerprint"].text())


def _recorded(recipe: str, node: _Node, tokens: Tokens) -> Recorded:
    facts = node.members("file", "mode", "format", "layers", "dtype", "shapes", "sha256")
    mode, format = facts["mode"].text(), facts["format"].text_or_null()
    if recipe != "-".join(part for part in (mode, format) if part):
        raise defect(node.file, f"{node.key}: its mode is {mode!r} and its format {format!r}, which is another recipe")
    dtypes, shapes = (facts[key].members() for key in ("dtype", "shapes"))
    for name in sorted(dtypes.keys() ^ shapes.keys()):
        raise defect(node.file, f"{node.key}: {name} has no {'dtype' if name in shapes else 'shape'}")
    layers = tuple(one.text() for one in facts["layers"].entries())
    _check_names(facts["layers"], layers, shapes)
    recorded = Recorded(
        facts["file"].text(FILE_NAME, "the plain name of a .safetensors file in this folder"),
        mode,
        format,
        layers,
        {name: one.text(re.compile("|".join(DTYPES)), f"one of {', '.join(DTYPES)}") for name, one in dtypes.items()},
        {name: tuple(size.count() for size in one.entries()) for name, one in shapes.items()},
        facts["sha256"].text(SHA256, "64 hexadecimal digits"),
    )
    for name, shape in recorded.shapes.items():
        expected = (tokens.samples, tokens.seqlen) if name == LOGITS else (tokens.samples,)
        if shape[: len(expected)] != expected:
            raise shapes[name].wrong(f"{' x '.join(map(str, expected))} first, as tokens says")
    return recorded


def _check_names(node: _Node, layers: tuple[str, ...], shapes: dict[str, _Node]) -> None:
    """Every layer has an output, and every tensor is of a layer or the logits."""
    for label in _repeated(layers):
        raise defect(node.file, f"{node.key}: {label} is listed twice")
    for label in layers:
        if f"{label}.output" not in shapes:
            raise defect(node.file, f"{node.key}: {label} is listed, but there is no {label}.output")
    known = {None, *layers}
    for name, one in shapes.items():
        match = TENSOR_NAME.fullmatch(name)
        if not match or match["label"] not in known:
            raise defect(node.file, f"{one.key}: is neither {LOGITS} nor of a layer in {node.key}")


def _is_text(value: Any) -> bool:
    """Names come up in messages and reports, so they hold nothing that a terminal would obey."""
    return isinstance(value, str) and value != "" and value.isprintable()


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return "something nested too deep"
    return text if len(text) <= 60 else text[:57] + "..."
