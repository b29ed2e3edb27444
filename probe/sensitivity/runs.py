"""The runs of an analysis: a whole run on each side, and from it one run per unit that skips what it shares.

    alone     runs that differ from the float model in one unit
    without   runs that differ from the quantized model in one unit

A run that differs from the whole run first in layer i starts there: it is the model's own forward, in which every layer
before i returns what it returned in the whole run. So masks, positions and whatever lies between layers stay the
model's business, and a restarted run gives the same bits as a whole one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from probe.running.reference import logits_of
from probe.sensitivity.units import Unit, by_layer, mixed, structure

Item = TypeVar("Item")
Result = TypeVar("Result")

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, Tensor)


class CannotRestartError(ValueError):
    """The runs of this model cannot be started in the middle; the message says why."""


@dataclass(frozen=True, eq=False)
class WholeRun:
    """A run of the whole model over one batch: its logits, and what each of its layers was given and returned."""

    batch: Tensor
    logits: Tensor
    returned: dict[str, Any]
    given: dict[str, list[Any]]


@torch.no_grad()
def whole_run(model: nn.Module, batch: Tensor, layers: Sequence[str], *, keep_inputs: bool = False) -> WholeRun:
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
        return WholeRun(batch, logits_of(model, batch), returned, given)


def _plain_leaves(where: str, value: Any) -> list[Any]:
    """Copies of the tensors and plain values in an argument or result; another object is a CannotRestartError."""
    leaves = tree_leaves(_copy(value))
    odd = next((leaf for leaf in leaves if not isinstance(leaf, _PLAIN)), None)
    if odd is not None:
        raise CannotRestartError(f"{where} a {type(odd).__name__}, which may carry more than one tensor")
    return leaves


def _copy(value: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, value)


def skip_layers(model: nn.Module, returned: Mapping[str, Any]) -> nn.Module:
    """`model`, a copy made by `structure`, changed so that these layers only return what they returned before."""
    for name, output in returned.items():
        layer: Any = model.get_submodule(name)
        layer.forward = lambda *args, output=output, **kwargs: _copy(output)  # the model may write to it
    return model


def layer_order(model: nn.Module, batch: Tensor, layers: Sequence[str]) -> tuple[str, ...]:
    """The layers in the order in which they run, if runs may start at any of them; else a CannotRestartError.

    The model runs once as it is, and once with layers that only return what they returned before: every argument of
    every layer and the logits must be the same, bit for bit. A layer that leaves a tensor in an attribute for a later
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
    again = whole_run(skip_layers(structure(model), first.returned), batch, layers, keep_inputs=True)
    for name, leaves in first.given.items():
        if len(again.given[name]) != len(leaves) or not all(map(_same, again.given[name], leaves)):
            raise CannotRestartError(f"{name} is given something that the layers before it do not return")
    if not torch.equal(again.logits, first.logits):
        raise CannotRestartError("its logits depend on more than what its layers return")
    return tuple(first.returned)


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
    order: tuple[str, ...] = ()  # the layers as they run; empty if every run must be a whole run
    threads: int | None = None  # forwards at a time on a CPU; None: as many as torch has threads

    def run(self, batch: Tensor, units: Sequence[Unit]) -> WholeRun:
        """The whole run, with the outputs that the runs of these units need."""
        return whole_run(self.shell, batch, self.order[: max(self._start(unit) for unit in units)])

    def work(self, units: Sequence[Unit]) -> int:
        """How many layers all these runs go through, with the whole run that they share."""
        return len(self.layers) + sum(len(self.layers) - self._start(unit) for unit in units)

    def logits(self, shared: WholeRun, units: Sequence[Unit]) -> Iterator[tuple[Unit, Tensor, int]]:
        """(unit, its logits, the layers that its run went through) of every unit, in the order of their starts."""

        @torch.no_grad()  # a thread has a grad mode of its own
        def run(unit: Unit) -> Tensor:
            skipped = self.order[: self._start(unit)]
            model = skip_layers(self.whole(unit.paths), {name: shared.returned[name] for name in skipped})
            return logits_of(model, shared.batch)

        threads = (self.threads or torch.get_num_threads()) if shared.batch.device.type == "cpu" else 1
        for unit, logits in at_once(run, sorted(units, key=self._start), threads):
            yield unit, logits, len(self.layers) - self._start(unit)

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

    def _start(self, unit: Unit) -> int:
        """The place in the order of layers where the run of a unit starts; 0 for a whole run."""
        inside = by_layer(unit.paths, self.layers) if self.order else None
        return 0 if inside is None else min(self.order.index(name) for name in inside)


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
