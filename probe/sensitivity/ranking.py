"""Ranking layers and sites: one at a time quantized, one at a time float, against one run of the float model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from probe.metrics import Comparison, LogitComparison
from probe.models.layers import blocks_of
from probe.models.loading import weight_fingerprint
from probe.running.calibration import Calibration
from probe.running.recipes import Recipe
from probe.running.reference import logits_of
from probe.sensitivity.advice import advise
from probe.sensitivity.calls import CannotRestartError
from probe.sensitivity.restart import rehearse
from probe.sensitivity.results import Advice, Effect, Figures, Sensitivity
from probe.sensitivity.sides import Side
from probe.sensitivity.units import Twins, Unit, layer_units, make_twins, site_units, structure

Sites = Literal["across", "within"]
#: Called with the work done, the work there is (in layers run), and what is being run.
Progress = Callable[[int, int, str], Any]

#: Tokens of a sequence that show whether runs may start in the middle.
REHEARSED = 16

_KINDS = {None: "layers", "across": "sites", "within": "layer sites"}
_NO_ADVICE = Advice(keep=(), kl_all=None, kl_kept=None, reached=False, text="No advice was asked for.")


@dataclass
class _Tally:
    """The figures of one run, batch after batch."""

    logits: LogitComparison = field(default_factory=LogitComparison)
    values: Comparison = field(default_factory=lambda: Comparison(percentiles=False))

    def update(self, found: Tensor, expected: Tensor, batch: Tensor) -> None:
        found, expected = found[:, :-1].cpu().float(), expected[:, :-1].cpu().float()  # that have a next token
        self.logits.update(found, expected, batch[:, 1:].cpu())
        self.values.update(found, expected)

    def figures(self) -> Figures:
        whole, values = self.logits.metrics(), self.values.metrics()
        return Figures(
            kl=whole.kl,
            mse=values.mse,
            top1_agreement=whole.top1_agreement,
            change_in_bits=whole.change_in_bits,
            finite=whole.finite and values.finite,
            identical=values.identical,
        )


@torch.no_grad()
def rank_layers(
    model: nn.Module,
    recipe: Recipe,
    batches: Sequence[Tensor],
    calibration: Calibration | None = None,
    *,
    layers: Sequence[str | int] = ("all",),
    sites: Sites | None = None,
    advice: bool = True,
    restart: bool = True,
    together: int | None = None,
    threads: int | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Sensitivity:
    """Quantize one layer at a time, and all but one; rank them by the KL and the mse of the logits.

    layers     which; anything that `select` knows
    sites      rank the sites inside those layers: `across`, one site in all of them at once, or `within`, one site
               of one layer at a time. A site of a model without Mamba blocks is a linear, with weight and input
    advice     search, and check by runs, which of them to keep in higher precision
    restart    start each run at the layer that differs, from the input that it shares with a whole run. False runs
               the whole model every time: the definition, and what a model that cannot be restarted gets
    together   runs in one forward; None chooses. The figures do not depend on it beyond the order of sums
    threads    forwards at a time, on the CPU; None: as many as torch has threads, which are divided among them

    Batches are worked on one at a time: of one the inputs of all layers are kept, of the others the logits.
    """
    _check(batches, sites, together, threads)
    twins = make_twins(model, recipe, calibration, sites=sites is not None)
    units = site_units(twins, recipe, layers, across=sites == "across") if sites else layer_units(twins, layers)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    batches = [batch.to(device) for batch in batches]
    alone, without, notes = _sides(
        twins, batches[0][:2, :REHEARSED], restart, {"together": together, "threads": threads}
    )
    runs = _Runs(alone, without, units, batches, progress)
    runs.measure()
    effects = runs.effects()
    if all(effect.alone.identical for effect in effects) and not runs.everything.figures().identical:
        raise ValueError(
            f"quantized alone, none of these {len(effects)} ({effects[0].name}, ...) changes a bit of the logits, but "
            f"all of {recipe} does. Choose what it quantizes; or the model calls its layers past its modules, so that "
            "they cannot be exchanged."
        )
    found = Sensitivity(
        model=weight_fingerprint(model),
        recipe=str(recipe),
        kind=_KINDS[sites],
        tokens=sum(batch.numel() for batch in batches),
        reference_bits_per_token=runs.everything.logits.metrics().reference_bits_per_token,
        everything=runs.everything.figures(),
        effects=effects,
        advice=_NO_ADVICE,
        notes=(*notes, *_idle(effects)),
    )
    return replace(found, advice=advise(found, runs.kl_keeping)) if advice else found


def _check(batches: Sequence[Tensor], sites: str | None, together: int | None, threads: int | None) -> None:
    if not batches:
        raise ValueError("there is nothing to run: not one batch was given. Pass at least one.")
    if min(batch.shape[1] for batch in batches) < 2:
        raise ValueError("a batch has sequences of one token. Expected at least 2: a token and the next one.")
    if sites not in _KINDS:
        raise ValueError(f"sites is {sites!r}. Give 'across', 'within', or None for whole layers.")
    if together is not None and together < 1:
        raise ValueError(f"together is {together}; expected 1 or more runs in a forward.")
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}; expected 1 or more forwards at a time.")


def _sides(twins: Twins, sample: Tensor, restart: bool, options: Any) -> tuple[Side, Side, list[str]]:
    """Both sides, and a note if neither can be restarted."""
    stack = tuple(blocks_of(twins.plain))
    alone = Side("alone", twins.plain, twins.floating, twins.quantized, stack, **options)
    without = Side("without", twins.quantized, twins.quantized, twins.floating, stack, **options)
    if not restart:
        return alone, without, []
    try:
        first = rehearse(structure(alone.shell), sample, stack)
        # built-in modes change what is inside of layers, not who calls them
        second = rehearse(structure(without.shell), sample, stack) if twins.is_foreign else first
    except CannotRestartError as problem:
        return alone, without, [f"every run is a whole run, which takes longer: {problem}."]
    return replace(alone, rehearsal=first), replace(without, rehearsal=second), []


def _idle(effects: Sequence[Effect]) -> list[str]:
    """A note of the units that do nothing: a mode that was not applied there looks like a layer that costs nothing."""
    idle = [effect.name for effect in effects if effect.alone.identical]
    some = ", ".join(idle[:3]) + (", ..." if len(idle) > 3 else "")
    return [f"{len(idle)} of {len(effects)} change no bit of the logits when quantized alone: {some}."] if idle else []


class _Runs:
    """All runs of one analysis, and what they gave."""

    def __init__(
        self, alone: Side, without: Side, units: Sequence[Unit], batches: Sequence[Tensor], progress: Progress
    ) -> None:
        self.alone, self.without, self.units, self.batches, self.progress = alone, without, units, batches, progress
        self.tallies = {side.name: {unit.name: _Tally() for unit in units} for side in (alone, without)}
        self.everything = _Tally()
        self.expected: list[Tensor] = []
        self.done = 0
        self.total = len(batches) * (alone.work(units) + without.work(units))

    def measure(self) -> None:
        """One unit at a time, on both sides."""
        for batch in self.batches:
            self._tell("the float model")
            known = self.alone.passage(batch, self.units)
            self.done += len(self.alone.stack)
            expected = known.logits
            self.expected.append(expected)
            for side in (self.alone, self.without):
                if side is self.without:
                    self._tell("the quantized model")
                    known = side.passage(batch, self.units)
                    self.everything.update(known.logits, expected, batch)
                    self.done += len(side.stack)
                for unit, logits, layers in side.logits(known, self.units):
                    self.tallies[side.name][unit.name].update(logits, expected, batch)
                    self.done += layers
                    self._tell(f"{unit.name} {side.name}")

    def effects(self) -> tuple[Effect, ...]:
        """What was measured, in the order of the model."""
        sides = {side: {name: tally.figures() for name, tally in own.items()} for side, own in self.tallies.items()}
        return tuple(
            Effect(
                name=unit.name, layer=unit.layer, alone=sides["alone"][unit.name], without=sides["without"][unit.name]
            )
            for unit in self.units
        )

    def kl_keeping(self, names: Sequence[str]) -> float | None:
        """The KL of the quantized model in which the units of these names are float: a whole run."""
        self._tell(f"checking: {len(names)} kept")
        tally = _Tally()
        paths = [path for unit in self.units if unit.name in names for path in unit.paths]
        model = self.without.whole(paths)
        for batch, expected in zip(self.batches, self.expected, strict=True):
            tally.update(logits_of(model, batch), expected, batch)
        return tally.figures().kl

    def _tell(self, what: str) -> None:
        self.progress(self.done, self.total, what)
