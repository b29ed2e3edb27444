"""A recipe: a mode with a format, and how it turns the float model into its quantized copy."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from probe.formats import FORMATS, GATE_FORMATS, Format
from probe.models.linear import grid_linears
from probe.models.loading import Loaded, weight_fingerprint
from probe.models.mamba import Layout, SiteMixer
from probe.models.mamba_blocks import MambaBlock, is_mamba, mamba_blocks, rotated_twin, why_not, with_sites
from probe.models.offload import is_offloaded
from probe.numerics.grids import activation_grid, sequence_grid, weight_on_grid
from probe.running.calibration import Amax, Calibration, amax_lookup
from probe.running.kept_float import check_kept, keeps, put_back, set_aside
from probe.running.modes import Mode, expand_modes, find_mode
from probe.words import look_up

#: Quamba's CUDA kernels round these integers half away from zero, all others half to even.
HALF_AWAY = ("conv1d.output", "out_proj.input")
#: Sites that have the scale of another one; scan.u is calibrated with the largest value of conv1d.output too.
SHARED_SCALE = {
    "conv1d.input": "in_proj.output",
    "x_proj.input": "conv1d.output",
    "scan.u": "conv1d.output",
    "scan.BC": "conv1d.output",
}


@dataclass(frozen=True)
class Recipe:
    """A mode and, if it quantizes, a format: everything that turns the float model into the quantized one."""

    mode: str
    format: str | None = None

    def __post_init__(self) -> None:
        row = find_mode(self.mode)
        object.__setattr__(self, "mode", row.name)
        if row.is_quantized and self.format is None:
            raise ValueError(f"mode {row.name} quantizes and needs a format. Known: {', '.join(FORMATS)}.")
        if not row.is_quantized and self.format is not None:
            raise ValueError(f"mode {row.name} is a float mode and takes no format, but {self.format} was given.")
        if self.format is not None:
            look_up("format", self.format, FORMATS, see="List them with: probe formats")

    @property
    def needs_calibration(self) -> bool:
        """Whether it has static scales; modes of users may look at a calibration as well."""
        static = self.format is not None and FORMATS[self.format].needs_calibration
        return static or find_mode(self.mode).kind == "user"

    def __str__(self) -> str:
        row = find_mode(self.mode)
        return row.id if self.format is None else f"{row.id}-{self.format}"


def recipes_of(modes: Sequence[str], formats: Sequence[str] | None) -> list[Recipe]:
    """The cross product: float modes once, every other mode with every format; every name is checked."""
    for format in formats or ():
        look_up("format", format, FORMATS)
    recipes = [
        Recipe(mode.name, format)
        for mode in expand_modes(list(modes))
        for format in ((formats or mode.formats or GATE_FORMATS) if mode.is_quantized else (None,))
    ]
    return list(dict.fromkeys(recipes))


def check_recipes(loaded: Loaded, recipes: Sequence[Recipe]) -> None:
    """Refuse, before anything runs, a recipe that cannot work on the model."""
    blocks = list(mamba_blocks(loaded.model))
    for recipe in recipes:
        mode = find_mode(recipe.mode)
        if mode.kind == "ssm" and not blocks:
            raise ValueError(
                f"{recipe} quantizes Mamba blocks and {loaded.name} has none ({why_not(loaded.model)}). "
                "Modes for other models: fp16, bf16, linear_w, linear_wa."
            )
        if mode.kind == "ssm":
            _check_widths(blocks, recipe)
        if mode.formats and recipe.format not in mode.formats:
            formats = ", ".join(mode.formats)
            raise ValueError(
                f"{recipe}: {mode.library or mode.name}'s modes take the format {formats} only. "
                f"Leave the format out, or give {formats}."
            )
        check_kept(loaded.model, mode, model_name=loaded.name)


def _check_widths(blocks: Sequence[MambaBlock], recipe: Recipe) -> None:
    """Refuse a format with a block that would reach from x into B, where both pass through conv1d."""
    size = FORMATS[str(recipe.format)].block_size
    for block in blocks:
        width = cast(int, block.mixer.intermediate_size)
        if size and block.layout.convolves_all and width % size:
            raise ValueError(
                f"{recipe}: x of {block.mixer_name} has {width} channels, no multiple of {size}, so that a block of "
                "conv1d.output would reach from x into B. Use the format int8, or the modes linear_w or linear_wa."
            )


def apply(model: nn.Module, recipe: Recipe, calibration: Calibration | None = None) -> nn.Module:
    """A copy of the float `model` under the recipe, ready to run; the model itself is not touched."""
    mode = find_mode(recipe.mode)
    if is_offloaded(model):
        raise ValueError(
            f"{type(model).__name__} is offloaded, and a recipe changes weights in memory. "
            "Bring them in first: probe.models.offload.brought_in(model)."
        )
    if calibration is not None and calibration.model != weight_fingerprint(model):
        raise ValueError(
            f"the calibration belongs to a model with fingerprint {calibration.model}, this one has "
            f"{weight_fingerprint(model)}: the weights changed or it is another model. Use probe.calibrate_on again."
        )
    if mode.kind == "float":
        return _float_twin(model).to(mode.dtype)
    assert recipe.format is not None
    check_kept(model, mode, model_name=type(model).__name__)
    if mode.kind == "ssm":
        _check_widths(list(mamba_blocks(model)), recipe)
        return _ssm(model, mode, recipe.format, calibration)
    twin = _float_twin(model)
    aside = set_aside(twin, mode) if mode.base else {}  # a user's own mode does it by itself
    if mode.kind == "user":
        assert mode.build is not None
        built = mode.build(twin, recipe.format, calibration)
        if not isinstance(built, nn.Module):
            raise ValueError(
                f"mode {mode.name!r} returned a {type(built).__name__}, expected the quantized torch.nn.Module. "
                "Return the model from the function given to register_mode."
            )
        twin = built.eval()
    else:
        twin = grid_linears(twin, recipe.format, amax_lookup(calibration), inputs=mode.inputs)
    put_back(twin, aside, mode)
    return twin


def _float_twin(model: nn.Module) -> nn.Module:
    """A float copy: the reference itself, and what every mode but the SSM ones starts from.

    A mode that does nothing to it gives the very bits of the reference, so `check_applied` notices.
    """
    return with_sites(model) if is_mamba(model) else copy.deepcopy(model).eval()


def _ssm(model: nn.Module, mode: Mode, format: str, calibration: Calibration | None) -> nn.Module:
    left = float_blocks(model, mode)
    twin = rotated_twin(model, scan=mode.scan, unrotated=left)
    for block in mamba_blocks(twin):
        if block.name not in left:
            name = block.mixer_name
            _put_weights_on_grid(block.sites, mode, format, name)
            _put_sites_on_grid(block.sites, mode, format, name, amax_lookup(calibration, f"{name}."))
    return twin


def float_blocks(model: nn.Module, mode: Mode) -> list[str]:
    """The names of the Mamba blocks that an SSM mode leaves as they are in the reference."""
    kept = keeps(mode)
    return [block.name for block in mamba_blocks(model) if kept(block.mixer_name)]


@torch.no_grad()
def _put_weights_on_grid(mixer: SiteMixer, mode: Mode, format: str, name: str) -> None:
    tensors = dict(mixer.named_parameters())
    for weight in gridded_weights(mode, mixer.layout, name):
        if weight in tensors:  # a convolution may have no bias
            tensors[weight].copy_(weight_on_grid(tensors[weight], format))


@dataclass(frozen=True)
class SiteGrid:
    """The grid that a recipe puts at a site. `amax` is calibrated; None: the scale is taken from the tensor."""

    format: Format
    amax: float | None
    per_sequence: bool = False
    rounding: str = "half_even"


def gridded_weights(mode: Mode, layout: Layout, mixer: str = "") -> list[str]:
    """The weights of the mixer of that name which an SSM mode puts on a grid; without a name, of any mixer."""
    kept = keeps(mode)
    return [weight for weight in layout.weights if not kept(f"{mixer}.{weight.rpartition('.')[0] or weight}")]


def kept_sites(mode: Mode, layout: Layout, mixer: str) -> list[str]:
    """The sites of the mixer of that name which the mode keeps float."""
    kept = keeps(mode)
    return [site for site in layout.sites if kept(f"{mixer}.sites.{site}")]


def gridded_sites(mode: Mode, format: Format, layout: Layout, mixer: str = "") -> list[str]:
    """The sites at which an SSM mode puts a grid; at all others values flow on as they are.

    With the name of a mixer, without those that the mode keeps float there.
    """
    absent = {
        "conv1d.input": mode.conv_input == "static",
        "conv1d.output": mode.conv_gives == "float",
        "x_proj.input": mode.conv_gives != "float",  # on the grid already
        "scan.BC": mode.conv_gives != "float",
        "scan.u": mode.scan_reads == "float",
        "scan.y": True,
        "scan.state": format.scale != "float32",  # what decode carries on; MX formats leave it float
        "norm.output": True,  # out_proj.input is the same, rotated
    }
    kept = kept_sites(mode, layout, mixer) if mixer else []
    return [site for site in layout.sites if not absent.get(site, False) and site not in kept]


def site_grid(format: Format, site: str, amax: Amax) -> SiteGrid:
    """The grid of a site that has one."""
    source = SHARED_SCALE.get(site, site)
    away = source in HALF_AWAY and format.scale == "float32"
    calibrated = amax(source) if format.needs_calibration else None
    return SiteGrid(format, calibrated, site == "conv1d.input", "half_away" if away else "half_even")


def as_it_is(x: Tensor) -> Tensor:
    """The grid of a site that stays float though values are rounded before it: conv1d.input of mode 3."""
    return x


def _put_sites_on_grid(mixer: SiteMixer, mode: Mode, format: str, name: str, amax: Amax) -> None:
    for site in kept_sites(mode, mixer.layout, name):
        if site in gridded_sites(mode, FORMATS[format], mixer.layout):
            mixer.site(site).grid = as_it_is
    for site in gridded_sites(mode, FORMATS[format], mixer.layout, name):
        grid = site_grid(FORMATS[format], site, amax)
        by_codes = site == "conv1d.output" and mode.conv_gives == "codes"
        mixer.site(site).grid = (
            sequence_grid(format, grid.amax)
            if grid.per_sequence
            else activation_grid(format, grid.amax, rounding=grid.rounding, by_codes=by_codes)
        )
