"""The outcomes of a test run, grouped by recipe, and as heat maps of their errors."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import get_args

from probe.gate.cases import Case, Outcome, Verdict
from probe.report.numbers import short, value
from probe.words import BESIDE, LOGITS, OUTPUT, OUTSIDE, PATHS, WHOLE, flow_key, natural_key, shared_lines, short_names

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
    def case(self) -> Case:
        """The first case. All have its mode, format, device and recipe; `recipe` is the anchor in the report."""
        return self.outcomes[0].case

    @property
    def layers(self) -> list[Outcome]:
        """The outcomes of the layers."""
        return [outcome for outcome in self.outcomes if is_layer(outcome)]

    @property
    def beside(self) -> list[Outcome]:
        """The outcomes of what is neither a layer nor the output of the model: embedding, norm, head and paths."""
        return [one for one in self.outcomes if not is_layer(one) and one.case.layer not in WHOLE]

    @property
    def whole(self) -> Outcome | None:
        """The outcome of the whole model, if it was measured."""
        return next((outcome for outcome in self.outcomes if outcome.case.layer in WHOLE), None)

    def values(self, *names: str) -> list[float]:
        """The first of these figures that each layer has."""
        values = (value(outcome.figures, *names) for outcome in self.layers)
        return [x for x in values if x is not None]

    @property
    def failing(self) -> list[Outcome]:
        """The outcomes that failed, as data flows; of a moved reference, the layer from which it moved comes first."""
        found = [outcome for outcome in self.outcomes if outcome.status == "failed"]

        def key(one: Outcome) -> tuple[bool, int]:
            start = one.verdict == "reference moved" and f", from {one.case.layer} on" in one.message
            at_a_layer = is_layer(one) or one.verdict in ("missing", "obsolete")  # where no data flowed
            return not start, 1 if at_a_layer else flow_key(one.case.layer)

        return sorted(found, key=key)


def is_layer(outcome: Outcome) -> bool:
    """Whether the case is of a layer; a module that was selected by name may be called `head` too."""
    return outcome.case.layer not in BESIDE or any(name.startswith(_OF_LAYERS) for name in outcome.figures)


_OF_LAYERS = ("injected.", "propagated.")


def runs(outcomes: Iterable[Outcome]) -> list[Run]:
    """The outcomes by recipe, in an order that does not depend on which worker finished first."""
    found: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.model, outcome.case.recipe, outcome.case.device), []).append(outcome)
    return [Run(tuple(found[key])) for key in sorted(found, key=lambda key: [natural_key(part) for part in key])]


@dataclass(frozen=True)
class RunGroup:
    """Runs that are one row of a table: one run, or those of modes that are equal by definition and gave the same."""

    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """The run that stands for all."""
        return self.runs[0]

    @property
    def modes(self) -> str:
        """mode_2_1 = mode_2_2."""
        return " = ".join(run.case.mode for run in self.runs)

    @property
    def recipes(self) -> str:
        """mode_2_1-int8 = mode_2_2-int8."""
        return " = ".join(run.case.recipe for run in self.runs)


def run_groups(runs: Iterable[Run]) -> list[RunGroup]:
    """The runs, those of equal modes together. A run that fails, or that differs, stays alone."""
    found: list[list[Run]] = []
    by_definition: dict[tuple[str, ...], list[list[Run]]] = {}
    for run in runs:
        case = run.case
        alike = by_definition.setdefault((run.model, case.device, case.format, run.outcomes[0].equals or case.mode), [])
        same = next((group for group in alike if not run.failing and _figures(group[0]) == _figures(run)), None)
        if same is None:
            found.append([run])
            alike += [] if run.failing else [found[-1]]
        else:
            same.append(run)
    return [RunGroup(tuple(group)) for group in found]


def _figures(run: Run) -> list[tuple[str, str, dict[str, float | None]]]:
    """Everything that is shown of a run."""
    return [(o.case.layer, o.status, {name: figure.new for name, figure in o.figures.items()}) for o in run.outcomes]


def is_inherited(outcome: Outcome) -> bool:
    """Whether only the accumulated error has changed."""
    moved = [name for name, figure in outcome.figures.items() if figure.moved]
    return bool(moved) and all(name.startswith("propagated.") for name in moved)


def got_worse(outcomes: Iterable[Outcome]) -> bool:
    """Whether a figure got worse, so that accepting it needs a reason."""
    figures = (figure for outcome in outcomes for figure in outcome.figures.values())
    return any(figure.moved and figure.direction == "worse" for figure in figures)


def totals(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many outcomes passed, were updated or skipped, and how many failed by verdict; zeros are left out."""
    counts: Counter[str] = Counter(
        outcome.verdict or "failed" if outcome.status == "failed" else outcome.status for outcome in outcomes
    )
    order = ("passed", "updated", "skipped", *VERDICTS, "failed")
    return {name: counts[name] for name in order if counts[name]}


def layer_names(runs: Sequence[Run]) -> list[str]:
    """The layers of all runs: by number if they differ in nothing else, otherwise as in the model; then all others."""
    longest = sorted(runs, key=lambda run: -len(run.outcomes))
    names = list(dict.fromkeys(outcome.case.layer for run in longest for outcome in run.layers))
    if len({re.sub(r"\d+", "0", name) for name in names}) == 1:
        names.sort(key=natural_key)
    beside = {outcome.case.layer for run in runs for outcome in run.outcomes if not is_layer(outcome)}
    return names + [label for label in BESIDE if label in beside]


@dataclass(frozen=True)
class Shown:
    """What the cells of a column show: in a word or two, and in a sentence."""

    words: str
    sentence: str


#: By figure, in the order in which a cell takes the first that its case has.
SHOWN = {
    "propagated.mse": Shown("propagated mse", "mse against the float layer, inside the whole quantized model"),
    "injected.mse": Shown("injected mse", "mse against the float layer, given the reference's input"),
    "scaling.mse": Shown("mse of the scale", "mse of the tensor at the recommended scale"),
    "outside.mse": Shown("mse", "mse against the float one, given the reference's input"),
    "logits.kl": Shown("KL", "KL divergence of the logits from those of the float model"),
    "output.mse": Shown("mse of the output", "mse of the output against that of the float model"),
}
OF_PATH = Shown(
    "from prefill or baseline",
    "the largest difference of a layer from the prefill or from the baseline, in units of the layer's own error",
)
_USUAL = {**dict.fromkeys(OUTSIDE, "outside.mse"), LOGITS: "logits.kl", OUTPUT: "output.mse"}


@dataclass(frozen=True)
class HeatMap:
    """One model and format. A cell is None where the matrix has no case."""

    title: str
    layers: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Outcome | None, ...]], ...]
    cases: int  # equal modes share a row

    @property
    def labels(self) -> list[str]:
        """Short names of the layers for the headers of the columns."""
        different = short_names([name for name in self.layers if name not in BESIDE])
        return different + [name for name in self.layers if name in BESIDE]

    @property
    def shown(self) -> list[Shown]:
        """What the cells of each column show."""
        return [shown_of(name, (row[place] for _, row in self.rows)) for place, name in enumerate(self.layers)]

    @property
    def groups(self) -> list[tuple[Shown, list[str]]]:
        """Neighbouring columns that show the same, with their labels."""
        columns = zip(self.shown, self.labels, strict=True)
        return [(shown, [label for _, label in same]) for shown, same in groupby(columns, key=lambda pair: pair[0])]

    def cells(self) -> Iterator[Outcome]:
        """The outcomes of all cells that have a case."""
        return (cell for _, row in self.rows for cell in row if cell)


def weight_lines(outcomes: Iterable[Outcome]) -> list[str]:
    """How much of each model is on a grid: a line for the recipes that share it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for one in outcomes:
        if one.weights:
            found.setdefault(one.model, []).append((one.case.recipe, one.weights))
    return [f"{model}: {line}" for model, lines in sorted(found.items()) for line in shared_lines(lines)]


def heat_maps(outcomes: Iterable[Outcome]) -> list[HeatMap]:
    """A map for each model and format, those of the float modes last."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs(outcomes):
        found.setdefault((run.model, run.case.format), []).append(run)
    order = sorted(found, key=lambda key: (natural_key(key[0]), not key[1], natural_key(key[1])))
    several = len({model for model, _ in order}) > 1
    return [_heat_map(found[key], f"{key[0]}, " * several + (key[1] or "float modes")) for key in order]


def _heat_map(runs: Sequence[Run], title: str) -> HeatMap:
    layers = layer_names(runs)
    several = len({run.case.device for run in runs}) > 1
    rows = []
    for group in run_groups(runs):
        run = group.first
        cells = {outcome.case.layer: outcome for outcome in (*run.outcomes, *run.failing)}  # the failing ones win
        label = f"{group.modes} {run.case.device}" if several else group.modes
        rows.append((label, tuple(map(cells.get, layers))))
    return HeatMap(title, tuple(layers), tuple(rows), sum(len({o.case.layer for o in run.outcomes}) for run in runs))


def error_of(outcome: Outcome) -> float | None:
    """The error that a cell shows, a figure of SHOWN."""
    if is_path(outcome):
        known = [one.new for name, one in outcome.figures.items() if name.startswith(_OF_PATHS) and one.new is not None]
        return max(known, default=None)
    return value(outcome.figures, *SHOWN)


def is_path(outcome: Outcome) -> bool:
    """Whether the case is of a path; a module that was selected by name may be called `decode` too."""
    return outcome.case.layer in PATHS and not is_layer(outcome)


_OF_PATHS = ("relation.", "distance.")


def shown_of(label: str, cells: Iterable[Outcome | None]) -> Shown:
    """What the cells of a column show; of a column without figures, what they would."""
    measured = [cell for cell in cells if cell and error_of(cell) is not None]
    if measured and is_path(measured[0]):
        return OF_PATH
    names = [name for name in SHOWN if any(name in cell.figures for cell in measured)]
    usual = OF_PATH if label in PATHS else SHOWN[_USUAL.get(label, "propagated.mse")]
    return SHOWN[names[0]] if names else usual


def cell_text(outcome: Outcome) -> str:
    """One digit of the error, or why there is none."""
    error = error_of(outcome)
    if error is not None:
        return short(error)
    return "skip" if outcome.status == "skipped" else "nan" if outcome.verdict == "not finite" else "?"
