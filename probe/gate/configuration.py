"""The settings of the gate: `[tool.probe]` of pyproject.toml, checked key by key. Imports nothing heavy."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from probe.formats import FORMATS, GATE_FORMATS, PERCENTILE
from probe.gate.tolerances import RULES, Rule
from probe.running.declarations import MATRIX, DeclaredMode, declarations_of, declares_modes
from probe.settings import (
    ConfigurationError,
    check_keys,
    function_name,
    key,
    share,
    whole,
    with_values,
    word,
    word_or_none,
    yes_or_no,
)
from probe.words import INCLUDABLE, OUTSIDE, PATHS, look_up, near


def _names(value: Any) -> tuple[str, ...]:
    """A list of names or numbers as texts, each once; a single one need not be in a list."""
    given = [value] if isinstance(value, str | int) and not isinstance(value, bool) else value
    good = isinstance(given, list | tuple) and all(
        isinstance(one, str | int) and not isinstance(one, bool) and one != "" for one in given
    )
    if not good or not given:
        raise ValueError('a list of names, such as ["0", "2-1"]')
    return tuple(dict.fromkeys(str(one) for one in given))


@dataclass(frozen=True)
class CalibrationSettings:
    """The text that scales are taken from."""

    data: str = key("calibration", word)
    inputs: str = key("", function_name)  # package.module:function, instead of data
    samples: int = key(16, whole(1))
    seqlen: int = key(256, whole(1))
    percentile: float = key(PERCENTILE, share)


@dataclass(frozen=True)
class Settings:
    """The matrix, the model, the data and the standards of the gate."""

    model: str = key("tiny-mamba", word)
    reference: str | None = key(None, word_or_none)  # the float original of a model that is quantized already
    modes: tuple[str, ...] = key((), _names)  # empty: what fits the model, and all that are declared
    modes_from: tuple[str, ...] = key((), _names)  # TOML files that declare modes
    layers: tuple[str, ...] = key(("all",), _names)
    include: tuple[str, ...] = key((), _names)  # what linear modes quantize too: router, embedding, head
    without: tuple[str, ...] = key((), _names)  # cases beside the layers that are left out: embedding, padded
    devices: tuple[str, ...] = key(("cpu",), _names)
    formats: tuple[str, ...] = key(GATE_FORMATS, _names)
    baselines: str = key("baselines", word)
    data: str = key("evaluation", word)
    inputs: str = key("", function_name)  # package.module:function, instead of data
    samples: int = key(8, whole(1))
    seqlen: int = key(256, whole(1))
    batch_size: int = key(8, whole(1))
    calibration: CalibrationSettings = CalibrationSettings()
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tolerances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    declared: Mapping[str, DeclaredMode] = field(default_factory=dict)  # [tool.probe.modes.NAME]
    allow_download: bool = key(False, yes_or_no)
    trust_remote_code: bool = key(False, yes_or_no)

    @property
    def key(self) -> str:
        """Equal for equal settings."""
        return repr(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Settings":
        """The inverse of dataclasses.asdict, with lists for tuples."""
        tuples = {name: tuple(given[name]) for name in (*AXES, "modes_from", "include", "without")}
        declared = {
            name: DeclaredMode(one["base"], tuple(one["keep_float"])) for name, one in given["declared"].items()
        }
        calibration = CalibrationSettings(**given["calibration"])
        return cls(**{**given, **tuples, "calibration": calibration, "declared": declared})


AXES = ("modes", "layers", "devices", "formats")


def read_settings(root: Path) -> Settings:
    """The settings of the project in `root`; without a [tool.probe], the defaults."""
    file = root / "pyproject.toml"
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as problem:
        if not has_settings(root):  # a project that does not use probe is none of its business
            return Settings()
        raise ConfigurationError(f"{file} cannot be read ({problem}). {_correction(file)}") from None
    tables = document.get("tool", {})
    if "probe" not in tables:
        for name in near("probe", tables, count=1, alike=0.8):
            raise ConfigurationError(f"{file} has a [tool.{name}] and no [tool.probe]. Did you mean [tool.probe]?")
    return settings_of(tables.get("probe", {}), where=f"[tool.probe] of {file}")


def _correction(file: Path) -> str:
    """What to do about a file that cannot be read; TOML has no list and tables of the same name."""
    if not declares_modes(file):
        return "Correct it and run again."
    return (
        f"If [tool.probe] has a list of modes, TOML allows no table [tool.probe.modes.NAME] beside it: make the list "
        f"the key {MATRIX} of [tool.probe.modes], or move the tables to a file and name it in modes_from."
    )


def has_settings(root: Path) -> bool:
    """Whether the project says anything about probe, without reading more than the text."""
    try:
        return "[tool.probe" in (root / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def settings_of(given: Any, *, where: str, base: Settings | None = None) -> Settings:
    """Settings from a table of keys and values, over `base`."""
    tables = {name: given[name] for name in ("limits", "tolerances") if isinstance(given, Mapping) and name in given}
    rest = {name: value for name, value in given.items() if name not in tables} if tables else given
    declared: dict[str, DeclaredMode] = {}
    if isinstance(rest, Mapping) and "declared" in rest:
        check_keys(where, ["declared"], [one.name for one in fields(Settings) if one.name != "declared"])
    if isinstance(rest, Mapping) and isinstance(rest.get("modes"), Mapping):
        modes = dict(rest["modes"])
        rest = (
            {**rest, "modes": modes.pop(MATRIX)} if MATRIX in modes else {k: v for k, v in rest.items() if k != "modes"}
        )
        declared = declarations_of(modes, where=where.rpartition(" of ")[2])
    settings = with_values(base or Settings(), rest, where=where)
    settings = replace(settings, declared={**settings.declared, **declared})
    for place, one, usual in (
        ("", settings, Settings()),
        ("calibration.", settings.calibration, CalibrationSettings()),
    ):
        if one.inputs and one.data != usual.data:
            both = f"{place}inputs {one.inputs!r} and {place}data {one.data!r} are both set"
            raise ConfigurationError(f"{where}: {both}, and a run has one input. Leave one of them out.")
    for format in settings.formats:
        _look_up(f"{where}: formats", "format", format, FORMATS)
    for part in settings.include:
        _look_up(f"{where}: include", "part of a model", part, dict.fromkeys(INCLUDABLE))
    for label in settings.without:
        _look_up(f"{where}: without", "case beside the layers", label, dict.fromkeys((*OUTSIDE, *PATHS)))
    checked = [(name, _figures(f"{where}: {name}", table, signed=name == "limits")) for name, table in tables.items()]
    return replace(settings, **dict[str, Any](checked))


def _figures(where: str, value: Any, *, signed: bool) -> dict[str, dict[str, float]]:
    """Limits: recipe pattern -> figure -> number. Tolerances: figure -> part of a rule -> number."""
    parts = {one.name: one for one in fields(Rule) if one.name not in ("worse", "exact", "float_factor")}
    outer, inner = ("a recipe", "a figure") if signed else ("a figure", "a part of its tolerance")
    if not isinstance(value, Mapping) or not all(isinstance(one, Mapping) for one in value.values()):
        raise ConfigurationError(f"{where} is {value!r}; expected a table by {outer} of tables by {inner}.")
    found: dict[str, dict[str, float]] = {}
    for given, table in value.items():
        name = given if signed else _figure(where, given)
        if not signed and RULES[name].exact:
            raise ConfigurationError(f"{where}: {name} is a count without a tolerance: any change fails. Leave it out.")
        found[name] = {}
        for part, number in table.items():
            if isinstance(number, bool) or not isinstance(number, int | float) or number != number:
                raise ConfigurationError(f"{where}.{given}.{part} is {number!r}; expected a number.")
            if not signed and number < 0:
                raise ConfigurationError(f"{where}.{given}.{part} is {number!r}; expected 0 or more.")
            if not signed:
                _look_up(f"{where}.{given}", "part of a tolerance", part, parts)
            found[name][_limited(where, part) if signed else part] = float(number)
    return found


def _figure(where: str, name: str) -> str:
    full = name if "." in name else f"propagated.{name}"
    _look_up(where, "figure", full, RULES)
    return full


def _limited(where: str, name: str) -> str:
    full = _figure(where, name)
    if not RULES[full].worse:
        able = ", ".join(one for one, rule in RULES.items() if rule.worse)
        raise ConfigurationError(f"{where}: {full} is neither better nor worse, so has no limit. These can: {able}.")
    return full


def _look_up(where: str, kind: str, name: str, table: Mapping[str, Any]) -> None:
    try:
        look_up(kind, name, table)
    except ValueError as problem:
        raise ConfigurationError(f"{where}: {problem}") from None
