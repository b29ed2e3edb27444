"""The plan of an analysis: which modules each plot needs, and which tensors of a module are measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import nn

from probe.activations.settings import (
    LAYERS,
    LINEAR,
    DistributionSettings,
    HeatmapSettings,
    PercentileSettings,
    Settings,
)
from probe.activations.statistics import KINDS, Kind
from probe.models.layers import blocks_of, select
from probe.models.linear import convolution_rows, linear_layers, stores_inputs_first

#: The most layers with percentile bands, each of which needs a table of 641 counts per channel.
MOST_BANDS = 12
#: What the default patterns stand for in a model with other names.
USUAL: dict[tuple[str, ...], Callable[[nn.Module], list[str]]] = {
    (LINEAR,): lambda model: [name for name, layer in linear_layers(model).items() if not layer.is_convolution],
    (LAYERS,): blocks_of,
}
Side = Literal["input", "output"]
SIDES: tuple[Side, Side] = ("input", "output")


@dataclass(frozen=True)
class Plan:
    """Modules by plot, in the order of the model. `bands` has at most MOST_BANDS of its modules, evenly spaced."""

    magnitude: dict[Kind, tuple[str, ...]]
    distribution: tuple[Side, tuple[str, ...]]
    outliers: tuple[str, ...]
    heat: tuple[Side, tuple[str, ...]]
    bands: tuple[Side, tuple[str, ...]]
    bands_of: int
    """How many layers match the pattern of the bands."""
    order: tuple[str, ...]
    """All modules of the model."""
    notes: tuple[str, ...] = ()

    def measured(self, kind: Kind) -> tuple[str, ...]:
        """The modules of which statistics of this kind are gathered."""
        wanted = {*self.magnitude.get(kind, ()), *(self.outliers if kind == "output" else ())}
        for side, names in (self.distribution, self.heat):  # the statistics decide which heat maps are drawn
            wanted |= set(names if side == kind else ())
        return self._in_order(wanted)

    def hooked(self) -> tuple[str, ...]:
        """The modules that get a hook."""
        return self._in_order({*self.measured("input"), *self.measured("output"), *self.bands[1]})

    def _in_order(self, names: set[str]) -> tuple[str, ...]:
        return tuple(name for name in self.order if name in names)


def make_plan(model: nn.Module, settings: Settings, *, model_name: str) -> Plan:
    """The plan for all enabled plots; a pattern that matches nothing is an error that shows the nearest names."""
    visualization, samples = settings.visualization, settings.data.num_samples
    enabled, distribution, heat = visualization.enabled, visualization.distribution, visualization.heatmap_3d
    selection = visualization.layer_selection.patterns
    allowed = _matched(model, "layer_selection.patterns", selection, model_name) if selection else None
    notes: dict[str, None] = {}

    def matched(key: str, patterns: Sequence[str], *, wanted: bool) -> tuple[str, ...]:
        """The layers of a section. Those of a default pattern need not be in the selection."""
        if not wanted:
            return ()
        found = _matched(model, key, patterns, model_name)
        left = tuple(name for name in found if allowed is None or name in allowed)
        if left or allowed is None:
            return left
        if tuple(patterns) in USUAL:
            return tuple(allowed)
        notes[
            f"visualization.layer_selection.patterns leaves none of the {len(found)} layers of visualization.{key} "
            f"({found[0]}, ...): all of them are analyzed."
        ] = None
        return tuple(found)

    magnitude = {
        kind: matched("magnitude.patterns", visualization.magnitude.patterns, wanted=True)
        for kind in KINDS
        if getattr(enabled, f"magnitude_{kind}")
    }
    if "weight" in magnitude:
        magnitude["weight"] = _with_weights(model, magnitude["weight"], needed=not selection)
        if not magnitude["weight"]:
            notes["none of the layers of visualization.magnitude has a weight: magnitude_weight is not drawn."] = None
    outliers = enabled.outlier_layer_wise or enabled.outlier_position or enabled.outlier_token
    percentiles = visualization.percentile_range
    bands = matched("percentile_range.patterns", percentiles.patterns, wanted=enabled.percentile_range)
    plan = Plan(
        magnitude,
        (_side(distribution), matched("distribution.patterns", distribution.patterns, wanted=enabled.distribution)),
        matched("outlier.pattern", [visualization.outlier.pattern], wanted=outliers),
        (_side(heat), matched("heatmap_3d.pattern", [heat.pattern], wanted=enabled.heatmap_3d)),
        (_side(percentiles), _evenly(bands, MOST_BANDS)),
        len(bands),
        tuple(name for name, _ in model.named_modules() if name),
        tuple(notes),
    )
    if enabled.heatmap_3d and heat.sample_idx >= samples:
        raise ValueError(
            f"visualization.heatmap_3d.sample_idx is {heat.sample_idx}; data.num_samples is {samples}, so expected 0 "
            f"to {samples - 1}."
        )
    if not plan.hooked() and not plan.measured("weight"):
        raise ValueError("there is nothing to analyze: everything of visualization.enabled is off. Switch some on.")
    return plan


def _side(section: DistributionSettings | HeatmapSettings | PercentileSettings) -> Side:
    return "input" if section.is_input else "output"


def _matched(model: nn.Module, key: str, patterns: Sequence[str], model_name: str) -> list[str]:
    """The modules that match. Where a default pattern names none, the model itself says which are meant."""
    try:
        return list(select(model, patterns, model_name=model_name).values())
    except ValueError as problem:
        usual = USUAL.get(tuple(patterns))
        if usual is not None and (found := usual(model)):
            return found
        raise ValueError(f"visualization.{key}: {problem}") from None


def _with_weights(model: nn.Module, names: Sequence[str], *, needed: bool) -> tuple[str, ...]:
    """Those that have weights; an error if there are none and some are needed."""
    experts = expert_weights(model)
    found = tuple(name for name in names if name in experts or _weight_of(model.get_submodule(name)) is not None)
    if needed and not found:
        raise ValueError(
            f"visualization.enabled.magnitude_weight: none of the {len(names)} layers of visualization.magnitude."
            f"patterns ({names[0]}, ...) has a weight. Name linear layers, or switch it off."
        )
    return found


def _weight_of(module: nn.Module) -> torch.Tensor | None:
    """The module's own weight, if it is a float tensor."""
    weight = cast(object, getattr(module, "weight", None))
    return weight if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.dim() > 0 else None


def expert_weights(model: nn.Module) -> dict[str, tuple[str, str]]:
    """By each input of experts, `layers.0.mlp.experts.middle`, the module and the parameter that reads it."""
    return {
        f"{name}.{site}": (name, layer.weight_of(site))
        for name, layer in linear_layers(model).items()
        for site in (layer.inputs if layer.is_experts and layer.has_sites else ())
    }


def expert_rows(experts: nn.Module, parameter: str) -> torch.Tensor:
    """A weight of experts as rows of inputs, [expert * out, in]."""
    layer = linear_layers(experts)[""]
    return torch.cat(layer.matrices(experts.get_parameter(parameter).detach()))


def weight_rows(module: nn.Module) -> torch.Tensor | None:
    """The weight as rows of inputs, [out, in * kernel] of every kind of module; a vector is one row.

    Most modules store [out, in, ...]. Conv1D of transformers (GPT-2) stores [in, out], transposed convolutions
    [in, out / groups, ...].
    """
    weight = _weight_of(module)
    if weight is None or weight.dim() < 2:
        return None if weight is None else weight[None]
    if stores_inputs_first(module):
        return weight.T
    return convolution_rows(module, weight)


def _evenly(names: tuple[str, ...], most: int) -> tuple[str, ...]:
    """At most `most` of the names, evenly spaced, with the first and the last."""
    if len(names) <= most:
        return names
    return tuple(names[round(i * (len(names) - 1) / (most - 1))] for i in range(most))
