"""The outcomes of a run, gathered: by recipe, with what failed and where it began, and as heat maps of their errors."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from probe.gate.cases import Outcome, Verdict
from probe.report.numbers import short, value
from probe.words import LOGITS, natural_key, short_names

VERDICTS: tuple[str, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Run:
    """The outcomes of one recipe of one model on one device: at least one, in the order of the model."""

    outcomes: tuple[Outcome, ...]

    @property
    def model(self) -> str:
        """The model's name."""
        return self.outcomes[0].model

    @property
    def mode(self) -> str:
        """The mode as test ids spell it."""
        return self.outcomes[0].case.mode

    @property
    def format(self) -> str:
        """The format, empty for a float mode."""
        return self.outcomes[0].case.format

    @property
    def device(self) -> str:
        """The device it ran on."""
        return self.outcomes[0].case.device

    @property
    def recipe(self) -> str:
        """mode_2_1-fp8_e4m3: the anchor in the report."""
        return self.outcomes[0].case.recipe

    @property
    def layers(self) -> list[Outcome]:
        """All but the figures of the whole model."""
        return [outcome for outcome in self.outcomes if outcome.case.layer != LOGITS]

    @property
    def whole(self) -> Outcome | None:
        """The figures of the whole model."""
        return next((outcome for outcome in self.outcomes if outcome.case.layer == LOGITS), None)

    def largest(self, *names: str) -> float | None:
        """The largest over the layers of the first of these figures that each has."""
        return max(self._known(names), default=None)

    def smallest(self, *names: str) -> float | None:
        """The smallest over the layers of the first of these figures that each has."""
        return min(self._known(names), default=None)

    def _known(self, names: Sequence[str]) -> list[float]:
        found = (value(outcome.figures, *names) for outcome in self.layers)
        return [x for x in found if x is not None]

    @property
    def failing(self) -> list[Outcome]:
        """What failed; the first of them is where the story begins."""
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]


def runs(outcomes: Iterable[Outcome]) -> list[Run]:
    """By recipe, in an order that does not depend on which worker was the first to finish."""
    found: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.model, outcome.case.recipe, outcome.case.device), []).append(outcome)
    return [Run(tuple(found[key])) for key in sorted(found, key=lambda key: [natural_key(part) for part in key])]


def is_inherited(outcome: Outcome) -> bool:
    """Whether only what has accumulated has changed."""
    moved = [name for name, figure in outcome.figures.items() if figure.moved]
    return bool(moved) and all(name.startswith("propagated.") for name in moved)


def got_worse(outcomes: Iterable[Outcome]) -> bool:
    """Whether accepting them takes a reason."""
    figures = (figure for outcome in outcomes for figure in outcome.figures.values())
    return any(figure.moved and figure.direction == "worse" for figure in figures)


def totals(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many passed, were updated and skipped, and how many failed by verdict; what did not occur is left out."""
    counts: Counter[str] = Counter(
        outcome.verdict or "failed" if outcome.status == "failed" else outcome.status for outcome in outcomes
    )
    order = ("passed", "updated", "skipped", *VERDICTS, "failed")
    return {name: counts[name] for name in order if counts[name]}


def layer_names(given: Sequence[Run]) -> list[str]:
    """The layers of all runs as columns, logits last: by number if that is all they differ in, else as in the model."""
    longest = sorted(given, key=lambda run: -len(run.outcomes))
    names = list(dict.fromkeys(outcome.case.layer for run in longest for outcome in run.layers))
    if len({re.sub(r"\d+", "0", name) for name in names}) == 1:
        names.sort(key=natural_key)
    return names + [LOGITS] * any(run.whole for run in given)


@dataclass(frozen=True)
class HeatMap:
    """One model and format. A cell is None where the matrix has no case."""

    title: str
    layers: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Outcome | None, ...]], ...]

    @property
    def labels(self) -> list[str]:
        """The heads of the columns: what tells the layers apart."""
        different = short_names([name for name in self.layers if name != LOGITS])
        return different + [name for name in self.layers if name == LOGITS]

    def cells(self) -> Iterator[Outcome]:
        """The cases there are."""
        return (cell for _, row in self.rows for cell in row if cell)


def heat_maps(outcomes: Iterable[Outcome]) -> list[HeatMap]:
    """A map per model and format, those of the float modes last."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs(outcomes):
        found.setdefault((run.model, run.format), []).append(run)
    order = sorted(found, key=lambda key: (natural_key(key[0]), not key[1], natural_key(key[1])))
    several = len({model for model, _ in order}) > 1
    return [_heat_map(found[key], f"{key[0]}, " * several + (key[1] or "float modes")) for key in order]


def _heat_map(given: Sequence[Run], title: str) -> HeatMap:
    layers = layer_names(given)
    several = len({run.device for run in given}) > 1
    rows = []
    for run in given:
        cells = {outcome.case.layer: outcome for outcome in (*run.outcomes, *run.failing)}  # of two, the failing one
        rows.append((f"{run.mode} {run.device}" if several else run.mode, tuple(map(cells.get, layers))))
    return HeatMap(title, tuple(layers), tuple(rows))


def error_of(outcome: Outcome) -> float | None:
    """What a cell shows: the propagated mse, of the whole model the KL divergence of the logits."""
    if outcome.case.layer == LOGITS:
        return value(outcome.figures, "logits.kl")
    return value(outcome.figures, "propagated.mse", "injected.mse", "scaling.mse")


def cell_text(outcome: Outcome) -> str:
    """One digit of the error, or why there is none."""
    error = error_of(outcome)
    if error is not None:
        return short(error)
    return "skip" if outcome.status == "skipped" else "nan" if outcome.verdict == "not finite" else "?"
