"""Golden figures of scaling: the recommended scale and the best error of chosen tensors.

They are stored as cases of the model `scaling`: baselines/scaling/cpu/scaling.json, by format and tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from probe.gate.cases import Case
from probe.gate.configuration import Settings
from probe.gate.engine import GoldenFigures, Judged
from probe.gate.session import Session
from probe.gate.tolerances import Rule
from probe.numerics.quantize import SCALE_RULES
from probe.recordings.tensor_sources import TensorSource, tensor_sources
from probe.scaling.advice import recommend
from probe.scaling.levels import GRANULARITIES, check_levels, expand_formats
from probe.scaling.sweep import scaling_sweep
from probe.settings import ConfigurationError, check_keys
from probe.words import look_up

MODEL = "scaling"
#: Sums are in float64 and a tensor is what it is: nothing but their order may move them.
RULES: dict[str, Rule] = {
    "scaling.exponent": Rule(absolute=1e-6),
    "scaling.rule": Rule(absolute=1e-6),  # of blocks: its place in SCALE_RULES
    "scaling.mse": Rule(relative=1e-6, worse=1),
    "tensor.amax": Rule(relative=1e-6),
    "tensor.mean_abs": Rule(relative=1e-6),
}
KEYS = ("tensors", "formats", "granularity", "num_levels")


@dataclass(frozen=True)
class ScalingRequest:
    """The case of one test: a tensor and a format, and how its scale is swept."""

    has_recipe: ClassVar[bool] = False

    settings: Settings
    case: Case
    source: TensorSource
    num_levels: int

    @property
    def depends_on(self) -> dict[str, str]:
        """What the figures depend on, beside the tensor and what the name of the case says."""
        return {"num_levels": str(self.num_levels)}

    def judge(self, session: Session) -> Judged:
        """Sweep the tensor and compare; in an update, find what to store."""
        given = GoldenFigures(self._measure(), RULES, self.depends_on)
        judged = session.gate.judge_figures(self.settings, self.case, given)
        outcome = judged.outcomes[self.case.layer]
        moved = [name for name, figure in outcome.figures.items() if figure.moved and name.startswith("tensor.")]
        if outcome.verdict != "drift" or not moved:
            return judged
        outcome = replace(outcome, cause="the tensor itself is another one than that of the baseline")
        return replace(judged, outcomes={self.case.layer: outcome})

    def _measure(self) -> dict[str, float | None]:
        granularity = "block" if self.case.mode.endswith("_block") else "tensor"
        levels, tensor = self.num_levels, self.source.load()
        result = scaling_sweep(tensor, self.case.format, granularity=granularity, num_levels=levels)
        found = recommend(result)
        rule = {} if found.rule is None else {"scaling.rule": float(list(SCALE_RULES).index(found.rule))}
        return {
            "scaling.exponent": found.scale_exponent,
            **rule,
            "scaling.mse": found.best["mse"].mse,
            "tensor.amax": result.amax,
            "tensor.mean_abs": result.mean_abs,
        }


def request(session: Session, marked: Mapping[str, Any], *, where: str) -> list[ScalingRequest]:
    """The cases of a test marked probe_scaling(tensors=[...], formats=[...], granularity=..., num_levels=...)."""
    check_keys(where, marked, KEYS)
    given = _words(where, "tensors", marked.get("tensors"))
    formats = expand_formats(_words(where, "formats", marked.get("formats", ["fp8_e4m3"])))
    granularity, levels = marked.get("granularity", "tensor"), marked.get("num_levels", 21)
    look_up("granularity", granularity, {one: one for one in GRANULARITIES})
    check_levels(levels)
    settings = session.settings_for(MODEL)
    mode = MODEL if granularity == "tensor" else f"{MODEL}_{granularity}"
    requests = []
    for source in tensor_sources([str(session.root / text) for text in given]):
        if source.defect:
            raise ConfigurationError(f"{where}: {source.defect}")
        label = source.text.removeprefix(f"{session.root}/")
        requests += [ScalingRequest(settings, Case(mode, label, "cpu", format), source, levels) for format in formats]
    session.add_cases(settings, {one.case: one.depends_on for one in requests}, where=where)
    named = session.options.axes.get("formats")
    return [one for one in requests if named is None or one.case.format in named]


def _words(where: str, key: str, value: Any) -> list[str]:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
        raise ConfigurationError(f"{where}: {key} is {value!r}; expected a list of names, such as ['weights/x.pt'].")
    return list(value)
