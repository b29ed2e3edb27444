"""The gate: every recipe run once, every layer of it judged against its baseline, or made the new one.

The pytest plugin and anything else that wants a verdict comes through here; nothing here knows of pytest.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from probe.diagnosis.causes import corner_cause, diagnose
from probe.gate.baselines.anchors import read_anchors, remove_leftovers, write_anchors
from probe.gate.baselines.entry import Entry
from probe.gate.baselines.format import BaselineError, path_part
from probe.gate.baselines.store import Store, changes
from probe.gate.bench import Bench
from probe.gate.cases import Case, Outcome
from probe.gate.configuration import Settings
from probe.gate.observations import Observation
from probe.gate.tolerances import RULES
from probe.gate.verdicts import RefusedError, Standards, judge, renewed
from probe.running.devices import is_recorded
from probe.running.environment import ANCHORS, INPUT, differences, environment
from probe.running.recipes import Recipe
from probe.running.traces import LayerTrace
from probe.running.variations import BASE, variations
from probe.words import LOGITS


@dataclass(frozen=True)
class Judged:
    """A recipe on a device, layer by layer; in an update also what is to be stored, and what must not be."""

    outcomes: dict[str, Outcome]
    entries: dict[str, Entry] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Bar:
    """A bench with the baselines that it is held to."""

    bench: Bench
    store: Store
    standards: Standards
    stored: Mapping[str, str] | None  # the environment of the baselines
    other_input: str = ""  # why the baselines cannot be compared


class Gate:
    """The judge of one run of the tests, in one process. `folder`: where processes of the run share references."""

    def __init__(self, root: Path, *, folder: Path | None = None, update: bool = False, reason: str = "") -> None:
        self.root = root
        self.update = update
        self.reason = reason
        self._folder = folder
        self._bars: dict[str, Bar] = {}
        self._judged: dict[tuple[int, str, str], Judged] = {}
        self._entries: dict[tuple[int, str], dict[Case, Entry]] = {}

    def bench(self, settings: Settings) -> Bench:
        """The bench of these settings, without a look at baselines: enough to know the cases."""
        return self._bar_of(settings).bench

    def bar(self, settings: Settings) -> Bar:
        """The bench with its baselines read; a defect in them is a BaselineError."""
        bar = self._bar_of(settings)
        if bar.stored is None and bar.bench.anchors is None:
            bar = self._bars[settings.key] = self._with_baselines(bar)
        return bar

    def bars(self) -> list[Bar]:
        """Those in use."""
        return list(self._bars.values())

    def judged(self, settings: Settings, case: Case) -> Judged:
        """The whole recipe of a case, run when first asked for."""
        bar = self.bar(settings)
        key = (id(bar.bench), case.device, case.recipe)
        if key not in self._judged:
            self._judged[key] = self._run(bar, case)
        return self._judged[key]

    def entries(self, bar: Bar, device: str) -> dict[Case, Entry]:
        """The stored cases of a device."""
        key = (id(bar.bench), device)
        if key not in self._entries:
            self._entries[key] = bar.store.read(bar.bench.settings.model, device)
        return self._entries[key]

    def _bar_of(self, settings: Settings) -> Bar:
        if settings.key not in self._bars:
            store = Store(self.root / settings.baselines)
            rules = {
                name: replace(rule, **settings.tolerances.get(name, {}))  # type: ignore[arg-type]
                for name, rule in RULES.items()
            }
            bench = Bench(settings, root=self.root, folder=self._folder)
            self._bars[settings.key] = Bar(bench, store, Standards(rules, settings.limits), None)
        return self._bars[settings.key]

    def _with_baselines(self, bar: Bar) -> Bar:
        bench, model = bar.bench, bar.bench.settings.model
        stored = bar.store.environment(model)
        if stored is None:
            devices = bar.store.devices(model)
            if devices:
                folder = bar.store.root / path_part(model)
                raise BaselineError(
                    f"{folder} has baselines of {', '.join(devices)} but no environment.json. Restore it with "
                    f"git checkout, or delete {folder} and make all again with: pytest --update-baselines"
                )
            return replace(bar, stored={})
        changed = differences({k: v for k, v in stored.items() if k.startswith(INPUT)}, bench.input_facts)
        if changed:
            return replace(bar, stored=stored, other_input="; ".join(changed))
        bench.anchors = read_anchors(bar.store.root / path_part(model), stored.get(ANCHORS, ""))
        return replace(bar, stored=stored)

    def _run(self, bar: Bar, case: Case) -> Judged:
        recipe = Recipe(case.mode, case.format or None)
        self.entries(bar, case.device)  # a defect in them is told before anything is measured
        if self.update:
            return self._renew(bar, recipe, case.device)
        if bar.other_input:
            raise BaselineError(
                f"the baselines of {bar.bench.settings.model} were made with another input: {bar.other_input}. "
                "Undo that, or make all of them again with: pytest --update-baselines"
            )
        seen = bar.bench.observe(recipe, case.device)
        return Judged(self._judge(bar, recipe, case.device, seen))

    def _judge(self, bar: Bar, recipe: Recipe, device: str, seen: Mapping[str, Observation]) -> dict[str, Outcome]:
        bench, model = bar.bench, bar.bench.settings.model
        stored = self.entries(bar, device)
        outcomes = {}
        for case in (one for one in bench.cases if one.recipe == str(recipe) and one.device == device):
            file = bar.store.file(model, case)
            shown = str(file.relative_to(self.root) if file.is_relative_to(self.root) else file)
            try:
                outcomes[case.layer] = judge(
                    model, case, seen[case.layer], stored.get(case), bar.standards, baseline_file=shown
                )
            except ValueError as problem:
                both = Path(shown).with_suffix(".*")
                again = f"Restore it with git checkout, or delete {both} and make it again: pytest --update-baselines"
                raise BaselineError(f"{shown}: {case}: {str(problem).rstrip('.')}. {again}") from None
        return self._with_cause(bar, recipe, device, outcomes)

    def _with_cause(self, bar: Bar, recipe: Recipe, device: str, outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
        """The first layer that failed by itself is looked into; what follows it is told to follow."""
        failing = [one for one in outcomes.values() if one.status == "failed" and one.verdict != "missing"]
        first = next((one for one in failing if one.is_own), failing[0] if failing else None)
        if first is None or first.case.layer == LOGITS or is_recorded(device) or first.verdict == "uncovered":
            return outcomes
        calibration = bar.bench.calibration() if recipe.format else None
        reference = bar.bench.reference()
        moved = [name for name, figure in first.figures.items() if figure.moved]
        trace = LayerTrace(bar.bench.loaded.model, recipe, reference, calibration, first.case.layer)
        only_corners = bool(moved) and all(name.startswith("corners.") for name in moved)
        cause = corner_cause(trace) if only_corners else diagnose(trace)
        return {**outcomes, first.case.layer: replace(first, cause=cause)}

    def _renew(self, bar: Bar, recipe: Recipe, device: str) -> Judged:
        """Measure under every harmless change, and say what to store."""
        bar.bench.make_anchors(BASE)
        base = bar.bench.observe(recipe, device, BASE)
        changes = () if is_recorded(device) else variations()
        others = [bar.bench.observe(recipe, device, variation) for variation in changes]
        outcomes = self._judge(bar, recipe, device, base)
        stored = self.entries(bar, device)
        entries, refusals = {}, {}
        for layer, outcome in outcomes.items():
            old = None if bar.other_input else stored.get(outcome.case)
            try:
                seen = [other[layer] for other in others]
                entries[layer] = renewed(outcome, base[layer], seen, old, reason=self.reason)
            except RefusedError as problem:
                refusals[layer] = str(problem)
        updated = {
            layer: outcome if layer in refusals else replace(outcome, status="updated")
            for layer, outcome in outcomes.items()
        }
        return Judged(updated, entries, refusals)


@dataclass(frozen=True)
class Update:
    """What an update found for one model: cases to store and to drop, and what they were measured with."""

    model: str
    entries: Mapping[Case, Entry]
    drop: Collection[Case]
    facts: Mapping[str, str]  # of the input
    anchors: tuple[str, bytes]


def store_update(store: Store, update: Update) -> list[str]:
    """Write an update and tell what changed: anchors, then cases, then the environment, which makes the anchors count.

    Where nothing changed nothing is written, but what a killed write left is put right.
    """
    folder = store.root / path_part(update.model)
    name, data = update.anchors
    devices = sorted({case.device for case in (*update.entries, *update.drop)})
    old = {case: entry for device in devices for case, entry in store.read(update.model, device).items()}
    new = {case: entry for case, entry in {**old, **update.entries}.items() if case not in update.drop}
    told = changes(old, new)
    stored = store.environment(update.model)
    facts = {**environment(), **update.facts, ANCHORS: name}
    is_new = bool(told) or stored is None or any(stored.get(key) != facts[key] for key in (*update.facts, ANCHORS))
    try:
        if is_new:
            write_anchors(folder, name, data)
        for device in devices:
            store.write(
                update.model,
                device,
                {case: entry for case, entry in update.entries.items() if case.device == device},
                drop=[case for case in update.drop if case.device == device],
            )
        if is_new:
            store.write_environment(update.model, facts)
    except BaselineError:
        remove_leftovers(folder, (stored or {}).get(ANCHORS, ""))
        raise
    remove_leftovers(folder, name)
    return told
