"""Corner values: inputs that text seldom or never produces, to ask every grid of a model what it makes of them.

Ties, both ends of the grid and what lies beyond, subnormals and half of the smallest, blocks of unlike size side by
side. A fault that shows only there moves no figure of a layer until the day it does.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from probe.calibration import Calibration
from probe.formats import Format
from probe.linear_steps import grid_step
from probe.mamba_steps import Block, site_grid
from probe.models.mamba import SITES, SiteMixer, mamba_blocks
from probe.modes import Recipe, find_mode
from probe.plain_grids import PlainGrid
from probe.signatures import Step, explain


def wrong_corners(twin: nn.Module, recipe: Recipe, calibration: Calibration | None) -> dict[str, str]:
    """Sites of a quantized Mamba whose grid is not the one of the recipe: module name -> how it looks."""
    found = {}
    for name, block in mamba_blocks(twin):
        for step in corner_steps(f"{name}.mixer", block, recipe, calibration):
            said = explain(step)
            if said:
                found[f"{name}.mixer.{step.name.removeprefix('site ')}"] = said
    return found


@torch.no_grad()
def corner_steps(mixer_name: str, block: nn.Module, recipe: Recipe, calibration: Calibration | None) -> Iterator[Step]:
    """Every site of a block that has a grid, given corner values."""
    mode, mixer = find_mode(recipe.mode), block.mixer
    if mode.kind != "ssm" or not isinstance(mixer, SiteMixer):
        return
    assert recipe.format is not None

    def amax(site: str) -> float | None:
        return None if calibration is None else calibration.amax_of(f"{mixer_name}.{site}")

    asked = Block({}, block, block, mode, recipe.format, amax)
    for site in SITES:
        grid = None if site == "scan.state" else site_grid(asked, site)
        if grid is not None:
            given = corner_values(grid, _width(mixer, site))
            yield grid_step(f"site {site}", grid, given, mixer.site(site).forward(given.clone()))


def _width(mixer: SiteMixer, site: str) -> int:
    parts = mixer.time_step_rank + 2 * mixer.state_size
    hidden, inner = mixer.in_proj.weight.shape[1], mixer.intermediate_size
    return {"in_proj.input": hidden, "in_proj.output": 2 * inner, "x_proj.output": parts}.get(site, inner)


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
