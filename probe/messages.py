"""Words of messages: what an exception says, some of many names, sizes in bytes."""

from collections.abc import Sequence

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def said(problem: BaseException) -> str:
    """What an exception says, on one line of bounded length, ending in a full stop."""
    words = " ".join(str(problem).split())
    words = words if len(words) <= 300 else words[:297] + "..."
    return f"{type(problem).__name__}: {words}".rstrip(".: ") + "."


def some(names: Sequence[str], separator: str = ", ", *, most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def said_size(size: int) -> str:
    """1.2 GB."""
    number, unit = float(size), 0
    while number >= 1000 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {_UNITS[unit]}"
