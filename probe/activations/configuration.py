"""Reading the settings: YAML, then `--data.num_samples 128`; what is unknown or wrong is refused with what is near."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from probe.activations.settings import Settings
from probe.words import near


class ConfigurationError(ValueError):
    """A setting that cannot be: what it is, what was expected, what is near."""


def keys_of(settings: Any = None, *, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value, in the order of the file."""
    settings = Settings() if settings is None else settings
    for one in fields(settings):
        value, name = getattr(settings, one.name), f"{before}{one.name}"
        if is_dataclass(value):
            yield from keys_of(value, before=f"{name}.")
        else:
            yield name, value


def read_configuration(path: str | Path | None, overrides: Sequence[tuple[str, str]] = ()) -> Settings:
    """The settings of a YAML file (None: the defaults) with overrides by dotted key over them."""
    settings = Settings()
    if path is not None:
        settings = settings_of(_read(Path(path)), where=str(path))
    for given, text in overrides:
        name = full_key(given)
        settings = _set(settings, name.split("."), _value(given, text), where=f"--{given}")
    return settings


def _read(path: Path) -> Any:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else f"does not exist (looked for {path.absolute()})"
        raise ConfigurationError(f"configuration {str(path)!r} {what}. Expected a YAML file, as configs/default.yaml.")
    try:
        text = path.read_text(encoding="utf-8")
        _check_twice(yaml.compose(text, Loader=yaml.SafeLoader), set(), str(path))
        return yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        said = " ".join(str(problem).split())
        raise ConfigurationError(
            f"configuration {str(path)!r} is not YAML: {said}. Correct it and run again."
        ) from None


def _check_twice(node: Any, seen: set[int], where: str) -> None:
    """Refuse a key that a table has twice: YAML would keep the last and say nothing."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    lines: dict[str, int] = {}
    for one in node.value:
        key, value = one if isinstance(node, yaml.MappingNode) else (None, one)
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigurationError(
                    f"{where}: key {key.value!r} is there twice, in lines {lines[key.value]} and {line}. Keep one."
                )
            lines[key.value] = line
        _check_twice(value, seen, where)


def _value(given: str, text: str) -> Any:
    """A value of the command line, read as YAML reads it; what it cannot read is text (a regular expression, say)."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    unread = isinstance(value, Mapping) or (value is None and text.strip().lower() not in ("null", "~"))
    return text if unread else value


def full_key(given: str) -> str:
    """The key that is meant: itself, or one that ends in it and is the only one, `outlier.threshold`."""
    names = [name for name, _ in keys_of()]
    name = given.replace("-", "_")
    if name in names:
        return name
    ending = [one for one in names if one.endswith(f".{name}")]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise ConfigurationError(f"--{given} can be any of {', '.join(ending)}. Write out which one.")
    inside = [one for one in names if one.startswith(f"{name}.") or f".{name}." in one]
    if inside:
        raise ConfigurationError(f"--{given} is a section. Give one of its keys: {', '.join(inside)}.")
    raise ConfigurationError(f"unknown key --{given}. {_did_you_mean(name, names)}")


def settings_of(given: Any, *, where: str) -> Settings:
    """Settings from nested tables, as YAML gives them."""
    settings = Settings()
    for path, value in _walk(given, Settings(), where, ()):
        settings = _set(settings, path, value, where=f"{where}: {'.'.join(path)}")
    return settings


def _walk(given: Any, settings: Any, where: str, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if given is None:
        return
    known = {one.name: getattr(settings, one.name) for one in fields(settings)}
    here = ".".join(at) or "it"
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where}: {here} is {given!r}; expected a table of {', '.join(known)}.")
    for name, value in given.items():
        path = (*at, str(name))
        if name not in known:
            beside = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
            names = [".".join((*at, *beside))] if beside else [one for one, _ in keys_of()]
            raise ConfigurationError(f"{where}: unknown key {'.'.join(path)!r}. {_did_you_mean('.'.join(path), names)}")
        if is_dataclass(known[name]):
            yield from _walk(value, known[name], where, path)
        else:
            yield path, value


def _set(settings: Any, path: Sequence[str], value: Any, *, where: str) -> Any:
    name, *rest = path
    if rest:
        return replace(settings, **{name: _set(getattr(settings, name), rest, value, where=where)})
    check = next(one for one in fields(settings) if one.name == name).metadata["check"]
    try:
        return replace(settings, **{name: check(value)})
    except ValueError as problem:
        typed = f"'{value}'" if isinstance(value, str) else repr(value)  # repr would double the backslashes
        raise ConfigurationError(f"{where} is {typed}; expected {problem}.") from None


def _did_you_mean(name: str, names: Sequence[str]) -> str:
    """By the last part first: `data.custom.column` means `data.custom.text_column`."""
    whole = near(name, names, count=1)
    last = {one.rpartition(".")[2]: one for one in reversed(names)}
    close = difflib.get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.75)
    if close and not (whole and difflib.SequenceMatcher(None, name, whole[0]).ratio() >= 0.85):
        whole = [last[close[0]]]
    sections = ", ".join(one.name for one in fields(Settings))
    return (f"Did you mean {whole[0]!r}?" if whole else f"Sections: {sections}.") + " All keys: probe analyze --keys"
