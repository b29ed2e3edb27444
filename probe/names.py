"""Names: looking one up in a table, with the nearest offered when it is not there."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

#: The label of what the whole model gives, beside `layer_0` and the names of modules.
LOGITS = "logits"

#: The ratio of difflib from which on a name may be what somebody meant.
ALIKE = 0.5


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
