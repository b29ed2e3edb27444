"""Corner values: inputs that text seldom or never produces, to ask every grid of a model what it makes of them.

Ties, both ends of the grid and what lies beyond, subnormals and half of the smallest, blocks of unlike size side by
side. A fault that shows only there moves no figure of a layer until the day it does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from probe.diagnosis.linear_steps import grid_step
from probe.diagnosis.mamba_steps import Block, site_grid
from probe.diagnosis.plain_grids import PlainGrid
from probe.diagnosis.signatures import explain
from probe.formats import FORMATS, Format
from probe.models.linear import NEVER_CALLED, GridLinear, linear_key
from probe.models.mamba import SITES, SiteMixer, mamba_blocks
from probe.running.calibration import Calibration
from probe.running.modes import find_mode
from probe.running.recipes import Recipe


@dataclass(frozen=True)
class Asked:
    """A site that the recipe puts on a grid, and the width of what flows through it."""

    name: str  # of the module: backbone.layers.0.mixer.conv1d.output
    grid: PlainGrid
    module: nn.Module
    width: int
    device: torch.device


def wrong_corners(twin: nn.Module, recipe: Recipe, calibration: Calibration | None) -> dict[str, str]:
    """Sites whose grid is not the one of the recipe: name -> how it looks."""
    found = {}
    for asked in asked_sites(twin, recipe, calibration):
        given = corner_values(asked.grid, asked.width)
        said = explain(grid_step(asked.name, asked.grid, given, _answer(asked, given)))
        if said:
            found[asked.name] = said
    return found


def corner_answers(twin: nn.Module, recipe: Recipe, calibration: Calibration | None) -> dict[str, Tensor]:
    """What every site makes of its corner values, over their rms: the same on every machine."""
    answers = {}
    for asked in asked_sites(twin, recipe, calibration):
        given = corner_values(asked.grid, asked.width)
        answers[asked.name] = _answer(asked, given).double() / given.double().square().mean().sqrt()
    return answers


@torch.no_grad()
def _answer(asked: Asked, given: Tensor) -> Tensor:
    made: Tensor = asked.module.forward(given.to(asked.device, copy=True))  # past the hooks: the model does not run
    return made.cpu()


def asked_sites(twin: nn.Module, recipe: Recipe, calibration: Calibration | None) -> Iterator[Asked]:
    """The sites of Mamba mixers, or the inputs of linears, that this recipe puts on a grid."""
    mode = find_mode(recipe.mode)
    if recipe.format is None or mode.kind not in ("ssm", "linear"):
        return
    for name, block in mamba_blocks(twin) if mode.kind == "ssm" else ():
        mixer = block.mixer
        assert isinstance(mixer, SiteMixer)
        context = Block({}, block, block, mode, recipe.format, _amax(calibration, f"{name}.mixer."))
        for site in SITES:
            grid = site_grid(context, site)
            if grid is not None:
                yield Asked(f"{name}.mixer.{site}", grid, mixer.site(site), _width(mixer, site), mixer.D.device)
    fmt = FORMATS[recipe.format]
    for name, module in twin.named_modules():
        if mode.inputs and isinstance(module, GridLinear) and not name.endswith(NEVER_CALLED):
            key = linear_key(name)
            amax = calibration.amax_of(key) if calibration and fmt.needs_calibration else None
            weight = module.weight
            yield Asked(f"{name}.input", PlainGrid(fmt, amax), module.input, weight.shape[1], weight.device)


def _amax(calibration: Calibration | None, prefix: str) -> Callable[[str], float | None]:
    return lambda site: None if calibration is None else calibration.amax_of(f"{prefix}{site}")


def _width(mixer: SiteMixer, site: str) -> int:
    parts = mixer.time_step_rank + 2 * mixer.state_size
    hidden, inner = mixer.in_proj.weight.shape[1], mixer.intermediate_size
    widths = {"in_proj.input": hidden, "in_proj.output": 2 * inner, "x_proj.output": parts}
    return {**widths, "scan.state": mixer.state_size}.get(site, inner)


@lru_cache(maxsize=512)
def corner_values(grid: PlainGrid, width: int) -> Tensor:
    """Corner values of a grid as an activation [1, token, channel]."""
    fmt = grid.format
    elements = _integer_corners(fmt) if fmt.scale == "float32" else _block_corners(fmt)
    if grid.per_sequence:
        elements = elements.clamp(-fmt.max, fmt.max)
        return _rows(elements, width).unsqueeze(0) / 8
    if fmt.scale == "float32":
        assert grid.amax is not None
        scale = (torch.tensor(grid.amax).double() / fmt.max).float()
        return (_rows(elements, width) * scale).unsqueeze(0)
    rows = _rows(elements, width)
    size = fmt.block_size or width
    starts = torch.arange(0, width, size)
    rows[:, starts] = fmt.max  # so that the scale of every block is known
    rows[::2, starts] = 2.0 ** (fmt.max_exponent + 1) * (1 - 2.0**-10)  # what follows may saturate
    exponents = torch.arange(rows.shape[0]).remainder(5) - 2
    scale = torch.ldexp(torch.ones(rows.shape[0], 1), exponents[:, None])
    if fmt.scale == "e4m3":
        assert grid.amax is not None
        scale = scale * grid.amax / 64
    return (rows * scale).unsqueeze(0)


def _integer_corners(fmt: Format) -> Tensor:
    top = int(fmt.max)
    codes = torch.arange(-top - 4, top + 5).float()
    beside = torch.cat([codes + 0.49, codes - 0.49, codes])
    return torch.cat([torch.tensor([0.5, -0.5, 0.0, 1e3, -1e3, top + 1e4]), beside])


def _block_corners(fmt: Format) -> Tensor:
    """Every value of the element, the ties between them and what lies just beside, both signs."""
    codes = range(1 << (fmt.bits - 1))
    levels = torch.tensor(sorted({abs(fmt.decode(code)) for code in codes if abs(fmt.decode(code)) <= fmt.max}))
    ties = (levels[1:] + levels[:-1]) / 2
    beyond = torch.tensor([fmt.max * (1 + 2.0**-8), 2.0 ** (fmt.max_exponent + 1) * (1 - 2.0**-9)])
    positive = torch.cat([levels, ties, ties * (1 + 2.0**-12), ties * (1 - 2.0**-12), beyond])
    return torch.cat([positive, -positive]).float()


def _rows(values: Tensor, width: int) -> Tensor:
    """The values over rows of this width, repeated to fill them; each row starts elsewhere among them."""
    count = max(4, -(-values.numel() // width))
    return torch.stack([values.roll(-row * width).repeat(-(-width // values.numel()))[:width] for row in range(count)])
