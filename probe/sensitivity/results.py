"""The results of a sensitivity analysis: frozen values that go to JSON and come back."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from probe.files.checked_json import Node
from probe.files.defects import DefectError
from probe.running.declarations import DeclaredMode
from probe.running.weights import Weights

VERSION = 3

#: What a loss is called: the KL where the output has classes, the mse where it has none.
LOSSES = {"kl": "KL", "mse": "mse"}
_PLAIN = ("model", "recipe", "kind", "tokens", "samples", "reference_bits_per_token", "measure")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The output of one run against that of the float model; of predictions of the next token, where there is one.

    None where a figure is not finite, or has no meaning for the output.

    kl               mean over positions of KL(float || run), in nats
    mse              mean squared difference of the output
    top1_agreement   share of positions with the same most likely token
    change_in_bits   bits per token of the text, run minus float
    """

    kl: float | None
    mse: float | None
    top1_agreement: float | None
    change_in_bits: float | None
    finite: bool  # no NaN and no Inf in the output
    identical: bool  # every element has the same bits as that of the float model


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One unit: a layer, a site in one layer, or a site in all layers."""

    name: str
    layer: str | None  # the layer it lies in; None for a site in several
    alone: Figures  # only this unit is quantized
    without: Figures  # all but this unit are quantized


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Which units to keep in higher precision, and the run that checked it.

    The rule: units are ordered twice, by `gain` and by their loss alone; of each order the shortest start with which
    the loss of the quantized model falls to half or less, and of the two the shorter. Whole runs were made of what is
    kept and of one unit fewer (which is not enough), so `loss_kept` is measured.
    """

    keep: tuple[str, ...]
    loss_all: float | None  # everything quantized
    loss_kept: float | None  # everything but `keep` quantized; all units kept, where that does not halve it
    reached: bool  # whether loss_kept <= loss_all / 2; if not, `keep` is empty
    text: str
    declared: DeclaredMode | None = None  # the mode that keeps them float; None where there is nothing to keep


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Every unit of one recipe on one model, in model order."""

    model: str  # fingerprint of the weights
    recipe: str
    kind: str  # layers, sites (one in all layers) or layer sites (one in one layer)
    tokens: int  # 0 where the model reads none
    samples: int
    reference_bits_per_token: float | None
    everything: Figures  # the whole model quantized
    effects: tuple[Effect, ...]
    advice: Advice
    weights: Weights  # how much the recipe puts on a grid
    notes: tuple[str, ...] = ()
    measure: Literal["kl", "mse"] = "kl"  # the figure that is the loss

    def loss(self, figures: Figures) -> float | None:
        """How much worse a run is than the float model."""
        found: float | None = getattr(figures, self.measure)
        return found

    def by_loss(self) -> list[Effect]:
        """The most sensitive first: by the loss of the unit alone; not finite is worst, ties as in the model."""
        return sorted(self.effects, key=lambda effect: _descending(self.loss(effect.alone), missing=-math.inf))

    def by_mse(self) -> list[Effect]:
        """The most sensitive first: by the mse of the unit alone."""
        return sorted(self.effects, key=lambda effect: _descending(effect.alone.mse, missing=-math.inf))

    def gain(self, effect: Effect) -> float | None:
        """The share of the loss of the quantized model that goes when this unit is kept float; below 0 it got worse."""
        whole, left = self.loss(self.everything), self.loss(effect.without)
        return None if whole is None or left is None or whole <= 0 else 1 - left / whole

    def by_gain(self) -> list[Effect]:
        """The largest gain first; those of which it is not known come last."""
        return sorted(self.by_loss(), key=lambda effect: _descending(self.gain(effect), missing=math.inf))

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Ranks by mse, and by KL if there is one, count from 1; they and the gain follow from the rest."""
        orders = {f"rank_{self.measure}": self.by_loss(), "rank_mse": self.by_mse()}
        effects = [
            asdict(one) | {rank: order.index(one) + 1 for rank, order in orders.items()} | {"gain": self.gain(one)}
            for one in self.effects
        ]
        return {"version": VERSION, **asdict(self), "effects": effects}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        version = found.get("version") if isinstance(found, Mapping) else None
        if version != VERSION:
            raise ValueError(
                f"this is not a sensitivity of version {VERSION} (version: {version!r}). "
                "Make it again with: probe sensitivity --json FILE"
            )
        try:
            return cls(
                **{name: found[name] for name in _PLAIN},
                everything=Figures(**found["everything"]),
                effects=tuple(_effect(one) for one in found["effects"]),
                advice=_advice(found["advice"]),
                weights=Weights.from_json(Node("weights", found["weights"])),
                notes=tuple(found["notes"]),
            )
        except (KeyError, TypeError, DefectError) as problem:
            raise ValueError(
                f"the sensitivity cannot be read: {problem}. Make it again with: probe sensitivity --json FILE"
            ) from None


def _advice(found: Mapping[str, Any]) -> Advice:
    declared = found.get("declared")  # absent in older results
    if declared is not None:
        declared = DeclaredMode(declared["base"], tuple(declared["keep_float"]))
    return Advice(**{**found, "keep": tuple(found["keep"]), "declared": declared})


def _effect(found: Mapping[str, Any]) -> Effect:
    sides = {side: Figures(**found[side]) for side in ("alone", "without")}
    return Effect(name=found["name"], layer=found["layer"], **sides)


def _descending(figure: float | None, *, missing: float) -> float:
    """A key that sorts the largest figure first."""
    return missing if figure is None else -figure
