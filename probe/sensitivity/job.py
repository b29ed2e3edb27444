"""The job of a sensitivity analysis: runs of one batch on one side, for all units or for some of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from probe.data.calls import Batch, shortened
from probe.engines.interface import Emit
from probe.models.forward import output_of
from probe.models.layers import blocks_of
from probe.models.offload import device_of
from probe.models.outputs import OutputKind, output_kind
from probe.running.calibration import Calibration
from probe.running.measurement import check_twin, short_reference
from probe.running.outputs import OutputComparison
from probe.running.recipes import Recipe
from probe.running.shared_models import ModelJob, accelerators
from probe.running.weights import Weights, count_weights
from probe.sensitivity.results import Figures
from probe.sensitivity.runs import CannotRestartError, Side, WholeRun, restart_plan
from probe.sensitivity.units import Twins, Unit, layer_units, make_twins, site_units

Sites = Literal["across", "within"]

#: Tokens of a sequence on which it is tried whether runs may start in the middle.
TRIED_TOKENS = 16


class Tally:
    """The figures of one run, gathered batch by batch."""

    def __init__(self, kind: OutputKind) -> None:
        self.output = OutputComparison(kind)

    def update(self, found: Tensor, expected: Tensor, batch: Batch) -> None:
        """Append a batch."""
        found, expected = (one.cpu().float() for one in (found, expected))
        self.output.update_kind(found, expected, batch)
        scored = (self.output.predictions(one, batch)[0] for one in (found, expected))  # those with a next token
        self.output.values.update(*scored)

    def merge(self, other: "Tally") -> Self:
        """Append the figures of the next batches; returns itself."""
        self.output.merge(other.output)
        return self

    def figures(self) -> Figures:
        """The figures so far."""
        found = self.output.metrics()
        whole, values = found.classes, found.values
        return Figures(
            kl=whole.kl if whole else None,
            mse=values.mse,
            top1_agreement=whole.top1_agreement if whole else None,
            change_in_bits=whole.change_in_bits if whole else None,
            finite=values.finite and (whole is None or whole.finite),
            identical=values.identical,
        )


@dataclass(frozen=True)
class Options:
    """How an analysis is made; the arguments of `rank_layers`."""

    layers: tuple[str | int, ...] = ("all",)
    sites: Sites | None = None
    restart: bool = True
    together: int | None = None
    threads: int | None = None


@dataclass(eq=False)
class Workbench:
    """Both sides of an analysis, its units, and the last run that units share."""

    twins: Twins
    units: list[Unit]
    weights: Weights
    kind: OutputKind
    batches: list[Batch]
    sides: dict[str, Side]
    notes: list[str]
    expected: dict[int, Tensor] = field(default_factory=dict)  # by batch: the output of the float model
    last: tuple[tuple[int, str], WholeRun] | None = None

    def whole_run(self, batch: int, side: str) -> WholeRun:
        """The whole run of a side, made once for units in a row."""
        if self.last is None or self.last[0] != (batch, side):
            self.last = None
            self.last = (batch, side), self.sides[side].run(self.batches[batch], self.units)
            if side == "alone":
                self.expected[batch] = self.last[1].output
        return self.last[1]

    def expected_output(self, batch: int) -> Tensor:
        """The output of the float model."""
        if batch not in self.expected:
            self.expected[batch] = output_of(self.sides["alone"].shell, self.batches[batch])
        return self.expected[batch]


@torch.no_grad()
def make_workbench(
    model: nn.Module, recipe: Recipe, batches: Sequence[Batch], calibration: Calibration | None, options: Options
) -> Workbench:
    """Copies of the model, its units and the way to run them; a recipe that is not applied is refused."""
    sites = options.sites
    twins = make_twins(model, recipe, calibration, sites=sites is not None)
    weights = count_weights(model, twins.quantized, recipe)
    chosen = options.layers
    units = site_units(twins, recipe, chosen, across=sites == "across") if sites else layer_units(twins, chosen)
    check_twin(model, twins.quantized, recipe, short_reference(model, batches, chosen))
    batches = [batch.to(device_of(model)) for batch in batches]
    sample = shortened(batches[0], samples=2, tokens=TRIED_TOKENS) if options.restart else None
    alone, without, notes = _sides(twins, sample)
    sides = {side.name: replace(side, together=options.together, threads=options.threads) for side in (alone, without)}
    return Workbench(twins, units, weights, output_kind(model, batches[0]), batches, sides, notes)


def _sides(twins: Twins, sample: Batch | None) -> tuple[Side, Side, list[str]]:
    """Both sides, and a note if they cannot be restarted; without a sample to try it on they are not."""
    layers = tuple(blocks_of(twins.plain))
    alone = Side("alone", twins.plain, twins.floating, twins.quantized, layers)
    without = Side("without", twins.quantized, twins.quantized, twins.floating, layers)
    if sample is None:
        return alone, without, []
    try:
        plan = restart_plan(alone.shell, sample, layers)
        # built-in modes change what is inside the layers, not how they are called
        other = restart_plan(without.shell, sample, layers) if twins.is_foreign else plan
    except CannotRestartError as problem:
        return alone, without, [f"every run is a whole run, which takes longer: {problem}."]
    return replace(alone, plan=plan), replace(without, plan=other), []


@dataclass(frozen=True, eq=False)
class SideRuns:
    """A unit of work: the runs of one batch on one side for the units of these names.

    The names, not a rule that finds them: what runs share a forward is decided by each machine for itself.
    """

    batch: int
    side: str
    names: tuple[str, ...]
    part: str  # for people: 1 of 4
    is_first: bool  # the one that also gives the figures of everything quantized


@dataclass(frozen=True, eq=False)
class KeepingRun:
    """A unit of work: the quantized model with some units float, on one batch: a whole run."""

    batch: int
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class SensitivityJob(ModelJob[Workbench, Any]):
    """All runs of one analysis."""

    recipe: Recipe
    batches: tuple[Batch, ...]
    calibration: Calibration | None
    options: Options
    device: str = "cpu"

    def open(self) -> Workbench:
        """Both sides."""
        model = self.model.load().model.to(self.device)
        return make_workbench(model, self.recipe, self.batches, self.calibration, self.options)

    @torch.no_grad()
    def run(self, state: Workbench, work: Any, given: None, emit: Emit) -> Any:
        """The tally of a run that keeps units float; or by unit those of a side, with that of everything quantized.

        Emits the layers that were run, and what it was.
        """
        batch = state.batches[work.batch]
        if isinstance(work, KeepingRun):
            emit((0, f"checking: {len(work.names)} kept"))
            tally = Tally(state.kind)
            paths = [path for unit in state.units if unit.name in work.names for path in unit.paths]
            output = output_of(state.sides["without"].whole(paths), batch)
            tally.update(output, state.expected_output(work.batch), batch)
            return tally
        side, found = state.sides[work.side], dict[str | None, Tally]()
        emit((0, f"the {'float' if work.side == 'alone' else 'quantized'} model"))
        shared = state.whole_run(work.batch, work.side)
        emit((len(side.layers), work.side))
        expected = state.expected_output(work.batch)
        if work.side == "without" and work.is_first:
            found[None] = Tally(state.kind)
            found[None].update(shared.output, expected, batch)
        groups = side.groups(batch, [unit for unit in state.units if unit.name in work.names])
        for unit, output, layers in side.outputs(shared, groups):
            found[unit.name] = Tally(state.kind)
            found[unit.name].update(output, expected, batch)
            emit((layers, f"{unit.name} {work.side}"))
        return found

    @property
    def gpus(self) -> int:
        """One, if it runs on one."""
        return accelerators(self.device)
