"""Looking a name up in a table, with the nearest name offered when it is not there."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def nearest(name: str, names: Iterable[str], *, count: int = 3) -> list[str]:
    """The names most like `name`, best first; never empty while `names` has any."""
    options = list(names)
    folded = {option.lower(): option for option in options}
    found = difflib.get_close_matches(str(name).lower(), folded, n=count, cutoff=0.0)
    return [folded[match] for match in found]


def look_up(kind: str, name: object, table: Mapping[str, T], *, see: str = "") -> T:
    """`table[name]`, or a ValueError that says what was asked, what is near and what there is."""
    if isinstance(name, str) and name in table:
        return table[name]
    near = nearest(str(name), table, count=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    where = f" {see}" if see else ""
    raise ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(table)}.{where}")
