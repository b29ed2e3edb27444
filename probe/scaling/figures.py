"""The figures of one level of a sweep: sums gathered while a tensor is on the grid, and what follows from them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from probe.numerics.underflow import HIGH, MODERATE
from probe.scaling.levels import Extent


@dataclass(frozen=True)
class Sums:
    """What is added up over elements x that became q * s; y = x / s, d = q * s - x."""

    squares: float = 0.0  # of d
    magnitudes: float = 0.0  # of d
    largest: float = 0.0  # |d|
    product: float = 0.0  # of x and q * s
    power: float = 0.0  # of q * s
    overflow: int = 0
    underflow: int = 0
    flushed: int = 0
    subnormal: int = 0
    lowest: float = math.inf  # q * s
    highest: float = -math.inf
    codes: tuple[int, ...] | None = None

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.squares + other.squares,
            self.magnitudes + other.magnitudes,
            max(self.largest, other.largest),
            self.product + other.product,
            self.power + other.power,
            self.overflow + other.overflow,
            self.underflow + other.underflow,
            self.flushed + other.flushed,
            self.subnormal + other.subnormal,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
            other.codes
            if self.codes is None
            else self.codes
            if other.codes is None
            else tuple(a + b for a, b in zip(self.codes, other.codes, strict=True)),
        )


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
    scale_exponent: float
    """log2 of the scale; with blocks, what is added to the exponent of every block."""
    scale: float
    """The float32 nearest to 2^scale_exponent."""
    rule: str | None
    """How the exponent of a block is chosen; None for one scale for the tensor."""
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
    """How often each code occurs, in the order of the codes; of the 4- and 6-bit formats only."""

    @property
    def lossless(self) -> bool:
        """Every element lies on the grid."""
        return self.max_abs_error == 0

    def percent(self, count: int) -> float:
        """A count in percent of the elements."""
        return 100 * count / self.elements

    @property
    def overflow_severity(self) -> str:
        """high above 1 %, moderate above 0.1 %, else none."""
        return _severity(self.overflow / self.elements)

    @property
    def underflow_severity(self) -> str:
        """high above 1 %, moderate above 0.1 %, else none."""
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
        found = {name: value for name, value in asdict(self).items() if name != "codes"}
        found["psnr"] = None if math.isinf(self.psnr) else self.psnr
        for name in COUNTS:
            found[f"{name}_percent"] = self.percent(getattr(self, name))
        return found | {
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


#: The cosine of a level that loses something is never above this, so that a lossless one is the best by cosine too.
BELOW_ONE = math.nextafter(1.0, 0.0)
COUNTS = ("overflow", "underflow", "flushed", "subnormal")


def _severity(share: float) -> str:
    return "high" if share > HIGH else "moderate" if share > MODERATE else "none"


def level_of(index: int, exponent: float, scale: float, rule: str | None, sums: Sums, extent: Extent) -> Level:
    """The figures that follow from the sums over a whole tensor."""
    n = extent.elements
    mse = sums.squares / n
    rmse = math.sqrt(mse)
    lossless = sums.largest == 0
    norm = math.sqrt(sums.power) * math.sqrt(extent.sum_squares)
    cosine = 1.0 if lossless else max(-1.0, min(BELOW_ONE, sums.product / norm)) if norm else 0.0
    return Level(
        level=index,
        scale_exponent=exponent,
        scale=scale,
        rule=rule,
        mse=mse,
        rmse=rmse,
        cosine=cosine,
        psnr=math.inf if lossless else 20 * (math.log10(extent.amax) - math.log10(rmse)),
        mae=sums.magnitudes / n,
        max_abs_error=sums.largest,
        relative_error=100 * sums.magnitudes / n / extent.mean_abs,
        elements=n,
        overflow=sums.overflow,
        underflow=sums.underflow,
        flushed=sums.flushed,
        subnormal=sums.subnormal,
        min_output=sums.lowest + 0.0,
        max_output=sums.highest + 0.0,
        codes=sums.codes,
    )
