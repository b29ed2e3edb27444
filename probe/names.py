"""Names: looking one up in a table, with the nearest offered when it is not there."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

#: The label of what the whole model gives, beside `layer_0` and the names of modules.
LOGITS = "logits"


def nearest(name: str, names: Iterable[str], *, count: int = 3) -> list[str]:
    """The names most like `name`, best first; never empty while `names` has any."""
    folded = {option.lower(): option for option in names}
    wanted = str(name).lower()
    starting = [option for option in folded if wanted and option.startswith(wanted)]
    alike = difflib.get_close_matches(wanted, folded, n=len(folded) or 1, cutoff=0.0)
    return [folded[match] for match in dict.fromkeys([*starting, *alike])][:count]


def look_up(kind: str, name: object, table: Mapping[str, T], *, see: str = "") -> T:
    """`table[name]`, or a ValueError that says what was asked, what is near and what there is."""
    if isinstance(name, str) and name in table:
        return table[name]
    near = nearest(str(name), table, count=1)
    close = near and difflib.SequenceMatcher(None, str(name).lower(), near[0].lower()).ratio() >= 0.5
    hint = f" Did you mean {near[0]!r}?" if close else ""
    where = f" {see}" if see else ""
    raise ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(table)}.{where}")
