"""`probe formats` and `probe demo`: the grids, and what each costs a tensor."""

import argparse
import json

from probe.commands.tables import table
from probe.formats import FORMATS, Format


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The parsers of both commands."""
    formats = commands.add_parser("formats", help="the number formats, as a table")
    formats.add_argument("--json", action="store_true", help="machine-readable")
    formats.set_defaults(run=_formats)

    demo = commands.add_parser("demo", help="quantize a tensor to every format and show the errors")
    demo.add_argument("--shape", type=int, nargs="+", default=[512, 768], metavar="N", help="default: 512 768")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument(
        "--outliers",
        type=float,
        default=0.001,
        metavar="SHARE",
        help="elements multiplied by 50 (default: 0.001)",
    )
    demo.add_argument("--scale-rule", default="floor", metavar="RULE", help="floor, ceil, even, rceil or mse")
    demo.add_argument("--formats", nargs="+", default=list(FORMATS), metavar="FORMAT", help="default: all")
    demo.add_argument("--json", action="store_true", help="machine-readable")
    demo.set_defaults(run=_demo)


def _formats(options: argparse.Namespace) -> int:
    rows = [_format_row(f) for f in FORMATS.values()]
    print(json.dumps(rows, indent=2) if options.json else table(rows))
    return 0


def _format_row(fmt: Format) -> dict[str, object]:
    scale = {"e8m0": "E8M0, 2^(byte-127)", "e4m3": "E4M3 x float32", "float32": "float32", None: "none"}[fmt.scale]
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
        "scale": scale,
        "special codes": fmt.special_codes,
        "note": fmt.note,
    }


def _demo(options: argparse.Namespace) -> int:
    from probe.commands.demonstration import error_table

    rows = error_table(options.shape, options.formats, options.seed, options.outliers, options.scale_rule)
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    shape = " x ".join(map(str, options.shape))
    print(f"normal values, {shape}, {options.outliers:.2%} of them times 50, seed {options.seed}, float32\n")
    print(table(rows))
    print("\nsqnr: signal to quantization noise, higher is better; -: lossless. saturated, flushed: of the elements.")
    return 0
