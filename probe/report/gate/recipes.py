"""The outcomes of a run, gathered by recipe: what failed, where it began and what only inherited it."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from probe.gate.cases import Outcome, Verdict
from probe.words import LOGITS

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

    @property
    def failing(self) -> list[Outcome]:
        """What failed; the first of them is where the story begins."""
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]


def runs(outcomes: Iterable[Outcome]) -> list[Run]:
    """By recipe, in an order that does not depend on which worker was the first to finish."""
    found: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.model, outcome.case.recipe, outcome.case.device), []).append(outcome)
    return [Run(tuple(found[key])) for key in sorted(found, key=lambda key: [natural(part) for part in key])]


def natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts layer_2 before layer_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


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
        names.sort(key=natural)
    return names + [LOGITS] * any(run.whole for run in given)


def short_names(names: Sequence[str]) -> list[str]:
    """What tells them apart: of model.layers.0.mixer and model.layers.1.mixer, 0 and 1."""
    if len(set(names)) < 2:
        return list(names)
    before = re.sub(r"[^._/-]*$", "", _beginning(names))
    rest = [name.removeprefix(before) for name in names]
    after = re.sub(r"^[^./]*", "", _beginning([name[::-1] for name in rest])[::-1])
    cut = [name.removesuffix(after) for name in rest]
    return cut if all(cut) else list(names)


def _beginning(names: Sequence[str]) -> str:
    """What all of them begin with: what the first and the last in order do."""
    first, last = min(names), max(names)
    return first[: next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]
