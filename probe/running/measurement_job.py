"""Measuring all recipes of a model: a job of one unit for every recipe and shard of the samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from typing import Any, cast

import torch

from probe.data.calls import Batch
from probe.data.samples import CALIBRATION, EVALUATION, TextSamples
from probe.engines import Engine, Unit
from probe.engines.interface import Emit, Progress, silent
from probe.engines.local import LocalEngine
from probe.formats import PERCENTILE
from probe.models.layers import select
from probe.models.loading import Loaded, load_model
from probe.models.mamba_blocks import is_all_mamba
from probe.models.outputs import OutputKind, output_kind
from probe.running.calibration import Calibration, CalibrationRun, check_percentile
from probe.running.inputs import calibrating, check_evaluated, check_samples, input_batches
from probe.running.measurement import Measured, Measuring, measure_shard, short_reference
from probe.running.modes import given_modes
from probe.running.recipes import Recipe, check_recipes, recipes_of
from probe.running.reference import Reference, float_copy, run_reference
from probe.running.reference_files import pack_reference, unpack_reference
from probe.running.shared_models import ModelJob, SharedModel
from probe.words import require_positive


@dataclass(eq=False)
class _Bench:
    """What a worker holds: the model, its batches by shard, and what all recipes share."""

    loaded: Loaded
    short: Reference | None = None
    kind: OutputKind | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class MeasureJob(ModelJob[_Bench, Any]):
    """Recipes against the reference, one shard of the batches at a time.

    A unit is the index of a shard, whose reference is to be kept; a recipe and a shard; or a CalibrationRun.
    """

    shards: tuple[tuple[Batch, ...], ...]
    layers: tuple[str | int, ...]
    injected: bool = False
    calibration: Calibration | None = None

    def open(self) -> _Bench:
        """The model, loaded."""
        return _Bench(self.model.load())

    @torch.no_grad()
    def run(self, state: _Bench, work: Any, given: Reference | None, emit: Emit) -> Any:
        """The calibration, the reference of a shard, or the figures of a recipe on it."""
        model, first = state.loaded.model, self.shards[0]
        if isinstance(work, CalibrationRun):
            return work.of(state.loaded)
        if isinstance(work, int):
            state.kind = state.kind or output_kind(float_copy(model), first[0])
            return run_reference(model, self.shards[work], self.layers, kind=state.kind)
        recipe, shard = work
        assert given is not None
        state.short = state.short or short_reference(model, first, self.layers)
        short = state.short if shard == 0 else None
        measuring = measure_shard(model, recipe, given, self.calibration, short, injected=self.injected)
        sizes = [sum(batch.numel() for batch in one) for one in self.shards]
        measuring.expect(Fraction(sum(sizes), sizes[shard]))
        return measuring

    def pack(self, value: Reference) -> bytes:
        """A reference as bytes."""
        return pack_reference(value)

    def unpack(self, data: Any) -> Reference:
        """The inverse."""
        return unpack_reference(data)


def measure_all(
    model: str,
    *,
    reference: str | None = None,
    modes: Sequence[str] | None = None,
    formats: Sequence[str] | None = None,
    include: Sequence[str] = (),
    layers: Sequence[str | int] = ("all",),
    data: tuple[str, int, int, int] = EVALUATION,
    calibration_data: tuple[str, int, int, int] = CALIBRATION,
    percentile: float = PERCENTILE,
    injected: bool = False,
    allow_download: bool = False,
    trust_remote_code: bool = False,
    progress: Callable[[str], Any] = lambda text: None,
    engine: Engine | None = None,
    shard_size: int | None = None,
    units: Progress = silent,
) -> list[Measured]:
    """Every recipe of modes x formats against fp32, on one model, with one reference and one calibration.

    `engine` runs them (None: this process), a shard of `shard_size` samples at a time (None: all). Results are the
    same on every engine, and for every size of shards but for the order of sums. `units` is told of the units done.

    Without modes: those that fit the model. `include` names what linear modes quantize too: router, embedding, head.
    `reference` is the float original of a model that is quantized already, which is then the mode `given`, and the only
    one if none is named. `data` and `calibration_data` are TextSamples, or the same as plain tuples.
    """
    evaluated, calibrated = TextSamples(*data), TextSamples(*calibration_data)
    check_evaluated(evaluated)
    check_samples(evaluated, calibrated)
    check_percentile(percentile)
    require_positive("the size of a shard", shard_size)
    modes = given_modes(modes or (), model, reference)
    recipes = recipes_of(modes, formats, include)
    engine = engine or LocalEngine()
    MeasureJob.prepare(engine)
    loaded = load_model(reference or model, allow_download=allow_download, trust_remote_code=trust_remote_code)
    if not modes:
        recipes = recipes_of(["all"] if is_all_mamba(loaded.model) else ["linear_w", "linear_wa"], formats, include)
    check_recipes(loaded, recipes)
    select(loaded.model, layers, model_name=loaded.name)
    inputs, calibrated = input_batches(loaded, evaluated), calibrating(evaluated, calibrated)
    scaling = None
    if any(recipe.needs_calibration for recipe in recipes):
        scaling = input_batches(loaded, calibrated, key="calib_seqlen")  # refused before anything runs
    batches = inputs.batches
    for note in (*loaded.notes, *inputs.notes):
        progress(f"note: {note}")
    progress(f"[reference] {loaded.name}, {inputs.about}")
    job = MeasureJob(
        model=SharedModel.of(
            reference or model,
            loaded,
            engine,
            modes=[recipe.mode for recipe in recipes],
            allow_download=allow_download,
            trust_remote_code=trust_remote_code,
        ),
        shards=shards_of(batches, shard_size),
        layers=tuple(layers),
        injected=injected,
    )
    bench = _Bench(loaded)
    kept = engine.keep(
        job,
        [Unit(f"reference {i}", i) for i in range(len(job.shards))],
        state=bench,
        progress=lambda done, total, text: units(done, total, f"reference, {text}"),
    )
    if scaling is not None:
        progress(f"[calibration] {scaling.about}")
        work = CalibrationRun(tuple(scaling.batches), percentile)
        (found,) = engine.run(job, [Unit("calibration", work)], state=bench)
        job = replace(job, calibration=cast(Calibration, found))
    works = [(recipe, shard) for recipe in recipes for shard in range(len(job.shards))]
    parts = engine.run(
        job,
        [Unit(_unit_name(recipe, shard, job), (recipe, shard), kept[shard]) for recipe, shard in works],
        state=bench,
        progress=units,
    )
    measured: list[Measured] = []
    for index, recipe in enumerate(recipes):
        progress(f"[{index + 1}/{len(recipes)}] {recipe}")
        shards = (cast(Measuring, next(parts)) for _ in job.shards)
        measured.append(reduce(Measuring.merge, shards).measured())
    next(parts, None)  # which reports the end
    engine.finish()
    return measured


def _unit_name(recipe: Recipe, shard: int, job: MeasureJob) -> str:
    return f"{recipe}, shard {shard + 1} of {len(job.shards)}" if len(job.shards) > 1 else str(recipe)


def shards_of(batches: Sequence[Batch], size: int | None) -> tuple[tuple[Batch, ...], ...]:
    """The batches in shards of `size` samples, the last one perhaps smaller; None: one shard of all."""
    require_positive("the size of a shard", size)
    if size is None:
        return (tuple(batches),)
    longest = max(map(len, batches))
    if size % longest:
        raise ValueError(
            f"a shard of {size} samples is not made of whole batches, which have {longest}. Give a multiple of it, or "
            "another batch size."
        )
    step = size // longest
    return tuple(tuple(batches[first : first + step]) for first in range(0, len(batches), step))
