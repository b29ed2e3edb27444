"""The two files of a mode's baselines, as bytes: JSON with the figures, safetensors with the golden values.

    {
     "cases": {
      "fp8_e4m3": {                                     the format; "-" for a float mode
       "layer_0": {
        "injected": {
         "correlation": [0.99987, 2e-07],               value, spread
         "mse": [0.000231, 1.2e-09, "other rounding"]   and why it was accepted though worse
        },
        "settings": {"outlier.threshold": "64"},        of cases that have their own: what the figures depend on
        "values": "9f86d081"                            digest of the tensor fp8_e4m3/layer_0
       }
      }
     },
     "device": "cpu",
     "mode": "mode_2_1",
     "model": "tiny-mamba",
     "version": 1
    }

Keys are sorted, a figure is a line, values have 6 significant digits and spreads 2. The digest ties the two files
together case by case: a merge that takes them from two branches is noticed, and a review sees whose values changed.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from probe.gate.baselines.entry import Entry, Stored
from probe.gate.cases import Case

VERSION = 1
VALUE_DIGITS = 6
SPREAD_DIGITS = 2
FLOAT_MODE = "-"  # the key of the empty format
VALUES = "values"  # the key of the digest, so no group of figures can be called that
SETTINGS = "settings"  # nor that
RECORDED = "recorded:"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class BaselineError(ValueError):
    """A baseline that cannot be read, or that must not or could not be written."""


class DefectError(Exception):
    """What is wrong inside a file. The reader adds which file and, unless `remedy` says it, what to do."""

    def __init__(self, problem: str, *, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclass(frozen=True)
class Figures:
    """What a JSON file says. The entries have no values yet; `digests` says which have some."""

    model: str
    device: str
    mode: str
    entries: dict[Case, Entry]
    digests: dict[Case, str]


def path_part(name: str) -> str:
    """`name` as one safe part of a path: letters, digits, '.', '_' and '-'; never empty, '.' or '..'.

    org/name       org_name           a:b             a_b
    ./some/folder  folder             recorded:/a/b   recorded_b

    Different names can give the same part, which is why the files hold the true ones.
    """
    if name.startswith(RECORDED):
        return "recorded_" + _safe(PurePosixPath(name.removeprefix(RECORDED)).name)
    return _safe(name if HUB_ID.fullmatch(name) else PurePosixPath(name).name)


def _safe(name: str) -> str:
    part = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    return part if part.strip(".") else "_" * max(len(part), 1)


def significant(x: float, digits: int = VALUE_DIGITS) -> float:
    """`x` with so many significant digits; -0.0 becomes 0.0."""
    return float(f"{x:.{digits}g}") + 0.0


def rounded(entry: Entry) -> Entry:
    """The entry as it reads back once it is written: figures of 6 digits, spreads of 2, values of float32."""
    figures = {
        name: Stored(significant(figure.value), significant(figure.spread, SPREAD_DIGITS), figure.reason)
        for name, figure in entry.figures.items()
    }
    return Entry(figures, tuple(_row(entry).tolist()), entry.settings)


def check(case: Case, entry: Entry) -> None:
    """Refuse what could not be read back: NaN, Inf, negative spreads and names that have no place in the file."""
    if not (case.mode and case.layer and case.device) or case.format == FLOAT_MODE or "/" in case.format:
        raise BaselineError(f"{case!r} cannot be stored: mode, layer and device have a name, the format no '/'.")
    if not entry.figures:
        raise BaselineError(f"{case} has no figures. A baseline has at least one; nothing was written.")
    for name, figure in entry.figures.items():
        group, _, rest = name.partition(".")
        if not group or not rest or group in (VALUES, SETTINGS):
            raise BaselineError(f"{case}: figure {name!r} cannot be stored. Expected group.name, such as injected.mse.")
        for what, number in ((name, figure.value), (f"the spread of {name}", figure.spread)):
            if not math.isfinite(number):
                raise BaselineError(f"{case}: {what} is {number} and is never stored; nothing was written.")
        if figure.spread < 0:
            raise BaselineError(f"{case}: the spread of {name} is {figure.spread}, expected 0 or more.")
    for name, text in entry.settings.items():
        if not name or not isinstance(text, str) or not text:
            raise BaselineError(f"{case}: setting {name!r} is {text!r} and cannot be stored. Expected a text.")
    for index, number in enumerate(entry.values):
        if not math.isfinite(number):
            raise BaselineError(f"{case}: golden value {index} is {number} and is never stored; nothing was written.")


def to_json(document: Mapping[str, Any]) -> bytes:
    """Sorted keys, an indent of one space, lists on one line, a newline at the end."""
    try:
        return (_lines(document, 0) + "\n").encode()
    except UnicodeEncodeError as problem:
        raise BaselineError(f"{problem.object!r} cannot be written as UTF-8; nothing was written.") from None


def _lines(node: Any, depth: int) -> str:
    if isinstance(node, Mapping) and node:
        rows = (f"{' ' * (depth + 1)}{_lines(key, 0)}: {_lines(node[key], depth + 1)}" for key in sorted(node))
        return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"
    return json.dumps(node, ensure_ascii=False, allow_nan=False)


def figures_to_json(model: str, device: str, mode: str, entries: Mapping[Case, Entry]) -> bytes:
    """The JSON file of a mode."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for case, entry in entries.items():
        groups: dict[str, Any] = {VALUES: digest(_row(entry).tobytes())} if entry.values else {}
        groups |= {SETTINGS: entry.settings} if entry.settings else {}
        for name, figure in entry.figures.items():
            group, _, rest = name.partition(".")
            reason = [figure.reason] if figure.reason else []
            groups.setdefault(group, {})[rest] = [figure.value, figure.spread, *reason]
        cases.setdefault(case.format or FLOAT_MODE, {})[case.layer] = groups
    return to_json({"cases": cases, "device": device, "mode": mode, "model": model, "version": VERSION})


def values_to_safetensors(entries: Mapping[Case, Entry]) -> bytes | None:
    """The safetensors file of a mode, or None where no case has values."""
    rows = {tensor_key(case): _row(entry) for case, entry in sorted(entries.items()) if entry.values}
    return save(rows) if rows else None


def tensor_key(case: Case) -> str:
    """The name of a case's tensor: fp8_e4m3/layer_0."""
    return f"{case.format or FLOAT_MODE}/{case.layer}"


def digest(data: bytes) -> str:
    """The first 8 hex digits of sha256: against accidents, not against malice."""
    return hashlib.sha256(data).hexdigest()[:8]


def _row(entry: Entry) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    with np.errstate(over="ignore"):  # too large for float32 becomes Inf, which check refuses
        return np.array(entry.values, dtype="<f4")


def document_from_json(data: bytes, keys: set[str]) -> dict[str, Any]:
    """The object in a JSON file of this version, with just these keys."""
    try:
        document = json.loads(data.decode(), object_pairs_hook=_each_key_once, parse_constant=_no_constant)
    except UnicodeDecodeError as problem:
        raise DefectError(f"byte {problem.start} is not UTF-8") from None
    except json.JSONDecodeError as problem:
        raise DefectError(f"line {problem.lineno} is not JSON ({problem.msg})") from None
    except (RecursionError, ValueError) as problem:
        raise DefectError(f"is not JSON that can be read ({problem})") from None
    if not data.endswith(b"\n"):
        raise DefectError("the last line does not end: the file is cut off")
    if not isinstance(document, dict):
        raise DefectError(f"expected an object, found {_shown(document)}")
    version = document.get("version")
    if type(version) is int and version > VERSION:
        newer = f"was written by a newer probe: version {version}, this one reads {VERSION}"
        raise DefectError(newer, remedy="Upgrade probe.")
    if type(version) is not int or version != VERSION:
        found = _shown(version) if "version" in document else "none"
        raise DefectError(f"version: expected {VERSION}, found {found}")
    for key in sorted(document.keys() ^ keys):
        raise DefectError(f"the key {key!r} is {'unknown' if key in document else 'missing'}")
    return document


def figures_from_json(data: bytes) -> Figures:
    """The inverse of figures_to_json."""
    document = document_from_json(data, {"cases", "device", "mode", "model", "version"})
    model, device, mode = (text_in(document[key], key) for key in ("model", "device", "mode"))
    entries: dict[Case, Entry] = {}
    digests: dict[Case, str] = {}
    for format_key, layers in table_in(document["cases"], "cases").items():
        if "/" in format_key:
            raise DefectError(f"cases.{format_key}: a format has no '/'")
        for layer, groups in table_in(layers, f"cases.{format_key}").items():
            where = f"cases.{format_key}.{layer}"
            case = Case(mode, layer, device, "" if format_key == FLOAT_MODE else format_key)
            groups = dict(table_in(groups, where))
            if VALUES in groups:
                digests[case] = text_in(groups.pop(VALUES), f"{where}.{VALUES}")
            settings = _settings_in(groups.pop(SETTINGS), f"{where}.{SETTINGS}") if SETTINGS in groups else {}
            entries[case] = Entry(_figures_in(table_in(groups, where), where), settings=settings)
    return Figures(model, device, mode, entries, digests)


def _settings_in(node: Any, where: str) -> dict[str, str]:
    return {name: text_in(text, f"{where}.{name}") for name, text in table_in(node, where).items()}


def _figures_in(groups: Mapping[str, Any], where: str) -> dict[str, Stored]:
    figures: dict[str, Stored] = {}
    for group, rows in groups.items():
        if "." in group:
            raise DefectError(f"{where}.{group}: a group of figures has no '.'")
        for name, row in table_in(rows, f"{where}.{group}").items():
            figures[f"{group}.{name}"] = _figure_in(row, f"{where}.{group}.{name}")
    return figures


def _figure_in(row: Any, where: str) -> Stored:
    if not isinstance(row, list) or not 2 <= len(row) <= 3:
        raise DefectError(f"{where}: expected [value, spread] or [value, spread, reason], found {_shown(row)}")
    value, spread = (_number_in(number, where) for number in row[:2])
    if spread < 0:
        raise DefectError(f"{where}: the spread is {spread}, expected 0 or more")
    return Stored(value, spread, text_in(row[2], where) if len(row) == 3 else "")


def _number_in(node: Any, where: str) -> float:
    if type(node) in (int, float) and abs(node) < math.inf:
        try:
            return float(node) + 0.0
        except OverflowError:
            pass  # an integer of 400 digits
    raise DefectError(f"{where}: expected a finite number, found {_shown(node)}")


def text_in(node: Any, where: str) -> str:
    """`node` if it is a text, and not an empty one."""
    if not isinstance(node, str) or not node:
        raise DefectError(f"{where}: expected a text, found {_shown(node)}")
    return node


def table_in(node: Any, where: str) -> dict[str, Any]:
    """`node` if it is an object with at least one key, none of them empty."""
    if not isinstance(node, dict) or not node or "" in node:
        raise DefectError(f"{where}: expected an object with named keys, found {_shown(node)}")
    return node


def values_from_safetensors(data: bytes, digests: Mapping[Case, str]) -> dict[Case, tuple[float, ...]]:
    """The golden values of the cases in `digests`: all of them, no others, and the very ones the digests are of."""
    try:
        rows = load(data)
    except (SafetensorError, LookupError, TypeError, ValueError) as problem:
        raise DefectError(f"is not safetensors that can be read ({problem})") from None
    keys = {tensor_key(case): case for case in digests}
    for key in sorted(rows.keys() ^ keys.keys()):
        raise DefectError(f"{key}: " + ("values without figures" if key in rows else "figures without values"))
    for key, row in sorted(rows.items()):
        if row.dtype != np.float32 or row.ndim != 1 or not row.size:
            raise DefectError(f"{key}: expected one row of float32, found {row.dtype} of shape {list(row.shape)}")
        if not np.isfinite(row).all():
            raise DefectError(f"{key}: value {int(np.isfinite(row).argmin())} is not finite")
        if digest(row.tobytes()) != digests[keys[key]]:
            raise DefectError(f"{key}: these are not the values that belong to the figures")
    return {case: tuple(rows[key].tolist()) for key, case in keys.items()}


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DefectError(f"the key {twice!r} is there twice")
    return document


def _no_constant(name: str) -> float:
    raise DefectError(f"holds {name}, which is never stored")


def _shown(node: Any) -> str:
    try:
        text = json.dumps(node)
    except RecursionError:
        return "something nested too deep"
    return text if len(text) <= 60 else text[:57] + "..."
