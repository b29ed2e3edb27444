"""The settings of the gate: `[tool.probe]` of pyproject.toml, checked key by key. Imports nothing heavy."""

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from probe.formats import FORMATS, GATE_FORMATS, PERCENTILE
from probe.words import did_you_mean, look_up


class ConfigurationError(ValueError):
    """A setting that cannot be: what it is, what was expected, what is near."""


@dataclass(frozen=True)
class CalibrationSettings:
    """The text that scales are taken from."""

    data: str = "calibration"
    samples: int = 16
    seqlen: int = 256
    percentile: float = PERCENTILE


@dataclass(frozen=True)
class Settings:
    """The matrix, the model, the data and the standards of the gate."""

    model: str = "tiny-mamba"
    modes: tuple[str, ...] = ()  # empty: what fits the model
    layers: tuple[str, ...] = ("all",)
    devices: tuple[str, ...] = ("cpu",)
    formats: tuple[str, ...] = GATE_FORMATS
    baselines: str = "baselines"
    data: str = "evaluation"
    samples: int = 8
    seqlen: int = 256
    batch_size: int = 8
    calibration: CalibrationSettings = CalibrationSettings()
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tolerances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    allow_download: bool = False
    trust_remote_code: bool = False

    @property
    def key(self) -> str:
        """Equal for equal settings."""
        return repr(self)

    def as_dict(self) -> dict[str, Any]:
        """For the way from one process to another."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Settings":
        """The inverse of as_dict."""
        tuples = {name: tuple(given[name]) for name in AXES}
        return cls(**{**given, **tuples, "calibration": CalibrationSettings(**given["calibration"])})


AXES = ("modes", "layers", "devices", "formats")


def read_settings(root: Path) -> Settings:
    """The settings of the project in `root`; without a [tool.probe], the defaults."""
    file = root / "pyproject.toml"
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as problem:
        if not has_settings(root):  # a project that does not use probe is none of its business
            return Settings()
        raise ConfigurationError(f"{file} cannot be read ({problem}). Correct it and run again.") from None
    tables = document.get("tool", {})
    if "probe" not in tables:
        for name in difflib.get_close_matches("probe", (one.lower() for one in tables), n=1, cutoff=0.8):
            raise ConfigurationError(f"{file} has a [tool.{name}] and no [tool.probe]. Did you mean [tool.probe]?")
    return settings_of(tables.get("probe", {}), where=f"[tool.probe] of {file}")


def has_settings(root: Path) -> bool:
    """Whether the project says anything about probe, without reading more than the text."""
    try:
        return "[tool.probe" in (root / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def settings_of(given: Any, *, where: str, base: Settings | None = None) -> Settings:
    """Settings from a table of keys and values, over `base`."""
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where} is {given!r}; expected a table of settings.")
    base = base or Settings()
    known = {one.name: one for one in fields(Settings)}
    values = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        check_keys(where, [key], known)
        values[name] = _checked(f"{where}: {key}", name, value, getattr(base, name))
    settings = replace(base, **values)
    for format in settings.formats:
        _look_up(f"{where}: formats", "format", format, FORMATS)
    return settings


def check_keys(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse a key that is not known, and name the nearest; `-` and `_` are the same."""
    for key in given:
        name = key.replace("-", "_")
        if name not in known:
            near = did_you_mean(name, known)
            raise ConfigurationError(f"{where}: unknown key {key!r}.{near} Known: {', '.join(known)}.")


def _checked(where: str, name: str, value: Any, default: Any) -> Any:
    if name == "calibration":
        return _calibration(where, value, default)
    if name in ("limits", "tolerances"):
        return _figures(where, value, signed=name == "limits")
    if isinstance(default, tuple):
        return _words(where, value)
    return _plain(where, value, type(default))


def _plain(where: str, value: Any, kind: type) -> Any:
    names = {str: "a string", int: "a whole number, 1 or more", float: "a number", bool: "true or false"}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind or value == "" or (isinstance(value, int) and kind is int and value < 1):
        raise ConfigurationError(f"{where} is {value!r}; expected {names[kind]}.")
    return value


def _words(where: str, value: Any) -> tuple[str, ...]:
    value = [value] if isinstance(value, str | int) and not isinstance(value, bool) else value
    good = isinstance(value, list | tuple) and all(
        isinstance(one, str | int) and not isinstance(one, bool) and one != "" for one in value
    )
    if not good or not value:
        raise ConfigurationError(f'{where} is {value!r}; expected a list of names, such as ["0", "2-1"].')
    return tuple(dict.fromkeys(str(one) for one in value))


def _calibration(where: str, value: Any, default: CalibrationSettings) -> CalibrationSettings:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{where} is {value!r}; expected a table with data, samples, seqlen, percentile.")
    check_keys(where, value, [one.name for one in fields(CalibrationSettings)])
    checked = {key: _plain(f"{where}.{key}", one, type(getattr(default, key))) for key, one in value.items()}
    if not 0 < checked.get("percentile", 1.0) <= 1:
        raise ConfigurationError(f"{where}.percentile is {checked['percentile']}; expected a share above 0, at most 1.")
    return replace(default, **checked)


def _figures(where: str, value: Any, *, signed: bool) -> dict[str, dict[str, float]]:
    """Limits: recipe pattern -> figure -> number. Tolerances: figure -> part of a rule -> number."""
    from probe.gate.tolerances import RULES, Rule

    parts = {one.name: one for one in fields(Rule) if one.name != "worse"}
    outer, inner = ("a recipe", "a figure") if signed else ("a figure", "a part of its tolerance")
    if not isinstance(value, Mapping) or not all(isinstance(one, Mapping) for one in value.values()):
        raise ConfigurationError(f"{where} is {value!r}; expected a table by {outer} of tables by {inner}.")
    found: dict[str, dict[str, float]] = {}
    for key, table in value.items():
        name = key if signed else _figure(f"{where}", key, RULES)
        found[name] = {}
        for part, number in table.items():
            if isinstance(number, bool) or not isinstance(number, int | float) or number != number:
                raise ConfigurationError(f"{where}.{key}.{part} is {number!r}; expected a number.")
            if not signed and number < 0:
                raise ConfigurationError(f"{where}.{key}.{part} is {number!r}; expected 0 or more.")
            chosen = _limited(where, part, RULES) if signed else part
            if not signed:
                _look_up(f"{where}.{key}", "part of a tolerance", part, parts)
            found[name][chosen] = float(number)
    return found


def _figure(where: str, name: str, rules: Mapping[str, Any]) -> str:
    full = name if "." in name else f"propagated.{name}"
    _look_up(where, "figure", full, rules)
    return full


def _limited(where: str, name: str, rules: Mapping[str, Any]) -> str:
    full = _figure(where, name, rules)
    if not rules[full].worse:
        able = ", ".join(one for one, rule in rules.items() if rule.worse)
        raise ConfigurationError(f"{where}: {full} is neither better nor worse, so has no limit. These can: {able}.")
    return full


def _look_up(where: str, kind: str, name: str, table: Mapping[str, Any]) -> None:
    try:
        look_up(kind, name, table)
    except ValueError as problem:
        raise ConfigurationError(f"{where}: {problem}") from None
