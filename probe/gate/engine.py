"""The gate: measures recipes, or takes figures of a tool, and judges each case against its baseline or updates it.

The pytest plugin calls this; nothing here knows of pytest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from probe.diagnosis.causes import corner_cause, diagnose, in_a_line
from probe.diagnosis.moved_reference import why_moved
from probe.engines import Engine
from probe.gate.baselines.format import BaselineError, Entry
from probe.gate.bench import Bench
from probe.gate.cases import Case, Outcome
from probe.gate.configuration import Settings
from probe.gate.definitions import differing_twin, exact_changes
from probe.gate.measured_layers import Flaw, Observation
from probe.gate.path_causes import path_cause, token_profile, wrong_layers
from probe.gate.sources import differing
from probe.gate.tolerances import RULES, Rule
from probe.gate.verdicts import (
    RefusedError,
    Standards,
    changed_digests,
    check_storable,
    golden_of,
    judge,
    keeps_entry,
    renewed,
)
from probe.running.environment import differences, is_present, is_recorded
from probe.running.noise import BASE, variations
from probe.running.recipes import Recipe
from probe.running.traces import LayerTrace
from probe.words import PATHS, flow_key


@dataclass(frozen=True)
class Judged:
    """Outcomes by layer; in an update also the entries to store, and why others must not be stored."""

    outcomes: dict[str, Outcome]
    entries: dict[str, Entry] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GoldenFigures:
    """Figures of one case that a tool measured, with their tolerances.

    The figures depend on `settings`, which are stored with them. Figures that were made with other settings are not
    compared: a threshold that nothing reaches would let everything pass.
    """

    figures: dict[str, float | None]
    rules: Mapping[str, Rule]
    settings: Mapping[str, str]
    flaws: tuple[Flaw, ...] = ()


class Gate:
    """The judge of one run of the tests, in one process.

    `folder`: where processes of the run share references. `engine`: where recipes are observed; None: in this process.
    """

    def __init__(
        self,
        root: Path,
        *,
        folder: Path | None = None,
        update: bool = False,
        reason: str = "",
        engine: Engine | None = None,
    ) -> None:
        self.root = root
        self.engine = engine
        self.update = update
        self.reason = reason
        self._folder = folder
        self.benches: dict[str, Bench] = {}  # by the key of their settings
        self._judged: dict[tuple[str, str, str], Judged] = {}
        self._refused: set[str] = set()  # models of which a case must not be stored, so that nothing of them will be

    def bench(self, settings: Settings) -> Bench:
        """The bench of these settings; nothing is loaded, measured or read from disk yet."""
        if settings.key not in self.benches:
            self.benches[settings.key] = Bench(settings, root=self.root, folder=self._folder, engine=self.engine)
        return self.benches[settings.key]

    def expect(self, settings: Settings, cases: Sequence[Case]) -> None:
        """The cases that will be judged, in this order, so that an engine can observe them ahead of the tests."""
        bench = self.bench(settings)
        wanted = dict.fromkeys(
            (bench.recipe(case.mode, case.format or None), case.device)
            for case in cases
            if not is_recorded(case.device) and is_present(case.device)
        )
        bench.expected = list(wanted)

    def forget(self) -> None:
        """Judge every recipe anew from here on; what was read and run for all of them is kept."""
        self._judged.clear()

    def judge_recipe(self, settings: Settings, case: Case) -> Judged:
        """All layers of the recipe of a case; the recipe runs once, with the first of its cases."""
        key = (settings.key, case.device, case.recipe)
        if key not in self._judged:
            self._judged[key] = self._run(self.bench(settings), case)
        return self._judged[key]

    def judge_figures(self, settings: Settings, case: Case, given: GoldenFigures) -> Judged:
        """One case whose figures were measured elsewhere."""
        bench = self.bench(settings)
        seen = Observation(given.figures, {}, {}, flaws=given.flaws)
        outcome = self._judge(bench, case, seen, Standards(given.rules))
        old = bench.entry(case)
        changed = tuple(_changed_settings(old.settings, given.settings)) if old else ()
        if changed:
            outcome = _not_compared(outcome, changed)
        if not self.update:
            return Judged({case.layer: outcome})
        try:
            entry = replace(renewed(outcome, seen, [], old, reason=self.reason), settings=dict(given.settings))
        except RefusedError as problem:
            also = f" Settings changed too: {'; '.join(changed)}." if changed else ""
            return Judged({case.layer: outcome}, refusals={case.layer: f"{problem}{also}"})
        return Judged({case.layer: replace(outcome, status="updated")}, {case.layer: entry})

    def _run(self, bench: Bench, case: Case) -> Judged:
        recipe, other_input = bench.recipe(case.mode, case.format or None), bench.other_input(case)
        if other_input and not self.update:
            raise BaselineError(
                f"the baselines of {bench.settings.model} were made with another input: {other_input}. "
                "Restore the old input, or make all of them again with: pytest --update-baselines"
            )
        bench.use_stored_anchors(all_devices=self.update)
        if self.update:
            if not bench.moved and bench.compare_reference(BASE):
                bench.discard_anchors()
            return self._renew(bench, recipe, case.device, is_other=bool(other_input or bench.moved))
        if bench.moved or bench.compare_reference():
            return Judged(self._reference_moved(bench, recipe, case.device))
        return Judged(self._judge_layers(bench, recipe, case.device, bench.observe(recipe, case.device)))

    def _reference_moved(self, bench: Bench, recipe: Recipe, device: str) -> dict[str, Outcome]:
        """The outcome of every case of a recipe where no verdict on the recipe would mean anything."""
        cases = _cases(bench, recipe, device)
        message = f"the float reference is not that of the baselines, {bench.moved}. The recipe was not run."
        model, sources = bench.settings.model, differing(bench, recipe, cases[0])[1:]
        found = sources or [why_moved(bench.loaded.model, bench.reference(), bench.moved_tensors)]
        cause = in_a_line(f"reference, {bench.moved.partition(':')[0]}; {'; '.join(found)}")
        return {
            case.layer: Outcome(
                model,
                case,
                "failed",
                "reference moved",
                message,
                cause=cause,
                baseline_file=self._shown_file(bench, case),
            )
            for case in cases
        }

    def _judge_layers(
        self, bench: Bench, recipe: Recipe, device: str, seen: Mapping[str, Observation]
    ) -> dict[str, Outcome]:
        rules = {
            name: replace(rule, **bench.settings.tolerances.get(name, {}))  # type: ignore[arg-type]
            for name, rule in RULES.items()
        }
        standards = Standards(rules, bench.settings.limits)
        cases = _cases(bench, recipe, device)
        outcomes = {case.layer: self._judge(bench, case, seen[case.layer], standards) for case in cases}
        if not is_recorded(device):
            outcomes = {label: replace(one, not_run=bench.paths_not_run) for label, one in outcomes.items()}
        for case in cases:
            if case.layer in PATHS and outcomes[case.layer].status == "failed":
                failed, of_path = outcomes[case.layer], seen[case.layer]
                cause = self._path_cause(bench, recipe, failed, of_path, outcomes)
                outcomes[case.layer] = replace(failed, cause=cause, profile=token_profile(failed, of_path))
        outcomes = self._with_changes(bench, recipe, device, seen, outcomes)
        return self._with_cause(bench, recipe, device, outcomes)

    def _path_cause(
        self, bench: Bench, recipe: Recipe, outcome: Outcome, seen: Observation, outcomes: Mapping[str, Outcome]
    ) -> str:
        """The cause of a failing path; empty where it did not run, or no layer of it moved."""
        wrong = wrong_layers(outcome, seen.path) if seen.path else []
        if seen.path is None or not wrong:
            return ""
        calibration = bench.calibration() if recipe.needs_calibration else None
        trace = LayerTrace(bench.loaded.model, recipe, bench.reference(), calibration, wrong[0])
        return path_cause(wrong, seen.path, bench.entry(outcome.case), outcomes, trace)

    def _with_changes(
        self,
        bench: Bench,
        recipe: Recipe,
        device: str,
        seen: Mapping[str, Observation],
        outcomes: dict[str, Outcome],
    ) -> dict[str, Outcome]:
        """The outcomes; where exact tensors changed or a function is off, with details that name the values."""
        found = dict(outcomes)
        for label, outcome in outcomes.items():
            entry = bench.entry(outcome.case)
            if outcome.verdict not in ("drift", "changed values") or entry is None or is_recorded(device):
                continue
            changed, function = changed_digests(seen[label], entry), outcome.figures.get("functions.error")
            if not any(changed.values()) and not (function and function.moved):
                continue
            calibration = bench.calibration() if recipe.needs_calibration else None
            trace = LayerTrace(bench.loaded.model, recipe, bench.reference(), calibration, label)
            lines = exact_changes(trace, changed, entry.digests, functions=bool(function and function.moved))
            found[label] = replace(outcome, details=(*outcome.details, *lines))
        return found

    def _judge(self, bench: Bench, case: Case, seen: Observation, standards: Standards) -> Outcome:
        shown, entry = self._shown_file(bench, case), bench.entry(case)
        try:
            return judge(bench.settings.model, case, seen, entry, standards, baseline_file=shown)
        except ValueError as problem:
            again = f"Restore it with git checkout, or delete {shown} and make it again: pytest --update-baselines"
            raise BaselineError(f"{shown}: {case}: {str(problem).rstrip('.')}. {again}") from None

    def _shown_file(self, bench: Bench, case: Case) -> str:
        file = bench.store.file(bench.settings.model, case)
        return str(file.relative_to(self.root) if file.is_relative_to(self.root) else file)

    def _with_cause(
        self, bench: Bench, recipe: Recipe, device: str, outcomes: dict[str, Outcome]
    ) -> dict[str, Outcome]:
        """The outcomes, with the likely cause at the first layer whose own figures failed."""
        of_prefill = [one for label, one in outcomes.items() if label not in PATHS]
        failing = [one for one in of_prefill if one.status == "failed" and one.verdict != "missing"]
        failing.sort(key=lambda one: flow_key(one.case.layer))
        first = next((one for one in failing if one.is_own), failing[0] if failing else None)
        if first is None or is_recorded(device):
            return outcomes
        layer, reference = first.case.layer, bench.reference()
        if first.verdict == "uncovered" or (first.verdict == "not float" and layer in reference.layers):
            return outcomes  # the message says it all
        calibration = bench.calibration() if recipe.format else None
        moved = [name for name, figure in first.figures.items() if figure.moved]
        trace = LayerTrace(bench.loaded.model, recipe, reference, calibration, layer)
        only_corners = bool(moved) and all(name.startswith("corners.") for name in moved)
        sources = differing(bench, recipe, first.case)
        golden = golden_of(bench.entry(first.case), "injected")
        only_functions = bool(moved) and all(name.startswith("functions.") for name in moved)
        functions = [line for line in first.details if line.startswith("function ")]
        twin = differing_twin(trace.corners()) if moved == ["corners.twins"] else ""
        if only_functions and functions:
            cause = in_a_line(f"{layer}; {functions[0]}")
        elif twin:
            cause = in_a_line(f"{layer}; {twin}")
        else:
            cause = corner_cause(trace, sources) if only_corners else diagnose(trace, sources, golden)
        return {**outcomes, layer: replace(first, cause=cause)}

    def _renew(self, bench: Bench, recipe: Recipe, device: str, *, is_other: bool) -> Judged:
        """Measure, also under every harmless change where a figure is to be stored, and find what to store.

        One case that must not be stored refuses the update of its whole model. So once a case of this process is
        refused, no spread is measured any more: what else is refused is still found.
        `is_other`: the input or the reference is not that of the old entries, so that none is kept.
        """
        changes = () if is_recorded(device) else variations()
        bench.make_anchors(BASE, changes)
        base = bench.observe(recipe, device, BASE)
        outcomes = self._judge_layers(bench, recipe, device, base)
        judged = {layer: replace(one, figures={}) if bench.moved else one for layer, one in outcomes.items()}
        old = {layer: None if is_other else bench.entry(one.case) for layer, one in outcomes.items()}
        new = [layer for layer, one in judged.items() if not keeps_entry(one, old[layer])]
        refusals = {}
        for layer in new:
            try:
                check_storable(judged[layer], base[layer], reason=self.reason)
            except RefusedError as problem:
                refusals[layer] = str(problem)
        outcomes |= {layer: replace(one, status="updated") for layer, one in outcomes.items() if layer not in refusals}
        if refusals:
            self._refused.add(bench.settings.model)
        if bench.settings.model in self._refused:
            return Judged(outcomes, {}, refusals)
        others = bench.observe_each(recipe, device, changes) if new else []
        entries = {
            layer: renewed(one, base[layer], [other[layer] for other in others], old[layer], reason=self.reason)
            for layer, one in judged.items()
        }
        return Judged(outcomes, entries)


def _cases(bench: Bench, recipe: Recipe, device: str) -> list[Case]:
    """The cases of a recipe on a device."""
    name = str(recipe)
    return [case for case in bench.cases if case.device == device and case.recipe == name]


def _changed_settings(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """outlier.threshold 20 -> 64; a setting that was not stored was none."""
    return differences({name: then.get(name, "none") for name in sorted({*then, *now})}, now)


def _not_compared(outcome: Outcome, changed: tuple[str, ...]) -> Outcome:
    """The outcome of a case whose settings changed; a flaw that no baseline excuses, such as a NaN, comes first."""
    if outcome.verdict not in (None, "drift", "changed values"):
        return replace(outcome, details=(*outcome.details, *(f"also another setting: {one}" for one in changed)))
    names = ", ".join(one.partition(" ")[0] for one in changed)
    message = (
        f"the baseline was made with other settings ({names}), so the figures are not compared. "
        "Restore those settings, or accept the new ones with --update-baselines."
    )
    return replace(outcome, status="failed", verdict=None, message=message, details=changed, cause="")
