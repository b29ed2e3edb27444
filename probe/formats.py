"""The number formats, as a table. Imports nothing heavy: `probe formats` prints it without torch.

A new format is a new row of FORMATS. Everything else about it (exponent range, smallest numbers, the
value of every code) follows from the row.
"""

import math
from dataclasses import dataclass
from typing import Literal

Specials = Literal["none", "nan", "ieee"]
ScaleKind = Literal["e8m0", "e4m3", "float32"]


@dataclass(frozen=True)
class Format:
    """One grid: the element, and the scale that a block of elements shares.

    A float element with exponent field E and mantissa field M is

        E > 0:  (-1)^sign * 2^(E - bias) * (1 + M / 2^mantissa_bits)
        E = 0:  (-1)^sign * 2^(1 - bias) * (M / 2^mantissa_bits)

    An integer element (exponent_bits = 0) is a two's complement code times 2^-mantissa_bits.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int  # of an integer: the bits behind the binary point
    max: float  # largest magnitude that the quantizers produce
    specials: Specials = "none"  # nan: the top code is NaN; ieee: the top exponent is Inf and NaN
    scale: ScaleKind | None = None
    block_size: int | None = None  # None: one scale for the whole tensor, or no scale at all
    note: str = ""

    @property
    def is_integer(self) -> bool:
        """True for two's complement elements, which have no negative zero."""
        return self.exponent_bits == 0

    @property
    def in_words(self) -> str:
        """Everything about the grid in a line, for a later comparison: bits 8, exponent 4, mantissa 3, max 448, ..."""
        names = {"exponent_bits": "exponent", "mantissa_bits": "mantissa", "block_size": "block"}
        fields = ("bits", "exponent_bits", "mantissa_bits", "max", "specials", "scale", "block_size")
        return ", ".join(f"{names.get(name, name)} {getattr(self, name)}" for name in fields)

    @property
    def needs_calibration(self) -> bool:
        """True if activations need an amax from calibration: the scale of the whole tensor is fixed before the run."""
        return self.scale in ("float32", "e4m3")

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field; 2^(exponent_bits - 1) - 1."""
        return 1 if self.is_integer else 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number; below it the step no longer shrinks."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)), exact."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_normal(self) -> float | None:
        """The smallest normal magnitude; None for integers."""
        return None if self.is_integer else 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest magnitude above zero: one step."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def special_codes(self) -> str:
        """In words: which codes are not numbers."""
        top = 2 ** (self.bits - 1)
        if self.specials == "none":
            return f"{-(top)} is never produced" if self.is_integer and self.scale == "e8m0" else "none"
        if self.specials == "nan":
            return f"NaN 0x{top - 1:02x}, 0x{2 * top - 1:02x}"
        infinity = (2**self.exponent_bits - 1) << self.mantissa_bits
        width = self.bits // 4
        return f"Inf 0x{infinity:0{width}x}, 0x{top + infinity:0{width}x}; NaN above"

    def decode(self, code: int) -> float:
        """The value of one code of an element, without any scale."""
        top = 1 << (self.bits - 1)
        if self.is_integer:
            return math.ldexp(code - 2 * top if code >= top else code, -self.mantissa_bits)
        sign = -1.0 if code & top else 1.0
        exponent, mantissa = divmod(code & (top - 1), 1 << self.mantissa_bits)
        if self.specials == "nan" and code & (top - 1) == top - 1:
            return math.nan
        if self.specials == "ieee" and exponent == 2**self.exponent_bits - 1:
            return math.nan if mantissa else sign * math.inf
        significand = mantissa + ((1 << self.mantissa_bits) if exponent else 0)
        return sign * math.ldexp(significand, max(exponent, 1) - self.bias - self.mantissa_bits)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp8_e4m3", 8, 4, 3, 448.0, "nan", "e8m0", 32, "OCP MXFP8"),
        Format("fp8_e5m2", 8, 5, 2, 57344.0, "ieee", "e8m0", 32, "OCP MXFP8"),
        Format("fp6_e3m2", 6, 3, 2, 28.0, "none", "e8m0", 32, "OCP MXFP6"),
        Format("fp6_e2m3", 6, 2, 3, 7.5, "none", "e8m0", 32, "OCP MXFP6"),
        Format("fp4_e2m1", 4, 2, 1, 6.0, "none", "e8m0", 32, "OCP MXFP4"),
        Format("mxint8", 8, 0, 6, 127 / 64, "none", "e8m0", 32, "OCP MXINT8, symmetric"),
        Format("nvfp4", 4, 2, 1, 6.0, "none", "e4m3", 16, "e4m3 scale per block, float32 per tensor"),
        Format("int8", 8, 0, 0, 127.0, "none", "float32", None, "scale = amax / 127, codes -128 to 127"),
        Format("int4", 4, 0, 0, 7.0, "none", "float32", None, "scale = amax / 7, codes -8 to 7"),
        Format("int2", 2, 0, 0, 1.0, "none", "float32", None, "scale = amax, codes -2 to 1"),
        Format("bf16", 16, 8, 7, 2.0**128 - 2.0**120, "ieee", note="a cast, no scale"),
        Format("fp16", 16, 5, 10, 65504.0, "ieee", note="a cast, no scale"),
    )
}

#: The formats of the default matrix.
GATE_FORMATS = ("int8", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "mxint8", "nvfp4")
#: The quantile of |x| that a calibrated scale covers where the largest value would be too much; 0.9999 is the other
#: that is in use. Every command and every function of the library has this default.
PERCENTILE = 0.9995
