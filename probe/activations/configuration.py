"""Reading the settings: YAML, then `--data.num_samples 128`; what is unknown or wrong is refused with what is near."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from probe.activations.settings import Settings
from probe.settings import ConfigurationError, key_hint, keys_of, with_value, with_values

#: Where all keys are listed.
ALL_KEYS = "All keys: probe analyze --keys"


def read_configuration(path: str | Path | None, overrides: Sequence[tuple[str, str]] = ()) -> Settings:
    """The settings of a YAML file (None: the defaults) with overrides by dotted key over them."""
    settings = Settings()
    if path is not None:
        settings = with_values(settings, _read(Path(path)), where=str(path), see=ALL_KEYS)
    for given, text in overrides:
        name = full_key(given)
        settings = with_value(settings, name.split("."), _value(given, text), where=f"--{given}")
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
    names = [name for name, _ in keys_of(Settings())]
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
    raise ConfigurationError(f"unknown key --{given}.{key_hint(name, Settings(), see=ALL_KEYS)}")
