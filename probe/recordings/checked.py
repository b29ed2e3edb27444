"""JSON from elsewhere, walked value by value: what is wrong is told with the file and the key."""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

AGAIN = "Copy the recording again from where it was made, or make it again there"


class RecordingError(ValueError):
    """A recording that cannot be read or written, or that is of something else than it is compared with."""


def defect(file: Path, problem: str, *, remedy: str = AGAIN) -> RecordingError:
    """The problem may quote a file from elsewhere: nothing of it reaches the terminal as a command."""
    return RecordingError(f"{file}: {printable(problem)}. {remedy}")


def printable(text: str) -> str:
    """The text with whatever a terminal might obey spelled out."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@dataclass(frozen=True)
class Node:
    """A value in a document, and where it stands there."""

    file: Path
    key: str
    value: Any

    def wrong(self, expected: str) -> RecordingError:
        """The error that something else was expected here."""
        where = f"{self.key}: " if self.key else ""
        return defect(self.file, f"{where}expected {expected}, found {_shown(self.value)}")

    def members(self, *keys: str, empty: bool = False) -> dict[str, "Node"]:
        """Of an object: just these keys, or any if none are given."""
        if not isinstance(self.value, dict) or not (self.value or empty) or not all(map(_is_text, self.value)):
            raise self.wrong("an object with named keys")
        for key in sorted(self.value.keys() ^ set(keys)) if keys else ():
            raise defect(self.file, f"the key {self._below(key)} is {'unknown' if key in self.value else 'missing'}")
        return {key: Node(self.file, self._below(key), value) for key, value in self.value.items()}

    def entries(self, *, empty: bool = False) -> list["Node"]:
        """Of a list."""
        if not isinstance(self.value, list) or not (self.value or empty):
            raise self.wrong("a list that is not empty")
        return [Node(self.file, f"{self.key}[{index}]", value) for index, value in enumerate(self.value)]

    def text(self, pattern: re.Pattern[str] | None = None, expected: str = "a text") -> str:
        """A text, of the pattern if there is one."""
        if not _is_text(self.value) or (pattern and not pattern.fullmatch(self.value)):
            raise self.wrong(expected)
        return str(self.value)

    def one_of(self, names: Collection[str]) -> str:
        """One of a few texts."""
        if not isinstance(self.value, str) or self.value not in names:
            raise self.wrong(f"one of {', '.join(names)}")
        return self.value

    def or_null(self, read: Callable[["Node"], T]) -> T | None:
        """What `read` makes of it, or None for null."""
        return None if self.value is None else read(self)

    def count(self) -> int:
        """A whole number, 1 or more."""
        if type(self.value) is not int or self.value < 1:
            raise self.wrong("a whole number, 1 or more")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if type(self.value) is not bool:
            raise self.wrong("true or false")
        return self.value

    def _below(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else key


def document(data: bytes, file: Path, version: int) -> Node:
    """The whole document, once its version is known to be ours."""

    def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name in repeated(name for name, _ in pairs):
            raise defect(file, f"the key {name!r} is there twice")
        return dict(pairs)

    try:
        whole = Node(file, "", json.loads(data.decode(), object_pairs_hook=each_key_once))
    except RecordingError:
        raise
    except (RecursionError, ValueError) as problem:
        raise defect(file, f"is not JSON that can be read ({problem})") from None
    if isinstance(whole.value, dict) and "version" in whole.value:
        found = whole.members()["version"]
        if found.count() > version:
            newer = f"version: was written by a newer probe, {found.value}; this one reads {version}"
            raise defect(file, newer, remedy="Upgrade probe.")
    return whole


def _is_text(value: Any) -> bool:
    """Names come up in messages and reports, so they hold nothing that a terminal would obey."""
    return isinstance(value, str) and value != "" and value.isprintable()


def repeated(names: Iterable[str]) -> list[str]:
    """The names that are there more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return "something nested too deep"
    return text if len(text) <= 60 else text[:57] + "..."
