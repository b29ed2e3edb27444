"""Golden figures: what the tools measure, compared with baselines by the gate. Each tool has a fixture and a marker.

probe_scaling       the recommended scale of chosen tensors and its error
                    baselines/scaling/cpu/scaling.json, by format and tensor
probe_activations   chosen statistics of a model, so that a checkpoint with new outliers fails
                    baselines/activations-<name>/cpu/activations.json, by kind (input, output, weight) and module
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from probe.activations.run import Analysis, Prepared, facts_of, prepare, run
from probe.activations.settings import Settings as AnalysisSettings, full_key, read_configuration
from probe.activations.statistics import Kind
from probe.gate.cases import Case
from probe.gate.engine import GoldenFigures, Judged
from probe.gate.measured_layers import Flaw
from probe.gate.session import CaseRequest, Session
from probe.gate.tolerances import Rule
from probe.numerics.quantize import SCALE_RULES
from probe.recordings.tensor_sources import TensorSource, tensor_sources
from probe.scaling.advice import recommend
from probe.scaling.levels import GRANULARITIES, check_levels, expand_formats
from probe.scaling.sweep import scaling_sweep
from probe.settings import ConfigurationError, check_keys
from probe.words import look_up

SCALING = "scaling"
#: The version of the sweep and its recommendation. It is stored too: figures of another version are of other settings.
SWEEP = "2"
SCALING_KEYS = ("tensors", "formats", "granularity", "num_levels")
#: Sums are in float64 and the tensor is fixed, so only the order of sums may move a figure.
SCALING_RULES = {
    "scaling.exponent": Rule(absolute=1e-6),
    "scaling.rule": Rule(absolute=1e-6),  # of blocks: its place in SCALE_RULES
    "scaling.mse": Rule(relative=1e-6, worse=1),
    "tensor.amax": Rule(relative=1e-6),
    "tensor.mean_abs": Rule(relative=1e-6),
}

ACTIVATIONS = "activations"
ACTIVATIONS_KEYS = ("config", "overrides", "figures", "tolerances")
#: Counts are exact; percentiles come from buckets of 2^-6, and sums may be in any order.
ACTIVATIONS_RULES = {
    "outliers": Rule(absolute=0.5, worse=1),
    "amax": Rule(relative=0.01, worse=1),
    "max_to_median": Rule(relative=0.03, worse=1),
    "max_to_p99": Rule(relative=0.03, worse=1),
    "kurtosis": Rule(relative=0.03, worse=1),
}
#: The figures of a marker that names none.
ACTIVATIONS_FIGURES = ("outliers", "max_to_median")


@dataclass(frozen=True)
class GoldenRequest(CaseRequest):
    """The case of one test, and the settings that its figures depend on, which are stored with them."""

    has_recipe: ClassVar[bool] = False

    depends_on: dict[str, str]

    def judge(self, session: Session) -> Judged:
        """Measure the figures and compare them; in an update, find what to store."""
        return session.gate.judge_figures(self.settings, self.case, self.measure())

    def measure(self) -> GoldenFigures:
        """The figures, with the rules for comparing them."""
        raise NotImplementedError


def _names(where: str, key: str, value: Any, *, expected: str) -> list[str]:
    """A list of names from a marker; a single name need not be in a list."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError(f"{where}: {key} is {value!r}; expected {expected}.")
    return list(names)


# scaling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScalingRequest(GoldenRequest):
    """A tensor and a format, and how its scale is swept."""

    source: TensorSource
    granularity: str
    num_levels: int | None

    def judge(self, session: Session) -> Judged:
        """As of every golden figure; where the tensor itself is another one, that is the cause."""
        judged = super().judge(session)
        outcome = judged.outcomes[self.case.layer]
        moved = any(figure.moved and name.startswith("tensor.") for name, figure in outcome.figures.items())
        if outcome.verdict != "drift" or not moved:
            return judged
        outcome = replace(outcome, cause="the tensor itself is another one than that of the baseline")
        return replace(judged, outcomes={self.case.layer: outcome})

    def measure(self) -> GoldenFigures:
        """The recommended scale, its error, and two figures of the tensor itself."""
        result = scaling_sweep(
            self.source.load(), self.case.format, granularity=self.granularity, num_levels=self.num_levels
        )
        advice = recommend(result)
        rule = {} if advice.rule is None else {"scaling.rule": float(list(SCALE_RULES).index(advice.rule))}
        figures: dict[str, float | None] = {
            "scaling.exponent": advice.scale_exponent,
            **rule,
            "scaling.mse": advice.level.mse,
            "tensor.amax": result.amax,
            "tensor.mean_abs": result.mean_abs,
        }
        return GoldenFigures(figures, SCALING_RULES, self.depends_on)


def request_scaling(session: Session, marked: Mapping[str, Any], *, where: str, test: str) -> list[ScalingRequest]:
    """The cases of a test marked probe_scaling(tensors=[...], formats=[...], granularity=..., num_levels=...)."""
    check_keys(where, marked, SCALING_KEYS)
    expected = "a list of names, such as ['weights/x.pt']"
    texts = _names(where, "tensors", marked.get("tensors"), expected=expected)
    formats = expand_formats(_names(where, "formats", marked.get("formats", ["fp8_e4m3"]), expected=expected))
    granularity, levels = marked.get("granularity", "tensor"), marked.get("num_levels")
    look_up("granularity", granularity, dict.fromkeys(GRANULARITIES))
    check_levels(levels)
    settings = session.settings_for(SCALING)
    depends_on = {"num_levels": "usual" if levels is None else str(levels), "sweep": SWEEP}
    mode = SCALING if granularity == "tensor" else f"{SCALING}_{granularity}"
    requests = []
    for source in tensor_sources([str(session.root / text) for text in texts]):
        if source.defect:
            raise ConfigurationError(f"{where}: {source.defect}")
        label = source.text.removeprefix(f"{session.root}/")
        for format in formats:
            case = Case(mode, label, "cpu", format)
            requests.append(ScalingRequest(settings, case, depends_on, source, granularity, levels))
    session.add_cases(settings, {request.case: depends_on for request in requests}, where=where, test=test)
    named = session.options.axes.get("formats")
    return [request for request in requests if named is None or request.case.format in named]


# activations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationsRequest(GoldenRequest):
    """A tensor of a module, and the figures that are compared. The model runs once for all tensors of a marker."""

    analysis: AnalysisSettings
    figures: tuple[str, ...]
    rules: Mapping[str, Rule]

    def measure(self) -> GoldenFigures:
        """The chosen statistics of the tensor."""
        analysis, name, kind = _analysis(self.analysis), self.case.layer, self.case.format
        statistics = analysis.statistics.get((name, kind))
        if statistics is None:
            raise ValueError(f"the {kind} of {name} could not be analyzed. {' '.join(analysis.notes)}")
        outliers = float(analysis.outliers[name].count) if name in analysis.outliers else None
        known = {**statistics.figures(), "outliers": outliers}
        bad, count = statistics.nonfinite, statistics.nonfinite + statistics.count
        return GoldenFigures(
            {f"{ACTIVATIONS}.{figure}": known[figure] for figure in self.figures},
            self.rules,
            self.depends_on,
            flaws=(Flaw("not finite", f"{bad} of {count} values are NaN or Inf."),) if bad else (),
        )


def request_activations(
    session: Session, marked: Mapping[str, Any], *, where: str, test: str
) -> list[ActivationsRequest]:
    """The cases of a test marked probe_activations(config=..., overrides={...}, figures=[...], tolerances={...})."""
    check_keys(where, marked, ACTIVATIONS_KEYS)
    expected = f"some of {', '.join(ACTIVATIONS_RULES)}"
    names = _names(where, "figures", marked.get("figures", ACTIVATIONS_FIGURES), expected=expected)
    figures = tuple(dict.fromkeys(names))
    for name in figures:
        look_up("figure", name, ACTIVATIONS_RULES)
    rules = _rules(where, marked.get("tolerances", {}), figures)
    overrides = marked.get("overrides", {})
    if not isinstance(overrides, Mapping):
        raise ConfigurationError(f"{where}: overrides is {overrides!r}; expected a dict such as {{'data.seed': 1}}.")
    config = marked.get("config")
    if config is not None and not isinstance(config, str):
        raise ConfigurationError(f"{where}: config is {config!r}; expected the path of a YAML file.")
    pairs = [(full_key(str(key)), str(value)) for key, value in overrides.items()]
    analysis = read_configuration(session.root / config if config else None, pairs)
    settings = session.settings_for(f"{ACTIVATIONS}-{analysis.model.name or analysis.model.path}")
    prepared = _prepared(analysis)
    facts = facts_of(prepared)
    tokens = f"{facts['data_fingerprint']} ({facts['tokens']} in {facts['samples']} samples)"
    requests = []
    for name, kind, compared in _tensors(prepared, figures):
        case, depends_on = Case(ACTIVATIONS, name, "cpu", kind), _depends_on(analysis, tokens, kind, compared)
        requests.append(ActivationsRequest(settings, case, depends_on, analysis, compared, rules))
    if not requests:
        raise ConfigurationError(
            f"{where}: no tensor has any of {', '.join(figures)}. Enable what they are taken from."
        )
    depends = {one.case: {"settings": one.depends_on, "figures": sorted(one.figures)} for one in requests}
    session.add_cases(settings, depends, where=where, test=test)
    return requests


def _rules(where: str, tolerances: Any, figures: tuple[str, ...]) -> dict[str, Rule]:
    """The rules with the tolerances of a marker: the part of itself that a figure may move; of `outliers`, a count."""
    if not isinstance(tolerances, Mapping):
        raise ConfigurationError(
            f"{where}: tolerances is {tolerances!r}; expected a dict such as {{'max_to_median': 0.2}}."
        )
    rules = dict(ACTIVATIONS_RULES)
    for name, value in tolerances.items():
        rule = look_up("figure", name, ACTIVATIONS_RULES)
        if name not in figures:
            raise ConfigurationError(
                f"{where}: tolerances has {name!r}, which is not among the figures of this test: {', '.join(figures)}. "
                "Add it to figures, or leave its tolerance out."
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigurationError(f"{where}: tolerances[{name!r}] is {value!r}; expected a number, 0 or more.")
        is_count = name == "outliers"
        rules[name] = replace(rule, absolute=value + 0.5) if is_count else replace(rule, relative=float(value))
    return {f"{ACTIVATIONS}.{name}": rule for name, rule in rules.items()}


def _depends_on(analysis: AnalysisSettings, tokens: str, kind: str, figures: tuple[str, ...]) -> dict[str, str]:
    """The settings that the figures of a tensor depend on; not the model, which is meant to change."""
    settings = {"model.dtype": analysis.model.dtype, "model.sites": str(analysis.model.sites).lower()}
    if kind != "weight":
        settings["tokens"] = tokens
    if "outliers" in figures:
        settings["outlier.threshold"] = f"{analysis.visualization.outlier.threshold!r}"
    return settings


def _tensors(prepared: Prepared, figures: tuple[str, ...]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Module, kind and the figures that it has: outliers are counted in outputs of the layers of their pattern."""
    plan = prepared.plan
    kinds: tuple[Kind, ...] = ("input", "output", "weight")
    measured = {kind: set(plan.measured(kind)) for kind in kinds}
    tensors: list[tuple[str, str, tuple[str, ...]]] = []
    for name, kind in ((name, kind) for name in plan.order for kind in kinds if name in measured[kind]):
        counted = kind == "output" and name in plan.outliers
        if compared := tuple(figure for figure in figures if figure != "outliers" or counted):
            tensors.append((name, kind, compared))
    return tensors


@lru_cache(maxsize=2)
def _prepared(settings: AnalysisSettings) -> Prepared:
    return prepare(settings, progress=_silent)


@lru_cache(maxsize=2)
def _analysis(settings: AnalysisSettings) -> Analysis:
    return run(_prepared(settings), progress=_silent)


def _silent(_: str) -> None:
    return


#: By fixture: finds the cases of a test from its marker.
REQUESTS = {"probe_scaling": request_scaling, "probe_activations": request_activations}
