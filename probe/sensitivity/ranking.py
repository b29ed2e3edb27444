"""Ranking layers and sites: one at a time quantized, one at a time float, against one run of the float model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probe.data.calls import Batch
from probe.data.samples import TextSamples
from probe.engines import Engine, Unit as EngineUnit
from probe.engines.interface import Progress, silent
from probe.engines.local import LocalEngine
from probe.formats import PERCENTILE
from probe.models.layers import select
from probe.models.loading import load_model, weight_fingerprint
from probe.models.mamba_blocks import is_all_mamba
from probe.models.offload import device_of
from probe.models.outputs import target_tokens
from probe.running.calibration import Calibration, CalibrationRun, check_percentile
from probe.running.declarations import DeclaredMode, short_patterns
from probe.running.environment import check_device, is_present, is_recorded
from probe.running.inputs import calibrating, check_evaluated, check_samples, input_batches
from probe.running.kept_float import float_names
from probe.running.modes import find_mode, given_modes
from probe.running.recipes import Recipe, check_recipes
from probe.running.shared_models import SharedModel
from probe.sensitivity.advice import advise
from probe.sensitivity.job import (
    KeepingRun,
    Options,
    SensitivityJob,
    SideRuns,
    Sites,
    Tally,
    Workbench,
    make_workbench,
)
from probe.sensitivity.results import Advice, Effect, Figures, Sensitivity
from probe.sensitivity.units import check_quantizes
from probe.words import require_positive

#: Units of work for each worker, where there are several: enough that none waits long for the last.
PARTS = 4

_KINDS = {None: "layers", "across": "sites", "within": "layer sites"}
_NO_ADVICE = Advice(keep=(), loss_all=None, loss_kept=None, reached=False, text="Advice is off.")


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
    progress: Progress = silent,
    engine: Engine | None = None,
    shared: SharedModel | None = None,
    device: str | None = None,
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
    engine     where the runs are made; None: in this process. Other processes load the model as `shared` says, to
               `device`; None: to the one where it is here

    Batches are worked on one at a time: of one the outputs of all layers are kept, of the others the output.
    """
    _check(batches, sites)
    require_positive("together", together)
    require_positive("threads", threads)
    options = Options(tuple(layers), sites, restart, together, threads)
    bench = make_workbench(model, recipe, batches, calibration, options)
    engine = engine or LocalEngine()
    if shared is None and not engine.is_here:
        raise ValueError("other processes load a model by its name, and this is one in memory. Use rank_model.")
    fingerprint = weight_fingerprint(model)
    shared = shared or SharedModel.here(type(model).__name__, fingerprint)
    job = SensitivityJob(
        model=shared,
        recipe=recipe,
        batches=tuple(batches),
        calibration=calibration,
        options=options,
        device=device or str(device_of(model)),  # a GPU that was named cuda is cuda:0 here
    )
    runs = _Runs(job, bench, engine, progress)
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
        model=fingerprint,
        recipe=str(recipe),
        kind=_KINDS[sites],
        tokens=sum(tokens.numel() for batch in batches if (tokens := target_tokens(batch)) is not None),
        samples=sum(map(len, batches)),
        reference_bits_per_token=classes.metrics().reference_bits_per_token if classes else None,
        measure="kl" if bench.kind.has_classes else "mse",
        everything=runs.everything.figures(),
        effects=effects,
        advice=_NO_ADVICE,
        weights=bench.weights,
        notes=(*bench.notes, *_idle(effects)),
    )
    if not advice:
        engine.finish()
        return found
    advised = advise(found, runs.loss_keeping)
    engine.finish()
    paths = [path for unit in bench.units if unit.name in advised.keep for path in unit.paths]
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


def _idle(effects: Sequence[Effect]) -> list[str]:
    """A note of the units that do nothing: a mode that was not applied there looks like a layer that costs nothing."""
    idle = [effect.name for effect in effects if effect.alone.identical]
    some = ", ".join(idle[:3]) + (", ..." if len(idle) > 3 else "")
    return [f"{len(idle)} of {len(effects)} change no bit of the output when quantized alone: {some}."] if idle else []


class _Runs:
    """All runs of one analysis, and their figures."""

    def __init__(self, job: SensitivityJob, bench: Workbench, engine: Engine, progress: Progress) -> None:
        self.job, self.bench, self.engine, self.progress = job, bench, engine, progress
        self.tallies: dict[str, dict[str | None, Tally]] = {side: {} for side in bench.sides}
        self.done = 0
        self.total = len(bench.batches) * sum(side.work(bench.units) for side in bench.sides.values())

    def measure(self) -> None:
        """Run one unit at a time, on both sides."""
        runs = self._side_runs()
        units = [EngineUnit(f"batch {one.batch}, {one.side}, {one.part}", one) for one in runs]
        for run, found in zip(runs, self._run(units), strict=True):
            there = self.tallies[run.side]
            for unit, tally in found.items():
                there[unit] = there[unit].merge(tally) if unit in there else tally

    @property
    def everything(self) -> Tally:
        """The figures of the whole model quantized."""
        return self.tallies["without"][None]

    def _side_runs(self) -> list[SideRuns]:
        """Batch by batch; in so many parts that every worker has some, where there are several."""
        bench, engine = self.bench, self.engine
        pairs = [(batch, name) for batch in range(len(bench.batches)) for name in bench.sides]
        parts = 1 if engine.is_here else engine.remember(self.job, "parts", -(-PARTS * engine.workers // len(pairs)))
        found = []
        for batch, name in pairs:
            groups = bench.sides[name].groups(bench.batches[batch], bench.units)
            count = min(parts, len(groups))
            for first in range(count):
                names = tuple(unit.name for group in groups[first::count] for unit in group)
                found.append(SideRuns(batch, name, names, part=f"{first + 1} of {count}", is_first=first == 0))
        return found

    def _run(self, units: Sequence[EngineUnit]) -> Iterator[Any]:
        engine = self.engine
        take, progress = (self._take, silent) if engine.is_here else (None, self.progress)
        return engine.run(self.job, units, state=self.bench, take=take, progress=progress)

    def effects(self) -> tuple[Effect, ...]:
        """The figures of every unit, in the order of the model."""

        def figures(name: str) -> dict[str, Figures]:
            return {side: tallies[name].figures() for side, tallies in self.tallies.items()}

        return tuple(Effect(name=unit.name, layer=unit.layer, **figures(unit.name)) for unit in self.bench.units)

    def loss_keeping(self, names: Sequence[str]) -> float | None:
        """The loss of the quantized model in which the units of these names are float: a whole run."""
        works = [KeepingRun(batch, tuple(names)) for batch in range(len(self.bench.batches))]
        units = [EngineUnit(f"batch {one.batch}, keeping {' '.join(one.names)}", one) for one in works]
        tallies: Iterator[Tally] = self._run(units)
        figures = reduce(Tally.merge, tallies).figures()
        return figures.kl if self.bench.kind.has_classes else figures.mse

    def _take(self, index: int, item: tuple[int, str]) -> None:
        self.done += item[0]
        self.progress(self.done, self.total, item[1])


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
    progress: Progress = silent,
    engine: Engine | None = None,
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
    engine = engine or LocalEngine()
    SensitivityJob.prepare(engine)
    loaded = load_model(reference or model, allow_download=allow_download, trust_remote_code=trust_remote_code)
    recipe = _recipe("2-1", format, include) if mode is None and is_all_mamba(loaded.model) else early
    check_recipes(loaded, [recipe])
    select(loaded.model, layers, model_name=loaded.name)  # before a minute of calibration
    inputs = input_batches(loaded, evaluated)
    calibration = None
    if recipe.needs_calibration:
        scaling = input_batches(loaded, calibrated, key="calib_seqlen")
        progress(0, 0, f"calibration on {scaling.about}")
        calibration = CalibrationRun(tuple(scaling.batches), percentile).of(loaded)
    loaded.model.to(device)
    allowed: dict[str, Any] = {"allow_download": allow_download, "trust_remote_code": trust_remote_code}
    shared = SharedModel.of(reference or model, loaded, engine, modes=[recipe.mode], **allowed)
    options: dict[str, Any] = {"layers": layers, "sites": sites, "advice": advice, "progress": progress}
    options |= {"engine": engine, "shared": shared, "device": device}
    found = rank_layers(loaded.model, recipe, inputs.batches, calibration, **options)
    return replace(found, notes=(*loaded.notes, *inputs.notes, *found.notes))
