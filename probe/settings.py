"""Settings from a file: frozen dataclasses in which every key has a check; what is unknown or wrong is refused.

    @dataclass(frozen=True)
    class DataSettings:
        samples: int = key(8, whole(1))

    with_values(DataSettings(), {"sampels": 3}, where="a.toml")
    ConfigurationError: a.toml: unknown key 'sampels'. Did you mean 'samples'? Known: samples.

A section is a field whose value is another such dataclass; its keys are `section.key`.
"""

import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass, replace
from typing import Any, TypeVar

from probe.words import did_you_mean, near

Settings = TypeVar("Settings")
#: Turns a value into what is stored, or raises a ValueError that says what was expected.
Check = Callable[[Any], Any]

_POWER = re.compile(r"\d+(\.\d*)?[eE][+-]?\d+")


class ConfigurationError(ValueError):
    """A setting that cannot be: what it is, what was expected, what is near."""


def key(default: Any, check: Check) -> Any:
    """A field with its default and its check."""
    return field(default=default, metadata={"check": check})


def keys_of(settings: Any, *, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value, in the order of the fields."""
    for one in fields(settings):
        value, name = getattr(settings, one.name), f"{before}{one.name}"
        if is_dataclass(value):
            yield from keys_of(value, before=f"{name}.")
        else:
            yield name, value


def with_values(settings: Settings, given: Any, *, where: str, see: str = "") -> Settings:
    """`settings` with the values of a table; `see` says where all keys are listed, if not in the message itself."""
    for path, value in _leaves(given, settings, settings, (), where, see):
        settings = with_value(settings, path, value, where=f"{where}: {'.'.join(path)}")
    return settings


def with_value(settings: Settings, path: Sequence[str], value: Any, *, where: str) -> Settings:
    """`settings` with one key changed, after its check; the key is known to exist."""
    name, *rest = path
    if rest:
        changed = with_value(getattr(settings, name), rest, value, where=where)
        return replace(settings, **{name: changed})  # type: ignore[type-var]
    check = next(one for one in fields(settings) if one.name == name).metadata["check"]  # type: ignore[arg-type]
    try:
        return replace(settings, **{name: check(value)})  # type: ignore[type-var]
    except ValueError as problem:
        typed = f"'{value}'" if isinstance(value, str) else _shown(value)  # repr would double the backslashes
        raise ConfigurationError(f"{where} is {typed}; expected {problem}.") from None


def _shown(value: Any) -> str:
    """The repr of a value, shortened: aliases in YAML can make it longer than any memory."""
    short = reprlib.Repr()
    short.maxlist = short.maxtuple = short.maxdict = 20
    short.maxlevel, short.maxother, short.maxlong = 3, 200, 200
    return short.repr(value)


def check_keys(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse an unknown key of a table that is not a dataclass, such as the arguments of a marker."""
    for name in given:
        if name not in known:
            raise ConfigurationError(
                f"{where}: unknown key {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}."
            )


def _leaves(
    given: Any, section: Any, settings: Any, at: tuple[str, ...], where: str, see: str
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path and the value of every key in nested tables; `section` is the part of `settings` that lies `at`."""
    if given is None:  # an empty section of a YAML file
        return
    known = {one.name: getattr(section, one.name) for one in fields(section)}
    if not isinstance(given, Mapping):
        here = f"{where}: {'.'.join(at)}" if at else where
        raise ConfigurationError(f"{here} is {_shown(given)}; expected a table of {', '.join(known)}.")
    for written, value in given.items():
        name = str(written).replace("-", "_")
        if name not in known:
            full = ".".join((*at, str(written)))
            beside = [".".join((*at, one)) for one in near(name, known, count=1)]
            raise ConfigurationError(
                f"{where}: unknown key {full!r}.{key_hint(full, settings, beside=beside, see=see)}"
            )
        if is_dataclass(known[name]):
            yield from _leaves(value, known[name], settings, (*at, name), where, see)
        else:
            yield (*at, name), value


def key_hint(name: str, settings: Any, *, beside: Sequence[str] = (), see: str = "") -> str:
    """` Did you mean 'data.samples'? Known: ...`: the key that was probably meant, those `beside` it first."""
    names = [one for one, _ in keys_of(settings)]
    last = {one.rpartition(".")[2]: one for one in reversed(names)}
    meant = (
        beside
        or near(name, names, count=1, alike=0.85)
        or [last[one] for one in near(name.rpartition(".")[2], last, count=1, alike=0.75)]
        or near(name, names, count=1)
    )
    top = ", ".join(one.name for one in fields(settings))
    hint = f" Did you mean {meant[0]!r}?" if meant else f" Sections: {top}." if see else ""
    return f"{hint} {see or f'Known: {top}.'}"


# checks ------------------------------------------------------------------------------------------------------------


def whole(at_least: int) -> Check:
    """A whole number."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ValueError(f"a whole number, {at_least} or more")
        return value

    return check


def positive(value: Any) -> float:
    """A finite number above 0."""
    if isinstance(value, str) and _POWER.fullmatch(value):
        value = float(value)  # YAML reads 1e-3 as text
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError("a number above 0")
    return float(value)


def share(value: Any) -> float:
    """A number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError("a share above 0, at most 1")
    return float(value)


def yes_or_no(value: Any) -> bool:
    """True or False, and nothing that only looks like it."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def word(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text that is not empty")
    return value


#: The name of a function: package.module:function.
FUNCTION = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")


def function_name(value: Any) -> str:
    """The name of a function, which is not looked for."""
    if not isinstance(value, str) or not FUNCTION.fullmatch(value):
        raise ValueError('the name of a function, "package.module:function", that returns a list of batches')
    return value


def word_or_none(value: Any) -> str | None:
    """A text that is not empty, or None."""
    return None if value is None else word(value)


def one_of(*options: Any) -> Check:
    """One of the options."""

    def check(value: Any) -> Any:
        if isinstance(value, bool) or value not in options:
            raise ValueError("one of " + ", ".join("null" if o is None else str(o) for o in options))
        return value

    return check


def some_of(*options: str) -> Check:
    """A list of options, each once; a single one need not be in a list."""

    def check(value: Any) -> tuple[str, ...]:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list | tuple) or not given or any(one not in options for one in given):
            raise ValueError(f"a list of some of {', '.join(options)}")
        return tuple(dict.fromkeys(given))

    return check
