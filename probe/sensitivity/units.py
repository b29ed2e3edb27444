"""The units that are quantized one at a time, and the models in which just one of them is.

Two twins of the same weights have the same modules by name: one float, one quantized. A unit is a few of those
names, and a mixed model is the one twin with those modules taken from the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from probe.models.layers import select
from probe.models.linear import linear_layers
from probe.models.mamba_blocks import mamba_blocks, rotated_twin
from probe.running.calibration import Calibration
from probe.running.modes import Mode, find_mode
from probe.running.recipes import Recipe, apply, as_it_is, float_blocks, gridded_weights

#: Sites that only decoding reads: a run over whole sequences does not show whether they are quantized.
UNSEEN = ("scan.state",)


@dataclass(frozen=True)
class Unit:
    """Modules or parameters, by name, that are quantized or left float together."""

    name: str
    layer: str | None
    paths: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Twins:
    """The float model, the quantized one, and the float one in whose basis the quantized sites are."""

    plain: nn.Module  # mode fp32: the reference, and every layer that no unit touches
    floating: nn.Module  # where float modules are taken from; the rotated twin for sites of Mamba blocks
    quantized: nn.Module
    is_foreign: bool  # whether a user's mode built the quantized one


def check_quantizes(recipe: Recipe) -> Mode:
    """The mode of a recipe; refused if it is a float one."""
    mode = find_mode(recipe.mode)
    if not mode.is_quantized:
        raise ValueError(
            f"mode {mode.name} is a float mode: no layer of it is on a grid, and layers of two dtypes do not fit "
            "together. Give a mode with a format, such as 2-1 with int8, or linear_wa with fp8_e4m3."
        )
    return mode


def make_twins(model: nn.Module, recipe: Recipe, calibration: Calibration | None, *, sites: bool) -> Twins:
    """Copies of the model under mode fp32 and under the recipe; a mode without a format is refused."""
    mode = check_quantizes(recipe)
    if sites and mode.kind == "user":
        raise ValueError(
            f"mode {mode.name} builds its model by itself, so its sites are not known. Rank layers (without --sites), "
            "or name modules with --layers."
        )
    plain, quantized = apply(model, Recipe("fp32")), apply(model, recipe, calibration)
    floating = plain
    if sites and mode.kind == "ssm":
        floating = rotated_twin(model, scan=mode.scan, unrotated=float_blocks(model, mode))
        _mark_sites(floating, quantized)
    return Twins(plain, floating, quantized, mode.kind == "user")


def _mark_sites(floating: nn.Module, quantized: nn.Module) -> None:
    """Give the float twin a grid that does nothing wherever the quantized one has a grid.

    Otherwise conv1d would read the grid of in_proj.output once its own dynamic grid (mode 3) is exchanged.
    """
    for mine, other in zip(mamba_blocks(floating), mamba_blocks(quantized), strict=True):
        for site in mine.layout.sites:
            if other.sites.site(site).grid is not None:
                mine.sites.site(site).grid = as_it_is


def layer_units(twins: Twins, layers: Sequence[str | int]) -> list[Unit]:
    """A unit for every selected module."""
    chosen = select(twins.plain, layers)
    known = dict(twins.quantized.named_modules())
    missing = [name for name in chosen.values() if name not in known]
    if missing:
        raise ValueError(
            f"the quantized model has no module {missing[0]}, which the float one has, so the two cannot be swapped. "
            "Choose a module around it."
        )
    return [Unit(label, label, (name,)) for label, name in chosen.items()]


def site_units(twins: Twins, recipe: Recipe, layers: Sequence[str | int], *, across: bool) -> list[Unit]:
    """A unit for every site and weight in the selected layers, or, `across`, for each of them in all those layers."""
    chosen = select(twins.plain, layers)
    mode = find_mode(recipe.mode)
    found: list[Unit] = []
    for label, layer in chosen.items():
        inner = _mamba_sites(twins, layer, mode) if mode.kind == "ssm" else _linear_sites(twins, layer)
        found += [Unit(f"{label} {site}", label, (path,)) for site, path in inner.items()]
    if not found:
        raise ValueError(
            f"there is no site in {', '.join(list(chosen)[:3])}. Select whole layers, by index or all: their sites "
            "are found by themselves."
        )
    if not across:
        return found
    by_site: dict[str, list[str]] = {}
    for unit in found:
        by_site.setdefault(unit.name.partition(" ")[2], []).extend(unit.paths)
    return [Unit(site, None, tuple(paths)) for site, paths in by_site.items()]


def _mamba_sites(twins: Twins, layer: str, mode: Mode) -> dict[str, str]:
    """Sites on a grid and weights, by their short name. A convolution or projection goes with its bias."""
    found: dict[str, str] = {}
    for block in mamba_blocks(twins.quantized):
        if not f"{block.name}.".startswith(f"{layer}."):
            continue
        for site in block.layout.sites:
            if block.sites.site(site).grid not in (None, as_it_is) and site not in UNSEEN:
                found[site] = f"{block.mixer_name}.sites.{site}"
        for weight in gridded_weights(mode, block.layout, block.mixer_name):
            module = weight.rpartition(".")[0]
            found.setdefault(f"{module}.weight" if module else weight, f"{block.mixer_name}.{module or weight}")
    return found


def _linear_sites(twins: Twins, layer: str) -> dict[str, str]:
    """Linear layers, each with its weights and its inputs, by their name within the layer."""
    return {
        name.removeprefix(f"{layer}.") if name != layer else name: name
        for name, linear in linear_layers(twins.quantized).items()
        if linear.has_sites and (name == layer or name.startswith(f"{layer}."))
    }


def mixed(base: nn.Module, donor: nn.Module, paths: Sequence[str], *, at: str = "") -> nn.Module:
    """The module `at` of `base` with the modules and parameters `paths` taken from `donor`; nothing is copied.

    `base` itself stays as it is: the result has modules of its own, which share all tensors.
    """
    if at in paths:
        return donor.get_submodule(at)
    result = structure(base.get_submodule(at))
    for path in paths:
        parent, _, child = path.rpartition(".")
        inside = parent[len(at) :].lstrip(".") if at else parent
        place, source = result.get_submodule(inside), donor.get_submodule(parent)
        table = "_modules" if child in source._modules else "_parameters"
        getattr(place, table)[child] = getattr(source, table)[child]
    return result


def structure(module: nn.Module) -> nn.Module:
    """A copy of the modules, not of the tensors: what is done to its modules is done to it alone."""
    result: nn.Module = object.__new__(type(module))  # copy.copy gives the same and is several times slower
    children = {name: child and structure(child) for name, child in module._modules.items()}
    vars(result).update(vars(module) | {"_modules": children, "_parameters": dict(module._parameters)})
    return result


def by_layer(paths: Sequence[str], layers: Sequence[str]) -> Mapping[str, list[str]] | None:
    """The paths of a unit by the layer that they lie in; None if one lies outside of all."""
    found: dict[str, list[str]] = {}
    for path in paths:
        layer = next((layer for layer in layers if path == layer or path.startswith(f"{layer}.")), None)
        if layer is None:
            return None
        found.setdefault(layer, []).append(path)
    return found
