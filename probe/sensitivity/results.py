"""The results of a sensitivity analysis: frozen values that go to JSON and come back."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from probe.files.checked_json import Node
from probe.files.defects import DefectError
from probe.running.declarations import DeclaredMode
from probe.running.weights import Weights

VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The logits of one run against those of the float model, at every position that has a next token.

    None where a figure is not finite.

    kl               mean over positions of KL(float || run), in nats
    mse              mean squared difference of the logits
    top1_agreement   share of positions with the same most likely token
    change_in_bits   bits per token of the text, run minus float
    """

    kl: float | None
    mse: float | None
    top1_agreement: float | None
    change_in_bits: float | None
    finite: bool  # no NaN and no Inf in any logit
    identical: bool  # every logit has the same bits as that of the float model


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

    The rule: units are ordered twice, by `gain` and by their KL alone; of each order the shortest start with which
    the KL of the quantized model falls to half or less, and of the two the shorter. Whole runs were made of what is
    kept and of one unit fewer (which is not enough), so `kl_kept` is measured.
    """

    keep: tuple[str, ...]
    kl_all: float | None  # everything quantized
    kl_kept: float | None  # everything but `keep` quantized; all units kept, where that does not halve it
    reached: bool  # whether kl_kept <= kl_all / 2; if not, `keep` is empty
    text: str
    declared: DeclaredMode | None = None  # the mode that keeps them float; None where there is nothing to keep


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Every unit of one recipe on one model, in model order."""

    model: str  # fingerprint of the weights
    recipe: str
    kind: str  # layers, sites (one in all layers) or layer sites (one in one layer)
    tokens: int
    reference_bits_per_token: float | None
    everything: Figures  # the whole model quantized
    effects: tuple[Effect, ...]
    advice: Advice
    weights: Weights  # how much the recipe puts on a grid
    notes: tuple[str, ...] = ()

    def by_kl(self) -> list[Effect]:
        """The most sensitive first: by the KL of the unit alone; what is not finite is worst, ties as in the model."""
        return sorted(self.effects, key=lambda effect: _descending(effect.alone.kl, missing=-math.inf))

    def by_mse(self) -> list[Effect]:
        """The most sensitive first: by the mse of the logits of the unit alone."""
        return sorted(self.effects, key=lambda effect: _descending(effect.alone.mse, missing=-math.inf))

    def gain(self, effect: Effect) -> float | None:
        """The share of the KL of the quantized model that goes when this unit is kept float; below 0 it got worse."""
        whole, left = self.everything.kl, effect.without.kl
        return None if whole is None or left is None or whole <= 0 else 1 - left / whole

    def by_gain(self) -> list[Effect]:
        """The largest gain first; those of which it is not known come last."""
        return sorted(self.by_kl(), key=lambda effect: _descending(self.gain(effect), missing=math.inf))

    def as_dict(self) -> dict[str, Any]:
        """For JSON. `rank_kl` and `rank_mse` count from 1 and `gain` is a share; all three follow from the rest."""
        orders = {"rank_kl": self.by_kl(), "rank_mse": self.by_mse()}
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
                **{name: found[name] for name in ("model", "recipe", "kind", "tokens", "reference_bits_per_token")},
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
