"""Golden figures of activations: chosen statistics of a model, so that a checkpoint with new outliers fails.

They are stored as cases of the model `activations-<name>`: baselines/activations-<name>/cpu/activations.json, by kind
of tensor (input, output, weight) and module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from probe.activations.run import Analysis, Prepared, facts_of, prepare, run
from probe.activations.settings import Settings as AnalysisSettings, full_key, read_configuration
from probe.activations.statistics import Kind
from probe.gate.cases import Case
from probe.gate.configuration import Settings
from probe.gate.engine import GoldenFigures, Judged
from probe.gate.observations import Flaw
from probe.gate.session import Session
from probe.gate.tolerances import Rule
from probe.settings import ConfigurationError, check_keys
from probe.words import look_up

MODE = "activations"
#: Counts are exact; percentiles come from buckets of 2^-6, and sums from any order.
RULES: dict[str, Rule] = {
    "outliers": Rule(absolute=0.5, worse=1),
    "amax": Rule(relative=0.01, worse=1),
    "max_to_median": Rule(relative=0.03, worse=1),
    "max_to_p99": Rule(relative=0.03, worse=1),
    "kurtosis": Rule(relative=0.03, worse=1),
}
#: The figures of a marker that names none.
FIGURES = ("outliers", "max_to_median")
KEYS = ("config", "overrides", "figures", "tolerances")


@dataclass(frozen=True)
class ActivationsRequest:
    """The case of one test: a tensor of a module, and the figures that are compared."""

    has_recipe: ClassVar[bool] = False

    settings: Settings
    case: Case
    analysis: AnalysisSettings
    figures: tuple[str, ...]
    tolerances: tuple[tuple[str, float], ...]
    depends_on: dict[str, str]

    def judge(self, session: Session) -> Judged:
        """Compare the statistics of the tensor; the model runs with the first tensor of a marker, once for all."""
        return session.gate.judge_figures(self.settings, self.case, self._measure())

    def _measure(self) -> GoldenFigures:
        analysis, name, kind = _analysis(self.analysis), self.case.layer, self.case.format
        s = analysis.statistics.get((name, kind))
        if s is None:
            raise ValueError(f"the {kind} of {name} could not be analyzed. {' '.join(analysis.notes)}")
        outliers = float(analysis.outliers[name].count) if name in analysis.outliers else None
        known = {**s.figures(), "outliers": outliers}
        bad = Flaw("not finite", f"{s.nonfinite} of {s.nonfinite + s.count} values are NaN or Inf.")
        return GoldenFigures(
            {f"{MODE}.{figure}": known[figure] for figure in self.figures},
            self._rules(),
            self.depends_on,
            flaws=(bad,) if s.nonfinite else (),
        )

    def _rules(self) -> dict[str, Rule]:
        wider = {
            name: replace(RULES[name], absolute=value + 0.5)  # a count
            if name == "outliers"
            else replace(RULES[name], relative=value)
            for name, value in self.tolerances
        }
        return {f"{MODE}.{name}": rule for name, rule in {**RULES, **wider}.items()}


def request(session: Session, marked: Mapping[str, Any], *, where: str) -> list[ActivationsRequest]:
    """The cases of a test marked probe_activations(config=..., overrides={...}, figures=[...], tolerances={...})."""
    check_keys(where, marked, KEYS)
    figures = _figures(where, marked.get("figures", FIGURES))
    tolerances = _tolerances(where, marked.get("tolerances", {}), figures)
    overrides = marked.get("overrides", {})
    if not isinstance(overrides, Mapping):
        raise ConfigurationError(f"{where}: overrides is {overrides!r}; expected a dict such as {{'data.seed': 1}}.")
    config = marked.get("config")
    if config is not None and not isinstance(config, str):
        raise ConfigurationError(f"{where}: config is {config!r}; expected the path of a YAML file.")
    pairs = [(full_key(str(key)), str(value)) for key, value in overrides.items()]
    analysis = read_configuration(session.root / config if config else None, pairs)
    settings = session.settings_for(f"{MODE}-{analysis.model.name or analysis.model.path}")
    prepared = _prepared(analysis)
    tokens = _tokens(prepared)
    requests = [
        ActivationsRequest(
            settings,
            Case(MODE, name, "cpu", kind),
            analysis,
            compared,
            tolerances,
            _depends_on(analysis, tokens, kind, compared),
        )
        for name, kind, compared in _tensors(prepared, figures)
    ]
    if not requests:
        raise ConfigurationError(
            f"{where}: no tensor has any of {', '.join(figures)}. Enable what they are taken from."
        )
    depends_on = {one.case: {"settings": one.depends_on, "figures": sorted(one.figures)} for one in requests}
    session.add_cases(settings, depends_on, where=where)
    return requests


def _depends_on(analysis: AnalysisSettings, tokens: str, kind: str, figures: tuple[str, ...]) -> dict[str, str]:
    """What the figures of a tensor depend on beside the model, which is meant to change."""
    found = {"model.dtype": analysis.model.dtype, "model.sites": str(analysis.model.sites).lower()}
    if kind != "weight":
        found["tokens"] = tokens
    if "outliers" in figures:
        found["outlier.threshold"] = f"{analysis.visualization.outlier.threshold!r}"
    return found


def _tokens(prepared: Prepared) -> str:
    """The very tokens, whatever of data and tokenizer they come from."""
    facts = facts_of(prepared)
    return f"{facts['data_fingerprint']} ({facts['tokens']} in {facts['samples']} samples)"


def _figures(where: str, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not names:
        raise ConfigurationError(f"{where}: figures is {given!r}; expected some of {', '.join(RULES)}.")
    for name in names:
        look_up("figure", name, RULES)
    return tuple(dict.fromkeys(names))


def _tolerances(where: str, given: Any, figures: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """By figure: how far it may move, as a part of it; of `outliers`, how many."""
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where}: tolerances is {given!r}; expected a dict such as {{'max_to_median': 0.2}}.")
    for name, value in given.items():
        look_up("figure", name, RULES)
        if name not in figures:
            raise ConfigurationError(
                f"{where}: tolerances has {name!r}, which is not among the figures of this test: {', '.join(figures)}. "
                "Add it to figures, or leave its tolerance out."
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigurationError(f"{where}: tolerances[{name!r}] is {value!r}; expected a number, 0 or more.")
    return tuple((str(name), float(value)) for name, value in given.items())


def _tensors(prepared: Prepared, figures: tuple[str, ...]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Module, kind and the figures that it has: outliers are counted in outputs of the layers of their pattern."""
    plan = prepared.plan
    kinds: tuple[Kind, ...] = ("input", "output", "weight")
    measured = {kind: set(plan.measured(kind)) for kind in kinds}
    found: list[tuple[str, str, tuple[str, ...]]] = []
    for name in plan.order:
        for kind in kinds:
            if name in measured[kind]:
                counted = kind == "output" and name in plan.outliers
                here = tuple(one for one in figures if one != "outliers" or counted)
                if here:
                    found.append((name, kind, here))
    return found


@lru_cache(maxsize=2)
def _prepared(settings: AnalysisSettings) -> Prepared:
    return prepare(settings, progress=_silent)


@lru_cache(maxsize=2)
def _analysis(settings: AnalysisSettings) -> Analysis:
    return run(_prepared(settings), progress=_silent)


def _silent(_: str) -> None:
    return
