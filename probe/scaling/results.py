"""What a sweep found: a frozen value that reads back from its own JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from probe.formats import Format
from probe.scaling.figures import Level
from probe.scaling.levels import element_format

#: Of the layout of the JSON; it goes up when a key changes its meaning or disappears.
LAYOUT = 1
#: Keys of a JSON file that are no part of the result: what others made of it.
BESIDE = ("recommendation", "blocks", "source", "identity")


@dataclass(frozen=True, kw_only=True)
class ScalingResult:
    """A tensor under every scale of a sweep. Level 0 is the max-aligned one."""

    name: str
    format: str
    granularity: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    zeros: int
    minimum: float
    maximum: float
    smallest: float
    """The smallest magnitude above zero."""
    mean_abs: float
    max_scale_exp: float
    """The exponent of the first level."""
    min_scale_exp: float
    """The exponent of the last level."""
    scale_bits: int
    block_size: int | None
    """Elements that share a scale; None for all of them."""
    axis: int | None
    levels: tuple[Level, ...]

    @property
    def amax(self) -> float:
        """The largest magnitude."""
        return max(-self.minimum, self.maximum)

    @property
    def element(self) -> Format:
        """The grid of the elements."""
        return element_format(self.format, self.granularity)

    @property
    def rules(self) -> tuple[str, ...]:
        """The scale rules side by side; none for one scale for the tensor."""
        return tuple(dict.fromkeys(level.rule for level in self.levels if level.rule is not None))

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found |= {"shape": list(self.shape), "levels": [level.as_dict() for level in self.levels]}
        return {"version": LAYOUT, **found}

    def to_json(self, **beside: Any) -> str:
        """Text that `from_json` reads; `beside` adds what others made of the result, see BESIDE."""
        return json.dumps({**self.as_dict(), **beside}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "ScalingResult":
        """The inverse of as_dict."""
        version = given.get("version")
        if version != LAYOUT:
            raise ValueError(
                f"the scaling result has version {version!r}, and this probe reads {LAYOUT}. "
                "Run probe scaling again, or read it with the probe that wrote it."
            )
        known = {field.name for field in fields(cls)}
        for key in sorted(known ^ (given.keys() - {"version", *BESIDE})):
            state = "misses" if key in known else "has an unknown key,"
            raise ValueError(f"the scaling result {state} {key!r}. Run probe scaling again.")
        values = {name: given[name] for name in known}
        try:
            values["shape"] = tuple(values["shape"])
            values["levels"] = tuple(Level.from_dict(level) for level in values["levels"])
        except (KeyError, TypeError) as problem:
            raise ValueError(f"the scaling result is damaged ({problem!r}). Run probe scaling again.") from None
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> "ScalingResult":
        """The inverse of to_json; also reads the files that `probe scaling` writes."""
        try:
            document = json.loads(text, parse_constant=_refuse)
        except (json.JSONDecodeError, RecursionError) as problem:
            raise ValueError(f"the scaling result is not JSON ({problem}). Run probe scaling again.") from None
        if not isinstance(document, dict):
            raise ValueError("the scaling result is not a JSON object. Run probe scaling again.")
        return cls.from_dict(document)


def _refuse(name: str) -> float:
    raise ValueError(f"the scaling result holds {name}, which is never stored. Run probe scaling again.")


def is_finite(x: float | None) -> bool:
    """Whether a figure can be drawn or averaged."""
    return x is not None and math.isfinite(x)
