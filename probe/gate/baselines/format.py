"""The baselines of a mode as one JSON document, and what it stores of each case.

    {
     "cases": {
      "fp8_e4m3": {                                     the format; "-" for a float mode
       "layer_0": {
        "injected": {
         "correlation": [0.99987, 2e-07],               value, spread
         "mse": [0.000231, 1.2e-09, "other rounding"]   and why it was accepted though worse
        },
        "digests": {"weights.in_proj.weight": "9f86d081"},  of tensors that must have the same bits
        "settings": {"outlier.threshold": "64"},        of cases that have their own: what the figures depend on
        "values": "9f86d081:AACAPwAAIMDNzMw9"           golden values: their digest, then float32 in base64
       }
      }
     },
     "device": "cpu",
     "environment": {"torch": "2.13.0"},                what made them: versions, machine, input, anchors
     "mode": "mode_2_1",
     "model": "tiny-mamba",
     "tests": {"tests/test_gate.py::test_modes": "all"},   which test compares which cases; else ["fp8_e4m3/layer_0"]
     "version": 3
    }

A file of version 2 is read without its sketch of corner values, whose place digests have taken: its cases fail until
they are updated. Keys are sorted, a figure is a line, values have 6 significant digits (counts have all) and spreads 2.
"""

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Self

import numpy as np

from probe.files.checked_json import Node, document
from probe.files.defects import DefectError
from probe.files.paths import safe_name
from probe.gate.cases import Case
from probe.gate.tolerances import RULES

VERSION = 3
VALUE_DIGITS = 6
SPREAD_DIGITS = 2
FLOAT_MODE = "-"  # the key of the empty format
ALL = "all"  # of a test that compares every case of the mode
VALUES = "values"  # the key of the golden values, so no group of figures can be called that
SETTINGS = "settings"  # nor that
DIGESTS = "digests"  # nor that
_CORNERS = 16  # golden values of corners, the last of a row, in version 2
RECORDED = "recorded:"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class BaselineError(ValueError):
    """A baseline that cannot be read, or that must not or could not be written."""


class OldLayoutError(DefectError):
    """A file of version 1, which kept golden values and environment in other files: see convert.py."""


@dataclass(frozen=True)
class Stored:
    """A figure, how far harmless changes moved it, and, if it was accepted though worse, the reason."""

    value: float
    spread: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Entry:
    """The baseline of a case. Figures are called injected.mse, propagated.correlation; values are one flat row."""

    figures: dict[str, Stored] = field(default_factory=dict)
    values: tuple[float, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    """The settings that golden figures depend on, such as outlier.threshold."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of tensors that must have the same bits: weights.in_proj.weight, corners.conv1d.output."""

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for the way from a worker to the controller."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """The inverse of as_dict."""
        figures = {name: Stored(**figure) for name, figure in given["figures"].items()}
        return cls(figures, tuple(given["values"]), given["settings"], given["digests"])


@dataclass(frozen=True)
class ModeBaselines:
    """The content of the file of a mode on a device."""

    model: str
    device: str
    mode: str
    environment: dict[str, str]
    entries: dict[Case, Entry]
    tests: dict[Case, tuple[str, ...]] = field(default_factory=dict)
    """By case, the tests that compare it, as `file::function`; a run that lacks them must say why."""

    def to_json(self) -> bytes:
        """The content of the file; the same baselines always give the same bytes."""
        cases: dict[str, dict[str, dict[str, Any]]] = {}
        for case, entry in self.entries.items():
            groups: dict[str, Any] = {VALUES: _encoded(entry.values)} if entry.values else {}
            groups |= {SETTINGS: entry.settings} if entry.settings else {}
            groups |= {DIGESTS: entry.digests} if entry.digests else {}
            for name, figure in entry.figures.items():
                group, _, rest = name.partition(".")
                reason = [figure.reason] if figure.reason else []
                groups.setdefault(group, {})[rest] = [figure.value, figure.spread, *reason]
            cases.setdefault(case.format or FLOAT_MODE, {})[case.layer] = groups
        names = {"device": self.device, "mode": self.mode, "model": self.model}
        tests = {"tests": self._cases_by_test()} if self.tests else {}
        return json_lines({"cases": cases, "environment": self.environment, **names, **tests, "version": VERSION})

    def _cases_by_test(self) -> dict[str, str | list[str]]:
        compared: dict[str, list[str]] = {}
        for case in self.entries:
            for test in self.tests.get(case, ()):
                compared.setdefault(test, []).append(_case_key(case))
        return {test: ALL if len(keys) == len(self.entries) else sorted(keys) for test, keys in compared.items()}

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """The inverse of to_json; whatever is wrong with `data` is a DefectError."""
        whole = document(data, version=VERSION)
        if isinstance(whole.value, dict) and whole.value.get("version") == 1:
            raise OldLayoutError("was written by an older probe")
        keys = ["cases", "device", "environment", "mode", "model", "version"]
        if isinstance(whole.value, dict) and "tests" in whole.value:
            keys.append("tests")
        members = whole.members(*keys)
        is_older = members["version"].count() < VERSION
        if not data.endswith(b"\n"):
            raise DefectError("the last line does not end: the file is cut off")
        model, device, mode = (members[key].text() for key in ("model", "device", "mode"))
        entries: dict[Case, Entry] = {}
        for format_key, layers in members["cases"].members().items():
            if "/" in format_key:
                raise DefectError(f"{layers.key}: a format has no '/'")
            for layer, node in layers.members().items():
                entry = _entry(node)
                entries[Case(mode, layer, device, "" if format_key == FLOAT_MODE else format_key)] = (
                    _without_corners(entry) if is_older else entry
                )
        tests = _tests(members["tests"], list(entries)) if "tests" in members else {}
        return cls(model, device, mode, _texts(members["environment"], empty=True), entries, tests)


def path_part(name: str) -> str:
    """`name` as one safe part of a path, see `safe_name`.

    org/name       org_name           a:b             a_b
    ./some/folder  folder             recorded:/a/b   recorded_b

    Different names can give the same part, which is why the files hold the true ones.
    """
    if name.startswith(RECORDED):
        return "recorded_" + safe_name(PurePosixPath(name.removeprefix(RECORDED)).name)
    return safe_name(name if HUB_ID.fullmatch(name) else PurePosixPath(name).name)


def digest(data: bytes) -> str:
    """The first 8 hex digits of sha256, which detect accidents, not malice."""
    return hashlib.sha256(data).hexdigest()[:8]


def significant(x: float, digits: int = VALUE_DIGITS) -> float:
    """`x` with so many significant digits; -0.0 becomes 0.0."""
    return float(f"{x:.{digits}g}") + 0.0


def _kept(name: str, x: float) -> float:
    """A count as it is, all other figures with 6 digits."""
    return x + 0.0 if name in RULES and RULES[name].exact else significant(x)


def rounded(entry: Entry) -> Entry:
    """The entry as it is read back: figures with 6 digits, counts with all, spreads with 2, values as float32."""
    figures = {
        name: Stored(_kept(name, figure.value), significant(figure.spread, SPREAD_DIGITS), figure.reason)
        for name, figure in entry.figures.items()
    }
    return Entry(figures, tuple(_row(entry.values).tolist()), entry.settings, entry.digests)


def check(case: Case, entry: Entry) -> None:
    """Refuse what could not be read back: NaN, Inf, negative spreads and names that have no place in the file."""
    if not (case.mode and case.layer and case.device) or case.format == FLOAT_MODE or "/" in case.format:
        raise BaselineError(f"{case!r} cannot be stored: mode, layer and device have a name, the format no '/'.")
    if not entry.figures:
        raise BaselineError(f"{case} has no figures. A baseline has at least one; nothing was written.")
    texts = [*vars(case).values(), *entry.figures, *(figure.reason for figure in entry.figures.values())]
    for text in (*texts, *entry.settings):
        if not text.isprintable():
            raise BaselineError(f"{case}: {text!r} is not printable and is never stored; nothing was written.")
    for name, figure in entry.figures.items():
        group, _, rest = name.partition(".")
        if not group or not rest or group in (VALUES, SETTINGS, DIGESTS):
            raise BaselineError(f"{case}: figure {name!r} cannot be stored. Expected group.name, such as injected.mse.")
        for what, number in ((name, figure.value), (f"the spread of {name}", figure.spread)):
            if not math.isfinite(number):
                raise BaselineError(f"{case}: {what} is {number} and is never stored; nothing was written.")
        if figure.spread < 0:
            raise BaselineError(f"{case}: the spread of {name} is {figure.spread}, expected 0 or more.")
    check_texts(f"{case}: setting", entry.settings)
    check_texts(f"{case}: digest", entry.digests)
    for index, number in enumerate(entry.values):
        if not math.isfinite(number):
            raise BaselineError(f"{case}: golden value {index} is {number} and is never stored; nothing was written.")


def check_texts(what: str, texts: Mapping[str, str]) -> None:
    """Refuse names and texts that are empty or could not be printed."""
    for name, text in texts.items():
        if not isinstance(text, str) or not (name and text and f"{name}{text}".isprintable()):
            raise BaselineError(f"{what} {name!r} is {text!r} and cannot be stored. Expected a text.")


def json_lines(whole: Mapping[str, Any]) -> bytes:
    """Sorted keys, an indent of one space, lists on one line, a newline at the end."""
    return (_lines(whole, 0) + "\n").encode()


def _lines(node: Any, depth: int) -> str:
    if isinstance(node, Mapping) and node:
        rows = (f"{' ' * (depth + 1)}{_lines(key, 0)}: {_lines(node[key], depth + 1)}" for key in sorted(node))
        return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"
    return json.dumps(node, ensure_ascii=False, allow_nan=False)


def _entry(node: Node) -> Entry:
    groups = node.members()
    values, settings, digests = (groups.pop(key, None) for key in (VALUES, SETTINGS, DIGESTS))
    if not groups:
        raise DefectError(f"{node.key}: has no figures")
    figures: dict[str, Stored] = {}
    for group, rows in groups.items():
        if "." in group:
            raise DefectError(f"{rows.key}: a group of figures has no '.'")
        figures |= {f"{group}.{name}": _figure(row) for name, row in rows.members().items()}
    texts = (_texts(found) if found else {} for found in (settings, digests))
    return Entry(figures, _decoded(values) if values else (), *texts)


def _without_corners(entry: Entry) -> Entry:
    """An entry of version 2 without what it knew of corner values: a sketch, and the distance to it."""
    name = "corners.distance"
    if name not in entry.figures:
        return entry
    figures = {key: figure for key, figure in entry.figures.items() if key != name}
    return replace(entry, figures=figures, values=entry.values[:-_CORNERS])


def _case_key(case: Case) -> str:
    return f"{case.format or FLOAT_MODE}/{case.layer}"


def _tests(node: Node, cases: list[Case]) -> dict[Case, tuple[str, ...]]:
    known = {_case_key(case): case for case in cases}
    found: dict[Case, tuple[str, ...]] = {}
    for test, listed in node.members().items():
        keys = list(known) if listed.value == ALL else [entry.one_of(known) for entry in listed.entries()]
        for key in keys:
            found[known[key]] = (*found.get(known[key], ()), test)
    return found


def _figure(row: Node) -> Stored:
    if not isinstance(row.value, list) or not 2 <= len(row.value) <= 3:
        raise row.wrong("[value, spread] or [value, spread, reason]")
    value, spread, *reason = row.entries()
    if spread.number() < 0:
        raise DefectError(f"{row.key}: the spread is {spread.number()}, expected 0 or more")
    return Stored(value.number() + 0.0, spread.number() + 0.0, reason[0].text() if reason else "")


def _texts(node: Node, *, empty: bool = False) -> dict[str, str]:
    return {name: text.text() for name, text in node.members(empty=empty).items()}


def _row(values: tuple[float, ...]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    with np.errstate(over="ignore"):  # beyond the range of float32 is Inf, which is refused
        return np.array(values, dtype="<f4")


def _encoded(values: tuple[float, ...]) -> str:
    data = _row(values).tobytes()
    return f"{digest(data)}:{base64.b64encode(data).decode()}"


def _decoded(node: Node) -> tuple[float, ...]:
    """Golden values; the digest notices a line that was damaged or edited."""
    expected, _, text = node.text().partition(":")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise node.wrong("a digest and float32 in base64") from None
    if not data or len(data) % 4:
        raise node.wrong("a digest and float32 in base64")
    if digest(data) != expected:
        raise DefectError(f"{node.key}: the values do not have the digest {expected}: they are damaged or were edited")
    row = np.frombuffer(data, dtype="<f4")
    if not np.isfinite(row).all():
        raise DefectError(f"{node.key}: value {int(np.isfinite(row).argmin())} is not finite")
    return tuple(row.tolist())
