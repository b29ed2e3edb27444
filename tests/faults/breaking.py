"""How a fault gets into the code: the real `apply` runs, and the copy it made is damaged before anyone sees it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import probe.running.recipes
import probe.running.traces  # now: the gate would load it inside of a fault, and it would keep the broken `apply`
from probe.models import mamba
from probe.models.mamba import Grid, SiteMixer
from probe.models.scans import SCANS, Scan
from probe.running.calibration import Calibration
from probe.running.modes import find_mode
from probe.running.recipes import Recipe

Side = Literal["copies", "reference", "both"]


def body(model: Any) -> Any:
    """The module that has the layers."""
    return getattr(model, "backbone", None) or getattr(model, "model", None) or model


@dataclass(frozen=True, eq=False)
class Patient:
    """A fresh copy, and the layer of it that is to be damaged."""

    twin: Any
    model: Any
    recipe: Recipe
    calibration: Calibration | None
    index: int

    @property
    def block(self) -> Any:
        return body(self.twin).layers[self.index]

    @property
    def stock(self) -> Any:
        """The layer of the float model."""
        return body(self.model).layers[self.index]

    @property
    def mixer(self) -> SiteMixer:
        return cast(SiteMixer, self.block.mixer)

    @property
    def format(self) -> str:
        assert self.recipe.format is not None
        return self.recipe.format

    @property
    def final_norm(self) -> Any:
        return getattr(body(self.twin), "norm_f", None) or body(self.twin).norm

    def amax(self, site: str) -> float:
        assert self.calibration is not None
        return self.calibration.amax_of(f"backbone.layers.{self.index}.mixer.{site}")


Damage = Callable[[Patient], None]


@contextmanager
def damaged(damage: Damage, index: int, *, side: Side = "copies") -> Iterator[None]:
    """While it lasts, copies have this damage: those that recipes make, the float reference, or both."""

    def broken(real: Any, model: nn.Module, recipe: Recipe, calibration: Calibration | None = None) -> nn.Module:
        twin: nn.Module = real(model, recipe, calibration)
        if side == "both" or find_mode(recipe.mode).is_reference == (side == "reference"):
            with torch.no_grad():
                damage(Patient(twin, model, recipe, calibration, index))
        return twin

    with applying(broken):
        yield


@contextmanager
def applying(change: Callable[..., nn.Module]) -> Iterator[None]:
    """While it lasts, `apply` is `change(real, model, recipe, calibration)` wherever probe calls it."""
    real = probe.running.recipes.apply

    def apply(*args: Any, **kwargs: Any) -> nn.Module:
        return change(real, *args, **kwargs)

    with replacing(real, apply):
        yield


@contextmanager
def replacing(real: Any, other: Any) -> Iterator[None]:
    """While it lasts, every module of probe that imported `real` has `other` in its place."""
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("probe"):
                for key in [key for key, value in vars(module).items() if value is real]:
                    patches.enter_context(mock.patch.object(module, key, other))
        yield


def grid(site: str, make: Callable[[Any], Grid | None]) -> Damage:
    """Another grid at a site, made from the one that is there."""

    def damage(patient: Patient) -> None:
        place = patient.mixer.site(site)
        assert place.grid is not None, site
        place.grid = make(place.grid)

    return damage


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """A weight of the mixer, changed after it was put on the grid."""

    def damage(patient: Patient) -> None:
        parameter = patient.mixer.get_parameter(name)
        parameter.copy_(change(parameter.clone()))

    return damage


def scanning(scan: Callable[..., tuple[Tensor, Tensor]]) -> Damage:
    """Another scan in the layer; `scan(real, u, delta, A, B, C, state)`."""

    def damage(patient: Patient) -> None:
        mixer = patient.mixer
        real: Scan = SCANS[mixer.scan_name]

        def faulty(*tensors: Any) -> tuple[Tensor, Tensor]:
            return scan(real, *tensors)

        during(mixer, SCANS={**SCANS, mixer.scan_name: faulty})

    return damage


class Functional:
    """torch.nn.functional with some functions replaced, for the one module that is given it."""

    def __init__(self, **replaced: Callable[..., Tensor]) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


def with_functions(**replaced: Callable[..., Tensor]) -> Damage:
    """The mixer computes with these in the place of torch.nn.functional's."""
    return lambda patient: during(patient.mixer, functional=Functional(**replaced))


def during(module: nn.Module, **names: Any) -> None:
    """While this one module runs, or a function of its, these names of probe.models.mamba mean something else."""

    def patched(real: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.multiple(mamba, **names):
                return real(*args, **kwargs)

        return method

    for name in ("forward", "delta", "rates", "gated"):
        if hasattr(module, name):
            setattr(module, name, patched(getattr(module, name)))


def calls(count: int, real: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`real`, but the call of this number, of every two, is left out."""
    made = [0]

    def function(x: Tensor) -> Tensor:
        made[0] += 1
        return x if (made[0] - count) % 2 == 0 else real(x)

    return function


def submodule(name: str, change: Callable[..., Any]) -> Damage:
    """A module of the layer is called in another way; `change(real, module, *args, **kwargs)`."""

    def damage(patient: Patient) -> None:
        module = patient.block.get_submodule(name)
        recalled(module, change)

    return damage


def recalled(module: Any, change: Callable[..., Any]) -> None:
    """The forward of a module is `change(real, module, *args, **kwargs)`."""
    real = module.forward
    module.forward = lambda *args, **kwargs: change(real, module, *args, **kwargs)


@contextmanager
def holding(parameter: Tensor, values: Tensor) -> Iterator[None]:
    """While it lasts, a parameter has other values."""
    before = parameter.detach().clone()
    parameter.detach().copy_(values)
    try:
        yield
    finally:
        parameter.detach().copy_(before)
