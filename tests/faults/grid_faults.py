"""Faults of the quantizer: rounding, scales, blocks, the ends of the grid."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from probe.numerics.grids import BlockGrid, IntegerGrid, SequenceGrid
from probe.numerics.integers import IntegerParameters
from probe.numerics.quantize import fake_quantize, round_to
from tests.faults.breaking import Patient, grid
from tests.faults.catalogue import E5M2, FP4, FP6, FP8, INT8, MXINT8, NOT_APPLIED, NOT_FINITE, NVFP4, VALUES, Fault

#: floor(log2(max)) of the elements, written down here so that a wrong table would not go unnoticed.
LARGEST_EXPONENT = {"fp8_e4m3": 8, "fp8_e5m2": 15, "fp6_e2m3": 2, "fp4_e2m1": 2, "mxint8": 0}
SMALLEST_NORMAL = {"fp8_e4m3": 2.0**-6, "fp8_e5m2": 2.0**-14, "fp6_e2m3": 1.0, "fp4_e2m1": 1.0}


def rounded(rounding: str) -> Callable[[IntegerGrid], IntegerGrid]:
    return lambda healthy: replace(healthy, rounding=rounding)


def scaled(factor: float) -> Callable[[IntegerGrid], IntegerGrid]:
    def make(healthy: IntegerGrid) -> IntegerGrid:
        old = healthy.parameters
        return replace(
            healthy, parameters=IntegerParameters(old.scale * factor, old.zero_point, old.bits, old.symmetric)
        )

    return make


def coded(change: Callable[[Tensor], Tensor]) -> Callable[[IntegerGrid], Callable[[Tensor], Tensor]]:
    """Codes before they are clamped, changed, and decoded."""

    def make(healthy: IntegerGrid) -> Callable[[Tensor], Tensor]:
        scale = healthy.parameters.scale.double()
        return lambda x: (change(torch.round(x.double() / scale)) * scale).to(x.dtype)

    return make


def by_chance(healthy: IntegerGrid) -> Callable[[Tensor], Tensor]:
    """Stochastic rounding, the same in every run."""
    scale = healthy.parameters.scale.double()

    def on_grid(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        return (torch.floor(x.double() / scale + noise).clamp(-128, 127) * scale).to(x.dtype)

    return on_grid


def one_channel(channel: int, factor: float) -> Callable[[IntegerGrid], Callable[[Tensor], Tensor]]:
    """One channel keeps the scale of an older calibration."""

    def make(healthy: IntegerGrid) -> Callable[[Tensor], Tensor]:
        stale = scaled(factor)(healthy)

        def on_grid(x: Tensor) -> Tensor:
            out = healthy(x)
            out[..., channel] = stale(x[..., channel])
            return out

        return on_grid

    return make


def one_token(token: int) -> Callable[[IntegerGrid], Callable[[Tensor], Tensor]]:
    def make(healthy: IntegerGrid) -> Callable[[Tensor], Tensor]:
        return lambda x: healthy(x) * (torch.arange(x.shape[1]) != token)[:, None]

    return make


def one_infinity(healthy: IntegerGrid) -> Callable[[Tensor], Tensor]:
    def on_grid(x: Tensor) -> Tensor:
        out = healthy(x)
        out[0, 3, 7] = torch.inf
        return out

    return on_grid


def largest_value(patient: Patient) -> None:
    """The scale of conv1d.output from the largest |x| of calibration instead of its quantile."""
    grid("conv1d.output", scaled(patient.amax("scan.u") / patient.amax("conv1d.output")))(patient)


def blocks(**options: Any) -> Callable[[BlockGrid], Callable[[Tensor], Tensor]]:
    return lambda healthy: lambda x: fake_quantize(x, healthy.format, **options)


def elements(
    change: Callable[[Tensor, str], Tensor], *, shift: int = 0
) -> Callable[[BlockGrid], Callable[[Tensor], Tensor]]:
    """MX by hand: `change(y, format)` gives the elements of y = x / scale; `shift` is added to the exponent."""

    def make(healthy: BlockGrid) -> Callable[[Tensor], Tensor]:
        def on_grid(x: Tensor) -> Tensor:
            padded = functional.pad(x.double(), (0, -x.shape[-1] % 32))
            rows = padded.reshape(*padded.shape[:-1], -1, 32)
            amax = rows.abs().amax(-1, keepdim=True)
            exponent = torch.frexp(amax).exponent - 1 - LARGEST_EXPONENT[healthy.format] + shift
            scale = torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent), 1.0)
            values = change(rows / scale, healthy.format) * scale
            return values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)

        return on_grid

    return make


def flushed(y: Tensor, format: str) -> Tensor:
    q = round_to(y, format)
    return torch.where(q.abs() < SMALLEST_NORMAL[format], 0.0, q)


def to_infinity(y: Tensor, format: str) -> Tensor:
    """464 is half way from 448, the largest e4m3, to what would be the next."""
    return torch.where(y.abs() >= 464.0, torch.copysign(torch.full_like(y, torch.inf), y), round_to(y, format))


def below_the_top(y: Tensor, format: str) -> Tensor:
    """The largest e5m2 number, 57344, is taken for an infinity."""
    return round_to(y, format).clamp(-49152.0, 49152.0)


def up_to_126(y: Tensor, format: str) -> Tensor:
    return round_to(y, format).clamp(-126 / 64, 126 / 64)


def whole_batch(healthy: SequenceGrid) -> Callable[[Tensor], Tensor]:
    """One dynamic scale for the batch, so that results depend on what else is in it."""
    return lambda x: fake_quantize(x.reshape(1, -1), healthy.format, block_size=x.numel()).reshape(x.shape)


def ties_to_zero(x: Tensor) -> Tensor:
    """Nearest, ties toward zero."""
    return torch.copysign(torch.ceil(x.abs() - 0.5), x)


def tied(rounding: Callable[[Tensor], Tensor]) -> Callable[[IntegerGrid], Callable[[Tensor], Tensor]]:
    """int8 with another rounding than those that the project knows."""

    def make(healthy: IntegerGrid) -> Callable[[Tensor], Tensor]:
        scale = healthy.parameters.scale.double()
        return lambda x: (rounding(x.double() / scale).clamp(-128, 127) * scale).to(x.dtype)

    return make


def odd_ties(x: Tensor) -> Tensor:
    """Nearest, ties to the odd code."""
    nearest = torch.round(x)
    return torch.where((x - torch.trunc(x)).abs() == 0.5, 2 * torch.floor(x / 2) + 1, nearest)


def one_ulp(healthy: IntegerGrid) -> IntegerGrid:
    old = healthy.parameters
    scale = torch.nextafter(old.scale, torch.tensor(torch.inf))
    return replace(healthy, parameters=IntegerParameters(scale, old.zero_point, old.bits, old.symmetric))


def batch_scale(healthy: SequenceGrid) -> Callable[[Tensor], Tensor]:
    """One dynamic scale for the batch, nvfp4 with its second scale."""

    def on_grid(x: Tensor) -> Tensor:
        whole: dict[str, Any] = {"tensor_scale": healthy.tensor_scale} if healthy.tensor_scale is not None else {}
        return fake_quantize(x.reshape(1, -1), healthy.format, block_size=x.numel(), **whole).reshape(x.shape)

    return on_grid


def token_scale(healthy: SequenceGrid) -> Callable[[Tensor], Tensor]:
    return lambda x: fake_quantize(x, healthy.format, block_size=x.shape[-1])


def rare_block(every: int) -> Callable[[BlockGrid], Callable[[Tensor], Tensor]]:
    """Of so many blocks one has a scale that is one exponent up."""

    def make(healthy: BlockGrid) -> Callable[[Tensor], Tensor]:
        coarse = elements(round_to, shift=1)(healthy)

        def on_grid(x: Tensor) -> Tensor:
            fine, blocks = healthy(x), -(-x.shape[-1] // 32)
            block = torch.arange(x.numel() // x.shape[-1])[:, None] * blocks + torch.arange(x.shape[-1]) // 32
            hit = (block % every == every // 2).reshape(x.shape)
            return torch.where(hit, coarse(x), fine)

        return on_grid

    return make


def ragged_float(healthy: BlockGrid) -> Callable[[Tensor], Tensor]:
    """A last block of fewer than 32 values is passed on as it is."""

    def on_grid(x: Tensor) -> Tensor:
        whole, out = x.shape[-1] // 32 * 32, healthy(x)
        return torch.cat([out[..., :whole], x[..., whole:]], -1)

    return on_grid


def ragged_stale(healthy: BlockGrid) -> Callable[[Tensor], Tensor]:
    """A last block of fewer than 32 values has the scale of the block before it."""

    def on_grid(x: Tensor) -> Tensor:
        whole = x.shape[-1] // 32 * 32
        amax = x[..., whole - 32 : whole].double().abs().amax(-1, keepdim=True)
        exponent = torch.frexp(amax).exponent - 1 - LARGEST_EXPONENT[healthy.format]
        scale = torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent), 1.0)
        last = round_to(x[..., whole:].double() / scale, healthy.format) * scale
        return torch.cat([healthy(x)[..., :whole], last.to(x.dtype)], -1)

    return on_grid


def one_block_late(healthy: BlockGrid) -> Callable[[Tensor], Tensor]:
    """Scales and elements are read from neighbouring blocks: every block has the scale of the block before."""

    def on_grid(x: Tensor) -> Tensor:
        padded = functional.pad(x.double(), (0, -x.shape[-1] % 32))
        rows = padded.reshape(*padded.shape[:-1], -1, 32)
        amax = rows.abs().amax(-1, keepdim=True).roll(1, -2)
        exponent = torch.frexp(amax).exponent - 1 - LARGEST_EXPONENT[healthy.format]
        scale = torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent), 1.0)
        values = round_to(rows / scale, healthy.format) * scale
        return values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    return on_grid


def in_narrow(dtype: torch.dtype) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    """The kernel reads its input in a narrower dtype, so that values are rounded twice."""
    return lambda healthy: lambda x: healthy(x.to(dtype).to(x.dtype))


def reciprocal(healthy: IntegerGrid) -> Callable[[Tensor], Tensor]:
    """Multiplies by 1 / scale in float32 instead of dividing."""
    scale = healthy.parameters.scale
    return lambda x: torch.round(x * (1.0 / scale)).clamp(-128, 127) * scale


def one_sequence(healthy: Any) -> Callable[[Tensor], Tensor]:
    """The last sequence is passed on as it is."""
    return lambda x: torch.cat([healthy(x)[:-1], x[-1:]]) if x.shape[0] > 1 else healthy(x)


def shifted(healthy: Any) -> Callable[[Tensor], Tensor]:
    """The output is that of the token before."""
    return lambda x: healthy(x).roll(1, 1)


def permuted(healthy: Any) -> Callable[[Tensor], Tensor]:
    """Two neighbouring channels change places in every pair, as by a wrong layout."""

    def on_grid(x: Tensor) -> Tensor:
        even = x.shape[-1] // 2 * 2
        pairs = torch.arange(even).reshape(-1, 2).flip(-1).flatten()
        out: Tensor = healthy(x)[..., torch.cat([pairs, torch.arange(even, x.shape[-1])])]
        return out

    return on_grid


def site(name: str, recipe: str, where: str, make: Callable[[Any], Any], cause: str, **rest: Any) -> Fault:
    """A fault of the grid at one site."""
    return Fault(name, recipe, grid(where, make), f"site {where}; {cause}", **rest)


ROUNDING = (
    site(
        "rounding floor",
        INT8,
        "in_proj.input",
        rounded("floor"),
        "rounding looks like floor, not nearest (mean error # steps)",
    ),
    site(
        "rounding floor, fp8",
        FP8,
        "x_proj.output",
        blocks(rounding="floor"),
        "rounding looks like floor, not nearest (mean error # steps)",
    ),
    site(
        "rounding toward zero",
        INT8,
        "out_proj.input",
        rounded("toward_zero"),
        "rounding looks like toward zero, not nearest",
    ),
    site(
        "ties away, fp4",
        FP4,
        "dt_proj.output",
        blocks(rounding="half_away"),
        "ties are rounded away from zero instead of to even",
    ),
    site(
        "ties away, mxint8",
        MXINT8,
        "in_proj.output",
        blocks(rounding="half_away"),
        "ties are rounded away from zero instead of to even",
    ),
    site(
        "stochastic rounding",
        INT8,
        "in_proj.output",
        by_chance,
        "rounding looks random, not nearest (#% to the farther side)",
    ),
)
SCALES = (
    site("activation scale + 1 %", INT8, "x_proj.output", scaled(1.01), "the scale is off by +1.00%"),
    site(
        "exponent + 1, mxint8",
        MXINT8,
        "in_proj.input",
        elements(round_to, shift=1),
        "the scale is off by a factor of 2^1, or the scale rule looks like ceil",
    ),
    site(
        "exponent - 1, fp4", FP4, "in_proj.output", elements(round_to, shift=-1), "the scale is off by a factor of 2^-1"
    ),
    site("activation scale + 0.1 %", INT8, "in_proj.output", scaled(1.001), "the scale is off by +0.10%"),
    site("scale doubled", INT8, "dt_proj.output", scaled(2.0), "the scale is off by a factor of 2^1"),
    site("scale halved", INT8, "x_proj.output", scaled(0.5), "the scale is off by a factor of 2^-1", layer=3),
    site(
        "stale scale of one channel",
        INT8,
        "conv1d.output",
        one_channel(17, 1.5),
        "only channel 17: the scale is off by +50.00%",
    ),
    Fault(
        "minmax at one site",
        INT8,
        largest_value,
        "site conv1d.output; scale from the largest value (minmax) instead of the percentile",
    ),
    site(
        "second scale ignored",
        NVFP4,
        "in_proj.input",
        lambda _: BlockGrid("nvfp4", torch.tensor(1.0)),
        "the second scale (of the tensor) is ignored",
    ),
    site("dynamic scale over the batch", "mode_3-int8", "conv1d.input", whole_batch, "one scale for all sequences"),
    site("scale rule rceil", FP4, "in_proj.output", blocks(scale_rule="rceil"), "the scale rule looks like rceil"),
)
BLOCKS = (
    site("blocks of 16", FP8, "in_proj.input", blocks(block_size=16), "blocks of 16 instead of 32"),
    site(
        "blocks of 64, first layer", FP4, "out_proj.input", blocks(block_size=64), "blocks of 64 instead of 32", layer=0
    ),
    site("blocks along the wrong axis", FP4, "x_proj.output", blocks(axis=-2), "blocks run along the wrong axis"),
)
ENDS = (
    site(
        "codes wrap around",
        INT8,
        "conv1d.output",
        coded(lambda q: (q + 128) % 256 - 128),
        "codes wrap around at the ends instead of being clamped",
    ),
    site("not clamped", INT8, "conv1d.output", coded(lambda q: q), "not clamped"),
    site(
        "clamp at 126",
        INT8,
        "conv1d.output",
        coded(lambda q: q.clamp(-128, 126)),
        "clamped at 126 instead of 127, or clamped at -126 and 126",
    ),
    site("clamp at 126, mxint8", MXINT8, "in_proj.output", elements(up_to_126), "clamped at -126 and 126"),
    site("subnormals flushed, fp4", FP4, "in_proj.output", elements(flushed), "subnormals are flushed to zero"),
    site("subnormals flushed, fp6", FP6, "x_proj.output", elements(flushed), "subnormals are flushed to zero", layer=2),
    site(
        "Inf, not saturation",
        FP8,
        "in_proj.output",
        elements(to_infinity),
        "Inf where values should saturate",
        verdicts=NOT_FINITE,
    ),
    site(
        "one Inf",
        INT8,
        "out_proj.input",
        one_infinity,
        "Inf in 1 of 65536 values, the first at [0, 3, 7]",
        verdicts=NOT_FINITE,
    ),
    site("one token lost", INT8, "x_proj.output", one_token(40), "only token 40: gives only zeros"),
)
#: On the text of the gate these change no value, or a few by little: corner values tell them.
AT_CORNERS = (
    site(
        "ties to even",
        INT8,
        "conv1d.output",
        rounded("half_even"),
        "ties are rounded to even instead of away from zero (at corner values)",
    ),
    site(
        "ties away",
        INT8,
        "in_proj.input",
        rounded("half_away"),
        "ties are rounded away from zero instead of to even (at corner values)",
    ),
    site(
        "ties away, fp8",
        FP8,
        "dt_proj.output",
        blocks(rounding="half_away"),
        "ties are rounded away from zero instead of to even",
    ),
    site(
        "clamp at 126, minmax",
        INT8,
        "in_proj.output",
        coded(lambda q: q.clamp(-128, 126)),
        "clamped at 126 instead of 127 (at corner values)",
    ),
    site(
        "-128 lost",
        INT8,
        "x_proj.output",
        coded(lambda q: q.clamp(-127, 127)),
        "-128 is lost, codes end at -127 (at corner values)",
    ),
    site(
        "subnormals flushed, fp8",
        FP8,
        "in_proj.input",
        elements(flushed),
        "subnormals are flushed to zero (at corner values)",
    ),
    site("state left float", INT8, "scan.state", lambda _: None, "not quantized (at corner values)"),
    site("not clamped, minmax", INT8, "out_proj.input", coded(lambda q: q), "not clamped (at corner values)"),
)
#: The exact answers at corner values tell these, whatever the text is.
EXACT = (
    site(
        "subnormals flushed, e5m2",
        E5M2,
        "in_proj.output",
        elements(flushed),
        "subnormals are flushed to zero (at corner values)",
    ),
    site(
        "ties toward zero",
        INT8,
        "in_proj.output",
        tied(ties_to_zero),
        "ties are rounded toward zero (at corner values)",
    ),
    site("ties to odd", INT8, "x_proj.output", tied(odd_ties), "ties are rounded to odd (at corner values)"),
    site("int8 scale one ulp up", INT8, "in_proj.input", one_ulp, "the scale is one ulp up (at corner values)"),
    site("the largest e5m2 lost", E5M2, "out_proj.input", elements(below_the_top), "clamped at 49152 instead of 57344"),
    site(
        "times 1 / scale",
        INT8,
        "dt_proj.output",
        reciprocal,
        "multiplied by 1 / scale, not divided by the scale (at corner values)",
    ),
    site(
        "input read in bf16", FP8, "in_proj.output", in_narrow(torch.bfloat16), "its input is rounded to bfloat16 first"
    ),
    site(
        "input read in fp16, int8",
        INT8,
        "in_proj.input",
        in_narrow(torch.float16),
        "its input is rounded to float16 first",
    ),
    *(
        site(
            f"one scale for the batch, {format}",
            f"mode_3-{format}",
            "conv1d.input",
            batch_scale,
            f"one scale for all sequences{where}",
        )
        for where, formats in (
            (" (at corner values)", ("fp8_e4m3", "fp6_e2m3", "fp4_e2m1", "mxint8")),
            ("", ("nvfp4",)),
        )
        for format in formats
    ),
    site("one scale a token, mode 3", "mode_3-mxint8", "conv1d.input", token_scale, "one scale for each token"),
)
#: A few blocks, one sequence, one order: each explains its own difference, and nothing else does.
LOCAL = (
    site(
        "one block in 1,000 one exponent up",
        MXINT8,
        "in_proj.output",
        rare_block(1000),
        "4 of 4096 blocks have their scale off by 2^1, or the scale rule looks like ceil",
    ),
    site(
        "one block in 100 one exponent up, fp4",
        FP4,
        "in_proj.input",
        rare_block(100),
        "10 of 1024 blocks have their scale off by 2^1, or the scale rule looks like ceil",
        layer=2,
    ),
    site(
        "a ragged block left float",
        FP8,
        "x_proj.output",
        ragged_float,
        "the last, shorter block is not quantized",
        verdicts=(*NOT_APPLIED, *VALUES),
    ),
    site(
        "a ragged block with its neighbour's scale",
        FP4,
        "x_proj.output",
        ragged_stale,  # of 40 channels these are the values of six faults of blocks
        "only the last, shorter block: no known cause: #% of the values differ, by # of t...",
        layer=3,
    ),
    site(
        "scales of the block before",
        MXINT8,
        "out_proj.input",
        one_block_late,
        "blocks have the scale of the block before",
    ),
    site(
        "one sequence left float",
        INT8,
        "in_proj.output",
        one_sequence,
        "only sequence 3: not quantized",
        verdicts=(*NOT_APPLIED, *VALUES),
    ),
    site("output one token late", INT8, "x_proj.output", shifted, "it is one token late"),
    site(
        "channels swapped in pairs",
        FP8,
        "dt_proj.output",
        permuted,
        "channels are permuted, 256 of 256: channel 0 is channel 1",
    ),
)
