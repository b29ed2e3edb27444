"""The job of an analysis: a batch, or some weights, in one unit."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from probe.activations.collecting import Collected, Collector, Key
from probe.activations.plan import Plan, expert_rows, expert_weights, make_plan, weight_rows
from probe.activations.settings import Settings
from probe.activations.statistics import LayerStatistics, measure
from probe.data.calls import as_call
from probe.data.library_logs import quietly
from probe.data.samples import TokenBatch
from probe.engines.interface import Emit
from probe.models.forward import call_model
from probe.models.linear_grids import put_expert_sites
from probe.models.loading import Loaded
from probe.models.mamba_blocks import with_sites
from probe.models.offload import NumbersOnly, Placed, Room, at_hand, device_named, place
from probe.running.inputs import with_decoder_tokens
from probe.running.shared_models import ModelJob, accelerators
from probe.words import describe_error


@dataclass(frozen=True, eq=False)
class Bench:
    """What a worker holds."""

    placed: Placed
    plan: Plan


@dataclass(frozen=True, eq=False, kw_only=True)
class AnalysisJob(ModelJob[Bench, Collected]):
    """An analysis: a unit is the index of a batch, or the names of weights."""

    settings: Settings
    batches: tuple[TokenBatch, ...]

    def open(self) -> Bench:
        """The model, as `prepare` makes it."""
        loaded = self.model.load()
        model = model_of(loaded, self.settings)
        plan = make_plan(model, self.settings, model_name=self.settings.model.path)
        return Bench(place(model, room_of(self.settings)), plan)

    @torch.no_grad()
    def run(self, state: Bench, work: Any, given: None, emit: Emit) -> Collected:
        """What one batch, or some weights, give."""
        view, placed = self.settings.visualization, state.placed
        collector = Collector(state.plan, threshold=view.outlier.threshold, heat_sample=view.heatmap_3d.sample_idx)
        if isinstance(work, tuple):
            collector.statistics |= _weight_statistics(placed, work)
        else:
            batch = self.batches[work]
            emit(f"[{work + 1}/{len(self.batches)}] {_shown(batch)}")
            with collector.hooked(placed.model):
                collector.begin(batch)
                _run(placed, batch)
        return collector.collected()

    @property
    def gpus(self) -> int:
        """One, if it runs on one."""
        return accelerators(str(device_named(self.settings.memory.device)))


def _shown(batch: TokenBatch) -> str:
    return f"{list(batch.tokens.shape)} tokens" if batch.call is None else str(batch.call)


def _weight_statistics(placed: Placed, names: Sequence[str]) -> dict[Key, LayerStatistics]:
    experts, found = expert_weights(placed.model), dict[Key, LayerStatistics]()
    for name in names:
        owner, parameter = experts.get(name, (name, ""))
        module = placed.model.get_submodule(owner)
        with at_hand(module):
            rows = expert_rows(module, parameter) if parameter else weight_rows(module)
            assert rows is not None
            found[name, "weight"] = measure(rows, module=name, kind="weight")[0]
    return found


def room_of(settings: Settings) -> Room:
    """Where the weights lie while they are not needed."""
    memory = settings.memory
    return Room(device_named(memory.device), memory.max_memory, cast(Any, memory.offload_device), memory.auto_offload)


def model_of(loaded: Loaded, settings: Settings) -> nn.Module:
    """The model that is analyzed: with the sites inside Mamba mixers if they are wanted, and those of experts."""
    model = with_sites(loaded.model, scan="fast") if settings.model.sites else loaded.model
    put_expert_sites(model)
    return model


def _run(placed: Placed, batch: TokenBatch) -> None:
    """One forward; an exception of the model becomes one message."""
    try:
        only: Any = NumbersOnly  # of torch, without types
        with quietly(), only() if placed.note else nullcontext():
            forward(placed.model, batch, placed.device)
    except Exception as problem:
        next_step = (
            "Its weights are offloaded, and modules that read the weights of others without calling them cannot run "
            "so: raise memory.max_memory."
            if placed.note
            else 'What its forward needs, a function returns: data.inputs "package.module:function". --debug shows '
            "where it failed."
        )
        failed = f"the model failed on {_shown(batch)}: {describe_error(problem)}"
        raise ValueError(f"{failed} {next_step}") from problem


def forward(model: nn.Module, batch: TokenBatch, device: torch.device) -> None:
    """Run a batch, with an attention mask if the batch is padded. The decoder of an encoder-decoder reads it too."""
    call = batch.call or as_call(with_decoder_tokens(model, [batch.tokens])[0])
    if batch.padded and batch.call is None:
        call = replace(call, kwargs={**call.kwargs, "attention_mask": batch.mask.long()})
    call_model(model, call.to(device))
