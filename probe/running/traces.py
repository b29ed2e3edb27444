"""The trace of one layer: the inputs and outputs of the layer and its parts when it is fed the reference's input."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from probe.models.linear import GridLinear, linear_layers
from probe.models.mamba import SITES, SiteMixer, mamba_blocks
from probe.running.calibration import Calibration
from probe.running.capture import UncoveredError, first_tensor
from probe.running.corners import CornerAnswer, corner_answers
from probe.running.modes import Mode, find_mode
from probe.running.recipes import Recipe, apply
from probe.running.reference import Reference, replay

#: By block or linear of the layer: `conv1d.output.given` and `conv1d.output.made` of each part.
Parts = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class BatchTrace:
    """A layer of the quantized copy on one batch of the reference's input."""

    given: Tensor
    expected: Tensor  # what the float layer makes of it
    output: Tensor | None  # None: the layer was never called as a module
    parts: Parts


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
            with _recording(self.twin.get_submodule(self.module), self.mode) as parts:
                output = _output(self.twin, one)
            expected = one.tensors[f"{self.label}.injected"][0].float()
            given = one.tensors.get(f"{self.label}.input", list(one.batches))[0]  # the embedding reads the tokens
            yield BatchTrace(given.float(), expected, output, parts)

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
            logits=whole.logits[index : index + 1],
        )


def _output(twin: nn.Module, reference: Reference) -> Tensor | None:
    outputs: list[Tensor] = []
    try:
        replay(twin, reference, lambda _, output, __: outputs.append(output.clone()), injected=True)
    except UncoveredError:
        return None
    return outputs[0]


@contextmanager
def _recording(layer: nn.Module, mode: Mode) -> Iterator[Parts]:
    """While the block runs, keep the input and output of each part of a layer at its first call."""
    parts: Parts = {}

    def keep(tensors: dict[str, Tensor], part: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = first_tensor(part, "input", (*args, *kwargs.values()))
        tensors.setdefault(f"{part}.given", given.detach().clone())
        tensors.setdefault(f"{part}.made", first_tensor(part, "output", output).detach().clone())

    with ExitStack() as hooks:
        for owner, modules in _watched(layer, mode):
            parts[owner] = {}
            for part, module in modules.items():
                hook = partial(keep, parts[owner], part)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield parts


def _watched(layer: nn.Module, mode: Mode) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """The parts of a layer by name, for each of its Mamba blocks or quantized linear layers."""
    if mode.kind == "ssm":
        for block in mamba_blocks(layer):
            modules = {"block": block.module, "norm": block.norm, "mixer": block.mixer}
            if isinstance(block.mixer, SiteMixer):
                modules |= {site: block.mixer.site(site) for site in SITES}
            yield block.name, modules
    elif mode.kind == "linear":
        for name, linear in linear_layers(layer).items():
            if linear.has_sites:
                whole = {"linear": linear.module} if isinstance(linear.module, GridLinear) else {}
                yield name, whole | {site: linear.module.get_submodule(site) for site in linear.inputs}
