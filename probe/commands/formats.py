"""`probe formats` and `probe demo`: the number formats, and the error that each makes on a random tensor."""

import argparse
import math
from typing import TYPE_CHECKING

from probe.commands.options import Subparsers
from probe.commands.output import print_rows
from probe.formats import FORMATS, Format
from probe.words import look_up

if TYPE_CHECKING:
    from torch import Tensor

#: What the scale of a block is, by `Format.scale`.
SCALES = {"e8m0": "E8M0, 2^(byte-127)", "e4m3": "E4M3 x float32", "float32": "float32", None: "none"}
LEGEND = "sqnr: signal to quantization noise, higher is better; -: lossless. saturated, flushed: of the elements."
#: Elements of the tensor of `probe demo`, at most.
MOST_ELEMENTS = 2**28


def add(commands: Subparsers) -> None:
    """Add the parsers of both commands."""
    formats = commands.add_parser("formats", help="the number formats, as a table")
    formats.add_argument("--json", action="store_true", help="machine-readable")
    formats.set_defaults(run=_formats)

    demo = commands.add_parser("demo", help="quantize a tensor to every format and show the errors")
    demo.add_argument("--shape", type=int, nargs="+", default=[512, 768], metavar="N", help="default: 512 768")
    demo.add_argument("--seed", type=int, default=0)
    outliers = "elements multiplied by 50 (default: 0.001)"
    demo.add_argument("--outliers", type=float, default=0.001, metavar="SHARE", help=outliers)
    demo.add_argument("--scale-rule", default="floor", metavar="RULE", help="floor, ceil, even, rceil or mse")
    demo.add_argument("--formats", nargs="+", default=list(FORMATS), metavar="FORMAT", help="default: all")
    demo.add_argument("--json", action="store_true", help="machine-readable")
    demo.set_defaults(run=_demo)


def _formats(options: argparse.Namespace) -> int:
    print_rows([_format_row(fmt) for fmt in FORMATS.values()], as_json=options.json)
    return 0


def _format_row(fmt: Format) -> dict[str, object]:
    return {
        "format": fmt.name,
        "bits": fmt.bits,
        "exponent": fmt.exponent_bits,
        "mantissa": fmt.mantissa_bits,
        "bias": None if fmt.is_integer else fmt.bias,
        "max": fmt.max,
        "min normal": fmt.min_normal,
        "min subnormal": fmt.min_subnormal,
        "block": fmt.block_size,
        "scale": SCALES[fmt.scale],
        "special codes": fmt.special_codes,
        "note": fmt.note,
    }


def _demo(options: argparse.Namespace) -> int:
    rows = _error_rows(options)
    if not options.json:
        shape = " x ".join(map(str, options.shape))
        print(f"normal values, {shape}, {options.outliers:.2%} of them times 50, seed {options.seed}, float32\n")
    print_rows(rows, as_json=options.json)
    if not options.json:
        print(f"\n{LEGEND}")
    return 0


def _error_rows(options: argparse.Namespace) -> list[dict[str, object]]:
    """One row per format: errors of `fake_quantize` against the float32 original, in float64."""
    import torch

    from probe.numerics.quantize import SCALE_RULES

    shape, seed, outliers, rule = options.shape, options.seed, options.outliers, options.scale_rule
    sizes, elements = " ".join(map(str, shape)), math.prod(shape)
    if min(shape) < 1:
        raise ValueError(f"shape {sizes} has no elements. Give sizes of at least 1.")
    if not 0 <= outliers <= 1:
        raise ValueError(f"outliers {outliers} is not a share. Give a number from 0 to 1.")
    if elements > MOST_ELEMENTS:
        raise ValueError(f"shape {sizes} has {elements} elements. Give at most {MOST_ELEMENTS}.")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed {seed} is out of range. Give a whole number from 0 to {2**63 - 1}.")
    look_up("scale rule", rule, SCALE_RULES)
    formats = [look_up("format", name, FORMATS, see="List them with: probe formats") for name in options.formats]
    if rule != "floor" and not any(fmt.scale == "e8m0" for fmt in formats):
        raise ValueError(f"scale rule {rule!r} was given, but none of these formats has a power-of-two scale.")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < outliers, 50 * x, x)
    return [_error_row(x, fmt, rule) for fmt in formats]


def _error_row(x: "Tensor", fmt: Format, scale_rule: str) -> dict[str, object]:
    import warnings

    from torch.nn.functional import cosine_similarity

    from probe.numerics.quantize import fake_quantize
    from probe.numerics.underflow import UnderflowWarning, analyze_underflow

    rule = scale_rule if fmt.scale == "e8m0" else "floor"
    reference = x.double().flatten()
    error = fake_quantize(x, fmt.name, scale_rule=rule).double().flatten() - reference
    mse = float(error.square().mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnderflowWarning)
        lost = analyze_underflow(x, fmt.name, scale_rule=rule)
    return {
        "format": fmt.name,
        "block": fmt.block_size or "tensor" if fmt.scale else "-",
        "rule": rule if fmt.scale == "e8m0" else "-",
        "mse": mse,
        "max abs error": float(error.abs().max()),
        "sqnr dB": round(10 * math.log10(float(reference.square().mean()) / mse), 2) if mse else None,
        "cosine": float(cosine_similarity(reference + error, reference, dim=0)),
        "saturated %": round(100 * lost.share(lost.overflow), 4),
        "flushed %": round(100 * lost.share(lost.flushed), 4),
    }
