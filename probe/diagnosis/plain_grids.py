"""The grids as plain float64 arithmetic in which every choice is a field.

Blocks and the rounding of float elements are the readable definitions in numerics, not the fast kernels that the modes
run. With the fields of the spec a grid gives the expected tensor; with one field changed, that of a known fault.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from probe.diagnosis.signatures import scaled
from probe.formats import FORMATS, Format
from probe.numerics.blocks import Blocks
from probe.numerics.reference import exponent_of, power, round_elements, scale_exponent
from probe.running.recipes import SiteGrid

SMALLEST_INTEGER_SCALE = 1e-6
SMALLEST_BLOCK_SCALE = 2.0**-9  # of nvfp4: the smallest e4m3 number

ROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "half_even": torch.round,
    "half_away": lambda x: x.trunc() + torch.where((x - x.trunc()).abs() >= 0.5, x.sign(), 0.0),
    "half_down": lambda x: x.trunc() + torch.where((x - x.trunc()).abs() > 0.5, x.sign(), 0.0),
    "half_odd": lambda x: torch.where((x - x.trunc()).abs() == 0.5, 2 * torch.floor(x / 2) + 1, torch.round(x)),
    "toward_zero": torch.trunc,
    "floor": torch.floor,
}


@dataclass(frozen=True)
class PlainGrid:
    """A format with its scale. The fields after `rounding` have the values of the spec unless a fault is replayed."""

    format: Format
    amax: float | None = None  # calibrated; None: taken from the tensor
    per_sequence: bool = False  # one scale for each sequence [batch, time, channel]
    rounding: str = "half_even"
    factor: float = 1.0  # of the scale
    fixed_scale: float | None = None  # of integers, in the place of amax / max
    block_size: int | None = None
    axis: int = -1
    rule: str = "floor"
    ends: Literal["clamp", "wrap", "open", "infinite"] = "clamp"
    low: float | None = None  # the first and last element, of int8 -128 and 127
    high: float | None = None
    flush: bool = False  # subnormals become zero
    shared: Literal["", "batch", "token"] = ""  # one scale for all of it, or for each token, whatever the blocks are
    late: int = 0  # blocks have the scale of so many blocks before them
    reciprocal: bool = False  # values are multiplied by 1 / scale in float32
    ragged: Literal["", "joined", "borrowed"] = ""  # of a shorter last block: its scale is that of both, of the former
    tensor_scale: float | None = None  # of nvfp4
    lengths: tuple[
        int, ...
    ] = ()  # of tokens [batch, time, channel] that came in several forwards, each with its scales

    @classmethod
    def at(cls, site: SiteGrid) -> Self:
        """The grid that a recipe puts at a site."""
        return cls(site.format, site.amax, site.per_sequence, site.rounding)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` on the grid, in its own dtype."""
        if self._parts(x):
            return torch.cat([replace(self, lengths=())(part) for part in self._parts(x)], 1)
        rows, blocks = self._split(x)
        scale = self._scale(rows, blocks.count)
        return self._join(self._elements(rows, scale) * scale, blocks, x)

    def unit(self, x: Tensor) -> Tensor:
        """The distance between neighbours on the grid, where each element of `x` lies."""
        if self._parts(x):
            return torch.cat([replace(self, lengths=()).unit(part) for part in self._parts(x)], 1)
        rows, blocks = self._split(x)
        scale = self._scale(rows, blocks.count)
        if self.format.scale == "float32":
            return self._join(scale.expand(rows.shape), blocks, x)
        exponent = exponent_of(rows / scale).clamp(min=self.format.min_exponent, max=self.format.max_exponent)
        return self._join(power(exponent - self.format.mantissa_bits) * scale, blocks, x)

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The forwards of a path, where the scale depends on all tokens of one."""
        return torch.split(x, list(self.lengths), 1) if self.per_sequence and self.lengths else ()

    def _split(self, x: Tensor) -> tuple[Tensor, Blocks]:
        wide = x.detach().double()
        if self.shared:
            wide = wide.reshape(1, -1) if self.shared == "batch" else wide
            blocks = Blocks.of(wide, -1, None)
        elif self.per_sequence:
            wide = wide.reshape(wide.shape[0], -1)
            blocks = Blocks.of(wide, -1, None)
        elif self.format.scale == "float32":
            wide = wide.reshape(-1)
            blocks = Blocks.of(wide, -1, self.block_size)
        else:
            axis = self.axis if -wide.dim() <= self.axis else -1
            blocks = Blocks.of(wide, axis, self.block_size or self.format.block_size)
        return blocks.split(wide), blocks

    def _join(self, rows: Tensor, blocks: Blocks, x: Tensor) -> Tensor:
        return blocks.join(rows.contiguous()).reshape(x.shape).to(x.dtype)

    def _amax(self, rows: Tensor, count: int) -> Tensor:
        amax = rows.abs().amax(-1, keepdim=True)
        if (self.late or self.ragged) and count > 1 and amax.numel() % count == 0:
            lines = amax.reshape(-1, count)
            if self.late:
                lines = lines.roll(self.late, -1)
            elif self.ragged == "joined":
                lines = torch.cat([lines[:, :-1], lines[:, -2:].amax(-1, keepdim=True)], -1)
            else:
                lines = torch.cat([lines[:, :-1], lines[:, -2:-1]], -1)
            amax = lines.reshape(-1, 1)
        return torch.where(amax.isfinite(), amax, torch.nan)

    def _scale(self, rows: Tensor, count: int) -> Tensor:
        """One scale per row, of which each line has `count`; NaN where it is taken from a row with NaN or Inf."""
        amax = self._amax(rows, count)
        if self.format.scale == "float32":
            if self.amax is not None and not self.per_sequence:
                amax = torch.full_like(amax, torch.tensor(self.amax).item())
            scale = (amax / self.format.max).clamp(min=SMALLEST_INTEGER_SCALE).float().double()
            if self.fixed_scale is not None:
                scale = torch.full_like(scale, self.fixed_scale)
        elif self.format.scale == "e4m3":
            whole = self._second_scale(rows)
            e4m3 = FORMATS["fp8_e4m3"]
            block = round_elements(amax / (self.format.max * whole), e4m3, "half_even", None)
            scale = (block.clamp(min=SMALLEST_BLOCK_SCALE).float() * whole.float()).double()
        else:
            some = torch.where(amax.isnan(), 0.0, amax)
            scale = torch.where(amax.isnan(), torch.nan, power(scale_exponent(some, self.format, self.rule)))
        return scale * self.factor

    def _second_scale(self, rows: Tensor) -> Tensor:
        if self.tensor_scale is not None:
            return torch.tensor(self.tensor_scale, dtype=torch.float32).double()
        finite = torch.where(rows.isfinite(), rows.abs(), 0.0)
        amax = finite.amax() if self.amax is None else torch.tensor(self.amax)
        scale = (amax.double() / (FORMATS["fp8_e4m3"].max * self.format.max)).float().double()
        return scale if amax else torch.ones_like(scale)  # of a tensor of zeros

    def _elements(self, rows: Tensor, scale: Tensor) -> Tensor:
        y = (rows.float() * (1.0 / scale.float())).double() if self.reciprocal else rows / scale
        fmt = self.format
        if fmt.scale == "float32":
            q = ROUND[self.rounding](y)
            first, last = -(fmt.max + 1), fmt.max
        else:
            down = self.rounding == "half_down"  # y has 24 bits: only ties are moved by a part of 2^-40
            rounding = "half_even" if down else self.rounding
            q = round_elements(y * (1 - down * 2.0**-40), replace(fmt, max=8 * fmt.max), rounding, None)
            first, last = -fmt.max, fmt.max
        if self.flush and fmt.min_normal is not None:
            q = torch.where(q.abs() < fmt.min_normal, 0.0, q)
        return self._within(q, first if self.low is None else self.low, last if self.high is None else self.high)

    def _within(self, q: Tensor, low: float, high: float) -> Tensor:
        if self.ends == "open":
            return q
        if self.ends == "wrap":
            return torch.remainder(q - low, high - low + 1) + low
        if self.ends == "infinite":
            return torch.where((q < low) | (q > high), torch.copysign(torch.full_like(q, torch.inf), q), q)
        return q.clamp(low, high)


def _ends(grid: PlainGrid) -> dict[str, dict[str, Any]]:
    """Faults at the ends of an integer grid: a first or last element one step inside of the right one, or a wrap."""
    fmt = grid.format
    if not fmt.is_integer:
        below = fmt.max - 2.0 ** (fmt.max_exponent - fmt.mantissa_bits)
        return {f"clamped at {below:g} instead of {fmt.max:g}": {"low": -below, "high": below}}
    step = fmt.min_subnormal
    top, one_less = round(fmt.max / step), round(fmt.max / step) - 1
    faults: dict[str, dict[str, Any]] = {f"clamped at {one_less} instead of {top}": {"high": fmt.max - step}}
    if fmt.scale == "float32":
        faults[f"-{top + 1} is lost, codes end at -{top}"] = {"low": -fmt.max}
    faults[f"clamped at -{one_less} and {one_less}"] = {"low": step - fmt.max, "high": fmt.max - step}
    if fmt.scale == "float32":
        faults["codes wrap around at the ends instead of being clamped"] = {"ends": "wrap"}
    return faults


def other_scales(grid: PlainGrid, x: Tensor, made: Tensor) -> Iterator[tuple[str, PlainGrid]]:
    """The grid at the scale that its output shows: the quantum of integers, or the factor of most of the values."""
    unit, levels = grid.unit(x).double(), torch.unique(made[made.isfinite()].double())
    if grid.format.scale == "float32" and not grid.per_sequence and unit.numel():
        right = float(unit.reshape(-1)[0])
        gaps = levels.diff()
        near = float(gaps[gaps <= 1.5 * gaps.min()].mean()) if gaps.numel() >= 4 else right
        for quantum in dict.fromkeys((right, near)):
            codes = (levels / quantum).round()
            if not bool(codes.any()) or abs(quantum / right - 1) > 10:
                continue
            scale = float((levels @ codes / codes.square().sum()).float())
            if scale != right:
                yield _rescaled(scale, right), replace(grid, fixed_scale=scale)
    else:
        right_values = grid(x).double()
        usable = (right_values != 0) & made.isfinite()
        ratio = float((made.double()[usable] / right_values[usable]).median()) if int(usable.sum()) >= 8 else 1.0
        if ratio > 0 and ratio != 1.0:
            yield scaled(ratio), replace(grid, factor=ratio)


def _rescaled(scale: float, right: float) -> str:
    ulps = int(torch.tensor(scale).view(torch.int32)) - int(torch.tensor(right).view(torch.int32))
    side = "up" if ulps > 0 else "down"
    return f"the scale is one ulp {side}" if abs(ulps) == 1 else scaled(scale / right)


def suspects(grid: PlainGrid, x: Tensor, *, largest: float | None = None) -> Iterator[tuple[str, PlainGrid]]:
    """The faults of a grid that can be replayed: a sentence, and the grid with the fault.

    `largest` is the largest |x| of calibration, where the grid should have a quantile.
    """
    fmt = grid.format
    rows: dict[str, dict[str, Any]] = {
        "rounding looks like floor, not nearest": {"rounding": "floor"},
        "rounding looks like toward zero, not nearest": {"rounding": "toward_zero"},
        "ties are rounded away from zero instead of to even": {"rounding": "half_away"},
        "ties are rounded to even instead of away from zero": {"rounding": "half_even"},
        "ties are rounded toward zero": {"rounding": "half_down"},
        "ties are rounded to odd": {"rounding": "half_odd"},
        "multiplied by 1 / scale, not divided by the scale": {"reciprocal": True},
        **_ends(grid),
        "not clamped": {"ends": "open"},
        "Inf where values should saturate": {"ends": "infinite"},
        "subnormals are flushed to zero": {"flush": True},
    }
    if largest is not None:
        rows["scale from the largest value (minmax) instead of the percentile"] = {"amax": largest}
    rows |= {f"the scale is off by a factor of 2^{k}": {"factor": 2.0**k} for k in (1, -1, 2, -2, 3, -3)}
    if fmt.block_size is not None and not grid.per_sequence:
        sizes = [size for size in (8, 16, 32, 64, 128) if size != fmt.block_size and size < x.shape[-1]]
        rows |= {f"blocks of {size} instead of {fmt.block_size}": {"block_size": size} for size in sizes}
        rows |= {"one block for the whole line": {"block_size": x.shape[-1] or 1}}
        if x.dim() > 1:
            rows |= {"blocks run along the wrong axis": {"axis": -2}}
    if fmt.scale == "e8m0":
        rows |= {f"the scale rule looks like {rule}": {"rule": rule} for rule in ("ceil", "even", "rceil")}
    if fmt.scale == "e4m3":
        rows["the second scale (of the tensor) is ignored"] = {"tensor_scale": 1.0}
    if grid.amax is not None:
        rows["the scale is taken from the live tensor, not from calibration"] = {"amax": None}
    if grid.per_sequence:
        rows["one scale for all sequences"] = {"shared": "batch"}
        rows["one scale for each token"] = {"shared": "token"}
    elif fmt.block_size is not None:
        rows["blocks have the scale of the block before"] = {"late": 1}
        rows["blocks have the scale of the block after"] = {"late": -1}
        if x.shape[-1] % fmt.block_size:
            rows["the last, shorter block shares its scale with the one before"] = {"ragged": "joined"}
            rows["the last, shorter block has the scale of the one before"] = {"ragged": "borrowed"}
    if fmt.scale != "float32":
        rows.pop("ties are rounded to odd")
    for sentence, changes in rows.items():
        if any(getattr(grid, name) != value for name, value in changes.items()):
            yield sentence, replace(grid, **changes)
    for other in FORMATS.values():
        if other.scale in ("e8m0", "float32") and other != fmt:
            yield f"on the grid of {other.name} instead of {fmt.name}", replace(grid, format=other, amax=None)
