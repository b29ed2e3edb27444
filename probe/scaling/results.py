"""The result of a sweep: its levels and their figures, frozen values that read back from their own JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from probe.files.checked_json import finite
from probe.formats import Format
from probe.numerics.underflow import HIGH, MODERATE
from probe.scaling.levels import element_format

#: The version of the JSON; it goes up when a key changes its meaning or disappears.
LAYOUT = 2
#: Keys of a JSON file beside the result, for what was derived from it.
BESIDE = ("recommendation", "blocks", "source", "identity")
#: The counts of a level that are also given in percent.
COUNTS = ("overflow", "underflow", "flushed", "subnormal")


@dataclass(frozen=True, kw_only=True)
class Level:
    """One scale and what it costs; n elements, d = output - x, y = x / scale.

    mse, rmse, mae    mean d^2, its root, mean |d|
    cosine            sum x o / sqrt(sum x^2 * sum o^2); 0 where every output is 0; 1 where nothing is lost, and only
                      there: a loss too small for float64 leaves the next number below
    psnr              20 log10(max |x| / rmse); inf where nothing is lost
    relative_error    100 mae / mean |x|
    overflow          |y| > max; of int8, whose codes are -128 to 127, y > 127 or y < -128
    underflow         0 < |y| < smallest subnormal
    flushed           0 < |y| <= half of that: these become zero
    subnormal         0 < |y| < smallest normal: kept, on a coarse grid (includes underflow; none for integers)
    """

    level: int
    scale_exponent: float  # log2 of the scale; with blocks, what is added to the exponent of every block
    scale: float  # the float32 nearest to 2^scale_exponent
    rule: str | None  # how the exponent of a block is chosen; None for one scale for the tensor
    mse: float
    rmse: float
    cosine: float
    psnr: float
    mae: float
    max_abs_error: float
    relative_error: float
    elements: int
    overflow: int
    underflow: int
    flushed: int
    subnormal: int
    min_output: float
    max_output: float
    codes: tuple[int, ...] | None = None
    """How often each code occurs, in the order of the codes; for formats of at most 6 bits."""

    @property
    def is_power(self) -> bool:
        """Whether the scale is a power of two."""
        return float(self.scale_exponent).is_integer()

    @property
    def lossless(self) -> bool:
        """Every element lies on the grid."""
        return self.max_abs_error == 0

    def percent(self, count: int) -> float:
        """A count in percent of the elements."""
        return 100 * count / self.elements

    @property
    def overflow_severity(self) -> str:
        """high above 1 %, moderate above 0.1 %, else none; the next likewise."""
        return _severity(self.overflow / self.elements)

    @property
    def underflow_severity(self) -> str:
        """Of the underflow."""
        return _severity(self.underflow / self.elements)

    @property
    def significant(self) -> bool:
        """Whether overflow or underflow is more than 0.1 %."""
        return (self.overflow_severity, self.underflow_severity) != ("none", "none")

    @property
    def codes_used(self) -> int | None:
        """How many of the codes occur."""
        return None if self.codes is None else sum(count > 0 for count in self.codes)

    def as_dict(self) -> dict[str, Any]:
        """Every figure, with percentages and severities, for JSON: the psnr of a lossless level is None."""
        found = {name: finite(value) for name, value in asdict(self).items() if name != "codes"}
        return found | {
            **{f"{name}_percent": self.percent(getattr(self, name)) for name in COUNTS},
            "overflow_severity": self.overflow_severity,
            "underflow_severity": self.underflow_severity,
            "codes_used": self.codes_used,
            "codes": None if self.codes is None else list(self.codes),
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Level":
        """The inverse of as_dict."""
        known = {field.name: given[field.name] for field in fields(cls)}
        known["psnr"] = math.inf if known["psnr"] is None else known["psnr"]
        known["codes"] = None if known["codes"] is None else tuple(known["codes"])
        return cls(**known)


def _severity(share: float) -> str:
    return "high" if share > HIGH else "moderate" if share > MODERATE else "none"


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
    smallest: float  # the smallest magnitude above zero
    mean_abs: float
    max_scale_exp: float  # the exponent of the first level
    min_scale_exp: float  # the exponent of the last level
    max_aligned: int  # the exponent at which the largest magnitude just fits; with blocks 0, that of the rule
    min_aligned: int  # the largest exponent at which nothing underflows; with blocks, the largest number added
    scale_bits: int
    block_size: int | None  # elements that share a scale; None for all of them
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
    def powers_only(self) -> bool:
        """Whether the scale of the format is a power of two, so that fractional exponents are no scales of it."""
        return self.element.scale == "e8m0"

    @property
    def rules(self) -> tuple[str, ...]:
        """The scale rules side by side; none for one scale for the tensor."""
        return tuple(dict.fromkeys(level.rule for level in self.levels if level.rule is not None))

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON."""
        levels = [level.as_dict() for level in self.levels]
        return {"version": LAYOUT, **vars(self), "shape": list(self.shape), "levels": levels}

    def to_json(self, **beside: Any) -> str:
        """Text that `from_json` reads; `beside` adds further keys, see BESIDE."""
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
