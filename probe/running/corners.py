"""Corner values: the results of every site that a recipe puts on a grid, each computed alone, outside a forward."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from probe.formats import FORMATS, Format
from probe.models.linear import NEVER_CALLED, GridLinear, linear_key
from probe.models.mamba import SITES, SiteMixer, mamba_blocks
from probe.numerics.grids import corner_values
from probe.running.calibration import Amax, Calibration, amax_lookup
from probe.running.modes import Mode, find_mode
from probe.running.recipes import HALF_AWAY, Recipe

#: These sites have the scale of conv1d.output, a quantile; scan.u is calibrated with the largest value of it too.
SHARED_SCALE = ("conv1d.output", "x_proj.input", "scan.u")


@dataclass(frozen=True)
class SiteGrid:
    """The grid that a recipe puts at a site. `amax` is calibrated; None: the scale is taken from the tensor."""

    format: Format
    amax: float | None
    per_sequence: bool = False
    rounding: str = "half_even"


@dataclass(frozen=True, eq=False)
class CornerAnswer:
    """What one site made of its corner values."""

    site: str  # backbone.layers.0.mixer.conv1d.output
    grid: SiteGrid
    given: Tensor
    answer: Tensor

    @property
    def relative(self) -> Tensor:
        """The answer in units of the rms of the corner values, in float64."""
        return self.answer.double() / self.given.double().square().mean().sqrt()


@torch.no_grad()
def corner_answers(twin: nn.Module, recipe: Recipe, calibration: Calibration | None) -> dict[str, CornerAnswer]:
    """By site, in model order: the sites of Mamba mixers, or the inputs of linears, that the recipe puts on a grid."""
    mode = find_mode(recipe.mode)
    if recipe.format is None:
        return {}
    format = FORMATS[recipe.format]
    sites = _mixer_sites if mode.kind == "ssm" else _linear_inputs if mode.kind == "linear" and mode.inputs else None
    answers = {}
    for name, grid, module, width, device in sites(twin, mode, format, calibration) if sites else ():
        given = corner_values(format, width, amax=grid.amax, per_sequence=grid.per_sequence)
        answer: Tensor = module.forward(given.to(device, copy=True))  # not module(), which would run its hooks
        answers[name] = CornerAnswer(name, grid, given, answer.cpu())
    return answers


_Site = tuple[str, SiteGrid, nn.Module, int, torch.device]


def _mixer_sites(twin: nn.Module, mode: Mode, format: Format, calibration: Calibration | None) -> Iterator[_Site]:
    for name, block in mamba_blocks(twin):
        mixer = block.mixer
        assert isinstance(mixer, SiteMixer)
        amax = amax_lookup(calibration, f"{name}.mixer.")
        for site in SITES:
            grid = site_grid(mode, format, site, amax)
            if grid is not None:
                yield f"{name}.mixer.{site}", grid, mixer.site(site), _width(mixer, site), mixer.D.device


def _linear_inputs(twin: nn.Module, mode: Mode, format: Format, calibration: Calibration | None) -> Iterator[_Site]:
    for name, module in twin.named_modules():
        if isinstance(module, GridLinear) and not name.endswith(NEVER_CALLED):
            weight, grid = module.weight, SiteGrid(format, linear_amax(calibration, format, name))
            yield f"{name}.input", grid, module.input, weight.shape[1], weight.device


def site_grid(mode: Mode, format: Format, site: str, amax: Amax) -> SiteGrid | None:
    """The grid of a site by the row of its mode; None where values flow on as they are."""
    absent = {
        "conv1d.input": mode.conv_input == "static",
        "conv1d.output": mode.conv_gives == "float",
        "x_proj.input": mode.conv_gives != "float",  # on the grid already
        "scan.u": mode.scan_reads == "float",
        "scan.y": True,
        "scan.state": format.scale != "float32",  # MX formats leave it float
    }
    if absent.get(site, False):
        return None
    source = scale_source(site)
    away = source in HALF_AWAY and format.scale == "float32"
    calibrated = amax(source) if format.needs_calibration else None
    return SiteGrid(format, calibrated, site == "conv1d.input", "half_away" if away else "half_even")


def scale_source(site: str) -> str:
    """The site whose calibration a site uses."""
    return "in_proj.output" if site == "conv1d.input" else "conv1d.output" if site in SHARED_SCALE else site


def linear_amax(calibration: Calibration | None, format: Format, name: str) -> float | None:
    """The calibrated amax of a linear's input; None where the format takes its scales from the tensor."""
    return calibration.amax_of(linear_key(name)) if calibration is not None and format.needs_calibration else None


def _width(mixer: SiteMixer, site: str) -> int:
    parts = mixer.time_step_rank + 2 * mixer.state_size
    hidden, inner = mixer.in_proj.weight.shape[1], mixer.intermediate_size
    widths = {"in_proj.input": hidden, "in_proj.output": 2 * inner, "x_proj.output": parts}
    return {**widths, "scan.state": mixer.state_size}.get(site, inner)
