"""The trace of one layer: the inputs and outputs of the layer and its parts when it is fed the reference's input."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from probe.data.calls import as_call
from probe.models.grid_modules import GridConvolution, GridLinear
from probe.models.linear import linear_layers
from probe.models.mamba import SiteMixer
from probe.models.mamba_blocks import mamba_blocks
from probe.running.calibration import Calibration
from probe.running.capture import UncoveredError, first_tensor
from probe.running.corners import CornerAnswer, corner_answers
from probe.running.modes import Mode, find_mode
from probe.running.paths import Path, run_path
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference, replay

#: By block or linear of the layer: `conv1d.output.given` and `conv1d.output.made` of each part.
Parts = dict[str, dict[str, Tensor]]
#: The same, call by call.
Calls = dict[str, dict[str, list[Tensor]]]
#: What decode carries on: [sequence, channel, state], not a tensor of tokens.
STATE = "scan.state"


@dataclass(frozen=True, eq=False)
class BatchTrace:
    """A layer of the quantized copy on one batch of the reference's input."""

    given: Tensor
    expected: Tensor  # what the float layer makes of it
    output: Tensor | None  # None: the layer was never called as a module
    parts: Parts


@dataclass(frozen=True, eq=False)
class PathTrace:
    """A layer of the quantized copy on a path: tensors [sequence, token, ...] of all forwards in a row, no padding.

    `padded` has them with the padding, where the path has some, and `real` says which tokens are none. `states` has, by
    block, what each forward gave to the site of the carried state and what that made of it.
    """

    path: Path
    parts: Parts
    padded: Parts
    real: Tensor
    states: dict[str, tuple[tuple[Tensor, Tensor], ...]]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each forward; empty where there is only one."""
        return tuple(call.shape[1] for call in self.path.calls) if len(self.path.calls) > 1 else ()


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """One layer of a recipe beside the float model. Nothing runs before it is needed."""

    model: nn.Module
    recipe: Recipe
    reference: Reference
    calibration: Calibration | None
    label: str

    @property
    def mode(self) -> Mode:
        """The row of the recipe's mode."""
        return find_mode(self.recipe.mode)

    @property
    def module(self) -> str:
        """The name of the layer's module."""
        return {**self.reference.outside, **self.reference.modules}[self.label]

    @cached_property
    def twin(self) -> nn.Module:
        """The quantized copy of the model."""
        return apply(self.model, self.recipe, self.calibration)

    def corners(self) -> list[CornerAnswer]:
        """What the grids of the layer make of corner values."""
        answers = corner_answers(self.twin, self.recipe, self.calibration)
        return [answer for answer in answers if answer.site.startswith(f"{self.module}.")]

    @torch.no_grad()
    def batches(self) -> Iterator[BatchTrace]:
        """The layer on every batch of the reference, one forward of the model each."""
        for index in range(len(self.reference.batches)):
            one = self._only(index)
            with _recording(self.twin.get_submodule(self.module), self.mode) as calls:
                output = _output(self.twin, one)
            parts = {owner: {name: own[0] for name, own in tensors.items()} for owner, tensors in calls.items()}
            expected = one.tensors[f"{self.label}.injected"][0].float()
            tokens = [as_call(one.batches[0]).main]  # which the embedding reads
            given = one.tensors.get(f"{self.label}.input", tokens)[0]
            yield BatchTrace(given.float(), expected, output, parts)

    @torch.no_grad()
    def outputs(self) -> list[Tensor | None]:
        """The outputs of the layer, batch by batch, as in `batches`; where it can, the layer runs without the model.

        It can if a second call with the same arguments gives the same bits: a layer may write to them.
        """
        if self._calls is None:
            return [batch.output for batch in self.batches()]
        layer = self.twin.get_submodule(self.module)
        return [first_tensor(self.label, "output", layer(*args, **kwargs)).float() for args, kwargs in self._calls]

    @cached_property
    def _calls(self) -> list[tuple[Any, Any]] | None:
        """The arguments of the layer in every batch; None where they do not give its output again."""
        calls: list[tuple[Any, Any]] = []
        layer = self.twin.get_submodule(self.module)
        hook = layer.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append((args, kwargs)), prepend=False, with_kwargs=True
        )
        try:
            outputs = [batch.output for batch in self.batches()]
        finally:
            hook.remove()
        if len(calls) != len(outputs):
            return None
        for (args, kwargs), output in zip(calls, outputs, strict=True):
            again = first_tensor(self.label, "output", layer(*args, **kwargs)).float().cpu()
            if output is None or again.shape != output.shape or not torch.equal(again, output):
                return None
        return calls

    @torch.no_grad()
    def on_path(self, path: Path, *, modules: bool = False) -> PathTrace:
        """The layer on a path; with `modules`, all modules inside it in the order in which they end, not its sites."""
        layer = self.twin.get_submodule(self.module)
        watched = [(name, {"": module}) for name, module in layer.named_modules()] if modules else None
        with _recording(layer, self.mode, watched) as calls:
            run_path(self.twin, path, self.reference)
        real = torch.cat([call >= 0 for call in path.calls], 1)
        whole: Parts = {owner: _joined(tensors, path) for owner, tensors in calls.items()}
        states = {
            owner: tuple(zip(*(tensors.get(f"{STATE}.{side}", []) for side in ("given", "made")), strict=True))
            for owner, tensors in calls.items()
        }
        parts = {
            owner: {name: x[real].reshape(len(x), -1, *x.shape[2:]) for name, x in tensors.items()}
            for owner, tensors in whole.items()
        }
        return PathTrace(path, parts, {} if bool(real.all()) else whole, real, states)

    def _only(self, index: int) -> Reference:
        """The reference with nothing but this layer and one batch."""
        whole, keys = self.reference, [f"{self.label}.{kind}" for kind in ("input", "output", "injected")]
        one = {self.label: self.module}
        is_layer = self.label in whole.modules
        return replace(
            whole,
            batches=whole.batches[index : index + 1],
            layers=(self.label,) if is_layer else (),
            modules=one if is_layer else {},
            outside={} if is_layer else one,
            tensors={key: whole.tensors[key][index : index + 1] for key in keys if key in whole.tensors},
            outputs=whole.outputs[index : index + 1],
        )


def _output(twin: nn.Module, reference: Reference) -> Tensor | None:
    outputs: list[Tensor] = []
    try:
        replay(twin, reference, lambda _, output, __: outputs.append(output.clone()), injected=True)
    except UncoveredError:
        return None
    return outputs[0]


def _joined(calls: dict[str, list[Tensor]], path: Path) -> dict[str, Tensor]:
    """The forwards of a path in a row, of the tensors that have its tokens and were there once in every forward."""
    shapes = [call.shape for call in path.calls]
    return {
        name: torch.cat([tensor.cpu().float() for tensor in tensors], 1)
        for name, tensors in calls.items()
        if [tensor.shape[:2] for tensor in tensors] == shapes
    }


@contextmanager
def _recording(
    layer: nn.Module, mode: Mode, watched: Iterable[tuple[str, dict[str, nn.Module]]] | None = None
) -> Iterator[Calls]:
    """While the block runs, keep the input and output of each part of a layer, call by call."""
    found: Calls = {}

    def keep(owner: str, part: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        with suppress(UncoveredError):  # of a module inside that takes or gives no tensor
            given = first_tensor(part, "input", (*args, *kwargs.values()))
            made = first_tensor(part, "output", output)
            tensors = found.setdefault(owner, {})
            tensors.setdefault(f"{part}.given", []).append(given.detach().clone())
            tensors.setdefault(f"{part}.made", []).append(made.detach().clone())

    with ExitStack() as hooks:
        for owner, modules in _watched(layer, mode) if watched is None else watched:
            if watched is None:
                found[owner] = {}  # also of a part that never runs
            for part, module in modules.items():
                hook = partial(keep, owner, part)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield found


def _watched(layer: nn.Module, mode: Mode) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """The parts of a layer by name, for each of its Mamba blocks or quantized linear layers."""
    if mode.kind == "ssm":
        for block in mamba_blocks(layer):
            modules = {"block": block.module, "norm": block.norm, "mixer": block.mixer}
            if isinstance(block.mixer, SiteMixer):
                modules |= {site: block.mixer.site(site) for site in block.layout.sites}
            yield block.name, modules
    elif mode.kind == "linear":
        for name, linear in linear_layers(layer).items():
            if linear.has_sites:
                whole = {"linear": linear.module} if isinstance(linear.module, GridLinear | GridConvolution) else {}
                yield name, whole | {site: linear.module.get_submodule(site) for site in linear.inputs}
