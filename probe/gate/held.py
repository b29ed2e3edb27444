"""Figures that are held to a baseline without a recipe: of a tensor's scale, of a model's activations."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from probe.gate.baselines.entry import Entry
from probe.gate.baselines.store import Store
from probe.gate.cases import Case, Outcome
from probe.gate.configuration import Settings
from probe.gate.observations import Observation
from probe.gate.session import Dossier, Session
from probe.gate.verdicts import RefusedError, Standards, judge, renewed
from probe.settings import ConfigurationError


@dataclass(frozen=True)
class Judged:
    """One case, judged; in an update also what is to be stored, or why it must not be."""

    outcome: Outcome
    entry: Entry | None = None
    refusal: str = ""


def admit(session: Session, settings: Settings, asked: Mapping[Case, object], *, where: str) -> None:
    """Add the cases of a test to the matrix; `asked` says what of them is held. One baseline serves one test."""
    dossier = session.dossiers.setdefault(settings.model, Dossier(settings))
    for case, what in asked.items():
        if session.held.setdefault((settings.model, case), what) != what:
            raise ConfigurationError(
                f"{where}: another test holds {case} of {settings.model} to the same baseline, with other settings or "
                f"figures: {session.held[settings.model, case]} there, {what} here. Make them agree, or leave one out."
            )
    dossier.matrix |= dict.fromkeys(asked)


def held(
    session: Session,
    settings: Settings,
    case: Case,
    seen: Observation,
    standards: Standards,
    *,
    made_with: Mapping[str, str],
) -> Judged:
    """Compare what was seen with the baseline of the case; in an update, find what to store.

    `made_with` is what the figures depend on beside model and code. It is stored with them: figures that were made with
    something else are not compared, since a threshold that nothing reaches would let everything pass.
    """
    store = Store(session.root / settings.baselines)
    stored = store.read(settings.model, "cpu").get(case)
    file = store.file(settings.model, case)
    shown = str(file.relative_to(session.root) if file.is_relative_to(session.root) else file)
    outcome = judge(settings.model, case, seen, stored, standards, baseline_file=shown)
    if any(name.startswith("tensor.") and figure.moved for name, figure in outcome.figures.items()) and stored:
        outcome = replace(outcome, cause="the tensor itself is another one than that of the baseline")
    changed = _changed(stored.settings, made_with) if stored else ()
    if changed:
        outcome = _with_other_settings(outcome, changed)
    if not session.options.update:
        return Judged(outcome)
    try:
        entry = renewed(outcome, seen, [], stored, reason=session.options.reason)
    except RefusedError as problem:
        also = f" Settings changed too: {'; '.join(changed)}." if changed else ""
        return Judged(outcome, refusal=f"{problem}{also}")
    return Judged(replace(outcome, status="updated"), replace(entry, settings=dict(made_with)))


def _changed(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """outlier.threshold 20 -> 64; what was never written down was none."""
    pairs = [(name, then.get(name, "none"), now.get(name, "none")) for name in sorted({*then, *now})]
    return tuple(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


def _with_other_settings(outcome: Outcome, changed: tuple[str, ...]) -> Outcome:
    """The outcome of a case whose figures cannot be compared. What is wrong by itself, a NaN, stays what is told."""
    if outcome.verdict not in (None, "drift", "changed values"):
        return replace(outcome, details=(*outcome.details, *(f"also another setting: {one}" for one in changed)))
    names = ", ".join(one.partition(" ")[0] for one in changed)
    message = (
        f"the baseline was made with other settings ({names}), so the figures are not compared. "
        "Undo that, or accept it with --update-baselines."
    )
    return replace(outcome, status="failed", verdict=None, message=message, details=changed, cause="")
