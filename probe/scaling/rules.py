"""The scale rules of real MX blocks side by side: errors, overflow and underflow by block, scales, outliers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from probe.formats import Format
from probe.numerics.blocks import Blocks
from probe.numerics.fast import round_elements
from probe.numerics.quantize import SCALE_RULES
from probe.numerics.reference import power
from probe.scaling import blockwise
from probe.scaling.levels import element_format, largest_exponent
from probe.scaling.reference import kinds, level_of
from probe.scaling.results import Level
from probe.scaling.sweep import BLOCK_SIZE, Prepared

#: An outlier spoils a block when the squared error of the others is more than this many times what it would be without.
SPOILED = 4.0


@dataclass(frozen=True)
class RuleResult:
    """One scale rule over all blocks of a tensor."""

    rule: str
    block_size: int
    blocks: int
    zero_blocks: int
    level: Level
    overflowing_blocks: int  # with at least one value beyond the largest number; the next two likewise
    underflowing_blocks: int
    flushing_blocks: int
    worst_overflow: float  # the largest share of one block that overflows; the next two likewise
    worst_underflow: float
    worst_flush: float
    mean_exponent: float  # over the scales of blocks that are not all zeros; the next three likewise
    std_exponent: float
    min_exponent: int
    max_exponent: int
    spoiled_blocks: int
    """Whose other values have more than 4 times the squared error that they had with a scale of their own."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "level": self.level.as_dict()}


class _Tally:
    """The counts of one rule, gathered piece by piece."""

    def __init__(self) -> None:
        self.blocks = self.zeros = self.spoiled = 0
        self.touched = torch.zeros(3, dtype=torch.int64)
        self.worst = torch.zeros(3, dtype=torch.float64)
        self.exponents = torch.zeros(256, dtype=torch.int64)

    def add(self, rows: Tensor, exponent: Tensor, without: Tensor, spared: Tensor, fmt: Format) -> None:
        """Add rows; `without` are the rows without their largest magnitude, `spared` the exponents of those."""
        y = rows.double() / power(exponent)
        masks = kinds(y, rows, fmt)
        counts = torch.stack([masks[name].sum(-1) for name in ("overflow", "underflow", "flushed")])
        used = (rows != 0).any(-1)
        self.blocks += len(rows)
        self.zeros += int((~used).sum())
        self.touched += (counts > 0).sum(-1)
        self.worst = torch.maximum(self.worst, counts.amax(-1) / rows.shape[-1])
        self.exponents += torch.bincount(exponent[used].reshape(-1) + 127, minlength=256)
        here, alone = _squares(without, exponent, fmt), _squares(without, spared, fmt)
        self.spoiled += int((here > SPOILED * alone).sum())


def _squares(rows: Tensor, exponent: Tensor, fmt: Format) -> Tensor:
    scale = power(exponent)
    y = rows.double() / scale
    d = (round_elements(y, fmt, "half_even", None) - y) * scale
    return (d * d).sum(-1)


def compare_rules(
    x: Tensor | Prepared,
    format: str,
    *,
    block_size: int | None = None,
    axis: int = -1,
    scale_rules: Sequence[str] = tuple(SCALE_RULES),
    scale_bits: int = 8,
) -> tuple[RuleResult, ...]:
    """Every scale rule over the blocks of `x`, as fake_quantize has it: errors, rates by block, scales, outliers.

    A block is spoiled by one outlier when, with the scale that its largest magnitude asks for, the squared error of
    all the others is more than 4 times what it is with the scale that they ask for by themselves.
    """
    given = x if isinstance(x, Prepared) else Prepared(x)
    fmt = element_format(format, "block")
    limit = largest_exponent(scale_bits)
    size = Blocks.of(given.x, axis, BLOCK_SIZE if block_size is None else block_size).size
    rules = tuple(scale_rules)
    sums = blockwise.block_levels(given.x, [0], rules, fmt, axis=axis, size=size, limit=limit)
    tallies = {rule: _Tally() for rule in rules}
    for rows in blockwise.pieces(given.x, axis, size):
        without = rows.scatter(-1, rows.abs().argmax(-1, keepdim=True), 0.0)
        exponents = blockwise.rule_exponents(rows, rules, fmt, limit)
        spared = blockwise.rule_exponents(without, rules, fmt, limit)
        for rule, tally in tallies.items():
            tally.add(rows, exponents[rule], without, spared[rule], fmt)
    return tuple(
        _result(rule, size, tally, level_of(index, 0, 1.0, rule, sums[rule, 0], given.extent))
        for index, (rule, tally) in enumerate(tallies.items())
    )


def _result(rule: str, size: int, tally: _Tally, level: Level) -> RuleResult:
    present = tally.exponents.nonzero().reshape(-1)
    counts, values = tally.exponents[present].double(), (present - 127).double()
    mean = float((counts * values).sum() / counts.sum())
    spread = float((counts * (values - mean) ** 2).sum() / counts.sum()) ** 0.5
    counted = (tally.blocks, tally.zeros, level, *tally.touched.tolist(), *tally.worst.tolist())
    exponents = (mean, spread, int(values.min()), int(values.max()))
    return RuleResult(*(rule, size, *counted, *exponents, tally.spoiled))
