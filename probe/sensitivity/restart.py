"""Runs that start in the middle of a model, several of them in one forward.

The model's own forward is run, so that masks, positions and whatever lies between its layers are the model's
business. Its layers are told what to do by a `forward` of their own for as long as the run lasts:

    before the first start   a layer passes on what it is given, without work
    at the start of a run    its rows of the batch are replaced by the known input of that layer
    from then on             its rows go through the layer, or through the one that stands in for it

A forward over k runs has the batch k times; rows whose run has not started yet are not worked on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from probe.running.reference import logits_of
from probe.sensitivity.calls import Call, CannotRestartError, like, tensor_of

Stage = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Run:
    """One run to make: `modules` stand in for layers of that name. It starts at the first of them."""

    name: str
    modules: Mapping[str, nn.Module]


@dataclass(frozen=True, eq=False)
class Passage:
    """A whole run over one batch: its logits, and the input of every layer that was asked for."""

    batch: Tensor
    logits: Tensor
    inputs: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """What is known of the calls of a model's layers."""

    order: tuple[str, ...]  # layers, as they run
    by_row: Mapping[str, Sequence[bool]]  # layer -> which of its arguments hold a row per sample
    stackable: bool
    returned: Mapping[str, Any] = field(repr=False)  # layer -> what it returned once, for the form of it


@torch.no_grad()
def passage(model: nn.Module, batch: Tensor, layers: Sequence[str]) -> Passage:
    """Run the whole model and keep the inputs of `layers`."""
    inputs: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    with ExitStack() as hooks:
        for name in layers:

            def keep(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                inputs[name] = Call.of(name, args, kwargs).activation.clone()

            hooks.callback(modules[name].register_forward_pre_hook(keep, with_kwargs=True).remove)
        logits = logits_of(model, batch)
    return Passage(batch, logits, inputs)


@torch.no_grad()
def rehearse(model: nn.Module, batch: Tensor, layers: Sequence[str]) -> Rehearsal:
    """Find out, on one batch, whether runs of this model may start at any of its layers; else a CannotRestartError.

    One plain run records every call. Then the model runs with layers that do nothing, the last one giving what it
    gave before: every argument but the activation must be as it was, and so must the logits, bit for bit.
    """
    known = dict(model.named_modules())
    missing = [name for name in layers if name not in known]
    if missing or not layers:
        raise CannotRestartError(f"it has no module {missing[0]}" if missing else "it has no nn.ModuleList of layers")
    calls: dict[str, Call] = {}
    returned: dict[str, Any] = {}

    def record(name: str, inner: Stage) -> Stage:
        def stage(*args: Any, **kwargs: Any) -> Any:
            if name in calls:
                raise CannotRestartError(f"{name} runs more than once in a forward")
            calls[name] = Call.of(name, args, kwargs)
            returned[name] = inner(*args, **kwargs)
            tensor_of(name, returned[name])
            return returned[name]

        return stage

    with _staged(model, layers, record):
        expected = logits_of(model, batch)
    silent = [name for name in layers if name not in calls]
    if silent:
        raise CannotRestartError(f"{silent[0]} does not run")
    order = tuple(calls)

    def idle_run(times: int) -> tuple[dict[str, list[bool]], Tensor]:
        rows: dict[str, list[bool]] = {}

        def idle(name: str, inner: Stage) -> Stage:
            def stage(*args: Any, **kwargs: Any) -> Any:
                call = Call.of(name, args, kwargs)
                rows[name] = call.rows_of(name, calls[name], times)
                last = torch.cat([tensor_of(name, returned[name])] * times)
                return like(returned[name], last if name == order[-1] else call.activation)

            return stage

        with _staged(model, layers, idle):
            try:
                return rows, logits_of(model, torch.cat([batch] * times))
            except (RuntimeError, TypeError, IndexError, KeyError, AttributeError) as problem:
                raise CannotRestartError(f"it fails when its layers pass on what they are given ({problem})") from None

    rows, logits = idle_run(1)
    if not torch.equal(logits, expected):
        raise CannotRestartError("its logits are not made of the output of its last layer alone")
    try:
        rows, logits = idle_run(2)
        stackable = torch.allclose(logits, torch.cat([expected] * 2), rtol=1e-4, atol=1e-4)
    except CannotRestartError:
        stackable = False
    return Rehearsal(order, rows, stackable, {name: like(out, torch.empty(0)) for name, out in returned.items()})


def start_of(run: Run, order: Sequence[str]) -> int:
    """The place of the first layer that differs."""
    return min(order.index(name) for name in run.modules)


@torch.no_grad()
def restarted(model: nn.Module, known: Passage, rehearsal: Rehearsal, runs: Sequence[Run]) -> list[Tensor]:
    """The logits of each run, over the batch of the passage, in the order given: by the places where they start."""
    if not runs or (len(runs) > 1 and not rehearsal.stackable):
        raise ValueError(f"{len(runs)} runs were given; this model takes one in a forward.")
    order, size = rehearsal.order, len(known.batch)
    starts = [start_of(run, order) for run in runs]
    if starts != sorted(starts):
        raise ValueError(f"the runs start at {starts}. Give those first that start first.")

    def stage_of(name: str, inner: Stage) -> Stage:
        place = order.index(name)
        by_row = rehearsal.by_row[name]

        def idle(*args: Any, **kwargs: Any) -> Any:
            return like(rehearsal.returned[name], Call.of(name, args, kwargs).activation)

        def stage(*args: Any, **kwargs: Any) -> Any:
            call = Call.of(name, args, kwargs)
            pieces: list[Tensor] = []
            for rows in _groups(runs, starts, name, place):
                cut = slice(rows.start * size, rows.stop * size)
                if starts[rows.start] > place:
                    waiting = (cut.stop - cut.start, *pieces[0].shape[1:])
                    pieces.append(pieces[0].new_zeros(waiting))
                    continue
                starting = starts[rows.start] == place
                held = known.inputs[name] if starting else call.activation[cut]
                layer = runs[rows.start].modules.get(name, inner)
                given, named = call.with_rows(held, cut, by_row)
                pieces.append(tensor_of(name, layer(*given, **named)))
            return like(rehearsal.returned[name], torch.cat(pieces) if len(pieces) > 1 else pieces[0])

        return idle if place < starts[0] else stage

    with _staged(model, order, stage_of):
        logits = logits_of(model, torch.cat([known.batch] * len(runs)))
    return list(torch.split(logits, size))


def _groups(runs: Sequence[Run], starts: Sequence[int], name: str, place: int) -> list[range]:
    """Runs that a layer works on at once: each by itself where it starts or differs, else neighbours together."""
    found: list[range] = []
    kinds: list[object] = []
    for index, (run, start) in enumerate(zip(runs, starts, strict=True)):
        kind = "wait" if start > place else index if start == place or name in run.modules else "together"
        if kinds and kinds[-1] == kind:
            found[-1] = range(found[-1].start, index + 1)
        else:
            found.append(range(index, index + 1))
            kinds.append(kind)
    return found


@contextmanager
def _staged(model: nn.Module, layers: Sequence[str], stage_of: Callable[[str, Stage], Stage]) -> Iterator[None]:
    """While it lasts, calling a layer runs `stage_of(name, its forward)` in the place of its forward."""
    with ExitStack() as undo:
        for name in layers:
            module: Any = model.get_submodule(name)
            before = vars(module).get("forward")
            inner = module.forward
            if before is None:
                undo.callback(delattr, module, "forward")
            else:
                undo.callback(setattr, module, "forward", before)
            module.forward = stage_of(name, inner)
        yield
