"""The sweep: a tensor under scales around maximum alignment and down to minimum alignment, as a whole or in blocks."""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from probe.formats import Format
from probe.numerics.blocks import Blocks
from probe.numerics.quantize import SCALE_RULES
from probe.numerics.reference import exponent_of
from probe.scaling import blockwise, fast, reference
from probe.scaling.levels import (
    BEYOND,
    GRANULARITIES,
    Extent,
    check_levels,
    check_tensor,
    element_format,
    largest_exponent,
    max_aligned,
    min_aligned,
    sweep_ends,
)
from probe.scaling.reference import level_of
from probe.scaling.results import Level, ScalingResult
from probe.words import look_up

Implementation = Literal["fast", "reference"]
BLOCK_SIZE = 32


class Prepared:
    """A tensor that is swept several times: it is checked once, and sorted or counted once."""

    def __init__(self, x: Tensor) -> None:
        self.x = check_tensor(x)
        self.dtype = x.dtype

    @cached_property
    def runs(self) -> fast.Runs:
        """Its values in the form that the fast sweep reads."""
        return fast.runs_of(self.x)

    @cached_property
    def extent(self) -> Extent:
        """Its range and size."""
        return self.runs.extent()


def scaling_sweep(
    x: Tensor | Prepared,
    format: str,
    *,
    granularity: str = "tensor",
    num_levels: int | None = None,
    max_scale_exp: float | None = None,
    min_scale_exp: float | None = None,
    scale_bits: int = 8,
    block_size: int | None = None,
    axis: int = -1,
    scale_rules: Sequence[str] = tuple(SCALE_RULES),
    name: str = "tensor",
    implementation: Implementation = "fast",
) -> ScalingResult:
    """The errors of `x` on the grid of `format` under every scale of the sweep.

        tensor   one scale 2^e for all; e from 3 octaves beyond ceil(log2(amax / max)) to
                 floor(log2(smallest / smallest subnormal)), evenly spaced, every whole number among them (the scale is
                 the float32 nearest to 2^e)
        block    a scale 2^e for each block of 32 along `axis`, e by every one of `scale_rules`; the sweep adds the
                 same whole number to all of them, from 3 octaves beyond 0 to the largest at which nothing underflows
                 that did not

    `num_levels` is 21, or two in each octave if those are more. With 1 or 2 levels a sweep has no octaves beyond
    maximum alignment. `max_scale_exp` and `min_scale_exp` replace the ends; with blocks they are the first and the last
    number added. Scales have `scale_bits` bits: 2^-127 to 2^127 for 8. The level at maximum alignment of `tensor` is,
    bit for bit, fake_quantize(x.reshape(-1), format, block_size=x.numel(), scale_rule="rceil"); number 0 of `block` is
    fake_quantize(x, format, scale_rule=rule).
    """
    look_up("granularity", granularity, {one: one for one in GRANULARITIES})
    look_up("implementation", implementation, {"fast": "", "reference": ""})
    fmt = element_format(format, granularity)
    check_levels(num_levels)
    limit = largest_exponent(scale_bits)
    given = x if isinstance(x, Prepared) else Prepared(x)
    extent = given.extent
    beyond = BEYOND if num_levels is None or num_levels > 2 else 0
    if granularity == "tensor":
        if block_size is not None or axis != -1 or tuple(scale_rules) != tuple(SCALE_RULES):
            raise ValueError(
                "block_size, axis and scale_rules belong to granularity 'block'; granularity 'tensor' has one scale. "
                "Leave them out, or ask for granularity='block'."
            )
        aligned = max_aligned(extent.amax, fmt), min_aligned(extent.smallest, fmt)
        ends = sweep_ends(max_scale_exp, min_scale_exp, aligned, scale_bits=scale_bits, beyond=beyond)
        levels = _tensor_levels(given, fmt, ends.exponents(num_levels), implementation)
        size = None
    else:
        rules = _checked_rules(scale_rules)
        size = Blocks.of(given.x, axis, BLOCK_SIZE if block_size is None else block_size).size
        first, last = _whole("max_scale_exp", max_scale_exp), _whole("min_scale_exp", min_scale_exp)
        aligned = 0, min_aligned_shift(given.x, fmt, axis=axis, size=size, limit=limit)
        ends = sweep_ends(first, last, aligned, scale_bits=scale_bits, beyond=beyond)
        twin = blockwise if implementation == "fast" else reference
        by_rule = twin.block_levels(given.x, ends.whole(num_levels), rules, fmt, axis=axis, size=size, limit=limit)
        pairs = enumerate(by_rule.items())
        levels = [level_of(i, shift, 2.0**shift, rule, sums, extent) for i, ((rule, shift), sums) in pairs]
    return ScalingResult(
        name=name,
        format=format,
        granularity=granularity,
        dtype=str(given.dtype).removeprefix("torch."),
        shape=tuple(given.x.shape),
        **{name: value for name, value in vars(extent).items() if name != "sum_squares"},
        max_scale_exp=ends.first,
        min_scale_exp=ends.last,
        max_aligned=aligned[0],
        min_aligned=aligned[1],
        scale_bits=scale_bits,
        block_size=size,
        axis=None if size is None else axis,
        levels=tuple(levels),
    )


def _tensor_levels(given: Prepared, fmt: Format, exponents: Sequence[float], implementation: str) -> list[Level]:
    if implementation == "fast":
        sums = fast.tensor_levels(given.runs, exponents, fmt)
    else:
        sums = reference.tensor_levels(given.x, exponents, fmt)
    pairs = enumerate(zip(exponents, sums, strict=True))
    return [level_of(i, e, reference.scale_of(e), None, one, given.extent) for i, (e, one) in pairs]


def _checked_rules(rules: Sequence[str]) -> tuple[str, ...]:
    if isinstance(rules, str) or not rules:
        raise ValueError(f"scale_rules is {rules!r}. Give a list of: {', '.join(SCALE_RULES)}.")
    for rule in rules:
        look_up("scale rule", rule, SCALE_RULES)
    return tuple(dict.fromkeys(rules))


def _whole(name: str, end: float | None) -> int | None:
    if end is None:
        return None
    if isinstance(end, int | float) and float(end).is_integer():
        return int(end)
    raise ValueError(f"{name} is {end!r}. Blocks have power-of-two scales: give a whole number to add to exponents.")


def min_aligned_shift(x: Tensor, fmt: Format, *, axis: int, size: int, limit: int) -> int:
    """The largest shift from the floor exponents at which no block's smallest non-zero value underflows.

    min over blocks of floor(log2(smallest / smallest subnormal)) - floor exponent
    """
    shifts = []
    lowest = min_aligned(1.0, fmt)
    for rows in blockwise.pieces(x, axis, size):
        magnitude = rows.abs()
        smallest = magnitude.masked_fill_(magnitude == 0, torch.inf).amin(-1, keepdim=True)
        some = smallest.isfinite()
        floor = blockwise.rule_exponents(rows, ("floor",), fmt, limit)["floor"]
        if bool(some.any()):
            shifts.append(int((exponent_of(smallest[some]) + lowest - floor[some]).min()))
    return min(shifts)
