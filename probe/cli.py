"""The command line: a thin door into the library. Nothing heavy is imported before a command needs it."""

import argparse
import json
import math
import sys
from collections.abc import Sequence

from probe.formats import FORMATS, Format
from probe.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 on a user's mistake, which is told in one message."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, OSError) as problem:
        if options.debug:
            raise
        print(f"probe: error: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="probe",
        description="Numerical regression tests for quantized models, and the tools around them.",
    )
    parser.add_argument("--version", action="version", version=f"probe {VERSION}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

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
    return parser


def _formats(options: argparse.Namespace) -> int:
    rows = [_format_row(f) for f in FORMATS.values()]
    print(json.dumps(rows, indent=2) if options.json else _table(rows))
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
    from probe.demonstration import error_table

    rows = error_table(options.shape, options.formats, options.seed, options.outliers, options.scale_rule)
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    shape = " x ".join(map(str, options.shape))
    print(f"normal values, {shape}, {options.outliers:.2%} of them times 50, seed {options.seed}, float32\n")
    print(_table(rows))
    print("\nsqnr: signal to quantization noise, higher is better. saturated, flushed: shares of the elements.")
    return 0


def _table(rows: list[dict[str, object]]) -> str:
    """Aligned columns: numbers to the right, words to the left."""
    texts = [{key: _cell(value) for key, value in row.items()} for row in rows]
    widths = {key: max(len(key), *(len(text[key]) for text in texts)) for key in rows[0]}
    words = {key for key in rows[0] if any(isinstance(row[key], str) for row in rows)}

    def line(cells: dict[str, str]) -> str:
        parts = (cells[k].ljust(w) if k in words else cells[k].rjust(w) for k, w in widths.items())
        return "  ".join(parts).rstrip()

    return "\n".join([line({key: key for key in widths}), *(line(text) for text in texts)])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if value == 0 or math.isinf(value):
            return f"{value:g}"
        if math.log2(abs(value)).is_integer() and abs(value) < 0.01:
            return f"2^{int(math.log2(abs(value)))}"
        return f"{value:.6g}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
