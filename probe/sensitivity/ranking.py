"""Ranking layers and sites: one at a time quantized, one at a time float, against one run of the float model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from probe.data.calls import Batch, shortened
from probe.data.samples import TextSamples
from probe.formats import PERCENTILE
from probe.models.forward import output_of
from probe.models.layers import blocks_of, select
from probe.models.loading import load_model, weight_fingerprint
from probe.models.mamba_blocks import is_all_mamba
from probe.models.offload import device_of
from probe.models.outputs import OutputKind, output_kind, target_tokens
from probe.running.calibration import Calibration, calibrate_on, check_percentile
from probe.running.declarations import DeclaredMode, short_patterns
from probe.running.environment import check_device, is_present, is_recorded
from probe.running.inputs import calibrating, check_evaluated, check_samples, input_batches
from probe.running.kept_float import float_names
from probe.running.measurement import check_twin, short_reference
from probe.running.modes import find_mode, given_modes
from probe.running.outputs import OutputComparison
from probe.running.recipes import Recipe, check_recipes
from probe.running.weights import count_weights
from probe.sensitivity.advice import advise
from probe.sensitivity.results import Advice, Effect, Figures, Sensitivity
from probe.sensitivity.runs import CannotRestartError, Side, restart_plan
from probe.sensitivity.units import Twins, Unit, check_quantizes, layer_units, make_twins, site_units
from probe.words import require_positive

Sites = Literal["across", "within"]
#: Called with the work done, the work there is (in layers run), and what is being run.
Progress = Callable[[int, int, str], Any]

#: Tokens of a sequence on which it is tried whether runs may start in the middle.
TRIED_TOKENS = 16

_KINDS = {None: "layers", "across": "sites", "within": "layer sites"}
_NO_ADVICE = Advice(keep=(), loss_all=None, loss_kept=None, reached=False, text="Advice is off.")


class _Tally:
    """The figures of one run, gathered batch by batch."""

    def __init__(self, kind: OutputKind) -> None:
        self.output = OutputComparison(kind)

    def update(self, found: Tensor, expected: Tensor, batch: Batch) -> None:
        found, expected = (one.cpu().float() for one in (found, expected))
        self.output.update_kind(found, expected, batch)
        scored = (self.output.predictions(one, batch)[0] for one in (found, expected))  # those with a next token
        self.output.values.update(*scored)

    def figures(self) -> Figures:
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


@torch.no_grad()
def rank_layers(
    model: nn.Module,
    recipe: Recipe,
    batches: Sequence[Batch],
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
    """Quantize one layer at a time, and all but one; rank them by the KL and the mse of the output.

    Where the output has no classes, by the mse alone.

    layers     which; anything that `select` knows
    sites      rank the sites inside those layers: `across`, one site in all of them at once, or `within`, one site
               of one layer at a time. A site of a model without Mamba blocks is a linear, with weight and input
    advice     search, and check by runs, which of them to keep in higher precision
    restart    start each run at the layer that differs, after what the layers before it returned in a whole run.
               False runs the whole model every time: the definition, and what a model that cannot be restarted gets
    together   runs in one forward; None chooses. The figures do not depend on it beyond the order of sums
    threads    forwards at a time, on the CPU; None: as many as torch has threads, which are divided among them

    Batches are worked on one at a time: of one the outputs of all layers are kept, of the others the output.
    """
    _check(batches, sites)
    require_positive("together", together)
    require_positive("threads", threads)
    twins = make_twins(model, recipe, calibration, sites=sites is not None)
    weights = count_weights(model, twins.quantized, recipe)
    units = site_units(twins, recipe, layers, across=sites == "across") if sites else layer_units(twins, layers)
    check_twin(model, twins.quantized, recipe, short_reference(model, batches, layers))
    batches = [batch.to(device_of(model)) for batch in batches]
    alone, without, notes = _sides(twins, shortened(batches[0], samples=2, tokens=TRIED_TOKENS) if restart else None)
    alone, without = (replace(side, together=together, threads=threads) for side in (alone, without))
    kind = output_kind(model, batches[0])
    runs = _Runs(alone, without, units, batches, kind, progress)
    runs.measure()
    effects = runs.effects()
    if all(effect.alone.identical for effect in effects) and not runs.everything.figures().identical:
        raise ValueError(
            f"quantized alone, none of these {len(effects)} ({effects[0].name}, ...) changes a bit of the output, but "
            f"all of {recipe} does. Choose what it quantizes; or the model calls its layers past its modules, so that "
            "they cannot be exchanged."
        )
    classes = runs.everything.output.classes
    found = Sensitivity(
        model=weight_fingerprint(model),
        recipe=str(recipe),
        kind=_KINDS[sites],
        tokens=sum(tokens.numel() for batch in batches if (tokens := target_tokens(batch)) is not None),
        samples=sum(map(len, batches)),
        reference_bits_per_token=classes.metrics().reference_bits_per_token if classes else None,
        measure="kl" if kind.has_classes else "mse",
        everything=runs.everything.figures(),
        effects=effects,
        advice=_NO_ADVICE,
        weights=weights,
        notes=(*notes, *_idle(effects)),
    )
    if not advice:
        return found
    advised = advise(found, runs.loss_keeping)
    paths = [path for unit in units if unit.name in advised.keep for path in unit.paths]
    can_declare = bool(paths) and not find_mode(recipe.mode).source  # what a checkpoint keeps float its tool decides
    return replace(found, advice=replace(advised, declared=_declared(model, recipe, paths) if can_declare else None))


def _declared(model: nn.Module, recipe: Recipe, paths: Sequence[str]) -> DeclaredMode:
    """The mode of the recipe with the modules of these paths kept float."""
    mode = find_mode(recipe.mode)
    return DeclaredMode(mode.base or mode.name, (*mode.keep_float, *short_patterns(paths, float_names(model))))


def _check(batches: Sequence[Batch], sites: str | None) -> None:
    if not batches:
        raise ValueError("there is nothing to run: not one batch was given. Pass at least one.")
    if min((batch.shape[1] for batch in batches if isinstance(batch, Tensor)), default=2) < 2:
        raise ValueError("a batch has sequences of one token. Expected at least 2: a token and the next one.")
    if sites not in _KINDS:
        raise ValueError(f"sites is {sites!r}. Give 'across', 'within', or None for whole layers.")


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


def _idle(effects: Sequence[Effect]) -> list[str]:
    """A note of the units that do nothing: a mode that was not applied there looks like a layer that costs nothing."""
    idle = [effect.name for effect in effects if effect.alone.identical]
    some = ", ".join(idle[:3]) + (", ..." if len(idle) > 3 else "")
    return [f"{len(idle)} of {len(effects)} change no bit of the output when quantized alone: {some}."] if idle else []


class _Runs:
    """All runs of one analysis, and their figures."""

    def __init__(
        self,
        alone: Side,
        without: Side,
        units: Sequence[Unit],
        batches: Sequence[Batch],
        kind: OutputKind,
        progress: Progress,
    ) -> None:
        self.alone, self.without, self.units, self.batches, self.progress = alone, without, units, batches, progress
        self.tallies = {side.name: {unit.name: _Tally(kind) for unit in units} for side in (alone, without)}
        self.everything, self.kind = _Tally(kind), kind
        self.expected: list[Tensor] = []
        self.done = 0
        self.total = len(batches) * (alone.work(units) + without.work(units))

    def measure(self) -> None:
        """Run one unit at a time, on both sides."""
        for batch in self.batches:
            for side, model in ((self.alone, "the float model"), (self.without, "the quantized model")):
                self._report(model)
                shared = side.run(batch, self.units)
                self.done += len(side.layers)
                if side is self.alone:
                    self.expected.append(shared.output)
                else:
                    self.everything.update(shared.output, self.expected[-1], batch)
                for unit, output, layers in side.outputs(shared, self.units):
                    self.tallies[side.name][unit.name].update(output, self.expected[-1], batch)
                    self.done += layers
                    self._report(f"{unit.name} {side.name}")

    def effects(self) -> tuple[Effect, ...]:
        """The figures of every unit, in the order of the model."""

        def figures(name: str) -> dict[str, Figures]:
            return {side: tallies[name].figures() for side, tallies in self.tallies.items()}

        return tuple(Effect(name=unit.name, layer=unit.layer, **figures(unit.name)) for unit in self.units)

    def loss_keeping(self, names: Sequence[str]) -> float | None:
        """The loss of the quantized model in which the units of these names are float: a whole run."""
        self._report(f"checking: {len(names)} kept")
        tally = _Tally(self.kind)
        paths = [path for unit in self.units if unit.name in names for path in unit.paths]
        model = self.without.whole(paths)
        for batch, expected in zip(self.batches, self.expected, strict=True):
            tally.update(output_of(model, batch), expected, batch)
        figures = tally.figures()
        return figures.kl if self.kind.has_classes else figures.mse

    def _report(self, what: str) -> None:
        self.progress(self.done, self.total, what)


def _recipe(mode: str, format: str | None, include: Sequence[str]) -> Recipe:
    return Recipe(mode, (format or "int8") if find_mode(mode).takes_format else format, include=tuple(include))


def rank_model(
    model: str,
    *,
    reference: str | None = None,
    mode: str | None = None,
    format: str | None = None,
    include: Sequence[str] = (),
    layers: tuple[str | int, ...] = ("all",),
    sites: Sites | None = None,
    data: tuple[str, int, int, int] = ("evaluation", 8, 128, 4),
    calibration_data: tuple[str, int, int] = ("calibration", 16, 256),
    percentile: float = PERCENTILE,
    device: str = "cpu",
    advice: bool = True,
    allow_download: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Sensitivity:
    """`rank_layers` of a model by name. `mode` None is 2-1 for a Mamba and linear_wa for all others.

    reference           the float original of a model that is quantized already; `mode` None is then that model
    format              None is int8 for a mode that takes a format
    include             what a linear mode quantizes too: router, embedding, head
    data                source, samples, tokens of each, samples in a batch
    calibration_data    source, samples, tokens of each; used by formats with calibrated scales only
    """
    check_device(device, Path())
    if is_recorded(device) or not is_present(device):
        raise ValueError(f"device {device!r} is not present here. Leave --device out to run on the cpu.")
    mode = given_modes([mode] if mode else [], model, reference)[0] if mode or reference else None
    early = _recipe(mode or "linear_wa", format, include)
    check_quantizes(early)
    check_percentile(percentile)
    evaluated = TextSamples(*data)
    check_evaluated(evaluated)
    calibrated = calibrating(evaluated, TextSamples(*calibration_data))
    check_samples(evaluated, calibrated)
    loaded = load_model(reference or model, allow_download=allow_download, trust_remote_code=trust_remote_code)
    recipe = _recipe("2-1", format, include) if mode is None and is_all_mamba(loaded.model) else early
    check_recipes(loaded, [recipe])
    select(loaded.model, layers, model_name=loaded.name)  # before a minute of calibration
    inputs = input_batches(loaded, evaluated)
    calibration = None
    if recipe.needs_calibration:
        scaling = input_batches(loaded, calibrated, key="calib_seqlen")
        progress(0, 0, f"calibration on {scaling.about}")
        calibration = calibrate_on(loaded, *calibrated, percentile=percentile)
    loaded.model.to(device)
    options: dict[str, Any] = {"layers": layers, "sites": sites, "advice": advice, "progress": progress}
    found = rank_layers(loaded.model, recipe, inputs.batches, calibration, **options)
    return replace(found, notes=(*loaded.notes, *inputs.notes, *found.notes))
