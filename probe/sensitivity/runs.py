"""The runs of an analysis: a whole run on each side, and from it one run per unit that skips what it shares.

    alone     runs that differ from the float model in one unit
    without   runs that differ from the quantized model in one unit

A run that differs from the whole run first in layer i starts there: it is the model's own forward, in which every layer
before i returns what it returned in the whole run. So masks, positions and whatever lies between layers stay the
model's business, and a restarted run gives the same bits as a whole one.

Several runs share one forward, over the batch repeated once for each. A layer splits its rows by run:

    runs that start later          are not worked on; their rows are the layer's output in the whole run
    a run that differs here        goes through its own copy of the layer
    neighbours that do not         go through the layer together
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from probe.data.calls import Batch, repeated as repeat
from probe.models.forward import output_of
from probe.sensitivity.units import Unit, by_layer, mixed, structure

#: Tokens in one forward over several runs: larger batches are no faster and take more memory.
TOKENS_TOGETHER = 512

Forward = Callable[..., Any]
Item = TypeVar("Item")
Result = TypeVar("Result")

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, Tensor)


class CannotRestartError(ValueError):
    """The runs of this model cannot be started in the middle; the message says why."""


@dataclass(frozen=True, eq=False)
class WholeRun:
    """A run of the whole model over one batch: its output, and what each of its layers was given and returned."""

    batch: Batch
    output: Tensor
    returned: dict[str, Any]
    given: dict[str, list[Any]]


@torch.no_grad()
def whole_run(model: nn.Module, batch: Batch, layers: Sequence[str], *, keep_inputs: bool = False) -> WholeRun:
    """Run the model and keep what `layers` return, in the order in which they run.

    With `keep_inputs` also their arguments; then a layer that runs twice, or with an object that could carry state
    past what it returns, is a CannotRestartError.
    """
    returned: dict[str, Any] = {}
    given: dict[str, list[Any]] = {}
    with ExitStack() as hooks:
        for name in layers:

            def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                if name in given:
                    raise CannotRestartError(f"{name} runs more than once in a forward")
                given[name] = _plain_leaves(f"{name} is given", (args, kwargs))

            def after(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                if keep_inputs:
                    _plain_leaves(f"{name} returns", output)
                returned[name] = _copy(output)

            module = model.get_submodule(name)
            if keep_inputs:
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        return WholeRun(batch, output_of(model, batch), returned, given)


def _plain_leaves(where: str, value: Any) -> list[Any]:
    """Copies of the tensors and plain values in an argument or result; another object is a CannotRestartError."""
    leaves = tree_leaves(_copy(value))
    odd = next((leaf for leaf in leaves if not isinstance(leaf, _PLAIN)), None)
    if odd is not None:
        raise CannotRestartError(f"{where} a {type(odd).__name__}, which may carry more than one tensor")
    return leaves


def _copy(value: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, value)


def _stack(outputs: Sequence[Any]) -> Any:
    """One output of a layer from its outputs for parts of the batch; a copy, since the model may write to it."""
    if len(outputs) == 1:
        return _copy(outputs[0])
    return tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *outputs)


def split_forward(forwards: Sequence[Forward | None], output: Any, samples: int, by_sample: Sequence[bool]) -> Forward:
    """A forward of one layer over stacked runs, `samples` rows each: those of run i go through `forwards[i]`.

    For None they are `output`, without work. `by_sample` marks the arguments that hold a row per sample; the others
    are the same for all runs.
    """
    parts = [(part, len(list(runs))) for part, runs in groupby(forwards)]
    if len(parts) == 1:
        return forwards[0] or (lambda *args, **kwargs: _stack([output] * len(forwards)))

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        outputs: list[Any] = []
        end = 0
        for part, runs in parts:
            rows = slice(end, end := end + runs * samples)
            if part is None:
                outputs += [output] * runs
                continue
            own = [leaf[rows] if is_cut else leaf for leaf, is_cut in zip(leaves, by_sample, strict=True)]
            own_args, own_kwargs = tree_unflatten(own, form)
            outputs.append(part(*own_args, **own_kwargs))
        return _stack(outputs)

    return forward


@dataclass(frozen=True, eq=False)
class RestartPlan:
    """How the runs of a model start in the middle."""

    order: tuple[str, ...]  # the layers as they run
    by_sample: Mapping[str, Sequence[bool]]  # layer -> which of its arguments hold a row per sample
    stackable: bool  # whether several runs fit in one forward


def restart_plan(model: nn.Module, batch: Batch, layers: Sequence[str]) -> RestartPlan:
    """The plan for a model whose runs may start at any of these layers; else a CannotRestartError.

    The model runs once as it is, and once with layers that only return what they returned before: every argument of
    every layer and the output must be the same, bit for bit. A layer that leaves a tensor in an attribute for a later
    one to read is not noticed.
    """
    modules = dict(model.named_modules())
    missing = [name for name in layers if name not in modules]
    if missing or not layers:
        raise CannotRestartError(f"it has no module {missing[0]}" if missing else "it has no nn.ModuleList of layers")
    first = whole_run(model, batch, layers, keep_inputs=True)
    silent = [name for name in layers if name not in first.returned]
    if silent:
        raise CannotRestartError(f"{silent[0]} does not run")
    again = _idle_run(model, first, 1)
    for name, leaves in first.given.items():
        if len(again.given[name]) != len(leaves) or not all(map(_same, again.given[name], leaves)):
            raise CannotRestartError(f"{name} is given something that the layers before it do not return")
    if not torch.equal(again.output, first.output):
        raise CannotRestartError("its output depends on more than what its layers return")
    by_sample = _arguments_by_sample(model, first)
    return RestartPlan(tuple(first.returned), by_sample or {}, by_sample is not None)


def _idle_run(model: nn.Module, known: WholeRun, times: int) -> WholeRun:
    """A run over the batch, repeated, in which the layers do nothing but return what they returned in `known`."""
    idle = structure(model)
    for name, output in known.returned.items():
        layer: Any = idle.get_submodule(name)
        layer.forward = split_forward([None] * times, output, len(known.batch), ())
    return whole_run(idle, repeat(known.batch, times), list(known.returned), keep_inputs=True)


def _arguments_by_sample(model: nn.Module, first: WholeRun) -> dict[str, list[bool]] | None:
    """For each layer which arguments hold a row per sample: those that are repeated when the batch is.

    None if runs cannot be stacked: a layer returns more than one tensor with a row per sample, or is given something
    that is neither the same nor repeated for a repeated batch, such as a tensor that depends on the place in it.
    """
    for output in first.returned.values():
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if [tensor.shape[:1] for tensor in tensors] != [first.batch.shape[:1]]:
            return None
    try:
        twice = _idle_run(model, first, 2)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return None
    found: dict[str, list[bool]] = {}
    for name, leaves in first.given.items():
        if len(twice.given[name]) != len(leaves):
            return None
        found[name] = [not _same(*pair) for pair in zip(twice.given[name], leaves, strict=True)]
        for repeated, leaf, is_cut in zip(twice.given[name], leaves, found[name], strict=True):
            if is_cut and not (isinstance(leaf, Tensor) and leaf.ndim and _same(repeated, torch.cat([leaf, leaf]))):
                return None
    return found if torch.allclose(twice.output, torch.cat([first.output] * 2), rtol=1e-4, atol=1e-4) else None


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    return a.dtype == b.dtype and torch.equal(a, b)


@dataclass(frozen=True, eq=False)
class Side:
    """Runs that differ from the whole run of `shell` in one unit at a time."""

    name: str
    shell: nn.Module
    base: nn.Module  # where the rest of a layer that differs is taken from
    donor: nn.Module  # where the unit is taken from
    layers: tuple[str, ...]  # by module name
    plan: RestartPlan | None = None  # None: every run is a whole run
    together: int | None = None  # runs in one forward; None chooses by TOKENS_TOGETHER
    threads: int | None = None  # forwards at a time on a CPU; None: as many as torch has threads

    def run(self, batch: Batch, units: Sequence[Unit]) -> WholeRun:
        """The whole run, with the outputs that the runs of these units need."""
        order = self.plan.order if self.plan else ()
        return whole_run(self.shell, batch, order[: max(self._start(unit) for unit in units)])

    def work(self, units: Sequence[Unit]) -> int:
        """How many layers all these runs go through, with the whole run that they share."""
        return len(self.layers) + sum(len(self.layers) - self._start(unit) for unit in units)

    def groups(self, batch: Batch, units: Sequence[Unit]) -> list[list[Unit]]:
        """The units whose runs share a forward, in the order of their starts."""
        inside = [unit for unit in sorted(units, key=self._start) if self._paths_by_layer(unit)]
        is_stackable = self.plan is not None and self.plan.stackable
        size = (self.together or max(1, TOKENS_TOGETHER // batch.numel())) if is_stackable else 1
        groups = [[unit] for unit in units if not self._paths_by_layer(unit)]
        return groups + [inside[first : first + size] for first in range(0, len(inside), size)]

    def outputs(self, shared: WholeRun, groups: Sequence[Sequence[Unit]]) -> Iterator[tuple[Unit, Tensor, int]]:
        """(unit, its output, the layers that its run went through) of every unit of these groups, in their order."""
        threads = (self.threads or torch.get_num_threads()) if shared.batch.device.type == "cpu" else 1
        for group, found in at_once(partial(self._forward, shared), groups, threads):
            for unit, output in zip(group, found, strict=True):
                yield unit, output, len(self.layers) - self._start(unit)

    @torch.no_grad()  # a thread has a grad mode of its own
    def _forward(self, shared: WholeRun, units: Sequence[Unit]) -> Sequence[Tensor]:
        """The output of each of these runs, which are made in one forward."""
        inside = [paths for unit in units if (paths := self._paths_by_layer(unit))]
        if self.plan is None or not inside:
            return [output_of(self.whole(unit.paths), shared.batch) for unit in units]
        model, starts, samples = structure(self.shell), [self._start(unit) for unit in units], len(shared.batch)
        for place, name in enumerate(self.plan.order):
            layer: Any = model.get_submodule(name)
            forwards = [
                mixed(self.base, self.donor, paths[name], at=name).__call__  # as an attribute a module is a child
                if name in paths
                else (layer.forward if start <= place else None)
                for paths, start in zip(inside, starts, strict=True)
            ]
            by_sample = self.plan.by_sample.get(name, ())
            layer.forward = split_forward(forwards, shared.returned.get(name), samples, by_sample)
        return torch.split(output_of(model, repeat(shared.batch, len(units))), samples)

    @torch.no_grad()
    def whole(self, paths: Sequence[str]) -> nn.Module:
        """The model in which these units differ: the definition of what is measured."""
        inside = by_layer(paths, self.layers)
        if inside is None:  # outside of the layers
            return mixed(self.shell, self.donor, paths)
        model = structure(self.shell)
        for name, inner in inside.items():
            parent, _, child = name.rpartition(".")
            model.get_submodule(parent)._modules[child] = mixed(self.base, self.donor, inner, at=name)
        return model

    def _paths_by_layer(self, unit: Unit) -> Mapping[str, Sequence[str]] | None:
        """The paths of a unit by layer; None if its run is a whole run."""
        return by_layer(unit.paths, self.layers) if self.plan else None

    def _start(self, unit: Unit) -> int:
        """The place in the order of layers where the run of a unit starts; 0 for a whole run."""
        inside = self._paths_by_layer(unit)
        return min(self.plan.order.index(name) for name in inside) if self.plan and inside else 0


def at_once(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[tuple[Item, Result]]:
    """(item, work of it) in the order given, `threads` of them at a time; no more results are kept.

    Forwards on threads of their own scale better than the operations inside of one. torch's threads are divided among
    them, and are as they were afterwards.
    """
    if threads < 2 or len(items) < 2:
        for item in items:
            yield item, work(item)
        return
    own = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(max(1, own // threads),)) as pool:
            for first in range(0, len(items), threads):
                some = items[first : first + threads]
                yield from zip(some, pool.map(work, some), strict=True)
    finally:
        torch.set_num_threads(own)
