"""Corner values: the results of every site that a recipe puts on a grid, each computed alone, outside a forward."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from probe.formats import FORMATS, Format
from probe.models.linear import linear_key, linear_layers
from probe.models.mamba_blocks import mamba_blocks
from probe.numerics.corners import corner_values
from probe.running.calibration import Calibration, amax_lookup
from probe.running.modes import Mode, find_mode
from probe.running.recipes import Recipe, SiteGrid, gridded_sites, site_grid


@dataclass(frozen=True, eq=False)
class CornerAnswer:
    """What one site made of one tensor of corner values."""

    site: str  # backbone.layers.0.mixer.conv1d.output
    grid: SiteGrid
    given: Tensor
    answer: Tensor
    width: int  # channels of the site
    part: int  # which tensor of its corner values was given


@torch.no_grad()
def corner_answers(twin: nn.Module, recipe: Recipe, calibration: Calibration | None) -> list[CornerAnswer]:
    """In model order, of the sites of Mamba mixers, or the inputs of linears, that the recipe puts on a grid.

    A site is asked several times where its format has several tensors of corner values.
    """
    mode = find_mode(recipe.mode)
    if recipe.format is None:
        return []
    format = FORMATS[recipe.format]
    sites = _mixer_sites if mode.kind == "ssm" else _linear_inputs if mode.kind == "linear" and mode.inputs else None
    answers = []
    for name, grid, module, width, device in sites(twin, mode, format, calibration) if sites else ():
        values = corner_values(format, width, amax=grid.amax, per_sequence=grid.per_sequence)
        for part, given in enumerate(values):
            answer: Tensor = module.forward(given.to(device, copy=True))  # not module(), which would run its hooks
            answers.append(CornerAnswer(name, grid, given, answer.cpu(), width, part))
    return answers


_Site = tuple[str, SiteGrid, nn.Module, int, torch.device]


def _mixer_sites(twin: nn.Module, mode: Mode, format: Format, calibration: Calibration | None) -> Iterator[_Site]:
    for block in mamba_blocks(twin):
        mixer, name = block.sites, block.mixer_name
        amax = amax_lookup(calibration, f"{name}.")
        for site in gridded_sites(mode, format, mixer.layout, name):
            grid = site_grid(format, site, amax)
            yield f"{name}.{site}", grid, mixer.site(site), mixer.width(site), mixer.D.device


def _linear_inputs(twin: nn.Module, mode: Mode, format: Format, calibration: Calibration | None) -> Iterator[_Site]:
    for name, layer in linear_layers(twin).items():
        for site in layer.inputs if layer.has_sites else ():
            grid, place = SiteGrid(format, linear_amax(calibration, format, name, site)), layer.module
            device = place.get_parameter(layer.weights[0]).device
            yield f"{name}.{site}", grid, place.get_submodule(site), layer.width(site), device


def linear_amax(calibration: Calibration | None, format: Format, name: str, site: str = "input") -> float | None:
    """The calibrated amax of an input of a linear layer; None where the format takes its scales from the tensor."""
    is_calibrated = calibration is not None and format.needs_calibration
    return calibration.amax_of(linear_key(name, site)) if calibration is not None and is_calibrated else None
