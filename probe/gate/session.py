"""The state of one run of the tests: which cases there are, their outcomes, and the update at the end.

Every process has a session. Workers send their outcomes and, at the end, their cases to the controller, which alone
writes. Importing this module loads nothing heavy; the gate is loaded when a test first takes a case.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from probe.gate.accounting import OBSOLETE, Account, LeftOut, ModelCases, Progress, Run, Stage
from probe.gate.cases import Case, Outcome
from probe.gate.configuration import Settings, has_settings, settings_of
from probe.settings import ConfigurationError
from probe.words import BESIDE, near_or_first

if TYPE_CHECKING:
    from probe.engines import Engine
    from probe.gate.baselines.format import Entry
    from probe.gate.baselines.store import Store
    from probe.gate.engine import Gate, Judged


@dataclass(frozen=True)
class Options:
    """The options of the command line; axes that it does not name are None."""

    model: str | None = None
    axes: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    baselines: str | None = None
    update: bool = False
    reason: str = ""

    @property
    def given(self) -> str:
        """The options that narrow the matrix, as they were typed."""
        axes = (f"--probe-{axis} {','.join(names)}" for axis, names in self.axes.items() if names is not None)
        return " ".join([*([f"--probe-model {self.model}"] if self.model else []), *axes])


@dataclass(frozen=True)
class CaseRequest:
    """The case of one test, and the settings that it is measured with."""

    has_recipe: ClassVar[bool] = True  # all layers of a recipe are judged together and explained once

    settings: Settings
    case: Case

    def judge(self, session: Session) -> Judged:
        """The outcomes of all layers of the recipe of this case."""
        return session.gate.judge_recipe(self.settings, self.case)


class Session:
    """The state of one process."""

    def __init__(
        self,
        root: Path,
        settings: Settings,
        options: Options,
        *,
        folder: Path | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.root = root
        self.engine = engine  # where recipes are observed; None: in this process
        self.options = options
        self.settings = settings
        self.models: dict[str, ModelCases] = {}
        self.outcomes: dict[tuple[str, Case], Outcome] = {}
        self.entries: dict[str, dict[Case, Entry]] = {}
        self.refusals: dict[tuple[str, Case], str] = {}
        self.figure_settings: dict[tuple[str, Case], object] = {}  # of golden figures: what each case depends on
        self.written: set[str] = set()  # models whose baselines were updated
        self.update_lines: list[str] = []  # what an update changed, for the terminal
        self.problems: list[str] = []  # each fails the run
        self.uncollected: dict[str, str] = {}  # by file: why pytest collected nothing from it
        self.filtered: set[str] = set()  # files of which --lf left out tests that did not fail
        self.crashes: dict[str, str] = {}  # by nodeid: how a test ended that has no outcome
        self.process = os.getpid()
        self.account = Account()
        self.tellers: dict[tuple[str, str, str, bool], str] = {}  # by recipe: the case that explains its failure
        self.drawn: Counter[tuple[str, str, str]] = Counter()  # by recipe: how many of its cases have a picture
        self._folder = folder
        self._gate: Gate | None = None

    @property
    def gate(self) -> Gate:
        """The gate, loaded with torch when first used."""
        if self._gate is None:
            from probe.gate.engine import Gate

            options = self.options
            self._gate = Gate(
                self.root, folder=self._folder, update=options.update, reason=options.reason, engine=self.engine
            )
        return self._gate

    def expect(self, requests: Iterable[CaseRequest]) -> None:
        """The cases of the tests that will run, in their order; with an engine they are observed ahead of them."""
        by_settings: dict[str, list[CaseRequest]] = {}
        for one in requests:
            by_settings.setdefault(one.settings.key, []).append(one)
        for some in by_settings.values():
            self.gate.expect(some[0].settings, [one.case for one in some])

    def request(self, marked: Mapping[str, Any], *, where: str, test: str) -> list[CaseRequest]:
        """The cases of a test: those of the configured matrix, or of its marker, narrowed by the options."""
        from probe.running.environment import check_device

        configured = self.settings_for(self.options.model or self.settings.model)
        if "model" in marked and marked["model"] != configured.model:
            configured = replace(configured, reference=None)
        configured = settings_of(marked, where=where, base=configured) if marked else configured
        axes: dict[str, Any] = {name: value for name, value in self.options.axes.items() if value is not None}
        named = settings_of(axes, where="the options", base=configured)
        narrowed = configured if marked else named
        for device in (*narrowed.devices, *named.devices):
            check_device(device, self.root)
        bench = self.gate.bench(narrowed)
        bench.check()
        cases = list(bench.cases)
        if marked:
            cases = self._named(cases, axes, configured, has_own_model="model" in marked)
        if not marked and narrowed.model == self.settings.model:
            _check_limits(configured, {case.recipe for case in self.gate.bench(configured).cases})
        known = self._model_cases(configured)
        self._check_shared(known.settings, configured)
        known.configure(self.gate.bench(configured).cases, test)
        return [CaseRequest(narrowed, case) for case in cases]

    def settings_for(self, model: str) -> Settings:
        """The settings with another model; golden figures have a model of their own among the baselines.

        The reference belongs to the model of the settings.
        """
        reference = self.settings.reference if model == self.settings.model else None
        baselines = self.options.baselines or self.settings.baselines
        return replace(self.settings, model=model, reference=reference, baselines=baselines)

    def add_cases(self, settings: Settings, depends_on: Mapping[Case, object], *, where: str, test: str) -> None:
        """Add cases of golden figures to the matrix, each with what it depends on. One baseline serves one test."""
        known = self._model_cases(settings)
        for case, given in depends_on.items():
            there = self.figure_settings.setdefault((settings.model, case), given)
            if there != given:
                raise ConfigurationError(
                    f"{where}: another test compares {case} of {settings.model} with the same baseline, with other "
                    f"settings or figures: {there} there, {given} here. Make them agree, or leave one out."
                )
        known.configure(depends_on, test)

    def store(self, settings: Settings) -> Store:
        """The baselines that these settings name."""
        from probe.gate.baselines.store import Store

        return Store(self.root / settings.baselines)

    def _model_cases(self, settings: Settings) -> ModelCases:
        if settings.model not in self.models:
            self.store(settings).check_layout(settings.model)
            self.models[settings.model] = ModelCases(settings)
        return self.models[settings.model]

    def _named(
        self, cases: list[Case], axes: Mapping[str, Any], settings: Settings, *, has_own_model: bool
    ) -> list[Case]:
        """The cases of a marked test that the options name: they narrow its matrix and add nothing to it."""
        from probe.models.layers import select
        from probe.running.modes import expand_modes, given_modes

        named: dict[str, Any] = {"device": axes.get("devices"), "format": axes.get("formats")}
        if "modes" in axes:
            modes = given_modes(axes["modes"], settings.model, settings.reference, narrowed=True)
            named["mode"] = [mode.id for mode in expand_modes(modes)]
        if "layers" in axes:
            named["layer"] = list(BESIDE)
            for pattern in axes["layers"]:
                try:
                    named["layer"] += select(self.gate.bench(settings).loaded.model, pattern, model_name=settings.model)
                except ValueError:
                    if not has_own_model:  # else it may be a pattern for another model
                        raise
        # a float mode has no format
        wanted = {part: ("", *names) for part, names in named.items() if names is not None}
        left = [case for case in cases if all(getattr(case, part) in names for part, names in wanted.items())]
        return left if any(case.layer not in BESIDE for case in left) else []

    def _check_shared(self, one: Settings, other: Settings) -> None:
        for name in ("reference", "data", "inputs", "samples", "seqlen", "calibration", "include", "baselines"):
            if getattr(one, name) != getattr(other, name):
                raise ValueError(
                    f"two tests measure {one.model} with different {name}: {getattr(one, name)!r} and "
                    f"{getattr(other, name)!r}. They share one set of baselines, so give both the same {name}."
                )

    def advance(self, request: CaseRequest, stage: Stage, *, test: str = "", why: str = "") -> None:
        """The case of this request came to `stage`."""
        progress = self.models[request.settings.model].cases.setdefault(request.case, Progress())
        progress.merge(Progress((test,) if test else (), stage, why))

    def close(self) -> dict[str, Any]:
        """The cases of this process by model, complete, as plain values for the controller."""
        for bench in self._gate.benches.values() if self.options.update and self._gate is not None else ():
            if bench.anchors is not None:  # else nothing was measured on it
                known = self.models[bench.settings.model]
                known.facts |= bench.facts  # of all matrices of the model, in whatever process they were measured
                known.moved = known.moved or bench.moved
                known.anchors.append(bench.anchors.to_bytes())
        models = {model: known.as_dict() for model, known in self.models.items()}
        return {"models": models, "uncollected": self.uncollected, "filtered": sorted(self.filtered)}

    def merge(self, given: Mapping[str, Any]) -> None:
        """Add the cases of a worker."""
        self.uncollected |= given["uncollected"]
        self.filtered |= set(given["filtered"])
        for model, plain in given["models"].items():
            other = ModelCases.from_dict(plain)
            mine = self.models.setdefault(model, ModelCases(other.settings))
            for case, progress in other.cases.items():
                mine.cases.setdefault(case, Progress()).merge(progress)
            mine.facts |= other.facts
            mine.moved = mine.moved or other.moved
            mine.anchors += other.anchors

    def add_outcome(self, outcome: Outcome, entry: Entry | None, refusal: str) -> None:
        """Add the outcome of a case, in the process that writes.

        Of several (two tests, a rerun, xdist's --dist each) the one that says most counts: a verdict that fails, then
        one that does not, then a test without a verdict.
        """
        key = outcome.model, outcome.case
        if key not in self.outcomes or _weight(outcome) >= _weight(self.outcomes[key]):
            self.outcomes[key] = outcome
        if entry is not None:
            self.entries.setdefault(outcome.model, {})[outcome.case] = entry
        if refusal:
            self.refusals[outcome.model, outcome.case] = refusal

    def ordered(self) -> list[Outcome]:
        """The outcomes in the order of the matrix; those that it does not have come last."""
        places = {(model, case): i for model, known in self.models.items() for i, case in enumerate(known.cases)}
        return [self.outcomes[key] for key in sorted(self.outcomes, key=lambda key: places.get(key, len(places)))]

    def finish(self, *, left_out: LeftOut, stopped: str = "") -> None:
        """At the end of the run: write the update or refuse it, and account for every stored case.

        `left_out` says how the command line leaves out a test, if it does. `stopped`: why the run ended early.
        """
        if self.options.update:
            self._write_updates(left_out, stopped)
        for key, outcome in self.outcomes.items():
            if outcome.status == "updated" and outcome.model not in self.written:
                # nothing was written, so the old outcome counts: the message says what is wrong, if anything is
                self.outcomes[key] = replace(outcome, status="failed" if outcome.message else "passed")
        with self._problems():
            options = self.options.given
            run = Run(self.root, self.models, self.outcomes, options, self.uncollected, left_out, stopped, self.crashes)
            stored = self._stored()
            self.account = run.account(stored, self._aside(stored))
        if self.options.update:  # of a part of the matrix: it leaves obsolete cases to the next check
            self.problems += [line for line in self.account.problems if not line.startswith(OBSOLETE)]
            return
        for (model, case), fate in self.account.fates.items():
            if fate.is_obsolete:
                self.outcomes[model, case] = Outcome(model, case, "failed", "obsolete", f"{fate.why}.")
        self.problems += self.account.problems

    def _write_updates(self, left_out: LeftOut, stopped: str) -> None:
        used = {model: known for model, known in self.models.items() if known.selected}
        if stopped:
            self.problems.append(f"no baseline was written: the run ended early ({stopped}).")
            return
        for known in used.values():
            with self._problems():
                self._update(known, left_out)
        for model in sorted(set(self.entries) - set(used)):
            self.problems.append(f"no baseline of {model} was written: the run ended before its workers did.")

    @contextmanager
    def _problems(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as problem:
            self.problems.append(str(problem))

    def _stored(self) -> dict[tuple[str, Case], tuple[str, ...]]:
        """Every stored case with its tests, of all models in the folders that the settings and the tests name."""
        every = [self.settings_for(""), *(known.settings for known in self.models.values())]
        there = {one.baselines: one for one in every if (self.root / one.baselines).is_dir()}
        found: dict[tuple[str, Case], tuple[str, ...]] = {}
        for settings in there.values():
            try:
                modes = [mode for modes in self.store(settings).inventory().values() for mode in modes]
            except ValueError:
                if self.models or has_settings(self.root):
                    raise
                continue  # a folder of that name in a project that has nothing to do with probe
            found |= {(mode.model, case): mode.tests.get(case, ()) for mode in modes for case in mode.entries}
        return found

    def _aside(self, stored: Mapping[tuple[str, Case], tuple[str, ...]]) -> dict[tuple[str, Case], str]:
        """The cases that only the configured folder has, when --baselines-dir names another one."""
        given = self.options.baselines
        if given is None or (self.root / given) == (self.root / self.settings.baselines):
            return {}
        try:
            modes = [mode for modes in self.store(self.settings).inventory().values() for mode in modes]
        except ValueError:
            return {}  # it is not in use
        keys = [(mode.model, case) for mode in modes for case in mode.entries]
        return {key: f"by --baselines-dir {given}" for key in keys if key not in stored}

    def _obsolete(self, known: ModelCases, left_out: LeftOut) -> list[Case]:
        """Stored cases that an update of the whole matrix drops; a device that it does not name at all counts too."""
        stored = {case: tests for (model, case), tests in self._stored().items() if model == known.settings.model}
        kept = set(known.matrix)
        for case, tests in stored.items():
            not_collected = any(test.partition("::")[0] in self.uncollected for test in tests)
            if not_collected or any(left_out(test, case) for test in tests or ("",)):
                kept.add(case)
        return sorted(set(stored) - kept)

    def _update(self, known: ModelCases, left_out: LeftOut) -> None:
        from probe.running.environment import INCLUDE, INPUT, environment, is_present
        from probe.running.noise import Anchors

        model = known.settings.model
        entries = self.entries.get(model, {})
        ours = {case: outcome for (one, case), outcome in self.outcomes.items() if one == model}
        skipped = {
            case for case, outcome in ours.items() if outcome.status == "skipped" and not is_present(case.device)
        }
        lost = known.selected - set(entries) - skipped
        if lost:
            refused = [text for (one, case), text in self.refusals.items() if one == model and case in lost]
            first = refused[0] if refused else f"{min(lost)} was not measured."
            count = f"{len(refused or lost)} of {len(known.selected)} cases have nothing to store"
            raise ValueError(f"no baseline of {model} was written: {count}. {first}")
        if not entries:
            return
        absent = {case.device for case in skipped}
        whole = known.selected - skipped >= {case for case in known.matrix if case.device not in absent}
        store = self.store(known.settings)
        before = store.environment(model)
        stored, now = {INCLUDE: "none", **before} if before else {}, {INCLUDE: "none", **known.facts}
        changed = any(stored.get(key, fact) != fact for key, fact in now.items() if key.startswith(INPUT))
        if not whole and (changed or known.moved):
            what = "the input changed" if changed else f"the float reference moved ({known.moved})"
            raise ValueError(
                f"no baseline of {model} was written: {what}, so all cases must be updated. "
                "Run pytest --update-baselines without -k and without --probe-* options."
            )
        drop = self._obsolete(known, left_out) if whole else []
        united = Anchors.united(Anchors.from_bytes(data) for data in sorted(set(known.anchors)))
        anchors = united.to_bytes() if known.anchors else None
        facts = {**environment(), **known.facts}
        tests = {case: progress.tests for case, progress in known.cases.items()}
        lines = store.write(model, entries, environment=facts, anchors=anchors, tests=tests, drop=drop)
        self.written.add(model)
        kind = "all" if whole else "some"
        self.update_lines.append(f"{model}: {len(entries)} cases measured ({kind} of the matrix), {len(lines)} changes")
        if known.moved:
            self.update_lines.append(f"{model}: the float reference moved, {known.moved}; every case was made anew")
        self.update_lines += _shortened(lines)


def _weight(outcome: Outcome) -> tuple[bool, bool, bool]:
    return outcome.is_compared, outcome.status == "failed", not outcome.is_expected


def _check_limits(settings: Settings, recipes: set[str]) -> None:
    """Refuse a limit for no recipe of the matrix: nothing would ever be compared with it."""
    for pattern in settings.limits:
        if not any(fnmatchcase(recipe, pattern) for recipe in recipes):
            hint = near_or_first(pattern, sorted(recipes))
            raise ValueError(f"[tool.probe.limits]: {pattern!r} matches no recipe of the matrix. {hint}")


def _shortened(lines: list[str], *, most: int = 2000) -> list[str]:
    """New and dropped cases as counts by recipe; figures that moved line by line."""
    cases, split = ("new", "dropped"), [(line, *line.partition("  ")[::2]) for line in lines]
    counts = Counter((what, name.split("-")[0]) for _, name, what in split if what in cases)
    rest = [line for line, _, what in split if what not in cases]
    counted = [f"{what}: {count} cases of {mode}" for (what, mode), count in sorted(counts.items())]
    more = [f"and {len(rest) - most} more; see git diff"] if len(rest) > most else []
    return [*counted, *rest[:most], *more]
