"""Single elements of a case: now, in the float model and in the baseline, and which of them are worst."""

import math
from dataclasses import dataclass

from probe.gate.cases import Outcome
from probe.report.numbers import change
from probe.words import LOGITS

#: Rows of the table of a failing case.
MOST_ROWS = 6
#: The axes of an output, counted from 0, as they index the tensor.
AXES, OF_LOGITS = ("sequence", "token", "channel"), ("sequence", "token", "token id")


@dataclass(frozen=True)
class Element:
    """One element of an output; `golden` is None where the baseline has no value of it."""

    index: tuple[int, ...]
    reference: float
    output: float
    golden: float | None = None

    @property
    def error(self) -> float:
        """Output - reference."""
        return self.output - self.reference

    @property
    def change(self) -> float | None:
        """Output - golden value."""
        return None if self.golden is None else self.output - self.golden


@dataclass(frozen=True)
class ElementTable:
    """The worst elements as text: a sentence, the names of the columns, and a row for each element."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def elements(outcome: Outcome) -> list[Element]:
    """The elements that were sampled of the output of a case, those with a golden value last."""
    points = outcome.points
    golden = [None if math.isnan(x) else x for x in points.golden] or [None] * len(points.output)
    both = zip(points.reference, points.output, golden, strict=True)
    return [Element(points.index(n), *values) for n, values in enumerate(both)]


def worst_elements(outcome: Outcome) -> ElementTable | None:
    """The elements furthest from their golden values; without any, furthest from the float model.

    None where no element was sampled.
    """
    found = elements(outcome)
    golden = [one for one in found if one.golden is not None]
    if not found:
        return None
    if golden and not any(one.change for one in golden):
        return ElementTable(f"Given the reference's input, all {len(golden)} sampled golden values are as stored.")
    if not golden and not any(one.error for one in found):
        return ElementTable(f"All {len(found)} sampled values equal those of the float model.")
    names = OF_LOGITS if outcome.case.layer == LOGITS else AXES
    place = f"[{', '.join(names)}]" if len(found[0].index) == len(names) else "index"
    ranked = sorted(golden or found, key=_size, reverse=True)[:MOST_ROWS]
    if golden:
        title = f"The largest differences of {len(golden)} sampled golden values:"
        columns: tuple[str, ...] = (place, "float", "baseline", "now", "now - baseline")
    else:
        title = f"The largest differences from the float model of {len(found)} sampled values:"
        columns = (place, "float", "now", "now - float")
    return ElementTable(title, columns, tuple(map(_row, ranked)))


def _size(one: Element) -> float:
    """How far an element is from what it should be; what is not finite comes first."""
    difference = one.error if one.change is None else one.change
    return math.inf if math.isnan(difference) else abs(difference)


def _row(one: Element) -> tuple[str, ...]:
    index = str(list(one.index))
    if one.change is None:
        return index, *change(one.reference, one.output), f"{one.error:+.2e}"
    return index, change(one.golden, one.reference)[1], *change(one.golden, one.output), f"{one.change:+.2e}"
