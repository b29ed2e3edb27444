"""Scaling results as golden values: of chosen tensors the recommended scale and the best error, held to a baseline.

They are stored as cases of the model `scaling`: baselines/scaling/cpu/scaling.json, by format and tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from probe.gate.cases import Case
from probe.gate.configuration import Settings
from probe.gate.held import Judged, admit, held
from probe.gate.observations import Observation
from probe.gate.session import Session
from probe.gate.tolerances import Rule
from probe.gate.verdicts import Standards
from probe.numerics.quantize import SCALE_RULES
from probe.recordings.tensor_sources import TensorSource, tensor_sources
from probe.scaling.advice import recommend
from probe.scaling.levels import GRANULARITIES, check_levels, expand_formats
from probe.scaling.sweep import scaling_sweep
from probe.settings import ConfigurationError
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
class AskedScaling:
    """The case of one test: a tensor and a format, and how they are swept."""

    settings: Settings
    case: Case
    source: TensorSource
    num_levels: int

    @property
    def made_with(self) -> dict[str, str]:
        """What the figures depend on, beside the tensor and what the name of the case says."""
        return {"num_levels": str(self.num_levels)}


def ask(session: Session, marked: Mapping[str, Any], *, where: str) -> list[AskedScaling]:
    """The cases of a test marked probe_scaling(tensors=[...], formats=[...], granularity=..., num_levels=...)."""
    for key in marked:
        if key not in KEYS:
            raise ConfigurationError(f"{where}: unknown key {key!r}. Known: {', '.join(KEYS)}.")
    given = _words(where, "tensors", marked.get("tensors"))
    formats = expand_formats(_words(where, "formats", marked.get("formats", ["fp8_e4m3"])))
    granularity, levels = marked.get("granularity", "tensor"), marked.get("num_levels", 21)
    look_up("granularity", granularity, {one: one for one in GRANULARITIES})
    check_levels(levels)
    settings = replace(session.settings, model=MODEL, baselines=session.options.baselines or session.settings.baselines)
    mode = MODEL if granularity == "tensor" else f"{MODEL}_{granularity}"
    asked = []
    for source in tensor_sources([str(session.root / text) for text in given]):
        if source.defect:
            raise ConfigurationError(f"{where}: {source.defect}")
        label = source.text.removeprefix(f"{session.root}/")
        asked += [AskedScaling(settings, Case(mode, label, "cpu", format), source, levels) for format in formats]
    admit(session, settings, {one.case: one.made_with for one in asked}, where=where)
    named = session.options.axes.get("formats")
    return [one for one in asked if named is None or one.case.format in named]


def _words(where: str, key: str, value: Any) -> list[str]:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
        raise ConfigurationError(f"{where}: {key} is {value!r}; expected a list of names, such as ['weights/x.pt'].")
    return list(value)


def judged(session: Session, asked: AskedScaling) -> Judged:
    """Sweep the tensor and compare; in an update, find what to store."""
    return held(session, asked.settings, asked.case, _observe(asked), Standards(RULES), made_with=asked.made_with)


def _observe(asked: AskedScaling) -> Observation:
    granularity = "block" if asked.case.mode.endswith("_block") else "tensor"
    result = scaling_sweep(asked.source.load(), asked.case.format, granularity=granularity, num_levels=asked.num_levels)
    found = recommend(result)
    rule = {} if found.rule is None else {"scaling.rule": float(list(SCALE_RULES).index(found.rule))}
    figures: dict[str, float | None] = {
        "scaling.exponent": found.scale_exponent,
        **rule,
        "scaling.mse": found.best["mse"].mse,
        "tensor.amax": result.amax,
        "tensor.mean_abs": result.mean_abs,
    }
    return Observation(figures, {}, {})
