"""JSON documents from elsewhere, checked value by value so that an error names its key; and `finite` figures."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from probe.files.defects import DefectError
from probe.words import single_line

T = TypeVar("T")


@dataclass(frozen=True)
class Node:
    """A value of a document and its key. Each method returns one kind of value and refuses any other."""

    key: str
    value: Any

    def wrong(self, expected: str) -> DefectError:
        """The error for a value that is not what was expected."""
        where = f"{self.key}: " if self.key else ""
        return DefectError(f"{where}expected {expected}, found {_shown(self.value)}")

    def members(self, *keys: str, empty: bool = False) -> dict[str, "Node"]:
        """The members of an object: exactly these keys, or any if none are given."""
        if not isinstance(self.value, dict) or not (self.value or empty) or not all(map(_is_text, self.value)):
            raise self.wrong("an object with named keys")
        for key in sorted(self.value.keys() ^ set(keys)) if keys else ():
            raise DefectError(f"the key {self._below(key)} is {'unknown' if key in self.value else 'missing'}")
        return {key: Node(self._below(key), value) for key, value in self.value.items()}

    def entries(self, *, empty: bool = False) -> list["Node"]:
        """The entries of a list."""
        if not isinstance(self.value, list) or not (self.value or empty):
            raise self.wrong("a list that is not empty")
        return [Node(f"{self.key}[{index}]", value) for index, value in enumerate(self.value)]

    def text(self, pattern: re.Pattern[str] | None = None, expected: str = "a text") -> str:
        """A text, one that matches the pattern if there is one."""
        if not _is_text(self.value) or (pattern and not pattern.fullmatch(self.value)):
            raise self.wrong(expected)
        return str(self.value)

    def one_of(self, names: Collection[str]) -> str:
        """One of a few texts."""
        if not isinstance(self.value, str) or self.value not in names:
            raise self.wrong(f"one of {', '.join(names)}")
        return self.value

    def or_null(self, read: Callable[["Node"], T]) -> T | None:
        """The result of `read`, or None for null."""
        return None if self.value is None else read(self)

    def count(self, *, least: int = 1) -> int:
        """A whole number, 1 (or `least`) or more."""
        if type(self.value) is not int or self.value < least:
            raise self.wrong(f"a whole number, {least} or more")
        return self.value

    def number(self) -> float:
        """A finite number."""
        try:
            number = float(self.value) if type(self.value) in (int, float) else math.nan
        except OverflowError:  # an integer of 400 digits
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong("a finite number")
        return number

    def flag(self) -> bool:
        """True or false."""
        if type(self.value) is not bool:
            raise self.wrong("true or false")
        return self.value

    def as_dataclass(self, cls: type[T], **readers: Callable[["Node"], Any]) -> T:
        """An object whose keys are the fields of `cls`; each is read by its type, or by the reader of its name."""
        types = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
        members = self.members(*types)
        return cls(**{name: (readers.get(name) or _READERS[types[name]])(members[name]) for name in types})

    def _below(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else key


_READERS: dict[Any, Callable[[Node], Any]] = {
    **{str: Node.text, int: Node.count, float: Node.number, bool: Node.flag},
    str | None: lambda node: node.or_null(Node.text),
}


def document(data: bytes, *, version: int) -> Node:
    """The whole document, in which each key occurs once, no number is NaN or Infinity, and `version` is not newer."""
    try:
        whole = Node("", json.loads(data.decode(), object_pairs_hook=_each_key_once, parse_constant=_no_constant))
    except (RecursionError, ValueError) as problem:
        raise DefectError(f"is not JSON that can be read ({problem})") from None
    if isinstance(whole.value, dict) and "version" in whole.value:
        written = whole.members()["version"].count()
        if written > version:
            newer = f"version: was written by a newer probe, {written}; this one reads {version}"
            raise DefectError(newer, remedy="Upgrade probe.")
    return whole


def finite(value: Any) -> Any:
    """`value` with None for every NaN and infinity, which JSON lacks, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [finite(member) for member in value]
    return value


def repeated(names: Iterable[str]) -> list[str]:
    """The names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name in repeated(name for name, _ in pairs):
        raise DefectError(f"the key {name!r} is there twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise DefectError(f"holds {name}, which is never stored")


def _is_text(value: Any) -> bool:
    """Texts are shown in messages and reports, so control characters are not allowed in them."""
    return isinstance(value, str) and value != "" and value.isprintable()


def _shown(value: Any) -> str:
    try:
        return single_line(json.dumps(value), most=60)
    except RecursionError:
        return "something nested too deep"
