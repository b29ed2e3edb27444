"""Was the recipe applied? Judged from values alone: every tensor that a mode puts on a grid must look like it.

The check does not know the scale, so that a wrong scale is drift and only a missing grid is "not applied":

    block floats, mxint8   the scale is a power of two, so no element has more significant bits than the format
    int8                   at most 2^8 different values in a tensor (of conv1d.input in mode 3: in a sequence)
    nvfp4                  at most 8 different magnitudes in a block of 16
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from probe.formats import FORMATS
from probe.models.linear import LinearLayer, linear_layers
from probe.models.mamba import Layout, SiteMixer
from probe.running.modes import find_mode
from probe.running.recipes import SHARED_SCALE, Recipe, gridded_sites, gridded_weights, kept_sites

#: How many elements of each tensor are checked: enough to tell 256 values from all different ones.
CHECKED = 4096
#: A tensor is off its grid when more than this share of the checked elements is.
STRAY = 0.5


def significant_bits(format: str) -> int:
    """Bits of the significand, the leading one included; of integers, those of the largest magnitude."""
    fmt = FORMATS[format]
    return fmt.bits - 1 if fmt.is_integer else fmt.mantissa_bits + 1


def off_grid(x: Tensor, format: str) -> float:
    """Share of the elements of `x` [..., last axis] that cannot lie on a grid of the format."""
    fmt = FORMATS[format]
    x = x.detach().float().cpu()
    if fmt.scale == "float32":
        few = x.reshape(-1)[:CHECKED]
        different: int = torch.unique(few).numel()
        levels = 1 << fmt.bits
        return float(max(0, different - levels)) / max(1, few.numel() - levels)
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    rows = rows[: max(1, CHECKED // rows.shape[1])]
    if fmt.scale == "e4m3":
        size = fmt.block_size or 1
        blocks = [block.abs() for block in torch.split(rows, size, dim=-1) if block.shape[-1] == size]
        if not blocks:
            return 0.0
        ordered = torch.cat(blocks).sort(dim=-1).values
        kinds = 1 + (ordered.diff(dim=-1) > 1e-6 * ordered[:, 1:]).sum(-1)
        return float((kinds > 8).float().mean())
    mantissa = torch.frexp(rows).mantissa * 2.0 ** significant_bits(format)
    return float((mantissa != mantissa.round()).float().mean())


def expected_on_grid(recipe: Recipe, layout: Layout, mixer: str = "") -> tuple[str, ...]:
    """The sites of a Mamba mixer whose values lie on a grid in every forward: one of their own or that of their source.

    The state leaves a mixer only into a cache. With the name of a mixer, without what the mode keeps float there.
    Blocks are judged at their source where those of the site are others.
    """
    mode = find_mode(recipe.mode)
    if mode.kind != "ssm" or recipe.format is None:
        return ()
    grids = {*gridded_sites(mode, FORMATS[recipe.format], layout, mixer)} - {"scan.state"}
    kept = kept_sites(mode, layout, mixer) if mixer else []
    source = {**SHARED_SCALE, "conv1d.input": "" if layout.interleaves else SHARED_SCALE["conv1d.input"]}
    return tuple(site for site in layout.sites if site not in kept and (site in grids or source.get(site) in grids))


@contextmanager
def watching(twin: nn.Module, recipe: Recipe) -> Iterator[dict[str, str]]:
    """Check the weights at once and the sites while the block runs: name -> why it is not on its grid."""
    found: dict[str, str] = {}
    mode = find_mode(recipe.mode)
    if recipe.format is None or mode.kind == "user":
        yield found
        return
    format = recipe.format
    with ExitStack() as hooks:
        checked: set[str] = set()

        def check(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
            if name not in checked:  # the first call is enough
                checked.add(name)
                _note(found, name, output[:1], format)

        def watch(name: str, module: nn.Module) -> None:
            hooks.callback(module.register_forward_hook(partial(check, name)).remove)

        for name, module in twin.named_modules():
            if isinstance(module, SiteMixer) and mode.kind == "ssm":
                parameters = dict(module.named_parameters())
                for weight in gridded_weights(mode, module.layout, name):
                    if weight in parameters:
                        _note(found, f"{name}.{weight}", parameters[weight], format)
                for site in expected_on_grid(recipe, module.layout, name):
                    watch(f"{name}.{site}", module.site(site))
        for name, layer in linear_layers(twin).items() if mode.kind == "linear" else ():
            if layer.has_sites:
                for parameter in layer.weights:
                    _note_matrices(found, f"{name}.{parameter}", layer, parameter, format)
                for site in layer.inputs if mode.inputs else ():
                    watch(f"{name}.{site}", layer.module.get_submodule(site))
        yield found


def _note(found: dict[str, str], name: str, x: Tensor, format: str) -> None:
    share = off_grid(x, format)
    if share > STRAY:
        found[name] = f"{name} is not on a grid of {format} ({share:.0%} of the checked values)"


def _note_matrices(found: dict[str, str], name: str, layer: LinearLayer, parameter: str, format: str) -> None:
    """As _note, for a weight of a linear layer: every expert is a tensor of its own."""
    matrices = layer.matrices(layer.module.get_parameter(parameter))
    for expert, matrix in enumerate(matrices):
        _note(found, f"{name}[{expert}]" if len(matrices) > 1 else name, matrix, format)


def rounding_bound(recipe: Recipe, change: float) -> float:
    """The mse below which the layer cannot have been rounded; `change` is the mean square of output - input.

        bound = 0.01 * 2^(-2 p) / 12 * change,      p = significant bits

    A value with p bits has a relative error of up to 2^-p, evenly spread: 2^(-2p) / 12 in the mean square at the
    least. One such rounding on the way through the layer gives more than this; 0.01 is a margin.
    """
    mode = find_mode(recipe.mode)
    if mode.kind == "user" or mode.is_reference:
        return 0.0
    of_dtype = 1 - round(math.log2(torch.finfo(mode.dtype).eps))
    p = of_dtype if recipe.format is None else significant_bits(recipe.format)
    return 0.01 * math.ldexp(change, -2 * p) / 12
