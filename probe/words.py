"""Names and sentences for people: near names, the first few of many, natural order, shortening, sizes, errors."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

#: The label of the whole model's output, beside `layer_0` and the names of modules: of scores, and of anything else.
LOGITS = "logits"
OUTPUT = "output"
#: Both of them.
WHOLE = (LOGITS, OUTPUT)
#: Cases of a recipe beside its layers: what lies outside of them, and ways through the model other than one prefill.
OUTSIDE = ("embedding", "norm", "head")
PATHS = ("decode", "batch_1", "ragged", "padded")
#: Parts of a model that linear modes leave float unless they are asked for.
INCLUDABLE = ("router", "embedding", "head")
#: All labels of cases that are no layers.
BESIDE = (*OUTSIDE, *PATHS, *WHOLE)

#: The difflib ratio from which a name counts as a likely misspelling of another.
ALIKE = 0.5

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def near(name: object, names: Iterable[str], *, count: int = 3, alike: float = ALIKE) -> list[str]:
    """The names that somebody who wrote `name` may have meant, best first; empty if none is like it.

    The plural of what was written comes first, then names that begin with it, the shortest first; `alike` is the
    difflib ratio that the others need. Of equally likely names the order of the table decides.
    """
    wanted = str(name).lower()
    folded = {option.lower(): option for option in names} if wanted else {}
    starting = [option for option in folded if option.startswith(wanted)]
    first = sorted(starting, key=lambda option: (option != f"{wanted}s", len(option)))
    then = difflib.get_close_matches(wanted, folded, n=count, cutoff=alike)
    return [folded[option] for option in dict.fromkeys([*first, *then])][:count]


def near_or_first(name: object, names: Sequence[str], *, aliases: Iterable[str] = ()) -> str:
    """`Nearest: layer_1, layer_2.` of names and aliases; where none is near, the first names: `It has: a, b.`"""
    close = near(name, [*names, *aliases])
    return f"Nearest: {', '.join(close)}." if close else f"It has: {first_few(names, most=5) or 'none'}."


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


def shared_lines(lines: Iterable[tuple[str, str]]) -> list[str]:
    """From pairs of a name and a line: each line once, after the names that have it; alone if all have the same."""
    names: dict[str, dict[str, None]] = {}
    for name, line in lines:
        names.setdefault(line, {})[name] = None
    return [line if len(names) == 1 else f"{first_few([*found])}: {line}" for line, found in names.items()]


def single_line(text: str, *, most: int = 500) -> str:
    """One line of at most `most` printable characters, for text that comes from models and files."""
    clean = "".join(c if c.isprintable() else "?" for c in text.replace("\n", " "))
    return clean if len(clean) <= most else clean[: most - 3] + "..."


def columns(rows: Sequence[Mapping[str, str]], *, left: Collection[str] = ()) -> list[str]:
    """A header line and a line for every row, two spaces between columns: those in `left` to the left, others right."""
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}

    def line(cells: Mapping[str, str]) -> str:
        return "  ".join(cells[k].ljust(w) if k in left else cells[k].rjust(w) for k, w in widths.items()).rstrip()

    return [line({key: key for key in widths}), *map(line, rows)]


def require_positive(name: str, value: int | None) -> None:
    """Refuse a count below 1 with a ValueError; None, an option that was left out, is fine."""
    if value is not None and value < 1:
        raise ValueError(f"{name} is {value}; expected 1 or more.")


def format_bytes(size: int) -> str:
    """1.2 GB."""
    number, unit = float(size), 0
    while number >= 1000 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {_UNITS[unit]}"


def printable(text: str, *, keep: str = "") -> str:
    """The text with every character that a terminal might obey spelled out, but for those of `keep`."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def flow_key(label: str) -> int:
    """A key that sorts labels as data flows through a model: embedding, layers (in their order), norm, head, paths."""
    order = {"embedding": 0, **{name: place + 2 for place, name in enumerate((*OUTSIDE[1:], *PATHS, *WHOLE))}}
    return order.get(label, 1)


def natural_key(text: str) -> list[tuple[str, int]]:
    """A key that sorts numbers by their size: layer_2 before layer_10."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", text)
    return [*((word, int(number or -1)) for word, number in parts), (text, 0)]


def short_names(names: Sequence[str], *, most: int | None = None) -> list[str]:
    """What tells names apart, of at most `most` characters: of layers.0.mixer and layers.1.mixer, 0 and 1.

    What is cut from the ends is whole parts between dots, slashes, hyphens and underscores, the same from all names.
    """
    if len(set(names)) > 1:
        before = re.sub(r"[^._/-]*$", "", _beginning(names))
        rest = [name.removeprefix(before) for name in names]
        after = re.sub(r"^[^./]*", "", _beginning([name[::-1] for name in rest])[::-1])
        cut = [name.removesuffix(after) for name in rest]
        names = cut if all(cut) else names
    return [name if most is None else tail(name, most=most) for name in names]


def _beginning(names: Sequence[str]) -> str:
    """What all of them begin with: what the first and the last in order do."""
    first, last = min(names), max(names)
    return first[: next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def tail(name: str, *, most: int, mark: str = "\N{HORIZONTAL ELLIPSIS}") -> str:
    """The end of a name that is longer than `most` characters, behind a mark: names of layers differ at the end."""
    return name if len(name) <= most else mark + name[len(name) - most + len(mark) :]
