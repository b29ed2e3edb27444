"""Figures that are held to a baseline without a recipe: of a tensor's scale, of a model's activations."""

from dataclasses import dataclass, replace

from probe.baselines import Store
from probe.baselines.entries import Entry
from probe.gate.cases import Case
from probe.gate.configuration import Settings
from probe.gate.observations import Observation
from probe.gate.outcomes import Outcome
from probe.gate.session import Session
from probe.gate.verdicts import RefusedError, Standards, judge, renewed


@dataclass(frozen=True)
class Judged:
    """One case, judged; in an update also what is to be stored, or why it must not be."""

    outcome: Outcome
    entry: Entry | None = None
    refusal: str = ""


def held(session: Session, settings: Settings, case: Case, seen: Observation, standards: Standards) -> Judged:
    """Compare what was seen with the baseline of the case; in an update, find what to store."""
    store = Store(session.root / settings.baselines)
    stored = store.read(settings.model, "cpu").get(case)
    file = store.file(settings.model, case)
    shown = str(file.relative_to(session.root) if file.is_relative_to(session.root) else file)
    outcome = judge(settings.model, case, seen, stored, standards, baseline_file=shown)
    if any(name.startswith("tensor.") and figure.moved for name, figure in outcome.figures.items()) and stored:
        outcome = replace(outcome, cause="the tensor itself is another one than that of the baseline")
    if not session.options.update:
        return Judged(outcome)
    try:
        entry = renewed(outcome, seen, [], stored, reason=session.options.reason)
    except RefusedError as problem:
        return Judged(outcome, refusal=str(problem))
    return Judged(replace(outcome, status="updated"), entry)
