"""Figures as text: short where they may be, and long enough that old and new can be told apart."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from probe.gate.cases import Figure

#: The order in which figures matter; all others come after, worst first.
PRIORITY = ("mse", "correlation", "distance", "moved", "max_abs")
SIDES = ("injected", "propagated")

_MOST_DIGITS = 12


def number(value: float | None) -> str:
    """2.31e-04, 0.99987, 3 and, where there is no figure, none."""
    return _texts(value)[0]


def change(old: float | None, new: float | None) -> tuple[str, str]:
    """Both figures, with so many digits that their difference can be read from them to a fifth."""
    digits = 3
    texts = _texts(old, new)
    if old is None or new is None or not math.isfinite(new - old):
        return texts[0], texts[1]
    while abs(float(texts[1]) - float(texts[0]) - (new - old)) > abs(new - old) / 5 and digits < _MOST_DIGITS:
        digits += 1
        texts = _texts(old, new, digits=digits)
    return texts[0], texts[1]


def short(value: float | None) -> str:
    """One digit: 5e-4."""
    if value is None or not math.isfinite(value) or value == 0:
        return number(value)
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def tolerance(figure: Figure) -> str:
    """4.6e-06, or empty where none is known."""
    return "" if figure.tolerance is None else f"{figure.tolerance:.1e}" if figure.tolerance else "0"


def ranked(figures: Mapping[str, Figure], *, moved: bool = False) -> list[tuple[str, Figure]]:
    """The most important first: by PRIORITY, injected before propagated, the worst relative to its tolerance.

    A count that moved comes before all others. With `moved`, only those that moved.
    """

    def key(item: tuple[str, Figure]) -> tuple[bool, int, int, float, str]:
        side, _, name = item[0].rpartition(".")
        counted = item[1].moved and item[1].tolerance == 0
        return not counted, _place(name, PRIORITY), _place(side, SIDES), -_excess(item[1]), item[0]

    return sorted(((name, figure) for name, figure in figures.items() if figure.moved or not moved), key=key)


def value(figures: Mapping[str, Figure], *names: str) -> float | None:
    """The new value of the first of `names` that is there and finite."""
    found = (figures[name].new for name in names if name in figures)
    return next((x for x in found if x is not None and math.isfinite(x)), None)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the same keys, below a header row; None is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _texts(*values: float | None, digits: int = 3) -> list[str]:
    known = [x for x in values if x is not None and math.isfinite(x)]
    if all(x == int(x) and abs(x) < 1e6 for x in known):
        return [_odd(x) or str(int(x or 0)) for x in values]
    if all(x == 0 or 0.01 <= abs(x) < 1e4 for x in known):
        return [_odd(x) or ("0" if x == 0 else f"{x:#.{digits + 2}g}") for x in values]
    return [_odd(x) or ("0" if x == 0 else f"{x:.{digits - 1}e}") for x in values]


def _odd(x: float | None) -> str:
    """The text of what is no finite number."""
    return "none" if x is None else "" if math.isfinite(x) else str(float(x))


def _place(name: str, order: tuple[str, ...]) -> int:
    return order.index(name) if name in order else len(order)


def _excess(figure: Figure) -> float:
    """How many tolerances it moved by; infinite where that cannot be said."""
    if figure.old is None or figure.new is None or not figure.tolerance:
        return math.inf
    times = abs(figure.new - figure.old) / figure.tolerance
    return math.inf if math.isnan(times) else times
