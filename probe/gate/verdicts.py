"""The verdict: an observation against its baseline, and what may be stored as a new baseline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from probe.gate.baselines.format import Entry, Stored
from probe.gate.cases import NEXT, Case, Figure, Outcome, Verdict
from probe.gate.golden_values import flat, gap, group_of, parted, with_golden
from probe.gate.measured_layers import Flaw, Observation
from probe.gate.tolerances import (
    ALWAYS_ZERO,
    OF_FLOAT,
    OF_PATHS,
    OF_VALUES,
    RULES,
    Rule,
    is_of_values,
    own_error,
    rule_of,
    tolerance,
)
from probe.numerics.sketches import SKETCH
from probe.running.digests import VARIES
from probe.running.modes import equal_to, find_mode
from probe.words import first_few

#: The verdict of a case with several findings is the first of these. What no baseline may excuse comes first.
ORDER: tuple[Verdict, ...] = (
    *("reference moved", "uncovered", "not finite", "not float", "not applied"),
    *("differs from prefill", "over the limit", "missing", "drift", "changed values"),
)


#: The figures that count tensors which are not the stored ones, by their digests, or not by their definitions.
CHANGED = (".changed", ".twins")


@dataclass(frozen=True)
class Standards:
    """What every case must meet beside its baseline: rules of tolerance, and absolute limits by recipe pattern."""

    rules: Mapping[str, Rule] = field(default_factory=lambda: RULES)
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def judge(
    model: str, case: Case, seen: Observation, entry: Entry | None, standards: Standards, *, baseline_file: str = ""
) -> Outcome:
    """The outcome of a case. Nothing that is NaN, undefined or without a baseline ever passes."""
    findings = list(seen.flaws)
    figures = {name: Figure(value) for name, value in seen.figures.items()}
    sound = not findings
    findings += _over_the_limit(case, seen, standards)
    if entry is None:
        findings.append(Flaw("missing", f"there is no baseline for {case}."))
    else:
        figures = compared(seen, entry, standards, is_float_mode=_is_float(case))
        if sound:  # else the flaw explains every figure that moved
            findings += _moved(figures, changed_digests(seen, entry))
    findings.sort(key=lambda flaw: ORDER.index(flaw.verdict))
    first = findings[0] if findings else None
    return Outcome(
        model,
        case,
        "failed" if first else "passed",
        first.verdict if first else None,
        first.message if first else "",
        (*first.details, *(f"also {flaw.verdict}: {flaw.message}" for flaw in findings[1:])) if first else (),
        figures=figures,
        points=with_golden(seen.points, golden_of(entry, "injected")) if "injected" in seen.values else seen.points,
        baseline_file=baseline_file,
        weights=seen.weights,
        equals=same if (same := equal_to(case.mode)) != case.mode else "",
    )


def _is_float(case: Case) -> bool:
    """Whether the case is of a float mode; one that is not in the table (a tool's) is float if it has no format."""
    try:
        return not find_mode(case.mode).is_quantized
    except ValueError:
        return not case.format


def compared(seen: Observation, entry: Entry, standards: Standards, *, is_float_mode: bool) -> dict[str, Figure]:
    """Every figure, old and new, with its tolerance; and the distances of the values."""
    old = {name: stored.value for name, stored in entry.figures.items()}
    groups = {group_of(name) for name in old}
    golden = parted(entry.values, groups)
    now: dict[str, float | None] = {**seen.figures, **_gaps(seen, golden, old)}
    unknown = [group for group in seen.values if group not in golden]
    found = {_figures_of(group)[0]: Figure(None, moved=True) for group in unknown}
    for name in dict.fromkeys([*now, *old]):
        new, stored = now.get(name), entry.figures.get(name)
        if name in ALWAYS_ZERO:
            found[name] = Figure(new, 0.0, 0.0, new != 0.0, "worse" if new else "")
            continue
        if stored is None:
            found[name] = Figure(new, moved=new is not None)  # undefined when stored, and now
            continue
        rule = rule_of(name, standards.rules)
        allowed = tolerance(rule, old, name, spread=stored.spread, is_float_mode=is_float_mode)
        inside = new is not None and abs(new - stored.value) <= allowed  # False for NaN
        direction = ""
        if not inside and new is not None and rule.worse:
            direction = "worse" if (new - stored.value) * rule.worse > 0 else "better"
        found[name] = Figure(new, stored.value, allowed, not inside, direction, stored.reason)
    for group, names in changed_digests(seen, entry).items():
        found[f"{group}.changed"] = Figure(float(len(names)), 0.0, 0.0, bool(names))
    return found


def golden_of(entry: Entry | None, group: str) -> tuple[float, ...] | None:
    """The golden values of a group, of a case that has them."""
    if entry is None or not entry.values:
        return None
    return parted(entry.values, {group_of(name) for name in entry.figures}).get(group)


def changed_digests(seen: Observation, entry: Entry) -> dict[str, list[str]]:
    """By group, the tensors that have other bits than the stored ones, or that only one side has."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys([*seen.digests, *entry.digests]):
        group, _, tensor = name.partition(".")
        changed = found.setdefault(group, [])
        if seen.digests.get(name) != entry.digests.get(name) and entry.digests.get(name) != VARIES:
            changed.append(tensor)
    return found


def _gaps(
    seen: Observation, golden: Mapping[str, tuple[float, ...]], old: Mapping[str, float]
) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for group in (group for group in golden if group in seen.values):
        count = seen.counts[group]
        unit = _unit(seen, group, old, golden[group])
        between = gap(seen.values[group], golden[group], count=count, rmse=unit)
        of_group = zip(_figures_of(group), OF_VALUES, strict=False)
        found |= {figure: getattr(between, name) for figure, name in of_group if figure in old}
    return found


def _figures_of(group: str) -> list[str]:
    """The figures that compare a group with its golden values, in the order of OF_VALUES; of a path, the distance."""
    return [group] if group.startswith(OF_PATHS) else [f"{group}.{name}" for name in OF_VALUES]


def _unit(seen: Observation, group: str, figures: Mapping[str, float | None], golden: tuple[float, ...]) -> float:
    """The unit of distances: the one that the observation names, else the recipe's own error among the figures.

    A layer that is float by declaration has no error either: there it is a part of the rms of its golden values, which
    the sketch estimates.
    """
    if group in seen.units:
        return seen.units[group]
    if f"{group}.mse" not in figures:
        return 1.0
    squares = sum(x * x for x in golden[:SKETCH])
    return own_error(figures, group) or OF_FLOAT * math.sqrt(squares / seen.counts[group])


def _moved(figures: Mapping[str, Figure], digests: Mapping[str, Sequence[str]]) -> list[Flaw]:
    moved = {name: figure for name, figure in figures.items() if figure.moved}
    if not moved:
        return []
    of_values = all(is_of_values(name) or name.endswith(CHANGED) for name in moved)
    of_text = {name: figure for name, figure in moved.items() if not name.endswith(CHANGED)}  # these say more
    name, figure = max((of_text or moved).items(), key=lambda pair: strength(pair[1]))
    text = f"{len(moved)} of {len(figures)} figures moved, most of all {name}: {_change(figure)}."
    details = [f"other {group} than stored: {first_few(names)}" for group, names in digests.items() if names]
    return [Flaw("changed values" if of_values else "drift", text, tuple(details))]


def strength(figure: Figure) -> float:
    """By how many tolerances a figure moved."""
    if figure.new is None or figure.old is None or not figure.tolerance:
        return math.inf
    moved = abs(figure.new - figure.old) / figure.tolerance
    return moved if not math.isnan(moved) else math.inf


def _change(figure: Figure) -> str:
    old, new = ("undefined" if x is None else f"{x:.6g}" for x in (figure.old, figure.new))
    times = strength(figure)
    return f"{old} -> {new}" + (f", {times:.1f} times its tolerance" if math.isfinite(times) else "")


def _over_the_limit(case: Case, seen: Observation, standards: Standards) -> list[Flaw]:
    found = []
    for pattern, limits in standards.limits.items():
        if not fnmatchcase(case.recipe, pattern):
            continue
        for name, limit in limits.items():
            if name not in seen.figures:
                continue
            new, worse = seen.figures[name], RULES[name].worse
            if new is None or math.isnan(new) or (new - limit) * worse > 0:
                side = "above" if worse > 0 else "below"
                value = "undefined" if new is None else f"{new:.6g}"
                found.append(Flaw("over the limit", f"{name} is {value}, {side} the limit {limit:g} of {pattern!r}."))
    return found


class RefusedError(ValueError):
    """A baseline that must not be stored."""


def renewed(
    outcome: Outcome, base: Observation, others: Sequence[Observation], old: Entry | None, *, reason: str
) -> Entry:
    """The entry to store for a case; `others` are observations of it under harmless changes.

    A case that agrees with its old entry keeps it, so that baselines do not creep and diffs stay small; what the old
    entry does not have yet is added to it.
    """
    if keeps_entry(outcome, old):
        assert old is not None
        return old
    check_storable(outcome, base, reason=reason)
    worse = _worse(outcome)
    figures = {}
    for name, value in base.figures.items():
        if value is not None and math.isfinite(value) and name not in ALWAYS_ZERO:
            spread = max((_between(value, other.figures.get(name)) for other in others), default=0.0)
            figures[name] = Stored(value, spread, reason if name in worse else "")
    for group, values in base.values.items():
        count = base.counts[group]
        unit = _unit(base, group, base.figures, values)
        gaps = [gap(other.values[group], values, count=count, rmse=unit) for other in others]
        for stored, name in zip(_figures_of(group), OF_VALUES, strict=False):
            if stored in RULES or group.startswith(OF_PATHS):
                figures[stored] = Stored(0.0, max((getattr(one, name) for one in gaps), default=0.0))
    digests = {
        name: digest if all(other.digests.get(name) == digest for other in others) else VARIES
        for name, digest in base.digests.items()
    }
    new = Entry(figures, flat(base.values), digests=digests)
    return new if old is None or not _agrees(outcome, old) else _added(old, new)


def keeps_entry(outcome: Outcome, old: Entry | None) -> bool:
    """Whether an update leaves the old entry as it is, so that there is nothing to measure or to refuse."""
    return outcome.status == "passed" and old is not None


def check_storable(outcome: Outcome, base: Observation, *, reason: str) -> None:
    """Raise RefusedError for a case that must not be stored; no observation under harmless changes is needed."""
    if outcome.verdict in NEXT:
        raise RefusedError(f"{outcome.case} cannot be stored, it is {outcome.verdict}: {outcome.message}")
    for name in ALWAYS_ZERO:
        if base.figures.get(name):
            raise RefusedError(
                f"{outcome.case} cannot be stored: {name} is {base.figures[name]:g}, which must be 0. "
                "Make the grid give the bits of its readable definition."
            )
    worse = _worse(outcome)
    if worse and not reason:
        figure = outcome.figures[worse[0]]
        raise RefusedError(
            f"{outcome.case} got worse: {worse[0]} {_change(figure)}"
            + (f", and {len(worse) - 1} more figures" if len(worse) > 1 else "")
            + '. If that is meant, say why: --update-baselines --allow-worse "REASON".'
        )


def _worse(outcome: Outcome) -> list[str]:
    return [name for name, figure in outcome.figures.items() if figure.direction == "worse" and figure.moved]


def _agrees(outcome: Outcome, old: Entry) -> bool:
    """Whether nothing that the old entry has moved: only figures or digests that it lacks are new."""
    known = {f"{name.partition('.')[0]}.changed" for name in old.digests}
    return not any(figure.moved and (name in old.figures or name in known) for name, figure in outcome.figures.items())


def _added(old: Entry, new: Entry) -> Entry:
    """The old entry with what only the new one has. Golden values are one row: they stay if they are as many."""
    values = old.values if len(old.values) == len(new.values) else new.values
    return replace(old, figures={**new.figures, **old.figures}, values=values, digests={**new.digests, **old.digests})


def _between(value: float, other: float | None) -> float:
    return abs(value - other) if other is not None and math.isfinite(other) else 0.0
