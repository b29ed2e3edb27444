"""What a comparison of modes found: figures of every layer, and their JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from probe.metrics import Metrics, label_correlation, label_mse

#: Where a figure of Metrics stands in the JSON of a layer, if not under its own name.
GROUPS: dict[str, tuple[str, str]] = {
    **{
        f"{figure}_{side}": (side, figure)
        for side in ("reference", "output")
        for figure in ("mean", "std", "min", "max")
    },
    "mean_difference": ("difference", "mean"),
    "std_difference": ("difference", "std"),
    "max_abs": ("difference", "max_abs"),
    **{f"p{n}": ("percentiles", str(n)) for n in (50, 90, 95, 99)},
}


@dataclass(frozen=True)
class LayerComparison:
    """One layer: its shape and all figures."""

    name: str
    shape: tuple[int, ...]
    metrics: Metrics

    @property
    def label(self) -> str:
        """excellent, good, fair or poor: the worse of what mse and correlation are called."""
        words = ("excellent", "good", "fair", "poor", "undefined")
        found = [label_mse(self.metrics.mse), label_correlation(self.metrics.correlation)]
        if self.metrics.correlation is None and self.metrics.mse is not None:  # a constant has none
            found = found[:1]
        return max(found, key=words.index)

    @property
    def first_nonfinite(self) -> tuple[int, ...] | None:
        """Where the output is first NaN or Inf while the reference is finite: (sample, token, feature)."""
        return place_of(self.metrics.first_nonfinite, self.shape)

    def as_dict(self) -> dict[str, Any]:
        """As JSON: figures in the groups reference, output, difference and percentiles, the others by name."""
        found: dict[str, Any] = {"shape": list(self.shape), "label": self.label}
        for name, value in self.metrics.as_dict().items():
            group, key = GROUPS.get(name, ("", name))
            plain = None if isinstance(value, float) and not math.isfinite(value) else value
            (found.setdefault(group, {}) if group else found)[key] = plain
        found["difference"]["mean_abs"] = self.metrics.mae
        place = self.first_nonfinite
        return found | {"first_nonfinite": None if place is None else list(place)}

    @classmethod
    def from_dict(cls, name: str, found: Mapping[str, Any]) -> Self:
        """The inverse; without loss (max_abs is 0) psnr and sqnr are infinite, which JSON has no word for."""
        figures = {}
        for field in fields(Metrics):
            group, key = GROUPS.get(field.name, ("", field.name))
            figures[field.name] = found[group][key] if group else found[key]
        shape = tuple(found["shape"])
        if figures["first_nonfinite"] is not None:
            place = zip(figures["first_nonfinite"], shape, strict=True)
            index = 0
            for where, size in place:
                index = index * size + where
            figures["first_nonfinite"] = index
        if figures["max_abs"] == 0:
            figures |= {"psnr": math.inf, "sqnr": math.inf}
        return cls(name, shape, Metrics(**figures))


@dataclass(frozen=True)
class ModeComparison:
    """A mode against its reference: `probe compare`."""

    reference_mode: str
    """As scripts call it: fp32."""
    compared_mode: str
    """2-1, or with the format if that is not int8: 2-1-fp8_e4m3."""
    recordings: tuple[str, str]
    """The folders of the reference and of the mode."""
    layers: dict[str, LayerComparison]
    notes: tuple[str, ...] = ()
    """What could not be verified."""

    @property
    def summary(self) -> dict[str, float | None]:
        """avg_mse, avg_mae and avg_correlation: means over the layers that have the figure."""
        return {f"avg_{name}": self._average(name) for name in ("mse", "mae", "correlation")}

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "reference_mode": self.reference_mode,
            "compared_mode": self.compared_mode,
            "recordings": list(self.recordings),
            "notes": list(self.notes),
            "layers": {name: layer.as_dict() for name, layer in self.layers.items()},
            "summary": self.summary,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """The inverse of as_dict."""
        try:
            return cls(
                found["reference_mode"],
                found["compared_mode"],
                tuple(found["recordings"]),
                {name: LayerComparison.from_dict(name, layer) for name, layer in found["layers"].items()},
                tuple(found["notes"]),
            )
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(
                f"this is no comparison of a mode ({type(problem).__name__}: {problem}). Expected what "
                "ModeComparison.as_dict gives, as probe compare saves it."
            ) from None

    def _average(self, name: str) -> float | None:
        known = [x for x in (getattr(layer.metrics, name) for layer in self.layers.values()) if x is not None]
        return sum(known) / len(known) if known else None


def place_of(index: int | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The index along every axis of an index over all values."""
    if index is None:
        return None
    place: list[int] = []
    for size in reversed(shape):
        index, where = divmod(index, size)
        place.insert(0, where)
    return tuple(place)
