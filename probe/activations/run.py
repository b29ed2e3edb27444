"""Running an analysis: load model and data, run every batch once with hooks, and collect the results."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from probe.activations.collecting import Collected, HeatGrid, Key, LayerOutliers
from probe.activations.job import AnalysisJob, Bench, model_of, room_of
from probe.activations.plan import Plan, make_plan
from probe.activations.prediction import mismatched_channels
from probe.activations.settings import DataSettings, Settings
from probe.activations.statistics import ChannelBands, LayerStatistics
from probe.data.calls import as_call, input_fingerprint
from probe.data.media import is_folder
from probe.data.samples import TextSamples, TokenBatch, batches_of, samples_of
from probe.data.sources import Documents, documents_of
from probe.engines import Engine, Unit
from probe.engines.interface import Progress as UnitProgress, silent
from probe.engines.local import LocalEngine
from probe.models.factories import check_function
from probe.models.loading import Loaded, load_model
from probe.models.mamba_blocks import is_mamba
from probe.models.offload import Room, device_named, place
from probe.models.outputs import real_tokens, target_tokens
from probe.models.positions import position_notes
from probe.running.inputs import input_batches, input_kind
from probe.running.paths import arguments as arguments_of
from probe.running.shared_models import SharedModel
from probe.words import first_few, printable

Progress = Callable[[str], Any]
#: Tokens on either side of an outlier that are shown with it.
NEIGHBOURS = 12
#: Weights that are measured together.
WEIGHTS = 16
#: Names that are printed as a run starts.
MOST_NAMES = 20


@dataclass(frozen=True, eq=False)
class Analysis:
    """The results of an analysis, by module in the order of the model."""

    settings: Settings
    plan: Plan
    facts: dict[str, Any]
    """Facts about model and data: name, fingerprints, samples, tokens."""
    statistics: dict[Key, LayerStatistics]
    outliers: dict[str, LayerOutliers]
    bands: dict[str, ChannelBands]
    heat: dict[str, HeatGrid]
    token_texts: dict[int, str] = field(default_factory=dict)
    around: dict[tuple[int, int], str] = field(default_factory=dict)
    """The text around each of the worst outliers, by sample and position."""
    notes: tuple[str, ...] = ()

    def hardest(self) -> list[LayerStatistics]:
        """The tensors by max / 99th percentile of |x|, the largest first; those with a percentile of 0 lead."""

        def ratio(s: LayerStatistics) -> float:
            return s.max_to_p99 if s.max_to_p99 is not None else math.inf if s.amax else 0.0

        return sorted(self.statistics.values(), key=ratio, reverse=True)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything that an analysis needs before its first forward."""

    settings: Settings
    loaded: Loaded
    model: nn.Module
    plan: Plan
    room: Room
    batches: list[TokenBatch]
    about_data: str
    loading: dict[str, Any]
    """How the model was loaded, as arguments of `load_model`."""

    def samples(self) -> list[Tensor]:
        """The tokens of every sample, without padding."""
        return [row[mask] for batch in self.batches for row, mask in zip(batch.tokens, batch.mask, strict=True)]


def prepare(
    settings: Settings, *, allow_download: bool = False, trust_remote_code: bool = False, progress: Progress = print
) -> Prepared:
    """Load the model and the data and match the patterns, so that mistakes in settings show before anything runs."""
    dtype = None if settings.model.dtype == "auto" else getattr(torch, settings.model.dtype)
    data, room = settings.data, room_of(settings)
    loading: dict[str, Any] = {
        "dtype": dtype,
        "allow_download": allow_download,
        "trust_remote_code": trust_remote_code,
        "room": None if settings.model.sites else room,  # sites are put into a copy, for which all weights are needed
    }
    documents = None if _reads_no_text(data) else _documents(data, allow_download=allow_download)
    loaded = load_model(settings.model.path, **loading)
    model = model_of(loaded, settings)
    for line in names_of(model):
        progress(line)
    plan = make_plan(model, settings, model_name=settings.model.path)
    if documents is None or input_kind(loaded.model) is not None:
        batches, about, notes = _other_inputs(loaded, data)
    else:
        samples = samples_of(documents, loaded.tokenizer, count=data.num_samples, length=data.seq_len, seed=data.seed)
        batches = batches_of(samples, batch_size=data.batch_size, pad="attention_mask" in arguments_of(model))
        about, longest = documents.about, max(map(len, samples))
        notes = position_notes(model, data.seq_len, key="data.seq_len", longest=longest)
    loaded = replace(loaded, notes=(*loaded.notes, *plan.notes, *notes))
    for note in loaded.notes:
        progress(f"note: {note}")
    return Prepared(settings, loaded, model, plan, room, batches, about, loading)


def _reads_no_text(data: DataSettings) -> bool:
    """Whether the data are a user's function, or a folder of files; the two are refused together."""
    if data.inputs is not None and data.source != DataSettings().source:
        raise ValueError(f"data.inputs and data.source {data.source!r} are both set. Leave one of them out.")
    if data.inputs is not None:
        check_function("data.inputs", data.inputs)
    return data.inputs is not None or is_folder(data.source.removeprefix("custom:"))


def _documents(data: DataSettings, *, allow_download: bool) -> Documents:
    format, column = data.custom.format, data.custom.text_column
    return documents_of(data.source, format=format, text_column=column, split=data.split, allow_download=allow_download)


def _other_inputs(loaded: Loaded, data: DataSettings) -> tuple[list[TokenBatch], str, tuple[str, ...]]:
    """What a model is given that reads pictures or sounds, or what a function returns; in words; and notes."""
    source = data.inputs or ("evaluation" if data.source == DataSettings().source else data.source[len("custom:") :])
    inputs = input_batches(loaded, TextSamples(source, data.num_samples, data.seq_len, data.batch_size))
    found, first = [], 0
    for batch in inputs.batches:
        tokens = target_tokens(batch)
        tokens = torch.zeros(len(batch), 0, dtype=torch.int64) if tokens is None else tokens
        real = real_tokens(batch)
        is_mask = real is not None and real.shape == tokens.shape
        mask = real if real is not None and is_mask else torch.ones_like(tokens, dtype=torch.bool)
        found.append(TokenBatch(tokens, mask, first, as_call(batch)))
        first += len(batch)
    return found, inputs.about, inputs.notes


def names_of(model: nn.Module) -> list[str]:
    """The first names that patterns can match, and how many there are, as the users' own tool prints them."""
    names = [name for name, module in model.named_modules() if name and not any(True for _ in module.children())]
    more = ["  ..."] if len(names) > MOST_NAMES else []
    shown = [f"  {printable(name)}" for name in names[:MOST_NAMES]]
    return [f"Total layers found: {len(names)}", f"Showing first {len(shown)} layers:", *shown, *more]


def analyze(
    settings: Settings, *, allow_download: bool = False, trust_remote_code: bool = False, progress: Progress = print
) -> Analysis:
    """Run the analysis that `settings` describe."""
    prepared = prepare(settings, allow_download=allow_download, trust_remote_code=trust_remote_code, progress=progress)
    return run(prepared, progress=progress)


@torch.no_grad()
def run(
    prepared: Prepared, *, progress: Progress = print, engine: Engine | None = None, units: UnitProgress = silent
) -> Analysis:
    """One forward of every batch, and the results. `engine` runs them, None: this process; `units` is told of them."""
    settings, plan, notes = prepared.settings, prepared.plan, list(prepared.loaded.notes)
    engine = engine or LocalEngine()
    placed = place(prepared.model, prepared.room)
    if placed.note:
        notes.append(placed.note)
        progress(f"note: {placed.note}")
    shared = SharedModel.of(settings.model.path, prepared.loaded, engine, **prepared.loading)
    memory = replace(settings.memory, device=str(device_named(settings.memory.device)))  # auto: the same everywhere
    job = AnalysisJob(model=shared, settings=replace(settings, memory=memory), batches=tuple(prepared.batches))
    weights = plan.measured("weight")
    works: list[Any] = [tuple(weights[first : first + WEIGHTS]) for first in range(0, len(weights), WEIGHTS)]
    works += range(len(prepared.batches)) if plan.hooked() else ()
    collected = Collected()
    parts = engine.run(
        job,
        [Unit(f"weights from {work[0]}" if isinstance(work, tuple) else f"batch {work + 1}", work) for work in works],
        state=Bench(placed, plan),
        take=lambda index, line: progress(line),
        progress=units,
    )
    for part in parts:
        collected.merge(part)
    engine.finish()
    notes += _gaps(collected, prepared)
    order = {name: index for index, name in enumerate(plan.order)}
    return Analysis(
        settings,
        plan,
        facts_of(prepared),
        {key: collected.statistics[key] for key in sorted(collected.statistics, key=lambda k: (order[k[0]], k[1]))},
        {name: collected.outliers[name] for name in plan.outliers if name in collected.outliers},
        {name: collected.bands[name] for name in plan.bands[1] if name in collected.bands},
        {name: collected.heat[name] for name in plan.heat[1] if name in collected.heat},
        *(_texts(collected, prepared) if settings.visualization.outlier.decode_tokens else ({}, {})),
        tuple(notes),
    )


def _gaps(collector: Collected, prepared: Prepared) -> list[str]:
    """Notes on tensors that could not be measured; an error if none could be."""
    hooked, notes = prepared.plan.hooked(), list[str]()
    silent = [name for name in hooked if name not in collector.ran]
    if silent:
        hidden = not prepared.settings.model.sites and is_mamba(prepared.model)
        inside = " Set model.sites true to see the tensors inside Mamba mixers." if hidden else ""
        notes.append(
            f"{len(silent)} of {len(hooked)} chosen modules never ran, and are left out: {first_few(silent)}. "
            f"The model reads their weights without calling them, or does not use them.{inside}"
        )
    notes += dict.fromkeys(collector.gaps.values())
    if hooked and not (collector.statistics or collector.bands):
        raise ValueError(f"nothing could be analyzed. {' '.join(notes)}")
    nonfinite = [f"{name} ({kind})" for (name, kind), s in collector.statistics.items() if s.nonfinite]
    if nonfinite:
        notes.append(f"NaN or Inf, which are left out of all statistics, in {len(nonfinite)}: {first_few(nonfinite)}.")
    unlike = [f"{name} ({x} and {w})" for name, (x, w) in mismatched_channels(collector.statistics).items()]
    if unlike:
        notes.append(
            f"the predicted error of {len(unlike)} modules is that of their input alone, without the weight: the input "
            f"has other channels than a row of the weight, as in convolutions: {first_few(unlike)}."
        )
    return notes


def facts_of(prepared: Prepared) -> dict[str, Any]:
    """Facts about model and data, known before anything runs."""
    model, samples, calls = prepared.settings.model, prepared.samples(), [batch.call for batch in prepared.batches]
    return {
        "model": model.name or model.path,
        "path": model.path,
        "model_fingerprint": prepared.loaded.fingerprint,
        "data": prepared.about_data,
        "data_fingerprint": input_fingerprint(
            [tokens[None] for tokens in samples] if calls[0] is None else [call for call in calls if call]
        ),
        "samples": len(samples),
        "tokens": sum(map(len, samples)),
        "shortest": min(map(len, samples)),
        "longest": max(map(len, samples)),
    }


def _texts(collector: Collected, prepared: Prepared) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    """The text of every outlier token, and of the NEIGHBOURS tokens before and after each of the worst ones."""
    samples, decode, outliers = prepared.samples(), prepared.loaded.tokenizer.decode, collector.outliers.values()
    ids = {token for layer in outliers for token in layer.token_ids}
    around = {}
    for sample, at in sorted({(token.sample, token.position) for layer in outliers for token in layer.worst}):
        around[sample, at] = decode(samples[sample][max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1].tolist())
    return {token: decode([token]) for token in sorted(ids)}, around
