"""Names and sentences for people: nearest name, first few of many, natural order, sizes, an exception on one line."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

#: The label of the whole model's output, beside `layer_0` and the names of modules.
LOGITS = "logits"

#: The difflib ratio from which a name counts as a likely misspelling of another.
ALIKE = 0.5

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def nearest(name: str, names: Iterable[str], *, count: int = 3) -> list[str]:
    """The names most like `name`, best first; never empty while `names` has any."""
    folded = {option.lower(): option for option in names}
    wanted = str(name).lower()
    starting = [option for option in folded if wanted and option.startswith(wanted)]
    alike = difflib.get_close_matches(wanted, folded, n=len(folded) or 1, cutoff=0.0)
    return [folded[match] for match in dict.fromkeys([*starting, *alike])][:count]


def near(name: object, names: Iterable[str], *, count: int = 3) -> list[str]:
    """Those of `nearest` that are really like `name`, so that somebody may have meant them; may be empty."""
    wanted = str(name).lower()
    return [one for one in nearest(str(name), names, count=count) if wanted and _is_like(wanted, one.lower())]


def _is_like(wanted: str, option: str) -> bool:
    return option.startswith(wanted) or difflib.SequenceMatcher(None, wanted, option).ratio() >= ALIKE


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """` Did you mean 'text'?`, or nothing where no name is near."""
    close = near(name, names, count=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def look_up(kind: str, name: object, table: Mapping[str, T], *, see: str = "") -> T:
    """`table[name]`, or a ValueError that says what was asked, what is near and what there is."""
    if isinstance(name, str) and name in table:
        return table[name]
    where = f" {see}" if see else ""
    raise ValueError(f"unknown {kind} {name!r}.{did_you_mean(name, table)} Known: {', '.join(table)}.{where}")


def describe_error(problem: BaseException) -> str:
    """What an exception says, on one line of bounded length, ending in a full stop."""
    words = " ".join(str(problem).split())
    words = words if len(words) <= 300 else words[:297] + "..."
    return f"{type(problem).__name__}: {words}".rstrip(".: ") + "."


def first_few(names: Sequence[str], separator: str = ", ", *, most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def format_bytes(size: int) -> str:
    """1.2 GB."""
    number, unit = float(size), 0
    while number >= 1000 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {_UNITS[unit]}"


def natural_key(text: str) -> list[tuple[str, int]]:
    """A key that sorts numbers by their size: layer_2 before layer_10."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", text)
    return [*((word, int(number or -1)) for word, number in parts), (text, 0)]
