"""A small gate with baselines of its own: a few sequences, and only the recipes that the faults need."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

from probe.gate.baselines.format import Entry
from probe.gate.baselines.store import Store
from probe.gate.cases import Case, Outcome
from probe.gate.configuration import CalibrationSettings, Settings
from probe.gate.engine import Gate
from tests.faults.catalogue import AnyFault
from tests.faults.results import Result

BASELINES = "baselines"


def settings_of(model: str, recipes: Iterable[str]) -> Settings:
    modes, formats = zip(*(recipe.partition("-")[::2] for recipe in sorted(recipes)), strict=True)
    return Settings(
        model=model,
        modes=tuple(dict.fromkeys(modes)),
        formats=tuple(dict.fromkeys(format for format in formats if format)),
        samples=4,
        seqlen=64,
        batch_size=4,
        calibration=CalibrationSettings(samples=8, seqlen=128),
    )


@dataclass
class SmallGate:
    """Baselines under `root`, made when a recipe is first asked for; references are shared by all healthy runs."""

    root: Path
    settings: dict[str, Settings]
    healthy: dict[tuple[str, str], dict[str, Outcome]] = field(default_factory=dict)
    gate: Gate | None = None  # of all runs that share reference and scales: what they read is read once

    @property
    def shared(self) -> Path:
        folder = self.root / "shared"
        folder.mkdir(exist_ok=True)
        return folder

    def make_baselines(self, model: str, recipes: Iterable[str]) -> None:
        """What `pytest --update-baselines` does, but on one thread: two would wait for each other on a busy machine."""
        gate, settings = Gate(self.root, folder=self.shared, update=True), self.settings[model]
        entries: dict[Case, Entry] = {}
        for recipe in recipes:
            with mock.patch("os.cpu_count", return_value=1):
                judged = gate.judge_recipe(settings, self.case(gate, model, recipe))
            assert not judged.refusals, judged.refusals
            entries |= {judged.outcomes[layer].case: entry for layer, entry in judged.entries.items()}
        bench = gate.bench(settings)
        assert bench.anchors is not None
        store = Store(self.root / BASELINES)
        store.write(model, entries, environment=bench.facts, anchors=bench.anchors.to_bytes())
        self.gate = None  # it may have read the old ones

    def judge(
        self, model: str, recipe: str, *, shared: bool = True, batch_size: int | None = None
    ) -> dict[str, Outcome]:
        """What the gate says of a recipe, layer by layer; `shared`: with the reference and scales of a healthy run."""
        settings = self.settings[model]
        if batch_size is not None:
            settings = replace(settings, batch_size=batch_size)
        gate = self._shared_gate() if shared else Gate(self.root)
        return gate.judge_recipe(settings, self.case(gate, model, recipe, settings)).outcomes

    def _shared_gate(self) -> Gate:
        """The gate with what it has read, and without what it has judged."""
        self.gate = self.gate or Gate(self.root, folder=self.shared)
        self.gate.forget()
        return self.gate

    def judge_healthy(self, model: str, recipe: str) -> dict[str, Outcome]:
        """Without any fault."""
        if (model, recipe) not in self.healthy:
            self.healthy[model, recipe] = self.judge(model, recipe)
        return self.healthy[model, recipe]

    def run(self, fault: AnyFault) -> Result:
        """What the gate makes of a fault."""
        healthy = self.judge_healthy(fault.model, fault.recipe)
        try:
            with fault.applied():
                shared = fault.kind in ("layer", "outside", "path")
                return Result(fault, healthy, self.judge(fault.model, fault.recipe, shared=shared))
        except Exception as problem:  # an error of the gate is a failure of the run, and says why
            return Result(fault, healthy, error=f"{type(problem).__name__}: {problem}")

    def case(self, gate: Gate, model: str, recipe: str, settings: Settings | None = None) -> Case:
        cases = gate.bench(settings or self.settings[model]).cases
        return next(case for case in cases if case.recipe == recipe)
