"""A recipe: a mode with a format, and how it turns the float model into its quantized copy."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from probe.formats import FORMATS, GATE_FORMATS, Format
from probe.models.linear import check_included, linear_layers, linear_weights
from probe.models.linear_grids import grid_linears
from probe.models.loading import Loaded, weight_fingerprint
from probe.models.mamba import Layout, SiteMixer
from probe.models.mamba_blocks import MambaBlock, is_mamba, mamba_blocks, rotated_twin, why_not, with_sites
from probe.models.offload import device_of, is_offloaded
from probe.models.quantized_checkpoints import check_source, load_quantized
from probe.numerics.grids import activation_grid, sequence_grid, weight_on_grid
from probe.running.calibration import Amax, Calibration, amax_lookup
from probe.running.kept_float import check_kept, keeps, put_back, set_aside
from probe.running.modes import Mode, expand_modes, find_mode
from probe.words import INCLUDABLE, look_up

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
    """A mode and, if it takes one, a format: everything that turns the float model into the quantized one."""

    mode: str
    format: str | None = None
    include: tuple[str, ...] = field(default=(), kw_only=True)
    """Of a linear mode, the parts of INCLUDABLE that are on the grid too."""

    def __post_init__(self) -> None:
        row = find_mode(self.mode)
        object.__setattr__(self, "mode", row.name)
        object.__setattr__(self, "include", checked_include(self.include, [row]))
        if row.takes_format and self.format is None:
            raise ValueError(f"mode {row.name} quantizes and needs a format. Known: {', '.join(FORMATS)}.")
        if not row.takes_format and self.format is not None:
            kind = "quantized already" if row.source else "a float mode"
            raise ValueError(f"mode {row.name} is {kind} and takes no format, but {self.format} was given.")
        if self.format is not None:
            look_up("format", self.format, FORMATS, see="List them with: probe formats")

    @property
    def needs_calibration(self) -> bool:
        """Whether it has static scales; modes of users may look at a calibration as well."""
        static = self.format is not None and FORMATS[self.format].needs_calibration
        row = find_mode(self.mode)
        return static or (row.kind == "user" and not row.source)

    def __str__(self) -> str:
        row = find_mode(self.mode)
        return row.id if self.format is None else f"{row.id}-{self.format}"


def checked_include(include: Sequence[str], modes: Sequence[Mode]) -> tuple[str, ...]:
    """The names in the order of INCLUDABLE, each once; refused if one is unknown, or if none of the modes takes it."""
    for part in include:
        look_up("part for include", part, dict.fromkeys(INCLUDABLE))
    if include and all(mode.kind != "linear" for mode in modes):
        raise ValueError(
            f"include is {', '.join(include)}, and none of the modes {', '.join(mode.name for mode in modes)} takes "
            "it: it is for linear_w, linear_wa and modes based on them. Leave it out, or add one of these."
        )
    return tuple(part for part in INCLUDABLE if part in include)


def recipe_of(mode: str, format: str | None, include: Sequence[str]) -> Recipe:
    """A recipe; what the linear modes include is nothing to the others."""
    return Recipe(mode, format, include=tuple(include) if find_mode(mode).kind == "linear" else ())


def recipes_of(modes: Sequence[str], formats: Sequence[str] | None, include: Sequence[str] = ()) -> list[Recipe]:
    """The cross product: modes that take no format once, all others with every format; every name is checked."""
    for format in formats or ():
        look_up("format", format, FORMATS)
    rows = expand_modes(list(modes))
    checked_include(include, rows or [find_mode("linear_w")])
    recipes = [
        recipe_of(mode.name, format, include)
        for mode in rows
        for format in ((formats or mode.formats or GATE_FORMATS) if mode.takes_format else (None,))
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
        if mode.source:
            check_source(mode.source)
        if mode.kind == "ssm":
            _check_widths(blocks, recipe)
        if mode.formats and recipe.format not in mode.formats:
            formats = ", ".join(mode.formats)
            raise ValueError(
                f"{recipe}: {mode.library or mode.name}'s modes take the format {formats} only. "
                f"Leave the format out, or give {formats}."
            )
        check_kept(loaded.model, mode, model_name=loaded.name)
        check_included(loaded.model, recipe.include, model_name=loaded.name)


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
    """A copy of the float `model` under the recipe, ready to run; the model itself is not touched.

    The copy of a checkpoint mode is the checkpoint, on the device of the model.
    """
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
    check_kept(model, mode, model_name=type(model).__name__)
    if mode.source:
        return load_quantized(mode.source, model).to(device_of(model))
    assert recipe.format is not None
    if mode.kind == "ssm":
        _check_widths(list(mamba_blocks(model)), recipe)
        return _ssm(model, mode, recipe.format, calibration)
    twin = _float_twin(model, replaced=mode.kind == "linear" and not mode.base and not recipe.include)
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
        twin = grid_linears(twin, recipe.format, amax_lookup(calibration), inputs=mode.inputs, include=recipe.include)
    put_back(twin, aside, mode)
    return twin


def _float_twin(model: nn.Module, *, replaced: bool = False) -> nn.Module:
    """A float copy: the reference itself, and what every mode but the SSM ones starts from.

    A mode that does nothing to it gives the very bits of the reference, so `check_applied` notices. With `replaced` the
    weights that `grid_linears` puts others in the place of are not copied first: they are most of the model.
    """
    if is_mamba(model):
        return with_sites(model)
    layers = [layer for layer in linear_layers(model).values() if not layer.is_experts] if replaced else []
    shared = [layer.module.get_parameter(name) for layer in layers for name in layer.weights]
    return copy.deepcopy(model, {id(weight): weight for weight in shared}).eval()


def _ssm(model: nn.Module, mode: Mode, format: str, calibration: Calibration | None) -> nn.Module:
    left = float_blocks(model, mode)
    twin = rotated_twin(model, scan=mode.scan, unrotated=left)
    for block in mamba_blocks(twin):
        if block.name not in left:
            name = block.mixer_name
            _put_weights_on_grid(block.sites, mode, format, name)
            _put_sites_on_grid(block.sites, mode, format, name, amax_lookup(calibration, f"{name}."))
    return twin


def gridded_modules(model: nn.Module, recipe: Recipe, modules: Mapping[str, str]) -> frozenset[str]:
    """The labels of the modules in which a linear mode puts a weight on a grid; `modules` has their names."""
    mode = find_mode(recipe.mode)
    kept = keeps(mode)
    weights = linear_weights(model, recipe.include) if mode.kind == "linear" else ()
    owners = [f"{name.rpartition('.')[0]}." for name in weights if not kept(name.rpartition(".")[0])]
    return frozenset(label for label, name in modules.items() if any(one.startswith(f"{name}.") for one in owners))


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
